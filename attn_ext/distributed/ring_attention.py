"""Attention over keys that go around the ranks, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .allgather import attend_gathered
from .calls import Call, Results
from .exchange import wide
from .layout import Run, SequenceLayout
from .plan import Step
from .ring import (
    Ring,
    Rows,
    at,
    attend_step,
    joined_rows,
    local_run,
    origin_of_step,
    padded,
    parts_of,
    row_size,
    rows_shape,
    split,
)
from .ring_key_mass import key_mass_of_own, mean_of_key_mass


def attend_ring(
    call: Call, tensors: Sequence[Tensor], mask: Tensor | None, sinks: Tensor | None, layout: SequenceLayout
) -> Results:
    """Of this rank's rows."""
    ring = Ring(call, layout, tensors[0].shape[:-3].numel())
    output, lse, mass = _RingAttention.apply(ring, *tensors, mask, sinks)  # type: ignore[no-untyped-call]
    return Results(output, lse if call.return_lse else None, mass)


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
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        own = Rows(query, mask, sinks)
        output, lse = _forward(ring, query, own, key, value)
        mass = key_mass_of_own(ring, own, key, lse).to(query.dtype) if ring.call.return_key_mass else None
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, mask, sinks, output, lse)
        return output.to(query.dtype), lse.to(wide(query.dtype)), mass

    @staticmethod
    def backward(
        ctx: Any, d_output: Tensor, d_lse: Tensor, d_mass: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        query, key, value, mask, sinks, output, lse = ctx.saved_tensors
        inputs, needs = (query, key, value, mask, sinks), ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # a graph of the gradients is wanted
            return (None, *_differentiable_gradients(ctx.ring, inputs, (d_output, d_lse, d_mass), needs))
        own, wanted = Rows(query, mask, sinks), (needs[0], needs[3], needs[4])
        delta = (d_output.to(output.dtype) * output).sum(-1)
        if d_mass is not None:
            delta += mean_of_key_mass(ctx.ring, own, key, d_mass, lse)
        along = (d_output, d_lse.to(output.dtype), delta, lse)
        grads = _backward(ctx.ring, own, (key, value, d_mass), along, wanted)
        return (None, *(g if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)))


def _forward(ring: Ring, query: Tensor, own: Rows, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, not rounded."""
    shape = rows_shape(query, key, value)
    dtype = wide(query.dtype)
    output = query.new_zeros((*shape, value.shape[-1]), dtype=dtype)
    lse = query.new_full(shape, -torch.inf, dtype=torch.float64)
    message, row = joined_rows(key, value)
    for distance, _, keys in ring.around(message, row):
        owner = ring.owner(distance)
        block = split(keys, ring.layout.num_rows(owner), key, value)
        for step in ring.steps.get(owner, ()):
            part, part_lse = attend_step(ring, step, parts_of(ring, step, own, *block))
            rows = local_run(ring.layout, ring.layout.rank, step.rows)
            _merge(at(output, -2, rows), at(lse, -1, rows), part, part_lse)
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
    ring: Ring,
    own: Rows,
    keys: tuple[Tensor, Tensor, Tensor | None],
    along: Sequence[Tensor],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, mask and sinks, not rounded. Keys travel with those of their mass."""
    key, value, d_mass = keys
    travelling = [key, value] if d_mass is None else [key, value, d_mass.unsqueeze(-1)]
    sums = Rows(*(_zeros(x, w) for x, w in zip(own, wanted, strict=True)))

    def add_part(step: Step, keys: Tensor, part: Tensor) -> None:
        rows = ring.layout.num_rows(step.owner)
        d_key, d_value = split(part, rows, key, value)
        totals = parts_of(ring, step, sums, d_key, d_value)
        _add_gradients(ring, step, own, split(keys, rows, *travelling), along, totals)

    total = ring.sums_home(*joined_rows(*travelling), row_size(key, value), add_part)
    d_key, d_value = split(total, ring.layout.num_rows(), key, value)
    return sums.query, d_key, d_value, sums.mask, sums.sinks


def _add_gradients(
    ring: Ring,
    step: Step,
    own: Rows,
    block: Sequence[Tensor],
    along: Sequence[Tensor],
    totals: Sequence[Tensor | None],
) -> None:
    """Of a step, whose weights are exp(score - lse) with the log-sum-exp over all keys."""
    key, value, *masses = block
    inputs, padding = padded(ring, step, parts_of(ring, step, own, key, value))
    rows = local_run(ring.layout, ring.layout.rank, step.rows)
    d_output, d_lse, delta, lse = (at(x, d, rows) for x, d in zip(along, (-2, -1, -1, -1), strict=True))
    d_mass = None
    if masses:
        of_step = at(masses[0], -2, local_run(ring.layout, step.owner, step.keys)).squeeze(-1)
        d_mass = torch.nn.functional.pad(of_step, (padding, 0))
    grads = torch.ops.attn_ext._sdpa_backward(
        d_output,
        d_lse,
        None,
        d_mass,
        *inputs,
        ring.call.seed,
        None,
        None,
        lse,
        *ring.call.scalars(step.query_offset + padding),
        [total is not None for total in totals],
        dropout_origin=origin_of_step(ring, step, padding),
        unrounded=True,
        delta=delta,
    )
    keys = Run(padding, padding + step.keys.size)
    for number, (total, grad) in enumerate(zip(totals, grads, strict=True)):
        if total is not None:
            of_keys = at(grad, {3: -1}.get(number, -2), keys) if padding and 0 < number < 4 else grad
            total.add_(of_keys.sum_to_size(total.shape))


def _differentiable_gradients(
    ring: Ring,
    inputs: Sequence[Tensor | None],
    grads_of_results: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """By all-gather, whose every step autograd knows."""
    query, key, value, mask, sinks = inputs
    assert query is not None and key is not None and value is not None
    call = ring.call._replace(return_lse=True)
    results = attend_gathered(call, (query, key, value), mask, sinks, ring.layout)
    leaves = [x for x, w in zip(inputs, wanted, strict=True) if w and x is not None]
    found = [(x, g) for x, g in zip(results, grads_of_results, strict=True) if x is not None]
    outputs, along = zip(*found, strict=True)
    grads = iter(torch.autograd.grad(outputs, leaves, along, create_graph=True))
    return [next(grads) if w else None for w in wanted]


def _zeros(x: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.zeros_like(x, dtype=wide(x.dtype)) if wanted and x is not None else None
