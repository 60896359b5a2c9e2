"""The cells of the grid, their tensors, and how their work is counted."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ext import reference

__all__ = ["DTYPES", "GRID", "MASKS", "MODES", "OUTSIDE", "Cell", "Problem", "Shape", "make_problem"]

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

#: What is timed, and how many times the flops of forward it counts: backward has five products for two.
MODES = {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5, "weights": 1.0, "dropout": 1.0}

MASKS = {
    "none": "every key takes part",
    "causal": "keys up to the query's own place, the last query at the last key",
    "window": "causal, and no further back than an eighth of the keys",
    "padding": "bool (B, 1, 1, Lk): between two thirds and all of the keys take part",
    "bool": "bool (1, 1, Lq, Lk): nine keys in ten take part, at random",
    "bias": "floating (1, Hq, Lq, Lk), learned: it takes part in backward",
}

DROPOUT = 0.1


class Shape(NamedTuple):
    """B, Hq, Hkv, Lq, Lk, D, Dv."""

    batch: int
    query_heads: int
    kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Cell:
    """One kind of attention."""

    name: str
    shape: Shape
    mask: str = "none"

    @property
    def is_causal(self) -> bool:
        return self.mask in ("causal", "window")

    @property
    def query_offset(self) -> int:
        """With causality the last query stands at the last key, as with a cache of keys and values."""
        return self.shape.key_length - self.shape.query_length if self.is_causal else 0

    @property
    def window_left(self) -> int | None:
        return self.shape.key_length // 8 if self.mask == "window" else None

    def flops(self) -> int:
        """2 (D + Dv) for every pair of query and key that causality and window let through.

        Masks do not count: who skips what they leave out is faster.
        """
        shape = self.shape
        pairs = 0
        for row in range(shape.query_length):
            place = row + self.query_offset
            end = min(place + 1, shape.key_length) if self.is_causal else shape.key_length
            begin = 0 if self.window_left is None else max(place - self.window_left, 0)
            pairs += max(end - begin, 0)
        return 2 * (shape.head_dim + shape.value_dim) * pairs * shape.batch * shape.query_heads

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """What has to be read of keys and values, once."""
        shape = self.shape
        return (
            shape.batch
            * shape.kv_heads
            * shape.key_length
            * (shape.head_dim + shape.value_dim)
            * dtype.itemsize
        )


#: Shapes that models have; what each stands for.
GRID = {
    Cell("bert-128", Shape(8, 12, 12, 128, 128, 64, 64), "padding"): "BERT base",
    Cell("bert-512", Shape(4, 12, 12, 512, 512, 64, 64), "padding"): "BERT base, full length",
    Cell("vit-197", Shape(8, 12, 12, 197, 197, 64, 64)): "ViT-B/16",
    Cell("gpt2-1024", Shape(1, 12, 12, 1024, 1024, 64, 64), "causal"): "GPT-2",
    Cell("llama-2048", Shape(1, 32, 8, 2048, 2048, 128, 128), "causal"): "Llama 3 8B, prefill",
    Cell("whisper-1500", Shape(1, 8, 8, 1500, 1500, 64, 64)): "Whisper, encoder",
    Cell("sd-self-4096", Shape(1, 8, 8, 4096, 4096, 40, 40)): "Stable Diffusion, self-attention",
    Cell("sd-cross-77", Shape(1, 8, 8, 4096, 77, 40, 40)): "Stable Diffusion, cross-attention",
    Cell("swin-49", Shape(64, 4, 4, 49, 49, 32, 32), "bias"): "Swin, one window",
    Cell("t5-512", Shape(2, 8, 8, 512, 512, 64, 64), "bias"): "T5",
    Cell("decode-4096", Shape(1, 32, 8, 1, 4096, 128, 128)): "Llama 3 8B, decoding",
    Cell("decode-batch", Shape(8, 32, 8, 1, 1024, 128, 128)): "Llama 3 8B, decoding a batch",
    Cell("value-96", Shape(1, 8, 8, 1024, 1024, 64, 96)): "value heads wider than key heads",
    Cell("tiny", Shape(1, 1, 1, 9, 9, 24, 28)): "a sentence of nine words",
    Cell("tiny-square", Shape(1, 1, 1, 9, 9, 24, 24)): "the same, value heads as wide as key heads",
}

#: Shapes outside of the grid, where peers come near or the kernels' plans change.
OUTSIDE = {
    Cell("vit-257", Shape(8, 16, 16, 257, 257, 80, 80)): "ViT-H/14: short, wide heads",
    Cell("wide-192", Shape(2, 8, 8, 512, 512, 192, 192)): "heads of 192",
    Cell("wide-256", Shape(2, 8, 8, 512, 512, 256, 256)): "heads of 256",
    Cell("tiny-heads", Shape(1024, 4, 4, 16, 16, 32, 32)): "thousands of tiny heads",
    Cell("tiniest-heads", Shape(20000, 1, 1, 8, 8, 16, 16)): "more and tinier ones",
    Cell("pair-256", Shape(16, 4, 4, 256, 256, 32, 32), "bias"): "a learned bias of pairs, narrow heads",
    Cell("bias-1024", Shape(1, 12, 12, 1024, 1024, 64, 64), "bias"): "a learned bias, longer",
    Cell("window-8192", Shape(1, 4, 4, 8192, 8192, 64, 64), "window"): "a long sequence under a window",
    Cell("rows-9", Shape(1, 8, 8, 9, 4096, 64, 64)): "nine rows against many keys",
    Cell("rows-24", Shape(1, 8, 8, 24, 4096, 64, 64)): "two dozen",
    Cell("pooled", Shape(256, 8, 8, 1, 50, 64, 64)): "one query pools a sample's tokens",
    Cell("multi-query", Shape(4, 32, 1, 4, 4096, 128, 128)): "one key head for all, a few rows",
    Cell("latent", Shape(1, 128, 1, 1, 4096, 576, 512)): "latent attention, decoding",
}


@dataclass(frozen=True)
class Problem:
    """A cell with its tensors: all that a contender has to know."""

    cell: Cell
    mode: str
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    grad_output: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def dropout_p(self) -> float:
        return DROPOUT if self.mode == "dropout" else 0.0

    @property
    def with_grad(self) -> bool:
        return self.mode in ("bwd", "fwdbwd")

    @property
    def grouped(self) -> bool:
        return self.cell.shape.query_heads != self.cell.shape.kv_heads

    def differentiable(self) -> list[Tensor]:
        """What backward gives a gradient for: query, key, value, and the mask where it is learned."""
        mask = self.attn_mask
        learned = [mask] if mask is not None and mask.is_floating_point() else []
        return [self.query, self.key, self.value, *learned]

    def visible(self) -> Tensor | None:
        """Causality, window and a bool mask as one bool mask, for those who lack the arguments.

        None where there is nothing to hide.
        """
        cell = self.cell
        mask = self.attn_mask if self.attn_mask is not None and self.attn_mask.dtype == torch.bool else None
        if not cell.is_causal:
            return mask
        visible = reference.visible_keys(
            cell.shape.query_length,
            cell.shape.key_length,
            is_causal=True,
            window_left=cell.window_left,
            query_offset=cell.query_offset,
            device=self.query.device,
        )
        return visible if mask is None else visible & mask


def make_problem(cell: Cell, mode: str, dtype: torch.dtype) -> Problem:
    """Tensors of a cell, the same every time, from the unit normal distribution."""
    generator = torch.Generator().manual_seed(0)
    b, hq, hkv, lq, lk, d, dv = cell.shape
    with_grad = mode in ("bwd", "fwdbwd")

    def normal(*shape: int, with_grad: bool = with_grad) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_(with_grad)

    mask: Tensor | None = None
    if cell.mask == "padding":
        shortest = -(-2 * lk // 3)
        lengths = torch.linspace(lk, shortest, b).round()
        mask = (torch.arange(lk) < lengths[:, None]).reshape(b, 1, 1, lk)
    elif cell.mask == "bool":
        mask = torch.rand(1, 1, lq, lk, generator=generator) < 0.9
    elif cell.mask == "bias":
        mask = normal(1, hq, lq, lk)
    return Problem(
        cell,
        mode,
        query=normal(b, hq, lq, d),
        key=normal(b, hkv, lk, d),
        value=normal(b, hkv, lk, dv),
        attn_mask=mask,
        grad_output=normal(b, hq, lq, dv, with_grad=False) if with_grad else None,
    )
