"""The key mass of a ring, and what its gradient adds to delta, each by going around once more.

Once the log-sum-exp of a row over all keys is known, a step's weights are exp(score - lse), with dropout's
factors. Their sums over rows are the gradient of the values where the output has one feature, whose gradient
is 1; their sums over keys, each times a number of its key, are attention with that number for a value.
"""

import torch
from torch import Tensor

from .exchange import wide
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
    rows_shape,
    split,
)


def key_mass_of_own(ring: Ring, own: Rows, key: Tensor, lse: Tensor) -> Tensor:
    """(..., Hq, L): how much attention this rank's keys got from the rows of all; not rounded."""
    assert own.query is not None
    query, heads = own.query, lse.shape[:-1]
    mass = key.new_empty(*heads, 0, 1)  # the shape of one feature of values, without rows

    def add_part(step: Step, keys: Tensor, part: Tensor) -> None:
        rows = ring.layout.num_rows(step.owner)
        (block,), (total,) = split(keys, rows, key), split(part, rows, mass)
        parts = parts_of(ring, step, own._replace(sinks=None), block, block.new_zeros(*heads, rows, 1))
        inputs, padding = padded(ring, step, _with_all_heads(parts, query))
        here = local_run(ring.layout, ring.layout.rank, step.rows)
        ones = query.new_ones(*heads, here.size, 1)
        _, _, grad, _, _ = torch.ops.attn_ext._sdpa_backward(
            ones,
            None,
            None,
            None,
            *inputs,
            ring.call.seed,
            None,
            None,
            at(lse, -1, here),
            *ring.call.scalars(step.query_offset + padding),
            [False, False, True, False, False],
            dropout_origin=origin_of_step(ring, step, padding),
            unrounded=True,
            delta=ones.squeeze(-1).to(wide(query.dtype)),
        )
        at(total, -2, local_run(ring.layout, step.owner, step.keys)).add_(grad[..., padding:, :])

    message, row = joined_rows(key)
    total = ring.sums_home(message, row, heads.numel(), add_part)
    return split(total, ring.layout.num_rows(), mass)[0].squeeze(-1)


def mean_of_key_mass(ring: Ring, own: Rows, key: Tensor, d_mass: Tensor, lse: Tensor) -> Tensor:
    """(..., Hq, L): of each row, its weights times the gradients of the keys' mass, summed over all keys."""
    assert own.query is not None
    query, travelling = own.query, (key, d_mass.unsqueeze(-1))
    mean = query.new_zeros(rows_shape(query, *travelling), dtype=wide(query.dtype))
    for distance, _, keys in ring.around(*joined_rows(*travelling)):
        owner = ring.owner(distance)
        block = split(keys, ring.layout.num_rows(owner), *travelling)
        for step in ring.steps.get(owner, ()):
            parts = _with_all_heads(parts_of(ring, step, own, *block), query)
            part, part_lse = attend_step(ring, step, parts)
            rows = local_run(ring.layout, ring.layout.rank, step.rows)
            whole = at(lse, -1, rows)
            share = (part_lse - whole).exp().masked_fill(whole == -torch.inf, 0).to(mean.dtype)
            at(mean, -1, rows).addcmul_(part.squeeze(-1), share)
        del keys, block
    return mean


def _with_all_heads(parts: list[Tensor | None], query: Tensor) -> list[Tensor | None]:
    """With the keys once for each head of the query, as the mass has them."""
    rows, key, *rest = parts
    assert key is not None
    group = query.shape[-3] // key.shape[-3] if query.dim() > 2 and key.dim() > 2 else 1
    return [rows, key.repeat_interleave(group, -3) if group > 1 else key, *rest]
