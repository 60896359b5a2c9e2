"""Decoding from paged caches: sequences whose keys and values lie in pages of a pool, in no order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import attn_ext

from .batch_report import AtLeast, Comparison
from .timing import SumTiming, Timing

__all__ = ["COMPARISONS", "GRID", "OURS", "Cache", "Problem", "entries", "errors", "make_problem"]

PAGE = 16
PAGES = (PAGE, 1, 256)
OURS = f"page {PAGE}"
INT8 = f"int8 {OURS}"
BY_ROWS = f"{OURS} by rows"
ALONE, PACKED, F_SDPA = "alone", "packed", "F.sdpa"
LONG_LENGTH = 32768


class Cache(NamedTuple):
    """The keys of sequences, each of which has one query."""

    name: str
    lengths: tuple[int, ...]
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


LONG = Cache("decode-1", (LONG_LENGTH,))
#: Batches, and what each is.
GRID = {
    Cache("decode-8", tuple(1024 * n for n in range(1, 9))): "8 sequences of 1,024, 2,048 ... 8,192 keys",
    LONG: "one sequence of 32,768 keys",
}

COMPARISONS: tuple[Comparison, ...] = (
    AtLeast("to alone", ALONE, OURS, 0.95),
    AtLeast("to packed", PACKED, OURS),
    AtLeast("to F.sdpa", F_SDPA, OURS),
    AtLeast(
        "int8", OURS, INT8, 1.7, lambda cell, dtype: cell == LONG.name and dtype in ("bfloat16", "float16")
    ),
)


@dataclass(frozen=True)
class Problem:
    """Queries (N, Hq, D), and the rows of keys and values of all sequences, (T, Hkv, D)."""

    cache: Cache
    query: Tensor
    key: Tensor
    value: Tensor

    mode: str = "fwd"

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def flops(self) -> float:
        """2 (D + Dv) for every pair of query and key."""
        return 4 * self.cache.head_dim * self.cache.query_heads * sum(self.cache.lengths)

    @property
    def bytes_read(self) -> int:
        """Keys and values, once."""
        return 2 * self.key.numel() * self.dtype.itemsize


def make_problem(cache: Cache, dtype: torch.dtype) -> Problem:
    """Tensors of a batch, the same every time, from the unit normal distribution."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, cache.head_dim, generator=generator).to(dtype)

    rows = sum(cache.lengths)
    query = normal(len(cache.lengths), cache.query_heads)
    return Problem(cache, query, normal(rows, cache.kv_heads), normal(rows, cache.kv_heads))


# Pages --------------------------------------------------------------------------------------------


class Pages(NamedTuple):
    """Where the rows of a problem lie in a pool of pages."""

    block_table: Tensor  # (N, most pages of a sequence) int32, -1 behind a sequence's own
    slots: Tensor  # (T,): the place in the pool of each row
    number: int
    size: int

    def lay(self, rows: Tensor, *, by_rows: bool = False) -> Tensor:
        """(T, Hkv, D) as (P, page, Hkv, D), a head's rows side by side, or by_rows a row's heads."""
        heads, dim = rows.shape[1:]
        if by_rows:
            pool = rows.new_zeros(self.number, self.size, heads, dim)
        else:
            pool = rows.new_zeros(self.number, heads, self.size, dim).transpose(1, 2)
        pool[self.slots // self.size, self.slots % self.size] = rows
        return pool


def make_pages(lengths: Sequence[int], size: int) -> Pages:
    """Pages of the sequences, shuffled over the pool as they are in one that has been used for a while."""
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    block_table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32)
    slots = []
    for number, own in enumerate(order.split(counts)):  # type: ignore[no-untyped-call]
        block_table[number, : len(own)] = own
        slots.append((own[:, None] * size + torch.arange(size)).flatten()[: lengths[number]])
    return Pages(block_table, torch.cat(slots), sum(counts), size)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and the scale that gives the rows back."""
    scale = rows.abs().max().float() / 127
    return (rows.float() / scale).round().to(torch.int8), scale


# Who attends --------------------------------------------------------------------------------------


def entries(problem: Problem) -> dict[str, Timing | str]:
    """What is timed of everyone, ready for the first call; all return the output or a list of outputs."""
    paged = {f"page {size}": Timing(_paged(problem, size)) for size in PAGES}
    paged[BY_ROWS] = Timing(_paged(problem, PAGE, by_rows=True))
    separate = _separate(problem)
    calls = [partial(attn_ext.sdpa, *one, enable_gqa=True) for one in separate]
    return {
        **paged,
        INT8: Timing(_paged_int8(problem)),
        ALONE: SumTiming(lambda: [call() for call in calls], parts=[(1, Timing(call)) for call in calls]),
        PACKED: Timing(_packed(problem)),
        F_SDPA: Timing(_f_sdpa(separate)),
    }


def _call(problem: Problem, size: int, lay: Callable[[Pages], dict[str, Tensor]]) -> Callable[[], Tensor]:
    pages = make_pages(problem.cache.lengths, size)
    given: dict[str, Any] = {
        **lay(pages),
        "block_table": pages.block_table,
        "seqlens_k": torch.tensor(problem.cache.lengths, dtype=torch.int32),
        "enable_gqa": True,
    }
    function: Callable[..., Tensor] = attn_ext.sdpa_paged
    return lambda: function(problem.query, **given)


def _paged(problem: Problem, size: int, *, by_rows: bool = False) -> Callable[[], Tensor]:
    def lay(pages: Pages) -> dict[str, Tensor]:
        key, value = (pages.lay(rows, by_rows=by_rows) for rows in (problem.key, problem.value))
        return {"key_pages": key, "value_pages": value}

    return _call(problem, size, lay)


def _paged_int8(problem: Problem) -> Callable[[], Tensor]:
    def lay(pages: Pages) -> dict[str, Tensor]:
        (key, key_scale), (value, value_scale) = quantized(problem.key), quantized(problem.value)
        rows = {"key_pages": pages.lay(key), "value_pages": pages.lay(value)}
        return {**rows, "key_scale": key_scale, "value_scale": value_scale}

    return _call(problem, PAGE, lay)


def _separate(problem: Problem) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(1, Hq, 1, D) and twice (1, Hkv, L, D) for each sequence, contiguous."""
    lengths = problem.cache.lengths
    keys, values = (
        [part.transpose(0, 1)[None].contiguous() for part in rows.split(lengths)]  # type: ignore[no-untyped-call]
        for rows in (problem.key, problem.value)
    )
    queries = [query[None, :, None] for query in problem.query]
    return list(zip(queries, keys, values, strict=True))


def _packed(problem: Problem) -> Callable[[], Tensor]:
    lengths = torch.tensor([0, *problem.cache.lengths], dtype=torch.int32)
    ends = lengths.cumsum(0, dtype=torch.int32)
    one_each = torch.arange(len(lengths), dtype=torch.int32)
    rows = (problem.query, problem.key, problem.value)
    return partial(attn_ext.sdpa_packed, *rows, one_each, ends, enable_gqa=True)


def _f_sdpa(separate: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Callable[[], list[Tensor]]:
    """A loop over contiguous caches."""
    function = F.scaled_dot_product_attention
    return lambda: [function(*one, enable_gqa=True) for one in separate]


# Whether they compute the same --------------------------------------------------------------------


def errors(problem: Problem, entries: dict[str, Timing | str]) -> dict[str, float]:
    """The largest error of each who is timed, as a part of the largest number there is.

    Against each sequence by itself in float64, for int8 with the numbers that it stands for.
    """
    exact = _exact(problem, lambda rows: rows.double())
    exact_int8 = _exact(problem, lambda rows: quantized(rows)[0].double() * quantized(rows)[1].double())
    found = {}
    for name, entry in entries.items():
        if isinstance(entry, Timing):
            expected = exact_int8 if name == INT8 else exact
            difference = (_rows(entry.call(), problem) - expected).abs().max().item()
            found[name] = difference / max(expected.abs().max().item(), 1e-30)
    return found


def _exact(problem: Problem, change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = Problem(problem.cache, problem.query.double(), change(problem.key), change(problem.value))
    return _rows([attn_ext.sdpa(*one, enable_gqa=True) for one in _separate(changed)], problem)


def _rows(results: Any, problem: Problem) -> Tensor:
    """(N, Hq, D) in float64."""
    outputs = torch.cat(list(results)) if isinstance(results, list) else results
    return outputs.double().reshape(problem.query.shape)
