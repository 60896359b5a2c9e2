"""A step of the ring as a call of the op, by the output and log-sum-exp that it would have alone."""

from typing import Any

import torch
from torch import Tensor


def forward_op(*args: Any, dropout_origin: Any, unrounded: bool) -> tuple[Tensor, Tensor, None, None]:
    output, lse, _, _ = torch.ops.attn_ext._sdpa_forward(*args)
    return output.to(torch.promote_types(output.dtype, torch.float32)), lse.double(), None, None


def backward_op(d_output: Tensor, d_lse: Tensor, *args: Any, **part: Any) -> list[Tensor | None]:
    """With w = exp(lse of the step - lse), its output has the gradient w dO, and its lse one of its own."""
    inputs, rest, wanted = args[2:7], args[7:9], args[-1]
    lse, scalars, delta = args[10], args[11:-1], part["delta"]
    leaves = [x.detach().requires_grad_() if w else x for x, w in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        output, part_lse, _, _ = torch.ops.attn_ext._sdpa_forward(*leaves, *rest, *scalars, False, False)
    weight = torch.where(part_lse == -torch.inf, 0, (part_lse.detach() - lse).exp()).to(part_lse.dtype)
    own = (d_output.to(weight.dtype) * output.detach()).sum(-1)
    along = [(weight.unsqueeze(-1) * d_output).to(output.dtype), weight * (own - delta + d_lse)]
    found = iter(
        torch.autograd.grad([output, part_lse], [x for x, w in zip(leaves, wanted, strict=True) if w], along)
    )
    return [next(found) if w else None for w in wanted]
