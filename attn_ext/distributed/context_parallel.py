"""Attention of a sequence whose rows lie on several ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..functional import sdpa, sdpa_with_lse
from .cost import choose_method, heads_divide
from .exchange import Route, gather_rows, scatter_rows, transport_of
from .layout import Run, SequenceLayout
from .plan import Reach, plan, visible_keys
from .ring import Ring, RingAttention, mask_part

METHODS = ("auto", "ulysses", "allgather", "ring")


def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    layout: SequenceLayout,
    method: str = "auto",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Masked scaled dot-product attention of rows that lie on several ranks.

    What :func:`attn_ext.sdpa` gives for the whole sequence, of which each rank passes and gets its own rows.
    Every rank of the group has to make the call, with the same options, and take part in its backward pass.
    Gradients are those of the sum of all ranks' losses: of query, key and value each rank gets those of its
    rows; of ``sinks``, and of a mask that is the same on every rank, its part, to be summed over the ranks
    as of any parameter. Two runs give the same bits.

    Args:
        query: :math:`(\dots, H_q, L, D)`, the rows of this rank as ``layout.shard`` takes them.
        key: :math:`(\dots, H_{kv}, L, D)`, the same rows.
        value: :math:`(\dots, H_{kv}, L, D_v)`.
        layout: which rows each rank has. Rows of packed sequences see their own sequence alone.
        method: "allgather" sends every rank all keys and values, and the gradients of them back. "ulysses"
            sends every rank all rows of some heads: it sends less, gives the bits of a single machine where
            no two ranks share a head of keys, and asks for heads that divide by the ranks. "ring" passes
            keys and values from rank to rank and holds those of two at once; it cannot be differentiated
            twice. "auto" takes what sends least of the first two.
        attn_mask: broadcasts to :math:`(\dots, H_q, L, S)`: the rows of this rank, the columns of all.
        is_causal: as in :func:`attn_ext.sdpa`, by the places of rows in their sequence, like the windows.
        scale: as there.
        enable_gqa: as there.
        window_left: as there.
        window_right: as there.
        softcap: as there.
        sinks: as there, the same on every rank.
        return_lse: also return the log-sum-exp of each row of scores.

    Returns:
        The output, :math:`(\dots, H_q, L, D_v)`, in the dtype of ``query``; with ``return_lse`` also the
        log-sum-exp, :math:`(\dots, H_q, L)`, as of :func:`attn_ext.sdpa_with_lse`.

    Dtypes:
        Those of :func:`attn_ext.sdpa`. Gradients of keys are summed over the ranks in float32 (float64 for
        float64).

    Raises:
        ValueError: rows that are not those of the layout; a method that there is not, or that the heads do
            not allow; a layout without a group.
        RuntimeError: what :func:`attn_ext.sdpa` refuses.

    Source:
        Jacobs et al. 2023, "DeepSpeed Ulysses"; Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2,
        for all-gather.

    Example:
        >>> import torch, attn_ext
        >>> from attn_ext.distributed import SequenceLayout, context_parallel_sdpa, run_in_memory
        >>> query, key, value = torch.randn(3, 4, 10, 8)  # of the whole sequence
        >>> def attend(rank):
        ...     layout = SequenceLayout.zigzag(10, rank)
        ...     own = [layout.shard(x, -2) for x in (query, key, value)]
        ...     output = context_parallel_sdpa(*own, layout=layout, is_causal=True)
        ...     return layout.unshard(output, -2)
        >>> outputs = run_in_memory(2, attend)
        >>> torch.testing.assert_close(outputs[1], attn_ext.sdpa(query, key, value, is_causal=True))
    """
    _check(query, key, value, attn_mask, layout, method)
    if method == "auto":
        method = choose_method(
            layout,
            query_heads=_heads(query),
            key_heads=_heads(key),
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            itemsize=query.element_size(),
            has_mask=attn_mask is not None,
        )
    bounds = {"is_causal": is_causal, "window_left": window_left, "window_right": window_right}
    options = {**bounds, "scale": scale, "enable_gqa": enable_gqa, "softcap": softcap}
    attend = partial(sdpa_with_lse if return_lse else _only_output, **options)
    tensors = (query, key, value)
    if method == "ulysses":
        results = _ulysses(attend, tensors, attn_mask, sinks, layout)
    elif method == "ring":
        steps = plan(layout, layout.rank, **bounds)
        ring = Ring(layout, transport_of(layout), steps, partial(sdpa_with_lse, **options))
        results = RingAttention.apply(ring, *tensors, attn_mask, sinks)  # type: ignore[no-untyped-call]
    else:
        reach = Reach.of(is_causal, window_left, window_right)
        results = _allgather(partial(attend, sinks=sinks), tensors, attn_mask, layout, reach)
    return (results[0], results[1]) if return_lse else results[0]


def _allgather(
    attend: Any, tensors: Sequence[Tensor], mask: Tensor | None, layout: SequenceLayout, reach: Reach
) -> list[Tensor]:
    """A call for each run of this rank's rows, with the keys that it sees."""
    query, key, value = tensors
    nothing = [(Run(0, 0), Run(0, 0))]  # a rank without rows too has a part in the sums of the others
    runs, spans = zip(*(list(visible_keys(layout, layout.rank, reach)) or nothing), strict=True)
    keys, values = gather_rows(Route(layout, spans), key, value)
    results = []
    for run, local, span, k, v in zip(runs, layout.local_runs() or runs, spans, keys, values, strict=True):
        rows = query.narrow(-2, local.begin, local.size)
        part = mask_part(mask, local, span)
        results.append(attend(rows, k, v, attn_mask=part, query_offset=run.begin - span.begin))
    return _joined(results)


def _ulysses(
    attend: Any,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    layout: SequenceLayout,
) -> list[Tensor]:
    """A call for each sequence, with all of its rows and this rank's heads."""
    query, key, value = tensors
    query_heads, key_heads = _heads_of_ranks(_heads(query), _heads(key), layout.world_size)
    own = query_heads[layout.rank]
    spans = layout.sequences
    rows = Route(layout, spans, query_heads)
    (queries,) = gather_rows(rows, query)
    keys, values = gather_rows(Route(layout, spans, key_heads), key, value)
    mask = _mask_of_all_rows(mask, _heads(query), layout, query_heads)
    sinks = None if sinks is None else sinks.narrow(0, own.begin, own.size)
    results = [
        attend(q, k, v, attn_mask=mask_part(mask, span, span), sinks=sinks)
        for q, k, v, span in zip(queries, keys, values, spans, strict=True)
    ]
    # One group of each result: its outputs, and its lses as if they had one feature.
    groups = [
        [x if x.dim() == query.dim() else x.unsqueeze(-1) for x in kind]
        for kind in zip(*results, strict=True)
    ]
    output, *lses = scatter_rows(rows, *groups)
    return [output, *(lse.squeeze(-1) for lse in lses)]


def _heads_of_ranks(query_heads: int, key_heads: int, ranks: int) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """The heads of queries that each rank has, and the heads of keys that these read."""
    if not heads_divide(query_heads, key_heads, ranks):
        raise ValueError(
            f"expected query heads that divide by the ranks, and key heads that divide by them or they by "
            f"these, but got {query_heads} query heads and {key_heads} key heads over {ranks} ranks"
        )
    own, readers = query_heads // ranks, query_heads // key_heads
    queries = tuple(Run(rank * own, (rank + 1) * own) for rank in range(ranks))
    keys = tuple(Run(heads.begin // readers, (heads.end - 1) // readers + 1) for heads in queries)
    return queries, keys


def _mask_of_all_rows(
    mask: Tensor | None, heads: int, layout: SequenceLayout, heads_of_ranks: tuple[Run, ...]
) -> Tensor | None:
    """The mask of this rank's heads, with the rows of all ranks or with one row for all."""
    if mask is None:
        return None
    by_head = mask.dim() > 2 and mask.shape[-3] == heads > 1
    if not _has_rows(mask, layout):
        own = heads_of_ranks[layout.rank]
        return mask.narrow(-3, own.begin, own.size) if by_head else mask
    whole = (Run(0, layout.length),)
    ((gathered,),) = gather_rows(Route(layout, whole, heads_of_ranks if by_head else None), mask)
    return gathered


def _has_rows(mask: Tensor, layout: SequenceLayout) -> bool:
    """Whether the mask has a row for each row, and not one for all of them.

    A rank that has one row cannot tell, so the ranks ask one another.
    """
    if mask.dim() < 2:
        return False
    route = Route(layout, ())
    count = torch.tensor([mask.shape[-2]], device=mask.device)
    counts = route.transport.all_gather(count, [(1,)] * layout.world_size)
    return any(int(rows) != 1 for rows in counts)


def _only_output(*args: Any, **options: Any) -> tuple[Tensor]:
    return (sdpa(*args, **options),)


def _joined(results: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Outputs, and lses if there are, of runs that follow one another."""
    return [torch.cat(kind, dim) for kind, dim in zip(zip(*results, strict=True), (-2, -1), strict=False)]


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, layout: SequenceLayout, method: str
) -> None:
    if method not in METHODS:
        raise ValueError(f"expected a method of {', '.join(map(repr, METHODS))}, but got {method!r}")
    local = layout.num_rows()
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2 or x.shape[-2] != local:
            got = x.shape[-2] if x.dim() > 1 else f"shape {list(x.shape)}"
            raise ValueError(f"expected {name} of {local} rows, those of rank {layout.rank}, but got {got}")
        if method == "ulysses" and x.dim() < 3:
            raise ValueError(f"expected {name} with a dimension of heads, but got shape {list(x.shape)}")
    if mask is not None:
        rows, columns = [1, 1, *mask.shape][-2:]
        if rows not in (1, local) or columns not in (1, layout.length):
            raise ValueError(
                f"expected attn_mask of {local} rows or 1, and {layout.length} columns or 1, "
                f"but got {list(mask.shape)}"
            )
