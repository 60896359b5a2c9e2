"""Ranks that do not make the same call, and ranks that die, end in an error on every rank."""

import datetime
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn_ext.distributed import SequenceLayout, context_parallel_sdpa, run_in_memory

LENGTH, TIMEOUT = 12, 40
WORLD_SIZE = 3
REFUSED = "rank 1 takes no part in the call: "


def call(group: Any = None, *, odd: bool = False, **changes: Any) -> torch.Tensor:
    """A good call, or on the odd rank one with changes: of the dtype, heads, rows, layout or options."""
    changes = changes if odd else {}
    layout = getattr(SequenceLayout, changes.pop("layout", "zigzag"))(LENGTH, group)
    heads, dtype, rows = changes.pop("heads", 6), changes.pop("dtype", torch.float32), changes.pop("rows", 0)
    x = torch.ones(heads, layout.num_rows() + rows, 4, dtype=dtype, requires_grad=changes.pop("grad", True))
    return context_parallel_sdpa(x, x, x, layout=layout, **{"method": "allgather", **changes})


#: What the odd rank, which is 1, does otherwise; what all of them say, or what it says and what the others.
FAULTS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "dtype": (
        {"dtype": torch.float64},
        "dtype of query on every rank, but got torch.float32 on rank 0",
        None,
    ),
    "shape": ({"heads": 3}, "shape of query on every rank, but got (6, rows, 4) on rank 0 and (3,", None),
    "layout": ({"layout": "contiguous"}, "same layout on every rank, but got 12 rows in 1", None),
    "option": (
        {"is_causal": True},
        "is_causal on every rank, but got False on rank 0 and True on rank 1",
        None,
    ),
    "method": ({"method": "ring"}, "same method on every rank, but got allgather on rank 0", None),
    "needs_gradients": ({"grad": False}, "same requires_grad of query on every rank", None),
    "rows": ({"rows": 1}, "expected query of 4 rows", REFUSED + "expected query of 4 rows"),
    "refused_by_op": (
        {"window_left": -1},
        "window_left to be at least 0",
        REFUSED + "attn_ext: expected window_left",
    ),
    "no_probability": (
        {"dropout_p": 2.0},
        "dropout_p between 0 and 1",
        REFUSED + "attn_ext: expected dropout_p",
    ),
    "no_method": ({"method": "star"}, "but got 'star'", REFUSED + "expected a method"),
}


def message_of(function: Callable[[], object]) -> str:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def messages(group: Any, rank: int) -> dict[str, str]:
    found = {}
    for name, (changes, _, _) in FAULTS.items():
        found[name] = message_of(partial(call, group, odd=rank == 1, **changes))
    call(group).sum().backward()  # nobody is left behind
    return found


def of_process(rank: int, folder: str, function: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    torch.save(function(rank), f"{folder}/{rank}.pt")


def run_processes(folder: Path, function: Callable[[int], Any]) -> list[Any]:
    """What each process found, None of one that died."""
    context = torch.multiprocessing.get_context("spawn")
    ranks = [context.Process(target=of_process, args=(r, str(folder), function)) for r in range(WORLD_SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(4 * TIMEOUT)
        assert process.exitcode is not None, "a rank hangs"
    paths = [folder / f"{rank}.pt" for rank in range(WORLD_SIZE)]
    return [torch.load(path) if path.exists() else None for path in paths]


def messages_of_process(rank: int) -> dict[str, str]:
    return messages(None, rank)


def check_messages(ranks: list[dict[str, str]]) -> None:
    for rank, found in enumerate(ranks):
        for name, (_, of_odd, of_others) in FAULTS.items():
            expected = of_odd if rank == 1 or of_others is None else of_others
            assert expected in found[name], f"{name} on rank {rank}"


def test_threads_that_disagree_all_say_on_what():
    check_messages(run_in_memory(WORLD_SIZE, lambda group: messages(group, group.rank)))


def test_processes_that_disagree_all_say_on_what(tmp_path):
    check_messages(run_processes(tmp_path, messages_of_process))


def test_without_the_check_only_the_rank_itself_says_it():
    layout = SequenceLayout.zigzag(LENGTH, rank=0, world_size=WORLD_SIZE)
    x = torch.ones(6, 5, 4)
    with pytest.raises(ValueError, match="expected query of 4 rows"):
        context_parallel_sdpa(x, x, x, layout=layout, check=False)


def loses_a_rank(rank: int, method: str, in_backward: bool) -> tuple[str, float, bool]:
    """What a survivor says, after how long, and whether it has a gradient."""
    layout = SequenceLayout.zigzag(LENGTH)
    x = torch.ones(6, layout.num_rows(), 4, requires_grad=True)
    attend = lambda: context_parallel_sdpa(x, x, x, layout=layout, method=method, is_causal=True)  # noqa: E731
    output = attend()
    if rank == 2:
        os._exit(1)
    begin = time.monotonic()
    said = message_of(lambda: (output if in_backward else attend()).sum().backward())
    return said, time.monotonic() - begin, x.grad is not None


def loses_a_rank_in_gathering(rank: int) -> tuple[str, float, bool]:
    return loses_a_rank(rank, "allgather", in_backward=False)


def loses_a_rank_in_the_ring(rank: int) -> tuple[str, float, bool]:
    return loses_a_rank(rank, "ring", in_backward=True)


@pytest.mark.parametrize("function", [loses_a_rank_in_gathering, loses_a_rank_in_the_ring])
def test_a_rank_that_dies_is_an_error_on_the_others_within_the_timeout(tmp_path, function):
    *survivors, dead = run_processes(tmp_path, function)
    assert dead is None
    for said, seconds, has_gradient in survivors:
        assert said != "no error"
        assert seconds < TIMEOUT + 10
        assert not has_gradient
