"""Cases as programs: the tensors that one makes, and what stands in front of it when it is printed."""

import math
from collections.abc import Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor


def numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Normal numbers that hang on seed and shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NAMES = {"torch": torch, "numbers": numbers, "inf": math.inf, "nan": math.nan}


@lru_cache(4096)
def compiled(program: str) -> CodeType:
    return compile(program, "case", "exec")


def tensors_of(program: Sequence[str]) -> dict[str, Tensor]:
    """Every tensor that the statements make, by name; "t" is for passing."""
    names: dict[str, Any] = dict(NAMES)
    exec(compiled("\n".join(program)), names)
    return {n: t for n, t in names.items() if isinstance(t, Tensor) and n != "t"}


def heading(result: str, capability: str, told: str) -> list[str]:
    """The first lines of a program that shows a case."""
    lines = [f"# {result}: {told}"] if result else []
    lines += [f"# ATTN_EXT_CPU_CAPABILITY={capability}"] if capability else []
    return [
        *lines,
        "import torch",
        "import attn_ext",
        "from attn_ext import reference",
        "inf, nan = float('inf'), float('nan')",
        "",
        "def numbers(seed, shape):",
        "    generator = torch.Generator().manual_seed(seed)",
        "    return torch.randn(shape, generator=generator, dtype=torch.float64)",
        "",
    ]


__all__ = ["NAMES", "heading", "numbers", "tensors_of"]
