"""Which rows of a sequence lie on which rank."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SequenceLayout:
    """Which rows of a sequence, or of packed sequences, lie on which rank.

    The layout itself is numbers: any of its ranks can be looked at without communication. Only
    :meth:`unshard` and :func:`context_parallel_sdpa` communicate, and every rank of the group has to call
    them, forward and backward.

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
        >>> layout = SequenceLayout.zigzag(10, rank=1, world_size=2)
        >>> layout.runs[1]
        (Run(begin=3, end=6), Run(begin=6, end=8))
        >>> layout.shard(torch.arange(10) * 10, dim=0)
        tensor([30, 40, 50, 60, 70])
    """

    runs: tuple[tuple[Run, ...], ...]
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
            group: a process group, a DeviceMesh of one dimension, a :class:`Transport`, or None for the
                default group.
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
        """Packed sequences, each laid out as by :meth:`zigzag`; no row sees another sequence.

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
        runs: list[list[Run]] = [[] for _ in range(ranks)]
        for begin, end in pairwise(starts):
            for piece, run in enumerate(_pieces(begin, end, 2 * ranks)):
                runs[min(piece, 2 * ranks - 1 - piece)].append(run)
        return cls(tuple(map(_not_empty, runs)), starts, rank, transport)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    @property
    def length(self) -> int:
        """The rows of all ranks."""
        return self.cu_seqlens[-1]

    @property
    def sequences(self) -> tuple[Run, ...]:
        """The rows of each sequence."""
        return tuple(Run(*ends) for ends in pairwise(self.cu_seqlens))

    def num_rows(self, rank: int | None = None) -> int:
        """How many rows a rank has, this one if None."""
        return sum(run.size for run in self.runs[self.rank if rank is None else rank])

    def local_runs(self, rank: int | None = None) -> tuple[Run, ...]:
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
        ((whole,),) = gather_rows(Route(self, (Run(0, self.length),), dim=_negative(x, dim)), x)
        return whole


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


def _pieces(begin: int, end: int, count: int) -> list[Run]:
    """Pieces whose lengths differ by 1 at most.

    Which of them are longer goes on, from one sequence to the next, where the last one stopped: the rows
    before ``begin`` were dealt out in the same way.
    """
    base, longer = divmod(end - begin, count)
    lengths = [base + ((piece - begin) % count < longer) for piece in range(count)]
    return [Run(*cut) for cut in pairwise(accumulate(lengths, initial=begin))]


def _not_empty(runs: Sequence[Run]) -> tuple[Run, ...]:
    return tuple(run for run in runs if run.size)
