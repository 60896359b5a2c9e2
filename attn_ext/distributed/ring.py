"""Keys and values that go around the ranks, one neighbour at a time: no rank ever holds those of all."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._packed import merge_partials
from .layout import Run, SequenceLayout
from .plan import Step
from .transport import Transport

Attend = Callable[..., tuple[Tensor, Tensor]]


class Ring(NamedTuple):
    """A call's constants: the work of this rank, and how a step of it is computed."""

    layout: SequenceLayout
    transport: Transport
    steps: Sequence[Step]
    attend: Attend  # sdpa_with_lse with its options

    def steps_of(self, owner: int) -> list[Step]:
        return [step for step in self.steps if step.owner == owner]

    def owner_after(self, shifts: int) -> int:
        """Whose keys are here."""
        return (self.layout.rank - shifts) % self.layout.world_size

    def shifted(self, tensors: Sequence[Tensor], shifts: int) -> list[Tensor]:
        """The tensors of the rank before, which has made as many shifts; these go to the next rank."""
        ranks, rank = self.layout.world_size, self.layout.rank
        rows = self.layout.num_rows(self.owner_after(shifts + 1))
        received = []
        for x in tensors:
            nothing = x.narrow(-2, 0, 0)
            pieces = [nothing] * ranks
            pieces[(rank + 1) % ranks] = x
            shapes = [list(nothing.shape) for _ in range(ranks)]
            shapes[rank - 1][-2] = rows
            received.append(self.transport.all_to_all(pieces, shapes)[rank - 1])
        return received

    def inputs(self, step: Step, tensors: Sequence[Tensor | None], here: Sequence[Tensor]) -> list[Any]:
        """Of query, mask and sinks, and of the keys and values that are here, what a step takes."""
        query, mask, sinks = tensors
        assert query is not None
        rows = local_run(self.layout, self.layout.rank, step.rows)
        keys = local_run(self.layout, step.owner, step.keys)
        # Every row sees its own key, if no mask hides it: the one step that every row is in.
        with_sinks = step.rows.overlap(step.keys).size > 0
        return [
            query.narrow(-2, rows.begin, rows.size),
            *(x.narrow(-2, keys.begin, keys.size) for x in here),
            mask_part(mask, rows, step.keys),
            sinks if with_sinks else None,
        ]

    def result(self, step: Step, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        query, key, value, mask, sinks = inputs
        return self.attend(query, key, value, attn_mask=mask, sinks=sinks, query_offset=step.query_offset)


def local_run(layout: SequenceLayout, rank: int, rows: Run) -> Run:
    """Where among its own rows a rank has these, which lie in one of its runs."""
    for local, run in zip(layout.local_runs(rank), layout.runs[rank], strict=True):
        if run.begin <= rows.begin and rows.end <= run.end:
            begin = local.begin + rows.begin - run.begin
            return Run(begin, begin + rows.size)
    raise ValueError(f"expected rows of rank {rank}, but got {rows}")


def mask_part(mask: Tensor | None, rows: Run, columns: Run) -> Tensor | None:
    """Of a mask, what a call with these rows and columns sees."""
    if mask is None or mask.dim() == 0:
        return mask
    if mask.shape[-1] != 1:
        mask = mask.narrow(-1, columns.begin, columns.size)
    if mask.dim() > 1 and mask.shape[-2] != 1:
        mask = mask.narrow(-2, rows.begin, rows.size)
    return mask


class RingAttention(torch.autograd.Function):
    """Output and log-sum-exp; each step is computed again in the backward pass."""

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
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = _rows_shape(query, key, value)
        output = query.new_zeros((*shape, value.shape[-1]), dtype=wide)
        lse = query.new_full(shape, -torch.inf, dtype=wide)
        here = [key, value]
        for shifts in range(ring.layout.world_size):
            for step in ring.steps_of(ring.owner_after(shifts)):
                rows = local_run(ring.layout, ring.layout.rank, step.rows)
                part = ring.result(step, ring.inputs(step, (query, mask, sinks), here))
                outputs, lses = (
                    output.narrow(-2, rows.begin, rows.size),
                    lse.narrow(-1, rows.begin, rows.size),
                )
                merged, merged_lse = merge_partials([outputs, part[0].to(wide)], [lses, part[1]])
                outputs.copy_(merged)
                lses.copy_(merged_lse)
            if shifts + 1 < ring.layout.world_size:
                here = ring.shifted(here, shifts)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, mask, sinks, output, lse)
        return output.to(query.dtype), lse

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_output: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        ring: Ring = ctx.ring
        query, key, value, mask, sinks, output, lse = ctx.saved_tensors
        own = (query, mask, sinks)
        d_query, d_mask, d_sinks = (_accumulator(x) for x in own)
        here, d_here = [key, value], [_accumulator(key), _accumulator(value)]
        for shifts in range(ring.layout.world_size):
            for step in ring.steps_of(ring.owner_after(shifts)):
                sums = ring.inputs(step, (d_query, d_mask, d_sinks), d_here)  # views
                rows = local_run(ring.layout, ring.layout.rank, step.rows)
                along = (
                    output.narrow(-2, rows.begin, rows.size),
                    lse.narrow(-1, rows.begin, rows.size),
                    d_output.narrow(-2, rows.begin, rows.size),
                    d_lse.narrow(-1, rows.begin, rows.size),
                )
                _add_gradients(ring, step, ring.inputs(step, own, here), along, sums)
            if shifts + 1 < ring.layout.world_size:
                here = ring.shifted(here, shifts)
            d_here = ring.shifted(d_here, shifts)  # the last time back to its owner
        grads = (d_query, *d_here, d_mask, d_sinks)
        inputs = (query, key, value, mask, sinks)
        return (None, *(g if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)))


def _rows_shape(*tensors: Tensor) -> list[int]:
    """Of the output's rows: batch, heads, length. Grouped heads of keys are fewer than those of queries."""
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))  # type: ignore[no-untyped-call]
    heads = [max(x.shape[-3] for x in tensors)] if all(x.dim() > 2 for x in tensors) else []
    return [*batch, *heads, tensors[0].shape[-2]]


def _accumulator(x: Tensor | None) -> Tensor | None:
    if x is None or not x.is_floating_point():
        return None
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _add_gradients(
    ring: Ring, step: Step, inputs: Sequence[Any], along: Sequence[Tensor], sums: Sequence[Tensor | None]
) -> None:
    """Those of a step, through its own output and log-sum-exp.

    With w = exp(lse of the step - lse), what the step adds to the output is w times its own output::

        d(output of the step) = w dO
        d(lse of the step) = w (rowsum(dO (output of the step - output)) + dlse)
    """
    output, lse, d_output, d_lse = along
    leaves = [
        x if x is None or s is None else x.detach().requires_grad_()
        for x, s in zip(inputs, sums, strict=True)
    ]
    with torch.enable_grad():
        part, part_lse = ring.result(step, leaves)
    weight = torch.where(part_lse == -torch.inf, 0, (part_lse.detach() - lse).exp())
    wide = d_output.to(output.dtype)
    d_part = weight.unsqueeze(-1) * wide
    d_part_lse = weight * ((wide * (part.detach().to(output.dtype) - output)).sum(-1) + d_lse)
    wanted = [(x, s) for x, s in zip(leaves, sums, strict=True) if s is not None]
    along_parts = [d_part.to(part.dtype), d_part_lse]
    grads = torch.autograd.grad([part, part_lse], [x for x, _ in wanted], along_parts)
    for grad, (_, total) in zip(grads, wanted, strict=True):
        total.add_(grad)
