"""Keys and values that go around the ranks: no rank ever holds those of more than two at once."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .allgather import attend_gathered
from .calls import DROPOUT_BLOCK, Call, Results, mask_part
from .exchange import wide
from .layout import Run, SequenceLayout, transport_of
from .plan import Step, distances, plan
from .transport import Arrival


def attend_ring(
    call: Call, tensors: Sequence[Tensor], mask: Tensor | None, sinks: Tensor | None, layout: SequenceLayout
) -> Results:
    """Of this rank's rows."""
    ring = Ring(call, layout, tensors[0].shape[:-3].numel())
    output, lse = _RingAttention.apply(ring, *tensors, mask, sinks)  # type: ignore[no-untyped-call]
    return Results(output, lse if call.return_lse else None, None)


class Ring:
    """A call's constants, and the way of the keys: in hops, from a rank to the next one that needs them."""

    def __init__(self, call: Call, layout: SequenceLayout, batches: int) -> None:
        self.call, self.layout = call, layout
        self.transport = transport_of(layout)
        self.distances = distances(layout.runs, layout.cu_seqlens, call.reach)
        self.batches = batches  # of the leading dimensions

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """By owner of the keys."""
        bounds = {name: getattr(self.call, name) for name in ("is_causal", "window_left", "window_right")}
        by_owner: dict[int, list[Step]] = {}
        for step in plan(self.layout, self.layout.rank, **bounds):
            by_owner.setdefault(step.owner, []).append(step)
        return by_owner

    def owner(self, distance: int) -> int:
        """Whose keys are here after they went so far."""
        return (self.layout.rank - distance) % self.layout.world_size

    def pass_on(self, message: Tensor, distance: int, hop: int, row: int) -> Arrival:
        """Start to send what has come a distance, and to receive what will have come a hop more."""
        rank, ranks = self.layout.rank, self.layout.world_size
        before = (rank - hop) % ranks
        size = self.layout.num_rows(self.owner(distance + hop)) * row
        return self.transport.exchange({(rank + hop) % ranks: message}, {before: size}, message)

    def around(self, message: Tensor, row: int) -> Iterator[tuple[int, int, Tensor]]:
        """Distance, next hop (0: none) and message, of ``row`` elements a row; the next one is on its way."""
        for here, there in pairwise((*self.distances, self.distances[-1])):
            hop = there - here
            arrival = self.pass_on(message, here, hop, row) if hop else None
            yield here, hop, message
            if arrival is not None:
                (message,) = arrival().values()
                del arrival


class _Block:
    """Keys and values of a rank as one message, or the sums of their gradients."""

    def __init__(self, message: Tensor, rows: int, key: Tensor, value: Tensor) -> None:
        self.message = message
        shapes = [[*x.shape[:-2], rows, x.shape[-1]] for x in (key, value)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.key, self.value = (
            x.view(s) for x, s in zip(message.split_with_sizes(sizes), shapes, strict=True)
        )


class _Rows(NamedTuple):
    """What lies here all the time, or the sums of their gradients, of those that are wanted."""

    query: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ring: Ring,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        output, lse = _forward(ring, query, _Rows(query, mask, sinks), key, value)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, mask, sinks, output, lse)
        return output.to(query.dtype), lse.to(wide(query.dtype))

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, output, lse = ctx.saved_tensors
        inputs, needs = (query, key, value, mask, sinks), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a graph of the gradients is wanted
            return (None, *_differentiable_gradients(ctx.ring, inputs, (d_output, d_lse), needs))
        delta = (d_output.to(output.dtype) * output).sum(-1)
        along = (d_output, d_lse.to(output.dtype), delta, lse)
        own, wanted = _Rows(query, mask, sinks), (needs[0], needs[3], needs[4])
        grads = _backward(ctx.ring, own, key, value, along, wanted)
        return (None, *(g if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)))


def _forward(ring: Ring, query: Tensor, own: _Rows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, not rounded."""
    shape = _rows_shape(query, key, value)
    dtype = wide(query.dtype)
    output = query.new_zeros((*shape, value.shape[-1]), dtype=dtype)
    lse = query.new_full(shape, -torch.inf, dtype=torch.float64)
    message = torch.cat([key.reshape(-1), value.reshape(-1)])
    for distance, _, keys in ring.around(message, _row_size(key, value)):
        owner = ring.owner(distance)
        block = _Block(keys, ring.layout.num_rows(owner), key, value)
        for step in ring.steps.get(owner, ()):
            inputs, padding = _padded(ring, step, _parts(ring, step, own, block))
            rows = local_run(ring.layout, ring.layout.rank, step.rows)
            part, part_lse, _, _ = torch.ops.attn_ext._sdpa_forward(
                *inputs,
                ring.call.seed,
                None,
                *ring.call.scalars(step.query_offset + padding),
                False,
                False,
                dropout_origin=_origin(ring, step, padding),
                unrounded=True,
            )
            _merge(_at(output, -2, rows), _at(lse, -1, rows), part, part_lse)
            del part
        del keys, block  # they have been sent on
    return output, lse


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Attention over more keys: output becomes sum_i exp(lse_i - lse) output_i, where no key was seen 0."""
    total = torch.logaddexp(lse, part_lse)
    nothing = total == -torch.inf
    old, new = ((x - total).exp().masked_fill(nothing, 0).to(output.dtype) for x in (lse, part_lse))
    output.mul_(old.unsqueeze(-1)).addcmul_(part, new.unsqueeze(-1))
    lse.copy_(total)


def _backward(
    ring: Ring, own: _Rows, key: Tensor, value: Tensor, along: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, mask and sinks, not rounded.

    Those of keys follow them around the ring: a rank adds its part and passes them on, the last to the owner.
    """
    row = _row_size(key, value)
    sums = _Rows(*(_zeros(x, w) for x, w in zip(own, wanted, strict=True)))
    message = torch.cat([key.reshape(-1), value.reshape(-1)])
    arrival: Arrival | None = None
    total = message.new_empty(0)
    for distance, hop, keys in ring.around(message, row):
        owner = ring.owner(distance)
        block = _Block(keys, ring.layout.num_rows(owner), key, value)
        d_block = _Block(
            torch.zeros_like(keys, dtype=wide(keys.dtype)), ring.layout.num_rows(owner), key, value
        )
        for step in ring.steps.get(owner, ()):
            _add_gradients(ring, step, (own, block), along, (sums, d_block))
        total = d_block.message
        if arrival is not None:
            (before,) = arrival().values()
            total = before.add_(total)
            del before
        if hop:
            arrival = ring.pass_on(total, distance, hop, row)
        del keys, block, d_block
    if last := ring.distances[-1]:
        (total,) = ring.pass_on(total, last, ring.layout.world_size - last, row)().values()
    d_own = _Block(total, ring.layout.num_rows(), key, value)
    return sums.query, d_own.key, d_own.value, sums.mask, sums.sinks


def _add_gradients(
    ring: Ring, step: Step, here: tuple[_Rows, _Block], along: Sequence[Tensor], sums: tuple[_Rows, _Block]
) -> None:
    """Of a step, whose weights are exp(score - lse) with the log-sum-exp over all keys."""
    parts = _parts(ring, step, *here)
    inputs, padding = _padded(ring, step, parts)
    totals = _parts(ring, step, *sums)
    rows = local_run(ring.layout, ring.layout.rank, step.rows)
    d_output, d_lse, delta, lse = (_at(x, d, rows) for x, d in zip(along, (-2, -1, -1, -1), strict=True))
    grads = torch.ops.attn_ext._sdpa_backward(
        d_output,
        d_lse,
        None,
        None,
        *inputs,
        ring.call.seed,
        None,
        None,
        lse,
        *ring.call.scalars(step.query_offset + padding),
        [total is not None for total in totals],
        dropout_origin=_origin(ring, step, padding),
        unrounded=True,
        delta=delta,
    )
    keys = Run(padding, padding + step.keys.size)
    for number, (total, grad) in enumerate(zip(totals, grads, strict=True)):
        if total is not None:
            of_keys = _at(grad, {3: -1}.get(number, -2), keys) if padding and 0 < number < 4 else grad
            total.add_(of_keys.sum_to_size(total.shape))


def _parts(ring: Ring, step: Step, own: _Rows, block: _Block) -> list[Tensor | None]:
    """Of query, key, value, mask and sinks, what a step takes, or where its gradients are added."""
    rows = local_run(ring.layout, ring.layout.rank, step.rows)
    keys = local_run(ring.layout, step.owner, step.keys)
    # Every row sees its own key, if no mask hides it: the one step that every row is in.
    with_sinks = step.rows.overlap(step.keys).size > 0
    return [
        None if own.query is None else _at(own.query, -2, rows),
        _at(block.key, -2, keys),
        _at(block.value, -2, keys),
        mask_part(own.mask, rows, step.keys),
        own.sinks if with_sinks else None,
    ]


def _padded(ring: Ring, step: Step, parts: list[Tensor | None]) -> tuple[list[Tensor | None], int]:
    """With keys in front that the mask hides, so that the draws of dropout begin at a block of columns."""
    first = ring.layout.cu_seqlens[ring.layout.sequence_of(step.keys)]
    padding = (step.keys.begin - first) % DROPOUT_BLOCK if ring.call.dropout_p else 0
    if not padding:
        return parts, 0
    query, key, value, mask, sinks = parts
    assert key is not None and value is not None
    seen = key.new_ones(step.keys.size, dtype=torch.bool) if mask is None else mask
    if seen.dim() == 0 or seen.shape[-1] == 1:
        seen = seen.expand(*seen.shape[:-1], step.keys.size)
    hidden = False if seen.dtype == torch.bool else -torch.inf
    longer = [F.pad(x, (0, 0, padding, 0)) for x in (key, value)]
    return [query, *longer, F.pad(seen, (padding, 0), value=hidden), sinks], padding


def _origin(ring: Ring, step: Step, padding: int) -> list[int] | None:
    """Where the first element of a step lies in the draw."""
    if not ring.call.dropout_p:
        return None
    number = ring.layout.sequence_of(step.keys)
    first = ring.layout.cu_seqlens[number]
    row, column = step.rows.begin - first, step.keys.begin - first - padding
    return [number * ring.batches, ring.call.first_head, row, column]


def _differentiable_gradients(
    ring: Ring,
    inputs: Sequence[Tensor | None],
    grads_of_results: tuple[Tensor, Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """By all-gather, whose every step autograd knows."""
    query, key, value, mask, sinks = inputs
    assert query is not None and key is not None and value is not None
    call = ring.call._replace(return_lse=True)
    results = attend_gathered(call, (query, key, value), mask, sinks, ring.layout)
    assert results.lse is not None
    leaves = [x for x, w in zip(inputs, wanted, strict=True) if w and x is not None]
    found = (results.output, results.lse)
    grads = iter(torch.autograd.grad(found, leaves, grads_of_results, create_graph=True))
    return [next(grads) if w else None for w in wanted]


def local_run(layout: SequenceLayout, rank: int, rows: Run) -> Run:
    """Where among its own rows a rank has these, which lie in one of its runs."""
    for local, run in zip(layout.local_runs(rank), layout.runs[rank], strict=True):
        if run.begin <= rows.begin and rows.end <= run.end:
            begin = local.begin + rows.begin - run.begin
            return Run(begin, begin + rows.size)
    raise ValueError(f"expected rows of rank {rank}, but got {rows}")


def _rows_shape(*tensors: Tensor) -> list[int]:
    """Of the output's rows: batch, heads, length. Grouped heads of keys are fewer than those of queries."""
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))  # type: ignore[no-untyped-call]
    heads = [max(x.shape[-3] for x in tensors)] if all(x.dim() > 2 for x in tensors) else []
    return [*batch, *heads, tensors[0].shape[-2]]


def _row_size(*tensors: Tensor) -> int:
    """Elements of a row of keys and values."""
    return sum(x.shape[:-2].numel() * x.shape[-1] for x in tensors)


def _at(x: Tensor, dim: int, rows: Run) -> Tensor:
    return x.narrow(dim, rows.begin, rows.size)


def _zeros(x: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.zeros_like(x, dtype=wide(x.dtype)) if wanted and x is not None else None
