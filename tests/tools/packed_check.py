"""Packed calls on this process's instruction set against the reference, forward and backward: a few seconds.

    ATTN_EXT_CPU_CAPABILITY=avx2 python tests/tools/packed_check.py

Ends with an AssertionError where one disagrees.
"""

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

import attn_ext
from attn_ext import reference

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 5, "window_right": 2},
    "softcap": {"softcap": 2.0, "scale": 0.7, "is_causal": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.4, "window_left": 40},
}
# Of every path: few rows and many keys, few keys and many rows, many of both, one, none.
LENGTHS = [(1, 300), (5, 0), (40, 70), (130, 9), (0, 5), (3, 3), (1, 1), (96, 160)]


def results(
    source: Any, tensors: list[Tensor], starts: list[Tensor], options: dict[str, Any]
) -> list[Tensor]:
    """Output, lse, and the gradient of every tensor."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    more = {**options, **({"sinks": leaves[3]} if "sinks" in options else {})}
    torch.manual_seed(3)
    if source is reference and "dropout_p" in options:
        more["dropout_seed"] = torch.randint(2**63 - 1, ())
    output, lse = source.sdpa_packed_with_lse(*leaves[:3], *starts, enable_gqa=True, **more)
    torch.manual_seed(4)
    along = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in (output, lse)]
    along[1] = along[1].masked_fill(lse == -math.inf, 0.0)
    used = leaves if "sinks" in options else leaves[:3]
    return [t.detach().double() for t in (output, lse, *torch.autograd.grad((output, lse), used, along))]


def main() -> None:
    """Every option in every dtype."""
    starts = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*LENGTHS, strict=True)]
    shapes = (
        (int(starts[0][-1]) + 2, 4, 24),
        (int(starts[1][-1]) + 1, 2, 24),
        (int(starts[1][-1]) + 1, 2, 17),
        (4,),
    )
    calls = list(product(TOLERANCE, OPTIONS))
    for dtype, name in calls:
        torch.manual_seed(0)
        tensors = [torch.randn(shape).to(dtype) for shape in shapes]
        wide = [t.double() for t in tensors]
        actual = results(attn_ext, tensors, starts, OPTIONS[name])
        for number, pair in enumerate(
            zip(actual, results(reference, wide, starts, OPTIONS[name]), strict=True)
        ):
            bound = TOLERANCE[dtype] * (1 + float(pair[1][pair[1].isfinite()].abs().max()))
            torch.testing.assert_close(
                *pair, rtol=0, atol=bound, msg=lambda m, at=(dtype, name, number): f"{at}: {m}"
            )
    print(f"{attn_ext.cpu_capability()}: {len(calls)} calls agree")


if __name__ == "__main__":
    main()
