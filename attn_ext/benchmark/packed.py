"""Packed sequences: batches of different lengths, and who attends within each of their sequences.

Contenders differ in how the rows of a batch lie (a :class:`Layout`) and in what is called on them; what is
timed and what is checked is made of the two. For everyone the heads of a row lie beside each other, as a
projection leaves them: packed rows are held against rows, and not against a copy with the heads apart.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

import attn_ext

from .batch_report import CANNOT, DOES_NOT_FIT, AtLeast, AtMost, Comparison
from .cells import MODES
from .timing import SumTiming, Timing

__all__ = ["COMPARISONS", "GRID", "OURS", "Batch", "Problem", "entries", "errors", "make_problem"]

OURS = "packed"
ALONE, LOOP, PADDED, F_PADDED, F_JAGGED = "alone", "loop", "padded", "F.sdpa padded", "F.sdpa jagged"
#: Of memory that a contender may ask for; a fixed number, so that the same ones take part on every machine.
MOST_BYTES = 4 * 2**30


class Batch(NamedTuple):
    """Sequences that attend to themselves."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 8
    head_dim: int = 64

    def flops(self, is_causal: bool) -> int:
        """2 (D + Dv) for every pair of query and key of one sequence."""
        pairs = sum(n * (n + 1) // 2 if is_causal else n * n for n in self.lengths)
        return 4 * self.head_dim * self.heads * pairs


UNIFORM = tuple(round(1 + 2047 * i / 15) for i in range(16))
TINY = tuple(1 + i % 16 for i in range(1000))
POWERS = tuple(2**i for i in range(12))
ONE = Batch("one-16", (16,), heads=1)

#: Mixes of lengths, and what each is.
GRID = {
    Batch("uniform", UNIFORM): "16 sequences, 1 to 2,048",
    Batch("long-tiny", (*TINY, 8192)): "a thousand sequences of 1 to 16, and one of 8,192",
    Batch("powers", POWERS): "12 sequences, 1, 2, 4 ... 2,048",
    ONE: "one sequence of 16, 1 head: what a call costs",
}


def _is_mix(cell: str, dtype: str) -> bool:
    return cell != ONE.name


COMPARISONS: tuple[Comparison, ...] = (
    AtLeast("to alone", ALONE, OURS, 0.95, _is_mix),
    AtLeast("to padded", PADDED, OURS, 1.5, _is_mix),
    AtMost("over alone", ALONE, OURS, 2e-6, lambda cell, dtype: cell == ONE.name),
)


@dataclass(frozen=True)
class Problem:
    """A batch with its tensors, each (T, H, D)."""

    batch: Batch
    mode: str
    is_causal: bool
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def flops(self) -> float:
        return self.batch.flops(self.is_causal) * MODES[self.mode]

    @property
    def bytes_read(self) -> int:
        """Rows are few against the work on them."""
        return 0

    @property
    def starts(self) -> list[int]:
        """Of each sequence, and the end of the last."""
        starts = [0]
        for length in self.batch.lengths:
            starts.append(starts[-1] + length)
        return starts

    @cached_property
    def offsets(self) -> Tensor:
        """The same tensor every time: it is what says that nested tensors have the same lengths."""
        return torch.tensor(self.starts)

    def with_rows(self, batch: Batch, change: Callable[[Tensor], Tensor]) -> "Problem":
        """The problem of other rows."""
        tensors = (self.query, self.key, self.value, self.grad_output)
        return Problem(batch, self.mode, self.is_causal, *map(change, tensors))

    def sequence(self, number: int) -> "Problem":
        """One sequence as a batch of its own."""
        begin, end = self.starts[number], self.starts[number + 1]
        return self.with_rows(self.batch._replace(lengths=(end - begin,)), lambda rows: rows[begin:end])


def make_problem(batch: Batch, mode: str, dtype: torch.dtype, is_causal: bool = True) -> Problem:
    """Tensors of a batch, the same every time, from the unit normal distribution."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(batch.lengths), batch.heads, batch.head_dim)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    return Problem(batch, mode, is_causal, *tensors)


# How rows lie -------------------------------------------------------------------------------------


class Layout(Protocol):
    """Where a contender has the rows of a batch."""

    def lay(self, problem: Problem, rows: Tensor) -> list[Tensor]:
        """(T, H, D) as the contender's tensors."""

    def pack(self, problem: Problem, tensors: Sequence[Tensor]) -> Tensor:
        """Back to (T, H, D)."""


class Packed:
    """(T, H, D)."""

    def lay(self, problem: Problem, rows: Tensor) -> list[Tensor]:
        return [rows]

    def pack(self, problem: Problem, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


class Separate:
    """(1, H, L, D) for each sequence, in memory of its own."""

    def lay(self, problem: Problem, rows: Tensor) -> list[Tensor]:
        parts = rows.split(problem.batch.lengths)  # type: ignore[no-untyped-call]
        return [part.clone().transpose(0, 1)[None] for part in parts]

    def pack(self, problem: Problem, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor[0].transpose(0, 1) for tensor in tensors])


class Padded:
    """(N, H, longest, D), zeros behind each sequence."""

    def lay(self, problem: Problem, rows: Tensor) -> list[Tensor]:
        parts = rows.split(problem.batch.lengths)  # type: ignore[no-untyped-call]
        return [torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)]

    def pack(self, problem: Problem, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2)[_takes_part(problem)]


class Jagged:
    """torch's nested tensor (N, H, lengths, D)."""

    def lay(self, problem: Problem, rows: Tensor) -> list[Tensor]:
        return [torch.nested.nested_tensor_from_jagged(rows, problem.offsets).transpose(1, 2)]

    def pack(self, problem: Problem, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2).values()


def _takes_part(problem: Problem) -> Tensor:
    """(N, longest): where a padded batch has rows of its sequences."""
    lengths = torch.tensor(problem.batch.lengths)
    return torch.arange(int(lengths.max())) < lengths[:, None]


# Who attends --------------------------------------------------------------------------------------

#: From the lists of queries, keys and values to the list of outputs.
Attend = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


def _attend_each(function: Callable[..., Tensor], **options: Any) -> Attend:
    """The function on each query, key and value in turn."""

    def attend(query: Sequence[Tensor], key: Sequence[Tensor], value: Sequence[Tensor]) -> list[Tensor]:
        return [function(q, k, v, **options) for q, k, v in zip(query, key, value, strict=True)]

    return attend


def _packed(problem: Problem) -> Attend:
    starts = problem.offsets.to(torch.int32)
    return _attend_each(attn_ext.sdpa_packed, cu_seqlens_q=starts, is_causal=problem.is_causal)


def _loop(problem: Problem) -> Attend:
    return _attend_each(attn_ext.sdpa, is_causal=problem.is_causal)


def _padded(problem: Problem) -> Attend:
    mask = _takes_part(problem)[:, None, None]
    return _attend_each(attn_ext.sdpa, attn_mask=mask, is_causal=problem.is_causal)


def _f_padded(problem: Problem) -> Attend:
    """It takes causality or a mask: both are a mask that is made beforehand."""
    mask = _takes_part(problem)[:, None, None]
    if problem.is_causal:
        longest = mask.shape[-1]
        mask = mask & torch.ones(longest, longest, dtype=torch.bool).tril()
    return _attend_each(F.scaled_dot_product_attention, attn_mask=mask)


def _f_jagged(problem: Problem) -> Attend | None:
    """On the CPU it knows no causality."""
    return None if problem.is_causal else _attend_each(F.scaled_dot_product_attention)


def _padded_bytes(problem: Problem) -> int:
    """Of query, key, value and output, and of their gradients."""
    batch = problem.batch
    rows = len(batch.lengths) * max(batch.lengths) * batch.heads
    return rows * batch.head_dim * problem.dtype.itemsize * (4 if problem.mode == "fwd" else 8)


def _f_padded_bytes(problem: Problem) -> int:
    """And of the mask, as bools and as numbers."""
    mask = len(problem.batch.lengths) * max(problem.batch.lengths) ** 2
    return _padded_bytes(problem) + mask * (1 + problem.dtype.itemsize)


def _f_jagged_bytes(problem: Problem) -> int:
    """Of scores and weights, in float32 at least, and of their gradients."""
    scores = problem.batch.heads * sum(length**2 for length in problem.batch.lengths)
    return scores * max(4, problem.dtype.itemsize) * (3 if problem.mode == "fwd" else 5)


class Contender(NamedTuple):
    """Someone who attends within sequences."""

    name: str
    layout: Layout
    prepare: Callable[[Problem], Attend | None]
    needed_bytes: Callable[[Problem], int] = lambda problem: 0


SINGLE = Contender(LOOP, Separate(), _loop)
CONTENDERS = (
    Contender(OURS, Packed(), _packed),
    SINGLE,
    Contender(PADDED, Padded(), _padded, _padded_bytes),
    Contender(F_PADDED, Padded(), _f_padded, _f_padded_bytes),
    Contender(F_JAGGED, Jagged(), _f_jagged, _f_jagged_bytes),
)

#: What is timed; it returns the outputs, or the gradients of all queries, all keys, all values.
Call = Callable[[], Sequence[Tensor]]


def entries(problem: Problem) -> dict[str, Timing | str]:
    """What is timed of everyone, ready for the first call; a word for who does not take part."""
    found: dict[str, Timing | str] = {}
    for contender in CONTENDERS:
        found[contender.name] = _entry(problem, contender)
        if contender.name == OURS:
            found[ALONE] = _alone(problem)
    return found


def _entry(problem: Problem, contender: Contender) -> Timing | str:
    if contender.needed_bytes(problem) > MOST_BYTES:
        return DOES_NOT_FIT
    attend = contender.prepare(problem)
    return CANNOT if attend is None else Timing(_timed(problem, contender.layout, attend))


def _alone(problem: Problem) -> SumTiming:
    """Of each length a sequence, timed by itself, as often as the batch has the length."""
    lengths = problem.batch.lengths
    parts = []
    for length, count in Counter(lengths).items():
        own = problem.sequence(lengths.index(length))
        parts.append((count, Timing(_timed(own, SINGLE.layout, _loop(own)))))
    return SumTiming(lambda: [part.call() for _, part in parts], parts=parts)


def _timed(problem: Problem, layout: Layout, attend: Attend) -> Call:
    """Forward, backward, or both; gradients are kept out of the leaves."""
    rows = (problem.query, problem.key, problem.value)
    query, key, value = ([t.detach() for t in layout.lay(problem, row)] for row in rows)
    if problem.mode == "fwd":
        return lambda: attend(query, key, value)
    inputs = [tensor.requires_grad_() for tensor in (*query, *key, *value)]
    grad_outputs = layout.lay(problem, problem.grad_output)
    if problem.mode == "fwdbwd":
        return lambda: torch.autograd.grad(attend(query, key, value), inputs, grad_outputs)
    with torch.enable_grad():
        outputs = attend(query, key, value)
    return lambda: torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=True)


# Whether they compute the same --------------------------------------------------------------------


def errors(problem: Problem, entries: dict[str, Timing | str]) -> dict[str, float]:
    """The largest error of each who is timed, as a part of the largest number that there is.

    Against each sequence by itself in float64, which the grid of cells holds against the reference.
    """
    exact = problem.with_rows(problem.batch, lambda rows: rows.double())
    with torch.set_grad_enabled(problem.mode == "fwdbwd"):
        expected = _packed_results(exact, SINGLE, _timed(exact, SINGLE.layout, _loop(exact)))
        largest = max(max(tensor.abs().max().item() for tensor in expected), 1e-30)
        found = {}
        for contender in CONTENDERS:
            entry = entries[contender.name]
            if isinstance(entry, str):
                continue
            actual = _packed_results(problem, contender, entry.call)
            differences = [(a.double() - e).abs().max() for a, e in zip(actual, expected, strict=True)]
            found[contender.name] = torch.stack(differences).max().item() / largest  # NaN where one is
    return found


def _packed_results(problem: Problem, contender: Contender, call: Callable[[], Any]) -> list[Tensor]:
    """The output, or the gradients of query, key and value, each (T, H, D)."""
    results = [tensor.detach() for tensor in call()]
    each = len(results) if problem.mode == "fwd" else len(results) // 3
    groups = [results[i : i + each] for i in range(0, len(results), each)]
    return [contender.layout.pack(problem, group) for group in groups]
