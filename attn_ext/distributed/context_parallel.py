"""Attention of a sequence whose rows lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from .allgather import attend_gathered
from .arguments import Inputs, Wish, agreed, heads_of, lowered
from .calls import Call, Results
from .cost import Way
from .exchange import Route, gather_rows, scatter_rows
from .layout import Run, Runs, SequenceLayout, rows_of, transport_of
from .ring_attention import attend_ring
from .transport import Members, Transport

if TYPE_CHECKING:
    from typing import TypedDict

    from typing_extensions import NotRequired, Unpack

    class Options(TypedDict):
        layout: SequenceLayout
        method: NotRequired[str]
        attn_mask: NotRequired[Tensor | None]
        is_causal: NotRequired[bool]
        scale: NotRequired[float | None]
        enable_gqa: NotRequired[bool]
        window_left: NotRequired[int | None]
        window_right: NotRequired[int | None]
        softcap: NotRequired[float]
        sinks: NotRequired[Tensor | None]
        dropout_p: NotRequired[float]
        dropout_seed: NotRequired[int | None]
        ulysses_size: NotRequired[int | None]
        memory_limit: NotRequired[int | None]
        check: NotRequired[bool]


One = Literal[True]
No = Literal[False]


@overload
def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: No = ...,
    return_key_mass: No = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: One,
    return_key_mass: One,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: One,
    return_key_mass: No = ...,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: No = ...,
    return_key_mass: One,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def context_parallel_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool = ...,
    return_key_mass: bool = ...,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, ...]: ...


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
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    return_key_mass: bool = False,
    ulysses_size: int | None = None,
    memory_limit: int | None = None,
    check: bool = True,
) -> Tensor | tuple[Tensor, ...]:
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
        method: "allgather" sends every rank the keys and values that its rows see, and the gradients of them
            back. "ulysses" sends every rank all rows of some heads: it sends less, gives the bits of a single
            machine where no two ranks share a head of keys, and asks for heads that divide by the ranks.
            "ring" passes keys and values from rank to rank while it computes and holds those of two at once.
            "auto" takes what :func:`attn_ext.distributed.cost` says sends least within ``memory_limit``, the
            same on every rank.
        attn_mask: broadcasts to :math:`(\dots, H_q, L, S)`: the rows of this rank, the columns of all.
        is_causal: as in :func:`attn_ext.sdpa`, by the places of rows in their sequence, like the windows.
        scale: as there.
        enable_gqa: as there.
        window_left: as there.
        window_right: as there.
        softcap: as there.
        sinks: as there, the same on every rank.
        dropout_p: as there. The draw is that of a single machine, and of packed sequences that of a padded
            batch of them, on however many ranks.
        dropout_seed: the number that keys the draw. None: the first rank draws one from torch's generator, as
            :func:`attn_ext.sdpa` does.
        return_lse: also return the log-sum-exp of each row of scores.
        return_key_mass: also return how much attention each key of this rank received from the rows of all.
        ulysses_size: with "allgather" and "ring", how many neighbouring ranks first share their rows by heads
            as "ulysses" does, so that ranks that are that many apart do the rest; 1 if None.
        memory_limit: for "auto", how many bytes a rank may hold beside what it passes; 1 GiB if None.
        check: ask the ranks, in 32 bytes each, whether they make the same call.

    Returns:
        The output, :math:`(\dots, H_q, L, D_v)`, in the dtype of ``query``; with ``return_lse`` also the
        log-sum-exp, :math:`(\dots, H_q, L)`, as of :func:`attn_ext.sdpa_with_lse`; with ``return_key_mass``
        also the mass of this rank's keys, :math:`(\dots, H_q, L)`, as of :func:`attn_ext.sdpa_with_key_mass`.

    Dtypes:
        Those of :func:`attn_ext.sdpa`. Gradients of keys are summed over the ranks in float32 (float64 for
        float64).

    Raises:
        ValueError: rows that are not those of the layout; a method that there is not, or that the heads
            do not allow; a layout without a group; on every rank, what two of them disagree on.
        RuntimeError: what :func:`attn_ext.sdpa` refuses, before anything is sent; on the other ranks, that a
            rank was refused and why; a rank that died, by the timeout of the process group.

    Source:
        Jacobs et al. 2023, "DeepSpeed Ulysses"; Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2,
        for all-gather; Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
        Context".

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
    call = Call(
        is_causal,
        window_left,
        window_right,
        scale,
        enable_gqa,
        softcap,
        dropout_p,
        None,
        return_lse,
        return_key_mass,
    )
    inputs = Inputs(query, key, value, attn_mask, sinks)
    wish = Wish(method, ulysses_size, memory_limit)
    found = _results(call, inputs, layout, wish, dropout_seed, check)
    return found if len(found) > 1 else found[0]


# torch.compile leaves it as it is between its graphs. torch.compiler.disable would import the compiler now.
@torch._disable_dynamo  # type: ignore[attr-defined]
def _results(
    call: Call, inputs: Inputs, layout: SequenceLayout, wish: Wish, seed: int | None, check: bool
) -> tuple[Tensor, ...]:
    inputs = inputs._replace(**{name: lowered(getattr(inputs, name)) for name in ("query", "key", "value")})
    with torch.autocast(inputs.query.device.type, enabled=False):
        way, told = agreed(call, inputs, layout, wish, seed, check)
        if call.dropout_p > 0.0:
            call = call._replace(seed=torch.tensor(told.seed, device=inputs.query.device))
        results = _attend(call, inputs, layout, way, told.has_mask_rows)
    return tuple(x for x in results if x is not None)


def _attend(call: Call, inputs: Inputs, layout: SequenceLayout, way: Way, has_mask_rows: bool) -> Results:
    size, method = way.ulysses_size, attend_ring if way.method == "ring" else attend_gathered
    if size == 1:
        return method(call, inputs.tensors, inputs.mask, inputs.sinks, layout)
    whole = transport_of(layout)
    inside, across = _grid(whole, size)
    group = layout.grouped(size, across)
    heads, key_heads = heads_of_ranks(heads_of(inputs.query), heads_of(inputs.key), size)
    own = heads[inside.rank]

    def route(*of_tensors: Runs | None) -> Route:
        first = group.rank * size
        rows = group.runs[group.rank]
        return Route(
            inside, layout.runs[first : first + size], (rows,) * size, (Run(0, rows_of(rows)),), of_tensors
        )

    (query,), (key,), (value,) = gather_rows(route(heads, key_heads, key_heads), *inputs.tensors)
    mask = _mask_of_group(inputs.mask, heads_of(inputs.query), has_mask_rows, heads, own, route)
    sinks = None if inputs.sinks is None else inputs.sinks.narrow(0, own.begin, own.size)
    results = method(call._replace(first_head=own.begin), (query, key, value), mask, sinks, group)
    output, lse, key_mass = (
        None if x is None else _of_own_rows(x, query.dim(), route(heads)) for x in results
    )
    assert output is not None
    return Results(output, lse, key_mass)


def _grid(transport: Transport, size: int) -> tuple[Transport, Transport]:
    """The neighbours of a rank, and the ranks that are ``size`` apart."""
    rank, ranks = transport.rank, transport.world_size
    first = rank // size * size
    inside = transport if size == ranks else Members(transport, range(first, first + size))
    return inside, Members(transport, range(rank % size, ranks, size))


def heads_of_ranks(query_heads: int, key_heads: int, ranks: int) -> tuple[Runs, Runs]:
    """The heads of queries that each rank has, and the heads of keys that these read."""
    own, readers = query_heads // ranks, query_heads // key_heads
    queries = tuple(Run(rank * own, (rank + 1) * own) for rank in range(ranks))
    keys = tuple(Run(heads.begin // readers, (heads.end - 1) // readers + 1) for heads in queries)
    return queries, keys


def _mask_of_group(
    mask: Tensor | None,
    query_heads: int,
    has_rows: bool,
    heads: Runs,
    own: Run,
    route: Callable[..., Route],
) -> Tensor | None:
    """The mask of this rank's heads, with the rows of its neighbours too, or with one row for all."""
    if mask is None:
        return None
    by_head = mask.dim() > 2 and mask.shape[-3] == query_heads > 1
    if not has_rows:
        return mask.narrow(-3, own.begin, own.size) if by_head else mask
    ((gathered,),) = gather_rows(route(heads if by_head else None), mask)
    return gathered


def _of_own_rows(x: Tensor, dims: int, route: Route) -> Tensor:
    """What the neighbours found for the rows of this rank, of all heads."""
    with_features = x if x.dim() == dims else x.unsqueeze(-1)
    (own,) = scatter_rows(route, [with_features])
    return own if x.dim() == dims else own.squeeze(-1)
