"""Attention over several ranks is attention on one: in processes over gloo, and in threads of one process."""

import functools
import os
import tempfile
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attn_ext
from attn_ext.distributed import SequenceLayout, context_parallel_sdpa, run_in_memory
from attn_ext.testing import OPTIONS

METHODS = ("ulysses", "allgather", "ring")
#: In two dimensions, pairs of neighbours share heads.
WAYS: dict[str, dict[str, Any]] = {
    **{method: {"method": method} for method in METHODS},
    "ulysses_allgather": {"method": "allgather", "ulysses_size": 2},
    "ulysses_ring": {"method": "ring", "ulysses_size": 2},
}
LENGTH, SEED = 37, 5
CU_SEQLENS = [0, 1, 20, 20, 37]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 5, "window_right": 2},
    "causal_window": {"is_causal": True, "window_left": 6},
    "gqa": {"is_causal": True, "enable_gqa": True, "key_heads": 2},
    "replicated": {"is_causal": True, "enable_gqa": True, "key_heads": 1},
    "sinks": {"is_causal": True, "sinks": True},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "bool_mask": {"mask": (4, LENGTH, LENGTH), "mask_dtype": torch.bool},
    "bias": {"mask": (LENGTH, LENGTH), "is_causal": True},
    "bias_heads": {"mask": (2, 4, LENGTH, LENGTH)},
    "bias_keys": {"mask": (4, 1, LENGTH), "is_causal": True},
    "all_at_once": {
        "mask": (4, LENGTH, LENGTH),
        "is_causal": True,
        "window_left": 7,
        "enable_gqa": True,
        "key_heads": 2,
        "sinks": True,
        "softcap": 3.0,
        "scale": 0.3,
    },
    "bfloat16": {"is_causal": True, "enable_gqa": True, "key_heads": 2, "dtype": torch.bfloat16},
    "contiguous": {"is_causal": True, "layout": "contiguous"},
    "dropout": {"dropout_p": 0.3, "is_causal": True, "length": 171, "enable_gqa": True, "key_heads": 2},
    "dropout_window": {"dropout_p": 0.3, "window_left": 30, "window_right": 5, "length": 230, "sinks": True},
    "dropout_bias": {"dropout_p": 0.6, "mask": (4, 1, 171), "length": 171, "layout": "contiguous"},
    "dropout_packed": {"dropout_p": 0.3, "layout": "packed", "is_causal": True},
    "packed": {"is_causal": True, "layout": "packed", "sinks": True},
    "packed_bias": {"layout": "packed", "mask": (LENGTH, LENGTH), "window_left": 4},
    "fewer_rows_than_ranks": {"is_causal": True, "length": 1},
    "no_rows": {"length": 0},
}
#: Rank by rank, dK and dV are rounded to the dtype of the keys once, and their sum once more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def problem(case: dict[str, Any]) -> tuple[list[Tensor], Tensor | None, Tensor | None, dict[str, Any]]:
    """Query, key, value, grad of the output and of the lse; mask; sinks; options. The same on every rank."""
    options = dict(case)
    draw = torch.Generator().manual_seed(1)  # threads share the default one
    length = options.pop("length", LENGTH)
    dtype = options.pop("dtype", torch.float32)
    heads, key_heads = options.pop("query_heads", 4), options.pop("key_heads", 4)
    options.pop("layout", None)
    q, out, lse = (torch.randn(2, heads, length, size, generator=draw).to(dtype) for size in (8, 6, 1))
    k, v = (torch.randn(2, key_heads, length, size, generator=draw).to(dtype) for size in (8, 6))
    mask, mask_dtype = options.pop("mask", None), options.pop("mask_dtype", dtype)
    if mask is not None:
        mask = (
            torch.rand(mask, generator=draw) > 0.3
            if mask_dtype == torch.bool
            else torch.randn(mask, generator=draw).to(dtype)
        )
    sinks = torch.randn(heads, generator=draw).to(dtype) if options.pop("sinks", False) else None
    return [q, k, v, out, lse.float().squeeze(-1)], mask, sinks, options


def layout_of(case: dict[str, Any], group: Any = None, **place: int) -> SequenceLayout:
    kind = case.get("layout", "zigzag")
    if kind == "packed":
        return SequenceLayout.from_cu_seqlens(CU_SEQLENS, group, **place)
    return getattr(SequenceLayout, kind)(case.get("length", LENGTH), group, **place)


def leaf(x: Tensor | None) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return x
    return x.detach().clone().requires_grad_()


def on_rank(case: dict[str, Any], way: str, group: Any) -> dict[str, Tensor]:
    """Output, lse and gradients of this rank: of its rows, and its part of what every rank has."""
    (q, k, v, d_out, d_lse), mask, sinks, options = problem(case)
    layout = layout_of(case, group)
    q, k, v = (leaf(layout.shard(x, -2)) for x in (q, k, v))
    if mask is not None and mask.shape[-2] != 1:
        mask = layout.shard(mask, -2)
    mask, sinks = leaf(mask), leaf(sinks)
    out, lse = context_parallel_sdpa(
        q,
        k,
        v,
        layout=layout,
        attn_mask=mask,
        sinks=sinks,
        return_lse=True,
        dropout_seed=SEED,
        **WAYS.get(way, {"method": way}),
        **options,
    )
    torch.autograd.backward([out, lse], [layout.shard(d_out, -2), layout.shard(d_lse, -1)])
    found = {"output": out.detach(), "lse": lse.detach(), "query": q.grad, "key": k.grad, "value": v.grad}
    if mask is not None and mask.is_floating_point():
        found["mask"] = mask.grad
    if sinks is not None:
        found["sinks"] = sinks.grad
    return found


def on_one(case: dict[str, Any]) -> dict[str, Tensor]:
    """The same by the op itself, sequence by sequence."""
    (q, k, v, d_out, d_lse), mask, sinks, options = problem(case)
    q, k, v, mask, sinks = map(leaf, (q, k, v, mask, sinks))
    starts = CU_SEQLENS if case.get("layout") == "packed" else [0, q.shape[-2]]
    outs, lses = [], []
    for begin, end in pairwise(starts):
        rows = slice(begin, end)
        part = mask
        if part is not None:
            part = part[..., rows if part.shape[-2] != 1 else slice(None), rows]
        attend = partial(with_seed, len(outs)) if options.get("dropout_p") else attn_ext.sdpa_with_lse
        out, lse = attend(*(x[..., rows, :] for x in (q, k, v)), attn_mask=part, sinks=sinks, **options)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.cat(outs, -2), torch.cat(lses, -1)
    torch.autograd.backward([out, lse], [d_out, d_lse])
    found = {"output": out.detach(), "lse": lse.detach(), "query": q.grad, "key": k.grad, "value": v.grad}
    if mask is not None and mask.is_floating_point():
        found["mask"] = mask.grad
    if sinks is not None:
        found["sinks"] = sinks.grad
    return found


def with_seed(number: int, *tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Of a sequence in a padded batch of all, each of them with a batch of its own."""
    inner = {
        "dropout_seed": torch.tensor(SEED),
        "sequences": None,
        "need_weights": False,
        "need_key_mass": False,
    }
    origin = [number * tensors[0].shape[0], 0, 0, 0]
    options = {**OPTIONS, **inner, **options, "dropout_origin": origin}
    output, lse, _, _ = torch.ops.attn_ext._sdpa_forward(*tensors, **options)
    return output, lse


def assembled(case: dict[str, Any], ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks found in global order; what every rank has a part of, summed."""
    layouts = [layout_of(case, rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    found = {}
    for name in ranks[0]:
        pieces = [rank[name] for rank in ranks]
        dim = -1 if name == "lse" else -2
        if name == "sinks" or (name == "mask" and case["mask"][-2] == 1):
            found[name] = sum(piece.double() for piece in pieces)
            continue
        rows = torch.cat([layout.rows() for layout in layouts])
        found[name] = torch.cat(pieces, dim).index_select(dim, rows.argsort())
    return found


def check(case: dict[str, Any], ranks: list[dict[str, Tensor]], same_bits: tuple[str, ...] = ()) -> None:
    actual, expected = assembled(case, ranks), on_one(case)
    assert actual.keys() == expected.keys()
    tolerance = TOLERANCE[expected["output"].dtype]
    for name, e in expected.items():
        a = actual[name]
        scale = 1 + (float(e[e.isfinite()].abs().max()) if e.isfinite().any() else 0)
        torch.testing.assert_close(
            a.to(e.dtype), e, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
        if name in same_bits:
            assert torch.equal(a.to(e.dtype), e), name


EXACT = ("output", "lse", "query", "key", "value")


def same_bits_as_one(case: dict[str, Any], way: str, world_size: int) -> tuple[str, ...]:
    """Ulysses computes whole heads as one process does, if no two ranks share a head of keys."""
    shares_keys = case.get("key_heads", 4) < world_size
    return EXACT if way == "ulysses" and not shares_keys else ()


by_way = pytest.mark.parametrize("way", WAYS)


@by_way
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_threads_find_what_one_finds(case, way):
    for world_size in (2, 4) if way.startswith("ulysses_") else (1, 4):
        ranks = run_in_memory(world_size, lambda group: on_rank(case, way, group))
        check(case, ranks, same_bits_as_one(case, way, world_size))


@pytest.mark.parametrize("way", METHODS)
def test_64_ranks_find_what_one_finds(way):
    case = {"is_causal": True, "window_left": 20, "enable_gqa": True, "query_heads": 64, "key_heads": 8}
    check(case, run_in_memory(64, lambda group: on_rank(case, way, group)))


@pytest.mark.parametrize("way", METHODS[1:])
def test_1024_ranks_find_what_one_finds(way):
    case = {"is_causal": True, "window_left": 9, "query_heads": 1, "key_heads": 1, "length": 1500}
    check(case, run_in_memory(1024, lambda group: on_rank(case, way, group)))


def ways_of(world_size: int) -> list[str]:
    """Those that four heads allow."""
    return ["allgather", "ring"] if world_size == 3 else [*WAYS]


def of_process(rank: int, folder: str, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    found = {
        (name, way, turn): on_rank(case, way, None)
        for name, case in CASES.items()
        for way in ways_of(world_size)
        for turn in range(2)
    }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@functools.cache
def of_processes(world_size: int) -> list[dict[Any, dict[str, Tensor]]]:
    """What each of some processes found: all cases in one go, as starting them takes longest."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_process, (folder, world_size), nprocs=world_size)
        return [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(world_size)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_find_what_one_finds(name, world_size):
    case, ranks = CASES[name], of_processes(world_size)
    for way in ways_of(world_size):
        first, again = ([found[name, way, turn] for found in ranks] for turn in range(2))
        check(case, first, same_bits_as_one(case, way, world_size))
        for a, b in zip(first, again, strict=True):
            assert all(torch.equal(a[key], b[key]) for key in a), f"{way}: another run, other bits"


def test_what_is_gathered_has_the_gradient_of_all_ranks():
    whole = torch.randn(7, 3, dtype=torch.float64)
    weights = torch.randn(4, 7, 3, dtype=torch.float64)

    def of_rank(group):
        layout = SequenceLayout.zigzag(7, group)
        local = layout.shard(whole, 0).requires_grad_()
        gathered = layout.unshard(local, 0)
        (gathered * weights[group.rank]).sum().backward()
        return gathered.detach(), local.grad, layout.rows()

    for gathered, grad, rows in run_in_memory(4, of_rank):
        assert torch.equal(gathered, whole)
        torch.testing.assert_close(grad, weights.sum(0)[rows])


@pytest.mark.parametrize("method", METHODS[:2])
def test_second_derivatives(method):
    q, k, v = torch.randn(3, 4, 9, 3, dtype=torch.float64)

    def penalty(q, k, v, attention):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out), create_graph=True)
        loss = sum(g.square().sum() for g in grads)
        return torch.autograd.grad(loss, leaves)

    def of_rank(group):
        layout = SequenceLayout.zigzag(9, group)
        shards = [layout.shard(x, -2) for x in (q, k, v)]
        attention = lambda *x: context_parallel_sdpa(*x, layout=layout, method=method, is_causal=True)  # noqa: E731
        return layout.rows(), penalty(*shards, attention)

    expected = penalty(q, k, v, lambda *x: attn_ext.sdpa(*x, is_causal=True))
    for rows, found in run_in_memory(2, of_rank):
        for actual, e in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, e[:, rows])


def test_auto_is_one_of_the_methods():
    case = CASES["causal"]
    check(case, run_in_memory(4, lambda group: on_rank(case, "auto", group)), EXACT)
    odd = {"query_heads": 3, "key_heads": 3}
    check(odd, run_in_memory(2, lambda group: on_rank(odd, "auto", group)))


def test_an_error_of_one_rank_ends_the_others():
    def of_rank(group):
        if group.rank == 1:
            raise ArithmeticError("rank 1 fails")
        return SequenceLayout.zigzag(8, group).unshard(torch.ones(2), 0)

    with pytest.raises(ArithmeticError, match="rank 1 fails"):
        run_in_memory(4, of_rank)


ONE = SequenceLayout.zigzag(6, rank=0, world_size=2)
QUERY = torch.zeros(3, 3, 8)
BAD = {
    "rows": ((QUERY[:, :2], QUERY, QUERY), {}, "query of 3 rows, those of rank 0, but got 2"),
    "keys": ((QUERY, QUERY, QUERY[:, :1]), {}, "value of 3 rows"),
    "method": ((QUERY,) * 3, {"method": "star"}, "'star'"),
    "heads": ((QUERY,) * 3, {"method": "ulysses"}, "3 query heads and 3 key heads over 2 ranks"),
    "no_heads": ((QUERY[0],) * 3, {"method": "ulysses"}, "a dimension of heads"),
    "mask_rows": ((QUERY,) * 3, {"attn_mask": torch.zeros(6, 6)}, "3 rows or 1, and 6 columns"),
    "mask_columns": ((QUERY,) * 3, {"attn_mask": torch.zeros(3, 3)}, r"but got \[3, 3\]"),
}


@pytest.mark.parametrize(("tensors", "options", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        context_parallel_sdpa(*tensors, layout=ONE, **{"method": "allgather", **options})
