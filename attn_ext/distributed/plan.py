"""Which rows meet which keys, and where: numbers only."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .layout import Run, Runs, SequenceLayout, check_rank, merged


class Step(NamedTuple):
    """Rows of one rank that meet keys of one owner, in one call."""

    rows: Run  # global
    owner: int
    keys: Run  # global
    query_offset: int  # of the call: the first row's place, counted from the first key


class Reach(NamedTuple):
    """How far a row sees: ``left`` keys before its own place and ``right`` after it; None: all."""

    left: int | None
    right: int | None

    @classmethod
    def of(cls, is_causal: bool, window_left: int | None, window_right: int | None) -> "Reach":
        for name, window in (("window_left", window_left), ("window_right", window_right)):
            if window is not None and window < 0:
                raise ValueError(f"expected {name} of at least 0 or None, but got {window}")
        return cls(window_left, 0 if is_causal else window_right)

    def keys_of(self, rows: Run, keys: Run) -> Run:
        """Of the keys, those from the first to the last that any of the rows sees."""
        begin = keys.begin if self.left is None else rows.begin - self.left
        end = keys.end if self.right is None else rows.end + self.right
        return keys.overlap(Run(begin, end))

    def rows_of(self, keys: Run, rows: Run) -> Run:
        """Of the rows, those from the first to the last that see any of the keys."""
        return Reach(self.right, self.left).keys_of(keys, rows)


def plan(
    layout: SequenceLayout,
    rank: int,
    *,
    is_causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
) -> list[Step]:
    """The calls in which the rows of a rank meet every key that they see, each pair in one of them.

    The rank's own keys come first, then those of the rank before it, and so on around the ring. Where no row
    of a step would see a key there is no step, and a step has no row and no key that it does not need.

    Args:
        layout: which rows lie where; queries and keys lie alike.
        rank: whose rows.
        is_causal: as in :func:`attn_ext.sdpa`, by the place of a row in its sequence, like the windows.
        window_left: as there.
        window_right: as there.

    Raises:
        ValueError: a rank that there is not; a negative window.

    Source:
        Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".

    Example:
        >>> from attn_ext.distributed import SequenceLayout, plan
        >>> layout = SequenceLayout.contiguous(6, world_size=3)
        >>> for step in plan(layout, 1, is_causal=True):
        ...     print(step)
        Step(rows=Run(begin=2, end=4), owner=1, keys=Run(begin=2, end=4), query_offset=0)
        Step(rows=Run(begin=2, end=4), owner=0, keys=Run(begin=0, end=2), query_offset=2)
    """
    check_rank(rank, layout.world_size)
    reach = Reach.of(is_causal, window_left, window_right)
    own = list(visible_keys(layout, rank, reach))
    steps = []
    for distance in distances(layout.runs, layout.cu_seqlens, reach):
        owner = (rank - distance) % layout.world_size
        for run, visible in own:
            for held in layout.runs[owner]:
                keys = held.overlap(visible)
                if keys.size:
                    rows = reach.rows_of(keys, run)
                    steps.append(Step(rows, owner, keys, rows.begin - keys.begin))
    return steps


def visible_keys(layout: SequenceLayout, rank: int, reach: Reach) -> Iterator[tuple[Run, Run]]:
    """Each run of a rank, and the keys from the first to the last that it sees."""
    sequences = iter(layout.sequences)
    sequence = Run(0, 0)
    for run in layout.runs[rank]:
        while run.begin >= sequence.end:
            sequence = next(sequences)
        yield run, reach.keys_of(run, sequence)


@lru_cache(maxsize=64)
def distances(runs: tuple[Runs, ...], cu_seqlens: tuple[int, ...], reach: Reach) -> tuple[int, ...]:
    """How far before any rank, around the ring, is a rank whose keys it sees; 0, itself, comes first."""
    layout = SequenceLayout(runs, cu_seqlens, 0, None)
    held = sorted((run.begin, run.end, rank) for rank, own in enumerate(runs) for run in own)
    begins = [begin for begin, _, _ in held]
    found = {0}
    for rank in range(layout.world_size):
        for _, keys in visible_keys(layout, rank, reach):
            first = max(0, bisect_right(begins, keys.begin) - 1)
            last = bisect_left(begins, keys.end)
            found.update(
                (rank - owner) % layout.world_size for _, end, owner in held[first:last] if end > keys.begin
            )
        if len(found) == layout.world_size:
            break
    return tuple(sorted(found))


Need = tuple[Run, Run]


@lru_cache(maxsize=64)
def needs(
    runs: tuple[Runs, ...], cu_seqlens: tuple[int, ...], reach: Reach, block: int = 1, but_whole: bool = False
) -> tuple[tuple[Need, ...], ...]:
    """Of each rank, its runs and the keys that each sees, from the begin of a block of columns on.

    Whole sequences, which see nothing that lies elsewhere, may be left out.
    """
    layout = SequenceLayout(runs, cu_seqlens, 0, None)
    return tuple(
        tuple(
            (run, _from_block(layout, keys, block))
            for run, keys in visible_keys(layout, rank, reach)
            if not (but_whole and is_whole(layout, run))
        )
        for rank in range(layout.world_size)
    )


def _from_block(layout: SequenceLayout, keys: Run, block: int) -> Run:
    first = layout.cu_seqlens[layout.sequence_of(keys)]
    return Run(keys.begin - (keys.begin - first) % block, keys.end)


@lru_cache(maxsize=64)
def wanted_keys(
    runs: tuple[Runs, ...], cu_seqlens: tuple[int, ...], reach: Reach, block: int = 1, but_whole: bool = False
) -> tuple[Runs, ...]:
    """Of each rank, the keys that all-gather sends it: all, or what it needs where that is less."""
    if sends_all(cu_seqlens, reach):
        return ((Run(0, cu_seqlens[-1]),),) * len(runs)
    found = needs(runs, cu_seqlens, reach, block, but_whole)
    return tuple(merged(keys for _, keys in need) for need in found)


def sends_all(cu_seqlens: tuple[int, ...], reach: Reach) -> bool:
    """Whether all keys go to every rank: causality alone spares a fourth, and one collective is fast."""
    return reach.left is None and len(cu_seqlens) == 2


def is_whole(layout: SequenceLayout, run: Run) -> bool:
    """Whether a run is a whole sequence."""
    number = layout.sequence_of(run)
    return run == Run(layout.cu_seqlens[number], layout.cu_seqlens[number + 1])


def visible_pairs(
    layout: SequenceLayout,
    rank: int,
    *,
    is_causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
) -> int:
    """How many pairs of a row and a key the rows of a rank see: its work."""
    reach = Reach.of(is_causal, window_left, window_right)
    return sum(pairs_of(run, keys, reach) for run, keys in visible_keys(layout, rank, reach))


def pairs_of(rows: Run, keys: Run, reach: Reach) -> int:
    """Every row sees itself, so its keys end behind where they begin: the difference of two sums."""
    ends = rows.size * keys.end if reach.right is None else _sum_of_min(rows, reach.right + 1, keys.end)
    if reach.left is None:
        return ends - rows.size * keys.begin
    mirrored = Run(1 - rows.end, 1 - rows.begin)  # max(x, y) is -min(-x, -y)
    return ends + _sum_of_min(mirrored, reach.left, -keys.begin)


def _sum_of_min(run: Run, shift: int, bound: int) -> int:
    """The sum of min(i + shift, bound) over i in the run."""
    turn = min(max(bound - shift, run.begin), run.end)
    below = (run.begin + turn - 1 + 2 * shift) * (turn - run.begin) // 2
    return below + (run.end - turn) * bound
