"""What attention over several ranks sends, holds and computes: formulas, without running it.

With S rows on W ranks, L = S / W of them here, and the features of keys and values together D + Dv::

    all-gather, ring   forward   (W - 1) L Hkv (D + Dv) itemsize
    all-gather         backward  (W - 1) L Hkv (D + Dv) 4
    ring               backward  (W - 1) L Hkv (D + Dv) itemsize + W L Hkv (D + Dv) 4
    Ulysses            either    (W - 1) L (Hq / W + heads of keys here) (D + Dv) itemsize

received a rank. Ulysses has Hkv / W heads of keys on a rank, and one where there are fewer heads than ranks.
"""

from typing import NamedTuple

from .layout import SequenceLayout
from .plan import visible_pairs

METHODS = ("ulysses", "allgather", "ring")


class Cost(NamedTuple):
    """Of one call, on one rank."""

    received_forward: int  # bytes
    received_backward: int  # bytes
    keys_held: int  # bytes of keys and values that are in memory at once
    flops_forward: int


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
        is_causal: as in :func:`attn_ext.sdpa`; like the windows it changes the flops alone.
        window_left: as there.
        window_right: as there.

    Raises:
        ValueError: a method that there is not.

    Example:
        >>> from attn_ext.distributed import SequenceLayout, cost
        >>> layout = SequenceLayout.zigzag(131072, world_size=8)
        >>> shape = {"query_heads": 32, "key_heads": 8, "head_dim": 128, "itemsize": 2}
        >>> [cost(method, layout, **shape).received_forward // 2**20 for method in ("ulysses", "allgather")]
        [280, 448]
    """
    if method not in METHODS:
        raise ValueError(f"expected a method of {', '.join(map(repr, METHODS))}, but got {method!r}")
    rank = layout.rank if rank is None else rank
    key_heads = query_heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim
    ranks, features = layout.world_size, head_dim + value_dim
    local, others = layout.num_rows(rank), layout.length - layout.num_rows(rank)
    bounds = {"is_causal": is_causal, "window_left": window_left, "window_right": window_right}
    if method == "ulysses":
        queries, keys = query_heads // ranks, max(1, key_heads // ranks)  # heads here
        returned = local * (query_heads - queries)  # rows of this rank under heads of the others
        forward = others * (queries * head_dim + keys * features) + returned * value_dim
        backward = others * queries * value_dim + returned * head_dim + (ranks - 1) * local * keys * features
        pairs = sum(visible_pairs(layout, each, **bounds) for each in range(ranks))
        flops = 2 * batch * queries * features * pairs
        held = layout.length * keys * features
        return Cost(forward * batch * itemsize, backward * batch * itemsize, held * batch * itemsize, flops)
    row = batch * key_heads * features  # elements of a row of keys and values
    forward = others * row * itemsize
    flops = 2 * batch * query_heads * features * visible_pairs(layout, rank, **bounds)
    if method == "ring":
        return Cost(forward, forward + layout.length * row * 4, 2 * local * row * itemsize, flops)
    return Cost(forward, (ranks - 1) * local * row * 4, layout.length * row * itemsize, flops)


def heads_divide(query_heads: int, key_heads: int, ranks: int) -> bool:
    """Whether each rank can have as many heads of queries, and those of keys that they read."""
    return query_heads % ranks == 0 and (key_heads % ranks == 0 or ranks % max(1, key_heads) == 0)


def choose_method(
    layout: SequenceLayout,
    *,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int = 4,
    has_mask: bool = False,
) -> str:
    """The method that receives the fewest bytes, forward and backward, among those that can be taken.

    With a mask that is all-gather: there the rows of the mask stay where they are. The answer is the same on
    every rank.
    """
    if has_mask or not heads_divide(query_heads, key_heads, layout.world_size):
        return "allgather"
    shape = {"query_heads": query_heads, "key_heads": key_heads, "head_dim": head_dim}

    def received(method: str) -> int:
        found = cost(method, layout, value_dim=value_dim, itemsize=itemsize, rank=0, **shape)
        return found.received_forward + found.received_backward

    return min(("ulysses", "allgather"), key=received)
