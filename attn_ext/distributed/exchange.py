"""Rows to where they are wanted, gradients back: a linear map and its adjoint, each backward of the other."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Run, Runs, rows_of
from .transport import Transport

Take = Callable[[Tensor, Tensor], None]


class Route(NamedTuple):
    """What goes where: each rank's wanted rows to it, of all heads or of its own."""

    transport: Transport
    held: tuple[Runs, ...]  # of each rank, its global rows in the order of its local rows
    wanted: tuple[Runs, ...]  # of each rank, rising global rows, none of them twice
    spans: Runs  # of the wanted rows of this rank, counted from the first: one tensor each; they may overlap
    heads: tuple[Runs | None, ...] = ()  # of each tensor, of each rank; () and None: all heads to every rank
    to_all: bool = True  # whether every rank wants rows of every other; else only who shares rows talks
    dim: int = -2  # of the rows; that of the heads is -3

    @property
    def ranks(self) -> range:
        return range(len(self.held))

    def partners(self) -> tuple[Sequence[int], Sequence[int]]:
        """Who wants rows of this rank, and who holds rows that it wants."""
        return (
            (self.ranks, self.ranks)
            if self.to_all
            else _partners(self.held, self.wanted)[self.transport.rank]
        )

    def heads_of(self, number: int) -> Runs | None:
        return self.heads[number] if self.heads else None

    def adds(self, number: int) -> bool:
        """Whether rows come back from several ranks, to be added."""
        heads = self.heads_of(number)
        return heads is None or any(a.overlap(b).size for a, b in pairwise(heads))


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
        wholes = gather(route, tensors)
        return tuple(w.narrow(route.dim, *_place(s)) for w in wholes for s in route.spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_Scatter.apply(ctx.route, *grads))  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: Route, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.route = route
        count = len(route.spans)
        groups = [pieces[begin : begin + count] for begin in range(0, len(pieces), count)]
        wholes = [_add_spans(route, group) for group in groups]
        return tuple(scatter(route, wholes, [group[0].dtype for group in groups]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *_Gather.apply(ctx.route, *grads))  # type: ignore[no-untyped-call]


def gather(route: Route, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The wanted rows of each tensor."""
    rank, rows = route.transport.rank, rows_of(route.wanted[route.transport.rank])
    wholes = []
    for number, x in enumerate(tensors):
        heads = route.heads_of(number)
        wholes.append(x.new_empty(_resized(x, route.dim, rows, None if heads is None else heads[rank].size)))

    def sent_to(other: int) -> list[Tensor]:
        return [
            _of_head(x, route.heads_of(number), other).narrow(route.dim, *_place(local))
            for number, x in enumerate(tensors)
            for local, _ in shared_rows(route.held[rank], route.wanted[other])
        ]

    def taken_from(other: int) -> list[Tensor]:
        return [
            whole.narrow(route.dim, *_place(place))
            for whole in wholes
            for _, place in shared_rows(route.held[other], route.wanted[rank])
        ]

    dtype = tensors[0].dtype
    if not any(route.heads) and is_for_all(route.wanted):
        targets = [taken_from(other) for other in route.ranks]
        message = _message(sent_to(rank), dtype, tensors[0])
        received = route.transport.all_gather(message, _sizes(targets))
        _take(map(_pieces, received, targets), targets, _copy)
    else:
        _swap(route, sent_to, taken_from, True, tensors[0], dtype)
    return wholes


def is_for_all(wanted: Sequence[Runs]) -> bool:
    """Whether one message goes to several ranks, as all want the same. Two ranks swap theirs."""
    return len(wanted) > 2 and all(rows == wanted[0] for rows in wanted)


def scatter(route: Route, wholes: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The adjoint of :func:`gather`; sums are rounded to ``dtypes`` at their end."""
    rank, rows = route.transport.rank, rows_of(route.held[route.transport.rank])
    totals = []
    for number, x in enumerate(wholes):
        heads = route.heads_of(number)
        shape = _resized(x, route.dim, rows, None if heads is None else max(run.end for run in heads))
        totals.append(x.new_zeros(shape, dtype=wide(x.dtype)))

    def sent_to(other: int) -> list[Tensor]:
        return [
            x.narrow(route.dim, *_place(place))
            for x in wholes
            for _, place in shared_rows(route.held[other], route.wanted[rank])
        ]

    def taken_from(other: int) -> list[Tensor]:
        return [
            _of_head(total, route.heads_of(number), other).narrow(route.dim, *_place(local))
            for number, total in enumerate(totals)
            for local, _ in shared_rows(route.held[rank], route.wanted[other])
        ]

    adds = any(map(route.adds, range(len(wholes))))
    _swap(route, sent_to, taken_from, False, wholes[0], totals[0].dtype if adds else wholes[0].dtype)
    return [total.to(dtype) for total, dtype in zip(totals, dtypes, strict=True)]


Parts = Callable[[int], list[Tensor]]


def _swap(
    route: Route, sent_to: Parts, taken_from: Parts, gathers: bool, like: Tensor, dtype: torch.dtype
) -> None:
    """Each rank's parts to it, and those of each rank taken, in the order of the ranks."""
    receivers, senders = route.partners() if gathers else route.partners()[::-1]
    rank = route.transport.rank  # whose own parts are no message
    parts = [sent_to(other) if other != rank else [] for other in receivers]
    targets = [taken_from(other) for other in senders]
    sizes = [size if other != rank else 0 for other, size in zip(senders, _sizes(targets), strict=True)]
    if route.to_all:
        message = _message([part for of_one in parts for part in of_one], dtype, like)
        received = route.transport.all_to_all(message, _sizes(parts), sizes)
    else:
        sent = {other: _message(of_one, dtype, like) for other, of_one in zip(receivers, parts, strict=True)}
        wanted = dict(zip(senders, sizes, strict=True))
        received = [*route.transport.exchange(sent, wanted, like.new_empty(0, dtype=dtype))().values()]
    pieces = (
        _pieces(message, of_one) if other != rank else sent_to(rank)
        for other, message, of_one in zip(senders, received, targets, strict=True)
    )
    _take(pieces, targets, _copy if gathers else _add)


def _pieces(message: Tensor, targets: Sequence[Tensor]) -> list[Tensor]:
    """What a message holds, one part after the other."""
    parts = message.split_with_sizes([target.numel() for target in targets])
    return [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]


def _sizes(targets: Sequence[Sequence[Tensor]]) -> list[int]:
    return [sum(part.numel() for part in parts) for parts in targets]


def _message(parts: Sequence[Tensor], dtype: torch.dtype, like: Tensor) -> Tensor:
    message = like.new_empty(sum(part.numel() for part in parts), dtype=dtype)
    for piece, part in zip(message.split_with_sizes([part.numel() for part in parts]), parts, strict=True):
        piece.view(part.shape).copy_(part)
    return message


def _take(pieces: Iterable[Sequence[Tensor]], targets: Sequence[Sequence[Tensor]], take: Take) -> None:
    for of_one, parts in zip(pieces, targets, strict=True):
        for part, piece in zip(parts, of_one, strict=True):
            take(part, piece)


def _copy(target: Tensor, piece: Tensor) -> None:
    target.copy_(piece)


def _add(target: Tensor, piece: Tensor) -> None:
    target.add_(piece)


@lru_cache(maxsize=1 << 16)
def shared_rows(held: Runs, wanted: Runs) -> tuple[tuple[Run, Run], ...]:
    """Rows that are both held and wanted: their places among those held and among those wanted."""
    begins = [run.begin for run in wanted]
    places = list(accumulate((run.size for run in wanted), initial=0))
    found, local = [], 0
    for run in held:
        for number in range(max(0, bisect_right(begins, run.begin) - 1), len(wanted)):
            if begins[number] >= run.end:
                break
            rows = run.overlap(wanted[number])
            if rows.size:
                at, place = local + rows.begin - run.begin, places[number] + rows.begin - begins[number]
                found.append((Run(at, at + rows.size), Run(place, place + rows.size)))
        local += run.size
    return tuple(found)


@lru_cache(maxsize=64)
def _partners(held: tuple[Runs, ...], wanted: tuple[Runs, ...]) -> tuple[tuple[list[int], list[int]], ...]:
    """Of each rank, those that want rows of it, and those that hold rows that it wants, itself among them."""
    runs = sorted((run.begin, run.end, rank) for rank, own in enumerate(held) for run in own)
    begins = [begin for begin, _, _ in runs]
    senders: list[set[int]] = [set() for _ in held]
    receivers: list[set[int]] = [set() for _ in held]
    for rank, own in enumerate(wanted):
        for rows in own:
            first = max(0, bisect_right(begins, rows.begin) - 1)
            for begin, end, owner in runs[first : bisect_left(begins, rows.end)]:
                if min(end, rows.end) > max(begin, rows.begin):
                    senders[rank].add(owner)
                    receivers[owner].add(rank)
    return tuple((sorted(to), sorted(of)) for to, of in zip(receivers, senders, strict=True))


def _add_spans(route: Route, pieces: Sequence[Tensor]) -> Tensor:
    """The spans as one tensor of the wanted rows, in float32 at least: they may overlap."""
    rows = rows_of(route.wanted[route.transport.rank])
    if len(pieces) == 1 and pieces[0].shape[route.dim] == rows:
        return pieces[0]  # nothing is added yet, so nothing is lost in its own dtype
    whole = pieces[0].new_zeros(_resized(pieces[0], route.dim, rows), dtype=wide(pieces[0].dtype))
    for span, piece in zip(route.spans, pieces, strict=True):
        whole.narrow(route.dim, *_place(span)).add_(piece)
    return whole


def _of_head(x: Tensor, heads: Runs | None, rank: int) -> Tensor:
    return x if heads is None else x.narrow(-3, *_place(heads[rank]))


def _place(run: Run) -> tuple[int, int]:
    return run.begin, run.size


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _resized(x: Tensor, dim: int, rows: int, heads: int | None = None) -> list[int]:
    shape = list(x.shape)
    shape[dim] = rows
    if heads is not None:
        shape[-3] = heads
    return shape
