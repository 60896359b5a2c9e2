"""Attention modules over the ops, one file each."""

from .cross_attention import CrossAttention
from .multi_head_attention import MultiHeadAttention
from .scaled_dot_product_attention import ScaledDotProductAttention
from .self_attention import SelfAttention

__all__ = [
    "AttentionModule",
    "CrossAttention",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "SelfAttention",
]
