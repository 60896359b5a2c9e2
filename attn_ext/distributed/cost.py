"""What attention over several ranks sends, holds and computes: formulas, without running it.

With S rows on W ranks, L = S / W of them here, and the features of keys and values together D + Dv::

    all-gather, ring   forward   (W - 1) L Hkv (D + Dv) itemsize
    all-gather         backward  (W - 1) L Hkv (D + Dv) 4
    ring               backward  (W - 1) L Hkv (D + Dv) itemsize + W L Hkv (D + Dv) 4
    Ulysses            either    (W - 1) L (Hq / W + heads of keys here) (D + Dv) itemsize

received a rank; under a window less, as only what is seen is sent. Ulysses has Hkv / W heads of keys on a
rank, and one where there are fewer heads than ranks. In two dimensions, U neighbours share their rows by
heads, then W / U ranks that are U apart do all-gather or ring with U L rows and the heads here.
"""

from typing import Any, NamedTuple

from .exchange import is_for_all, shared_rows
from .layout import Runs, SequenceLayout, rows_of
from .plan import Reach, distances, pairs_of, visible_keys, wanted_keys

METHODS = ("ulysses", "allgather", "ring")
MEMORY_LIMIT = 2**30
WIDE = 4  # bytes of what is summed over ranks


class Cost(NamedTuple):
    """Of one call, on one rank."""

    received_forward: int  # bytes
    received_backward: int  # bytes
    keys_held: int  # bytes of keys and values that are in memory at once
    flops_forward: int
    memory_forward: int  # bytes at the peak, beside what the rank passes; at most this, and about
    memory_backward: int  # the same, with what the forward pass left


class Way(NamedTuple):
    """How a call is made: ``ulysses_size`` ranks share heads, the others do the method."""

    method: str  # "allgather" or "ring"
    ulysses_size: int


def cost(
    method: str,
    layout: SequenceLayout,
    *,
    query_heads: int,
    head_dim: int,
    key_heads: int | None = None,
    value_dim: int | None = None,
    itemsize: int = 4,
    batch: int = 1,
    rank: int | None = None,
    is_causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    ulysses_size: int | None = None,
) -> Cost:
    """Bytes and flops of a rank.

    Args:
        method: "ulysses", "allgather" or "ring".
        layout: which rows lie where.
        query_heads: :math:`H_q`.
        head_dim: :math:`D`.
        key_heads: :math:`H_{kv}`; ``query_heads`` if None.
        value_dim: :math:`D_v`; ``head_dim`` if None.
        itemsize: bytes of an element, 2 for bfloat16.
        batch: how many sequences, or how many batches of packed ones.
        rank: which rank; that of the layout if None.
        is_causal: as in :func:`attn_ext.sdpa`, like the windows: what no row sees is not computed, and what
            no row of a rank sees because of a window is not sent to it.
        window_left: as there.
        window_right: as there.
        ulysses_size: as of :func:`attn_ext.distributed.context_parallel_sdpa`.

    Raises:
        ValueError: a method that there is not; a ``ulysses_size`` that does not divide the ranks.

    Example:
        >>> from attn_ext.distributed import SequenceLayout, cost
        >>> layout = SequenceLayout.zigzag(131072, world_size=8)
        >>> shape = {"query_heads": 32, "key_heads": 8, "head_dim": 128, "itemsize": 2}
        >>> [cost(method, layout, **shape).received_forward // 2**20 for method in ("ulysses", "allgather")]
        [280, 448]
    """
    if method not in METHODS:
        raise ValueError(f"expected a method of {', '.join(map(repr, METHODS))}, but got {method!r}")
    size = layout.world_size if method == "ulysses" else ulysses_size or 1
    if layout.world_size % size:
        raise ValueError(f"expected a ulysses_size that divides {layout.world_size} ranks, but got {size}")
    rank = layout.rank if rank is None else rank
    key_heads = query_heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim
    reach = Reach.of(is_causal, window_left, window_right)
    return _Problem(
        layout,
        rank,
        size,
        method == "ring",
        batch,
        query_heads,
        key_heads,
        head_dim,
        value_dim,
        itemsize,
        reach,
    ).cost()


class _Problem(NamedTuple):
    """A call of one rank; all sizes of its properties are elements."""

    layout: SequenceLayout
    rank: int
    size: int  # ranks that share heads
    is_ring: bool
    batch: int
    query_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    reach: Reach

    def cost(self) -> Cost:
        group, place = self.layout.grouped(self.size, None), self.rank // self.size
        found = self._ring(group, place) if self.is_ring else self._allgather(group, place)
        pairs = sum(pairs_of(run, keys, self.reach) for run, keys in visible_keys(group, place, self.reach))
        flops = 2 * self.batch * self.queries * (self.head_dim + self.value_dim) * pairs
        return self._with_heads(found._replace(flops_forward=flops), group.num_rows(place))

    @property
    def queries(self) -> int:
        """Heads here, as of the next."""
        return self.query_heads // self.size

    @property
    def keys(self) -> int:
        return max(1, self.key_heads // self.size)

    @property
    def key_row(self) -> int:
        """Of the keys and values here."""
        return self.batch * self.keys * (self.head_dim + self.value_dim)

    @property
    def wide(self) -> int:
        return max(WIDE, self.itemsize)

    def _ring(self, group: SequenceLayout, place: int) -> Cost:
        """Hops of all keys of a rank; their gradients go on home."""
        ways = distances(group.runs, group.cu_seqlens, self.reach)
        rows = [group.num_rows((place - way) % group.world_size) for way in ways]
        travels = len(ways) > 1
        keys = sum(rows[1:]) * self.key_row * self.itemsize
        grads = sum(rows) * self.key_row * self.wide if travels else 0
        block = max(rows) * self.key_row
        query, output = self._rows(group.num_rows(place))
        # A block that is used, one that comes, one that goes, or the sums of their gradients.
        blocks = (3 if travels else 1) * block
        forward = blocks * self.itemsize + 2 * output * self.wide
        backward = blocks * self.itemsize + (blocks + block + 3 * query // 2 + output) * self.wide
        return Cost(keys, keys + grads, (1 + travels) * block * self.itemsize, 0, forward, backward)

    def _allgather(self, group: SequenceLayout, place: int) -> Cost:
        wanted = wanted_keys(group.runs, group.cu_seqlens, self.reach)
        own = group.runs[place]
        from_others = rows_of(wanted[place]) - _shared(own, wanted[place])
        to_others = sum(_shared(own, rows) for rank, rows in enumerate(wanted) if rank != place)
        keys = rows_of(wanted[place]) * self.key_row
        query, output = self._rows(group.num_rows(place))
        forward, backward = 2 * output * self.itemsize, (query + keys + output) * self.itemsize
        if group.world_size > 1:
            sent = group.num_rows(place) * self.key_row
            moved = (from_others + to_others) * self.key_row
            # A message for all is received whole, and held once more by gloo.
            messages = 2 * keys + sent if is_for_all(wanted) else moved
            forward = max((keys + messages) * self.itemsize, keys * self.itemsize + forward)
            backward += keys * self.itemsize + (moved + sent) * self.wide
        received = (from_others * self.key_row * self.itemsize, to_others * self.key_row * self.wide)
        return Cost(*received, keys * self.itemsize, 0, forward, backward)

    def _rows(self, rows: int) -> tuple[int, int]:
        """Of rows of the query and the output, with the heads here."""
        heads = rows * self.batch * self.queries
        return heads * self.head_dim, heads * self.value_dim

    def _with_heads(self, found: Cost, rows: int) -> Cost:
        """And what goes between those that share heads, if any do."""
        local = self.layout.num_rows(self.rank)
        whole_output = local * self.batch * self.query_heads * self.value_dim
        if self.size == 1:
            return found._replace(memory_backward=found.memory_backward + whole_output * self.itemsize)
        query, output = self._rows(rows)
        inputs, others = query + rows * self.key_row, rows - local
        from_others = inputs * others // rows if rows else 0
        sent = local * (self.batch * self.query_heads * self.head_dim + self.size * self.key_row)
        to_others = sent * (self.size - 1) // self.size
        outputs = (output * others // rows if rows else 0, whole_output * (self.size - 1) // self.size)
        is_shared = self.keys * self.size > self.key_heads
        summed = self.wide if is_shared else self.itemsize
        kept = inputs * self.itemsize
        forward = max(
            kept + (from_others + to_others) * self.itemsize,
            kept + found.memory_forward,
            kept + (output + sum(outputs)) * self.itemsize + whole_output * self.wide,
        )
        returned = kept + (from_others + to_others) * summed + sent * self.wide
        backward = whole_output * self.itemsize + max(kept + found.memory_backward, returned)
        return Cost(
            found.received_forward + (from_others + outputs[1]) * self.itemsize,
            found.received_backward + outputs[0] * self.itemsize + to_others * summed,
            found.keys_held,
            found.flops_forward,
            forward,
            backward,
        )


def _shared(held: Runs, wanted: Runs) -> int:
    return sum(place.size for _, place in shared_rows(held, wanted))


def heads_divide(query_heads: int, key_heads: int, ranks: int) -> bool:
    """Whether each rank can have as many heads of queries, and those of keys that they read."""
    return query_heads % ranks == 0 and (key_heads % ranks == 0 or ranks % max(1, key_heads) == 0)


def choose_way(
    layout: SequenceLayout,
    *,
    query_heads: int,
    key_heads: int,
    has_mask: bool = False,
    memory_limit: int | None = None,
    **problem: Any,
) -> Way:
    """What receives the fewest bytes, forward and backward, of what fits the memory; else what needs least.

    With a mask nothing is shared by heads: the rows of the mask stay where they are. The answer is the same
    on every rank.
    """
    limit = MEMORY_LIMIT if memory_limit is None else memory_limit
    ranks = layout.world_size
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0 and heads_divide(query_heads, key_heads, n)]
    ways = [
        Way(method, size)
        for size in (sizes[:1] if has_mask else sizes)
        for method in ("allgather", "ring")
        if method == "allgather" or size < ranks
    ]
    shape = {"query_heads": query_heads, "key_heads": key_heads, "rank": 0, **problem}

    def burden(way: Way) -> tuple[int, int]:
        found = cost(way.method, layout, ulysses_size=way.ulysses_size, **shape)
        memory = max(found.memory_forward, found.memory_backward)
        received = found.received_forward + found.received_backward
        return (0, received) if memory <= limit else (1, memory)

    return min(ways, key=burden)
