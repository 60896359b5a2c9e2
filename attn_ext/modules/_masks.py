"""From the modules' masks to the op's.

The modules follow ``nn.MultiheadAttention``: a bool mask is True where a key is **masked out**. The op
follows ``F.scaled_dot_product_attention``: a bool mask is True where a key **takes part**. Floating masks are
added to the scores in both.
"""

import math

import torch
from torch import Tensor


def to_attn_mask(mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Join both masks of a module into one of the op; each may have any shape that broadcasts to the scores.

    The joint mask has the shape to which the two broadcast, and no more.
    """
    if mask is None and key_padding_mask is None:
        return None
    joint = _join(mask, key_padding_mask)
    return joint.logical_not() if joint.dtype == torch.bool else joint


def _join(mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor:
    """The joint mask, still True = masked out."""
    if mask is None:
        assert key_padding_mask is not None
        return _checked(key_padding_mask, "key_padding_mask")
    mask = _checked(mask, "mask")
    if key_padding_mask is None:
        return mask
    padding = _checked(key_padding_mask, "key_padding_mask")
    if mask.dtype == torch.bool and padding.dtype == torch.bool:
        return mask.logical_or(padding)
    if mask.dtype == torch.bool:
        return padding.masked_fill(mask, -math.inf)
    if padding.dtype == torch.bool:
        return mask.masked_fill(padding, -math.inf)
    return mask + padding


def _checked(mask: Tensor, name: str) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name} must be bool (True = masked out) or floating (added to the scores)")
    return mask
