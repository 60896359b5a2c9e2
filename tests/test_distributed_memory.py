"""What a rank holds at its peak is what `cost` says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from attn_ext.distributed import SequenceLayout, context_parallel_sdpa, cost

LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 4096, 8, 4, 32
WAYS: dict[str, dict[str, Any]] = {
    "ulysses": {"method": "ulysses"},
    "allgather": {"method": "allgather"},
    "allgather_window": {"method": "allgather", "window_left": 300},
    "ring": {"method": "ring"},
}


def allocated(function: Callable[[], Any], trace: str) -> tuple[Any, int, int]:
    """What a function returns, the bytes allocated at its peak, and those that it leaves."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        result = function()
    profiled.export_chrome_trace(trace)
    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e.get("name") == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return result, peak, now


def peaks_of(layout: SequenceLayout, way: dict[str, Any], trace: str) -> tuple[int, int]:
    """The bytes held at most in a forward and in a backward pass, beside the inputs."""
    query, key, value = (
        torch.randn(heads, layout.num_rows(), HEAD_DIM).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    options = {"layout": layout, "is_causal": True, "enable_gqa": True, **way}
    output, forward, left = allocated(lambda: context_parallel_sdpa(query, key, value, **options), trace)
    along = torch.ones_like(output)
    _, backward, _ = allocated(lambda: output.backward(along), trace)
    return forward, left + backward


def of_process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    layout = SequenceLayout.zigzag(LENGTH)
    found = {}
    for name, way in WAYS.items():
        # Gloo's own thread sometimes lets a message go a little after it has come: the least of a few counts.
        peaks = [peaks_of(layout, way, f"{folder}/{rank}.json") for _ in range(5)]
        found[name] = tuple(min(of_pass) for of_pass in zip(*peaks, strict=True))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(of_process, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", WAYS)
def test_a_rank_holds_what_cost_says(measured, name):
    layout = SequenceLayout.zigzag(LENGTH, world_size=2)
    shape = {"query_heads": HEADS, "key_heads": KEY_HEADS, "head_dim": HEAD_DIM, "is_causal": True}
    for rank, found in enumerate(measured):
        said = cost(layout=layout, rank=rank, **shape, **WAYS[name])
        for actual, expected in zip(found[name], (said.memory_forward, said.memory_backward), strict=True):
            assert 0.65 * expected < actual < 1.1 * expected, f"{name}, rank {rank}"
