"""Which rows of a sequence lie on which rank."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from heapq import heapreplace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .transport import Transport, as_transport


class Run(NamedTuple):
    """Rows, keys or heads that follow one another: from ``begin`` to before ``end``."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        """How many."""
        return self.end - self.begin

    def overlap(self, other: "Run") -> "Run":
        """What both have; empty where that is nothing."""
        begin = max(self.begin, other.begin)
        return Run(begin, max(begin, min(self.end, other.end)))


Runs = tuple[Run, ...]


@dataclass(frozen=True)
class SequenceLayout:
    """Which rows of a sequence, or of packed sequences, lie on which rank.

    The layout itself is numbers: any of its ranks can be looked at without communication. Only
    :meth:`unshard` and :func:`attn_ext.distributed.context_parallel_sdpa` communicate, and every rank of the
    group has to call them, forward and backward.

    **Gradients** are those of the sum of the losses of all ranks. Where every rank computes the same loss of
    the whole, that is as many times too much as there are ranks.

    Attributes:
        runs: of each rank, the runs of global rows that it has, in the order of its local rows. A run never
            leaves its sequence.
        cu_seqlens: where each sequence begins, and where the last one ends.
        rank: that of this process.
        transport: how it communicates, or None.

    Example:
        >>> from attn_ext.distributed import SequenceLayout
        >>> layout = SequenceLayout.zigzag(10, rank=0, world_size=2)
        >>> layout.runs[0]
        (Run(begin=0, end=3), Run(begin=8, end=10))
        >>> layout.shard(torch.arange(10) * 10, dim=0)
        tensor([ 0, 10, 20, 80, 90])
    """

    runs: tuple[Runs, ...]
    cu_seqlens: tuple[int, ...]
    rank: int
    transport: Transport | None

    @classmethod
    def zigzag(
        cls, length: int, group: Any = None, *, rank: int = 0, world_size: int | None = None
    ) -> "SequenceLayout":
        """Each rank an early piece and a late one, so that all have as much work under causality.

        Args:
            length: rows of the sequence; any number.
            group: a process group, a DeviceMesh of one dimension, a
                :class:`attn_ext.distributed.Transport`, or None for the default group.
            rank: with ``world_size``, of which rank this is, without a group.
            world_size: the number of ranks, without a group.

        Raises:
            ValueError: a negative length; a rank that there is not.

        Source:
            Brandon et al. 2023, "Striped Attention"; Zhu 2024, "ring-flash-attention".
        """
        return cls.from_cu_seqlens((0, length), group, rank=rank, world_size=world_size)

    @classmethod
    def contiguous(
        cls, length: int, group: Any = None, *, rank: int = 0, world_size: int | None = None
    ) -> "SequenceLayout":
        """Each rank one piece, in the order of the ranks; arguments and errors as of :meth:`zigzag`."""
        rank, ranks, transport = _place(group, rank, world_size)
        cu_seqlens = _checked((0, length))
        cuts = [length * piece // ranks for piece in range(ranks + 1)]
        runs = tuple(_not_empty([Run(*cut)]) for cut in pairwise(cuts))
        return cls(runs, cu_seqlens, rank, transport)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Tensor | Sequence[int],
        group: Any = None,
        *,
        rank: int = 0,
        world_size: int | None = None,
    ) -> "SequenceLayout":
        """Packed sequences: short ones whole, long ones as by :meth:`zigzag`; no row sees another sequence.

        A sequence is short if it has at most a fourth of a rank's share of the rows. Each goes, the longest
        first, to the rank that has the fewest rows yet, as long as that gets no more than its share.

        Args:
            cu_seqlens: 0, then where each sequence ends.
            group: as of :meth:`zigzag`, like the other arguments.
            rank: as there.
            world_size: as there.

        Raises:
            ValueError: lengths that fall or do not begin with 0; what :meth:`zigzag` refuses.
        """
        rank, ranks, transport = _place(group, rank, world_size)
        starts = _checked(cu_seqlens)
        return cls(_zigzag(starts, ranks), starts, rank, transport)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @property
    def length(self) -> int:
        """The rows of all ranks."""
        return self.cu_seqlens[-1]

    @property
    def sequences(self) -> Runs:
        """The rows of each sequence."""
        return tuple(Run(*ends) for ends in pairwise(self.cu_seqlens))

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceLayout":
        """Itself: nothing of it changes, and a process group is not copied with a model."""
        return self

    def num_rows(self, rank: int | None = None) -> int:
        """How many rows a rank has, this one if None."""
        return sum(run.size for run in self.runs[self.rank if rank is None else rank])

    def local_runs(self, rank: int | None = None) -> Runs:
        """Where among its own rows a rank has each of its runs."""
        sizes = (run.size for run in self.runs[self.rank if rank is None else rank])
        ends = accumulate(sizes, initial=0)
        return tuple(Run(*run) for run in pairwise(ends))

    def rows(self, rank: int | None = None, device: torch.device | str | None = None) -> Tensor:
        """The global rows that a rank has, int64."""
        runs = self.runs[self.rank if rank is None else rank]
        return torch.cat([torch.arange(0), *(torch.arange(*run) for run in runs)]).to(device)

    def positions(self, rank: int | None = None, device: torch.device | str | None = None) -> Tensor:
        """The place of each row of a rank in its sequence, int64, as rotary embeddings need it."""
        rows = self.rows(rank)
        starts = torch.tensor(self.cu_seqlens)
        return (rows - starts[torch.bucketize(rows, starts, right=True) - 1]).to(device)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """The rows of this rank, of a tensor that every rank has; differentiable, without communication.

        Args:
            x: any shape, with ``length`` rows in ``dim``.
            dim: of the sequence.

        Raises:
            ValueError: another number of rows.
        """
        check_rows(x, dim, self.length)
        return take(self, x, dim, self.rank)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The rows of all ranks in their order; differentiable.

        Args:
            x: this rank's rows; any shape that differs between ranks in ``dim`` alone.
            dim: of the sequence.

        Raises:
            ValueError: not as many rows as this rank has; a layout without a group.
        """
        from .exchange import Route, gather_rows

        check_rows(x, dim, self.num_rows())
        everything = (Run(0, self.length),)
        wanted = (everything,) * self.world_size
        route = Route(transport_of(self), self.runs, wanted, everything, dim=_negative(x, dim))
        ((whole,),) = gather_rows(route, x)
        return whole

    @property
    def digest(self) -> str:
        """The same for the same rows on the same ranks."""
        return _digest(self.runs, self.cu_seqlens)

    def sequence_of(self, rows: Run) -> int:
        """The number of the sequence in which rows begin."""
        return max(0, bisect_right(self.cu_seqlens, rows.begin) - 1)

    def grouped(self, size: int, transport: Transport | None) -> "SequenceLayout":
        """As many neighbouring ranks at a time as one rank; ``transport`` is that of this rank's group."""
        groups = [self.runs[first : first + size] for first in range(0, self.world_size, size)]
        runs = tuple(_joined(self.cu_seqlens, (run for own in group for run in own)) for group in groups)
        return SequenceLayout(runs, self.cu_seqlens, self.rank // size, transport)


@lru_cache(maxsize=64)
def _digest(*numbers: object) -> str:
    return blake2b(repr(numbers).encode(), digest_size=8).hexdigest()


def transport_of(layout: SequenceLayout) -> Transport:
    if layout.transport is None:
        raise ValueError("expected a layout with a group, but got one that was made without a group")
    return layout.transport


def merged(runs: Iterable[Run]) -> Runs:
    """The rows of all runs, rising and each once."""
    result: list[Run] = []
    for run in sorted(runs):
        if result and run.begin <= result[-1].end:
            result[-1] = Run(result[-1].begin, max(run.end, result[-1].end))
        elif run.size:
            result.append(run)
    return tuple(result)


def rows_of(runs: Iterable[Run]) -> int:
    return sum(run.size for run in runs)


def check_rows(x: Tensor, dim: int, expected: int) -> None:
    if x.shape[dim] != expected:
        raise ValueError(f"expected {expected} rows in dim {dim}, but got {x.shape[dim]}")


def take(layout: SequenceLayout, whole: Tensor, dim: int, rank: int) -> Tensor:
    """The rows of a rank, out of those of all."""
    pieces = [whole.narrow(dim, run.begin, run.size) for run in layout.runs[rank]]
    return torch.cat(pieces, dim) if pieces else whole.narrow(dim, 0, 0)


def _negative(x: Tensor, dim: int) -> int:
    return dim if dim < 0 else dim - x.dim()


def _place(group: Any, rank: int, world_size: int | None) -> tuple[int, int, Transport | None]:
    """Rank, number of ranks, and transport."""
    if world_size is None:
        transport = as_transport(group)
        return transport.rank, transport.world_size, transport
    if world_size < 1:
        raise ValueError(f"expected a world size of at least 1, but got {world_size}")
    check_rank(rank, world_size)
    return rank, world_size, None


def check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"expected a rank below {world_size}, but got {rank}")


def _checked(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    starts = tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)
    if len(starts) == 2 and starts[0] == 0 and starts[1] < 0:
        raise ValueError(f"expected a length of at least 0, but got {starts[1]}")
    if len(starts) < 2 or starts[0] != 0:
        raise ValueError(f"expected cu_seqlens that begins with 0 and has an end, but got {list(starts)[:8]}")
    for before, after in pairwise(starts):
        if after < before:
            raise ValueError(f"expected cu_seqlens that never falls, but got {after} after {before}")
    return starts


@lru_cache(maxsize=64)
def _zigzag(cu_seqlens: tuple[int, ...], ranks: int) -> tuple[Runs, ...]:
    """Of each rank, short sequences whole, of long ones an early and a late piece."""
    runs, long = _deal_out([Run(*ends) for ends in pairwise(cu_seqlens)], ranks)
    dealt = 0
    for sequence in long:
        for piece, run in enumerate(_pieces(sequence, 2 * ranks, dealt)):
            runs[min(piece, 2 * ranks - 1 - piece)].append(run)
        dealt += sequence.size
    return tuple(_joined(cu_seqlens, own) for own in runs)


def _deal_out(sequences: Sequence[Run], ranks: int) -> tuple[list[list[Run]], list[Run]]:
    """Short sequences by rank, and those that are left to be cut into pieces."""
    share = -(-sum(sequence.size for sequence in sequences) // ranks)
    runs: list[list[Run]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    left = []
    for sequence in sorted(sequences, key=lambda run: (-run.size, run.begin)):
        load, rank = loads[0]
        if 4 * sequence.size <= share and load + sequence.size <= share:
            runs[rank].append(sequence)
            heapreplace(loads, (load + sequence.size, rank))
        else:
            left.append(sequence)
    return runs, sorted(left)


def _pieces(rows: Run, count: int, dealt: int) -> list[Run]:
    """Pieces whose lengths differ by 1 at most.

    Which of them are longer goes on, from one sequence to the next, where the last one stopped: ``dealt``
    rows were cut before these.
    """
    base, longer = divmod(rows.size, count)
    lengths = [base + ((piece - dealt) % count < longer) for piece in range(count)]
    return [Run(*cut) for cut in pairwise(accumulate(lengths, initial=rows.begin))]


def _joined(cu_seqlens: Sequence[int], runs: Iterable[Run]) -> Runs:
    """Rising, and neighbours of one sequence as one run."""
    starts = set(cu_seqlens)
    joined: list[Run] = []
    for run in sorted(run for run in runs if run.size):
        if joined and joined[-1].end == run.begin and run.begin not in starts:
            joined[-1] = Run(joined[-1].begin, run.end)
        else:
            joined.append(run)
    return tuple(joined)


def _not_empty(runs: Sequence[Run]) -> Runs:
    return tuple(run for run in runs if run.size)
