"""Who has which rows, which rows meet which keys, and what that costs: without communication."""

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from attn_ext.distributed import SequenceLayout, cost, plan
from attn_ext.distributed.cost import Way, choose_way
from attn_ext.distributed.plan import visible_pairs

BOUNDS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 3, "window_right": 1},
    "causal_window": {"is_causal": True, "window_left": 4, "window_right": 2},
    "itself": {"window_left": 0, "window_right": 0},
}
LAYOUTS = {
    "zigzag": lambda world_size: SequenceLayout.zigzag(41, world_size=world_size),
    "contiguous": lambda world_size: SequenceLayout.contiguous(41, world_size=world_size),
    "packed": lambda world_size: SequenceLayout.from_cu_seqlens([0, 17, 17, 18, 41], world_size=world_size),
    "empty": lambda world_size: SequenceLayout.zigzag(0, world_size=world_size),
}
by_layout = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
by_bounds = pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)


def visible(layout: SequenceLayout, is_causal=False, window_left=None, window_right=None) -> Tensor:
    """(length, length), from the definition."""
    row = torch.arange(layout.length)
    distance = row[:, None] - row  # how far the key is behind the query
    sequence = torch.bucketize(row, torch.tensor(layout.cu_seqlens), right=True)
    mask = sequence[:, None] == sequence
    if is_causal:
        mask &= distance >= 0
    if window_left is not None:
        mask &= distance <= window_left
    if window_right is not None:
        mask &= -distance <= window_right
    return mask


def times_computed(layout: SequenceLayout, rank: int, **bounds) -> Tensor:
    """(length, length): how many steps of the rank see each pair, given to each what a call would see."""
    seen = torch.zeros(layout.length, layout.length, dtype=torch.int32)
    left, right = bounds.get("window_left"), bounds.get("window_right")
    for rows, owner, keys, query_offset in plan(layout, rank, **bounds):
        assert any(run.begin <= keys.begin < keys.end <= run.end for run in layout.runs[owner])
        assert any(run.begin <= rows.begin < rows.end <= run.end for run in layout.runs[rank])
        i, j = torch.arange(rows.size)[:, None] + query_offset, torch.arange(keys.size)
        mask = torch.ones(rows.size, keys.size, dtype=torch.bool)
        if bounds.get("is_causal"):
            mask &= j <= i
        if left is not None:
            mask &= j >= i - left
        if right is not None:
            mask &= j <= i + right
        assert mask.any(), "a step that sees nothing"
        assert mask.any(0).all() and mask.any(1).all(), "a step with rows or keys that nothing needs"
        seen[rows.begin : rows.end, keys.begin : keys.end] += mask
    return seen


@by_layout
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 50])
def test_every_row_has_one_place(make, world_size):
    layout = make(world_size)
    rows = torch.cat([layout.rows(rank) for rank in range(world_size)])
    assert rows.sort().values.tolist() == list(range(layout.length))
    counts = [layout.num_rows(rank) for rank in range(world_size)]
    assert counts == [len(layout.rows(rank)) for rank in range(world_size)]
    assert max(counts) - min(counts) <= 2


@by_layout
@by_bounds
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 50])
def test_every_visible_pair_is_computed_once(make, bounds, world_size):
    layout = make(world_size)
    total = sum(times_computed(layout, rank, **bounds) for rank in range(world_size))
    torch.testing.assert_close(total, visible(layout, **bounds).to(total.dtype))


@by_bounds
@pytest.mark.parametrize("rank", [0, 1, 511, 1023])
def test_every_visible_pair_is_computed_once_at_1024_ranks(bounds, rank):
    layout = SequenceLayout.zigzag(3 * 1024 + 5, world_size=1024)
    rows = layout.rows(rank)
    expected = visible(layout, **bounds)[rows]
    torch.testing.assert_close(times_computed(layout, rank, **bounds)[rows], expected.to(torch.int32))


def test_steps_go_from_the_own_keys_backwards_through_the_ring():
    layout = SequenceLayout.contiguous(8, world_size=4)
    assert [step.owner for step in plan(layout, 1)] == [1, 0, 3, 2]
    assert [tuple(step) for step in plan(layout, 1, is_causal=True)] == [
        ((2, 4), 1, (2, 4), 0),
        ((2, 4), 0, (0, 2), 2),
    ]


@by_layout
@by_bounds
def test_pairs_are_counted_without_listing_them(make, bounds):
    layout = make(3)
    for rank in range(3):
        expected = int(visible(layout, **bounds)[layout.rows(rank)].sum())
        assert visible_pairs(layout, rank, **bounds) == expected


@pytest.mark.parametrize("world_size", [2, 16, 1024])
def test_zigzag_balances_causality(world_size):
    length = 16 * world_size + 7
    layout = SequenceLayout.zigzag(length, world_size=world_size)
    pairs = [visible_pairs(layout, rank, is_causal=True) for rank in range(world_size)]
    assert sum(pairs) == length * (length + 1) // 2
    one_row = length  # ranks may differ by two rows, no row sees more keys than there are
    assert max(pairs) - min(pairs) <= 2 * one_row
    uneven = SequenceLayout.contiguous(length, world_size=world_size)
    last = visible_pairs(uneven, world_size - 1, is_causal=True)
    assert last > 1.4 * sum(pairs) / world_size


def test_many_short_sequences_are_balanced():
    layout = SequenceLayout.from_cu_seqlens(torch.arange(0, 301, 3), world_size=7)
    counts = [layout.num_rows(rank) for rank in range(7)]
    assert max(counts) - min(counts) <= 2


def test_positions_count_from_the_begin_of_a_sequence():
    assert SequenceLayout.zigzag(8, rank=1, world_size=2).positions().tolist() == [2, 3, 4, 5]
    packed = SequenceLayout.from_cu_seqlens([0, 4, 8], rank=0, world_size=2)
    assert packed.rows().tolist() == [0, 3, 4, 7]
    assert packed.positions().tolist() == [0, 3, 0, 3]


def test_shard_takes_the_rows_of_the_rank():
    x = torch.arange(2 * 7.0).view(2, 7)
    layout = SequenceLayout.zigzag(7, rank=0, world_size=2)
    torch.testing.assert_close(layout.shard(x, 1), x[:, layout.rows()])
    torch.testing.assert_close(layout.shard(x.T, 0), x.T[layout.rows()])
    with pytest.raises(ValueError, match=r"7 rows in dim 0, but got 2"):
        layout.shard(x, 0)


BAD = {
    "length": (lambda: SequenceLayout.zigzag(-1, world_size=2), "a length of at least 0, but got -1"),
    "ranks": (lambda: SequenceLayout.zigzag(4, world_size=0), "a world size of at least 1, but got 0"),
    "rank": (lambda: SequenceLayout.zigzag(4, rank=2, world_size=2), "a rank below 2, but got 2"),
    "falls": (lambda: SequenceLayout.from_cu_seqlens([0, 4, 3], world_size=2), "never falls"),
    "begin": (lambda: SequenceLayout.from_cu_seqlens([1, 4], world_size=2), "begins with 0"),
    "no_end": (lambda: SequenceLayout.from_cu_seqlens([0], world_size=2), "has an end"),
    "window": (lambda: plan(SequenceLayout.zigzag(4, world_size=2), 0, window_left=-1), "window_left"),
    "plan_rank": (lambda: plan(SequenceLayout.zigzag(4, world_size=2), 2), "a rank below 2, but got 2"),
    "alone": (lambda: SequenceLayout.zigzag(4, world_size=2).unshard(torch.ones(2), 0), "without a group"),
    "method": (
        lambda: cost("star", SequenceLayout.zigzag(4, world_size=2), query_heads=2, head_dim=4),
        "'ulysses', 'allgather', 'ring', but got 'star'",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_what_makes_no_layout_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


LLAMA = {"query_heads": 32, "key_heads": 8, "head_dim": 128, "itemsize": 2}


def test_costs_at_a_million_tokens():
    layout = SequenceLayout.contiguous(2**20, world_size=1024)
    ring = cost("ring", layout, **LLAMA)
    assert ring.received_forward == 1023 * 2 * 1024 * 8 * 128 * 2
    assert math.isclose(ring.received_forward / 2**30, 4.0, rel_tol=1e-2)
    assert ring.received_backward == ring.received_forward + 2 * 2**20 * 8 * 128 * 4
    gathered = cost("allgather", layout, **LLAMA)
    assert gathered.received_forward == ring.received_forward
    assert gathered.received_backward == 1023 * 2 * 1024 * 8 * 128 * 4
    assert gathered.keys_held == 2 * 2**20 * 8 * 128 * 2
    eight = SequenceLayout.contiguous(2**20, world_size=8)
    ulysses = cost("ulysses", eight, **LLAMA)
    assert ulysses.received_forward == 7 * 2 * 2**17 * (32 + 8) // 8 * 128 * 2
    assert ulysses.received_backward == ulysses.received_forward


def test_flops_are_of_what_is_visible():
    layout = SequenceLayout.zigzag(64, world_size=4)
    shape = {"query_heads": 8, "key_heads": 2, "head_dim": 16, "value_dim": 32, "is_causal": True}
    pairs = 64 * 65 // 2
    for method in ("allgather", "ring"):
        total = sum(cost(method, layout, rank=rank, **shape).flops_forward for rank in range(4))
        assert total == 2 * 8 * (16 + 32) * pairs
    assert cost("ulysses", layout, **shape).flops_forward == 2 * 2 * (16 + 32) * pairs


def test_auto_takes_what_sends_least_of_what_the_heads_allow():
    few, many = (SequenceLayout.zigzag(4096, world_size=n) for n in (8, 64))
    assert choose_way(few, **LLAMA) == Way("allgather", 8)  # nothing is left to gather
    assert choose_way(many, **LLAMA) == Way("allgather", 8)  # 32 heads do not divide by 64 ranks
    assert choose_way(few, **{**LLAMA, "query_heads": 9, "key_heads": 9}) == Way("allgather", 1)
    assert choose_way(few, **LLAMA, has_mask=True) == Way("allgather", 1)


def test_auto_finds_two_dimensions_for_a_million_tokens_on_1024_ranks():
    layout = SequenceLayout.zigzag(2**20, world_size=1024)
    way = choose_way(layout, **LLAMA, is_causal=True)
    assert way == Way("ring", 8)
    found = cost(way.method, layout, ulysses_size=way.ulysses_size, **LLAMA, is_causal=True)
    assert 0.45 * 2**30 < found.received_forward < 0.55 * 2**30
    assert max(found.memory_forward, found.memory_backward) < 2**27


def test_auto_keeps_to_the_memory_that_it_may_take():
    layout = SequenceLayout.zigzag(2**20, world_size=1024)
    assert choose_way(layout, **LLAMA, memory_limit=2**40) == Way("allgather", 8)
    assert choose_way(layout, **LLAMA, memory_limit=0) == Way("ring", 1)  # nothing fits: what needs least


def test_a_window_spares_what_it_hides():
    layout = SequenceLayout.zigzag(2**20, world_size=1024)
    for method in ("allgather", "ring"):
        near = cost(method, layout, **LLAMA, is_causal=True, window_left=4096)
        assert near.received_forward < cost(method, layout, **LLAMA, is_causal=True).received_forward / 50
    own = cost("allgather", SequenceLayout.from_cu_seqlens(range(0, 801, 10), world_size=4), **LLAMA)
    assert own.received_forward == own.received_backward == 0  # short sequences are dealt out whole


def test_importing_attn_ext_does_not_import_its_distributed_part():
    program = """
import sys, attn_ext
assert not any(name.startswith("attn_ext.distributed") for name in sys.modules)
before = set(sys.modules)
import attn_ext.distributed
new = {name for name in set(sys.modules) - before if not name.startswith("attn_ext.distributed")}
assert not any(name.startswith("torch") for name in new), new
"""
    subprocess.run([sys.executable, "-c", program], check=True)
