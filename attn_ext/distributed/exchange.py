"""Rows to where they are needed, gradients back: a linear map and its adjoint, each backward of the other."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Run, SequenceLayout, take
from .transport import Transport


class Route(NamedTuple):
    """What goes where: the rows of all ranks to every rank, or to each rank those of some heads."""

    layout: SequenceLayout
    spans: tuple[Run, ...]  # of global rows, one tensor each; they may overlap
    heads: tuple[Run, ...] | None = None  # of each rank; None: of all heads to every rank
    dim: int = -2  # of the rows; that of the heads is -3

    @property
    def transport(self) -> Transport:
        return transport_of(self.layout)


def transport_of(layout: SequenceLayout) -> Transport:
    if layout.transport is None:
        raise ValueError("expected a layout with a group, but got one that was made without a group")
    return layout.transport


def gather_rows(route: Route, *tensors: Tensor) -> list[list[Tensor]]:
    """Of each tensor, which holds the rows of this rank, a tensor for each span of the route."""
    gathered = iter(_Gather.apply(route, *tensors))  # type: ignore[no-untyped-call]
    return [list(islice(gathered, len(route.spans))) for _ in tensors]


def scatter_rows(route: Route, *groups: Sequence[Tensor]) -> list[Tensor]:
    """The adjoint: of each group of tensors, one a span, the rows of this rank, summed over the ranks.

    The sums are made in the order of the ranks, in float32 (float64 for float64).
    """
    flat = [piece for group in groups for piece in group]
    return list(_Scatter.apply(route, *flat))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        wholes = [_gather(route, x) for x in tensors]
        return tuple(w.narrow(route.dim, s.begin, s.size) for w in wholes for s in route.spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_Scatter.apply(ctx.route, *grads))  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        count = len(route.spans)
        groups = [pieces[begin : begin + count] for begin in range(0, len(pieces), count)]
        return tuple(_scatter(route, group) for group in groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_Gather.apply(ctx.route, *grads))  # type: ignore[no-untyped-call]


def _gather(route: Route, x: Tensor) -> Tensor:
    layout, transport = route.layout, route.transport
    ranks = range(layout.world_size)
    if route.heads is None:
        shapes = [_resized(x.shape, {route.dim: layout.num_rows(rank)}) for rank in ranks]
        received = transport.all_gather(x, shapes)
    else:
        own = route.heads[layout.rank].size
        shapes = [_resized(x.shape, {route.dim: layout.num_rows(rank), -3: own}) for rank in ranks]
        received = transport.all_to_all([x.narrow(-3, h.begin, h.size) for h in route.heads], shapes)
    whole = x.new_empty(_resized(received[0].shape, {route.dim: layout.length}))
    for rank in ranks:
        for local, run in zip(layout.local_runs(rank), layout.runs[rank], strict=True):
            piece = received[rank].narrow(route.dim, local.begin, local.size)
            whole.narrow(route.dim, run.begin, run.size).copy_(piece)
    return whole


def _scatter(route: Route, pieces: Sequence[Tensor]) -> Tensor:
    layout, dim = route.layout, route.dim
    whole = _add_spans(route, pieces)
    mine = _resized(whole.shape, {dim: layout.num_rows()})
    ranks = range(layout.world_size)
    heads = route.heads
    shapes = [mine if heads is None else _resized(mine, {-3: heads[rank].size}) for rank in ranks]
    received = route.transport.all_to_all([take(layout, whole, dim, rank) for rank in ranks], shapes)
    total = mine if heads is None else _resized(mine, {-3: max(run.end for run in heads)})
    result = whole.new_zeros(total, dtype=_wide(whole.dtype))
    for rank in ranks:
        part = result if heads is None else result.narrow(-3, heads[rank].begin, heads[rank].size)
        part.add_(received[rank])
    return result.to(pieces[0].dtype)


def _add_spans(route: Route, pieces: Sequence[Tensor]) -> Tensor:
    """The spans as one tensor of all rows, in float32 at least: they may overlap."""
    shape = _resized(pieces[0].shape, {route.dim: route.layout.length})
    if len(pieces) == 1 and pieces[0].shape[route.dim] == route.layout.length:
        return pieces[0]  # nothing is added yet, so nothing is lost in its own dtype
    whole = pieces[0].new_zeros(shape, dtype=_wide(pieces[0].dtype))
    for span, piece in zip(route.spans, pieces, strict=True):
        whole.narrow(route.dim, span.begin, span.size).add_(piece)
    return whole


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _resized(shape: Sequence[int], sizes: dict[int, int]) -> list[int]:
    resized = list(shape)
    for dim, size in sizes.items():
        resized[dim] = size
    return resized
