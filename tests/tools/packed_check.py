"""Packed and paged calls on this process's instruction set against the reference: a few seconds.

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


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype, where: Any) -> None:
    largest = max([0.0, *expected[expected.isfinite()].abs().flatten().tolist()])
    torch.testing.assert_close(
        actual.double(),
        expected,
        rtol=0,
        atol=TOLERANCE[dtype] * (1 + largest),
        msg=lambda m: f"{where}: {m}",
    )


def check_packed() -> int:
    """Every option in every dtype, forward and backward."""
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
        expected = results(reference, wide, starts, OPTIONS[name])
        for number, pair in enumerate(zip(actual, expected, strict=True)):
            check(*pair, dtype, (dtype, name, number))
    return len(calls)


def check_paged() -> int:
    """Pages of every kind under every dtype; the same pages are read as rows in one piece, bit by bit."""
    lengths = torch.tensor([keys for _, keys in LENGTHS])
    starts = torch.tensor([0, *(rows for rows, _ in LENGTHS)]).cumsum(0)
    calls = list(product(TOLERANCE, (None, torch.int8, torch.float8_e4m3fn), (1, 3, 16)))
    for dtype, stored, page in calls:
        torch.manual_seed(0)
        used = (lengths + page - 1) // page
        order, table = torch.randperm(int(used.sum())), torch.full((len(LENGTHS), int(used.max())), -1)
        for row, pages in zip(table, order.split(used.tolist()), strict=True):
            row[: len(pages)] = pages
        caches = [(3 * torch.randn(len(order), page, 2, dim)).to(stored or dtype) for dim in (24, 17)]
        scales = {} if stored is None else {"key_scale": torch.rand(2), "value_scale": torch.rand(2)}
        query = torch.randn(int(starts[-1]), 4, 24).to(dtype)
        arguments = (query, *caches, table, lengths, starts)
        actual = attn_ext.sdpa_paged_with_lse(*arguments, enable_gqa=True, **scales)
        for pair in zip(
            actual, reference.sdpa_paged_with_lse(*arguments, enable_gqa=True, **scales), strict=True
        ):
            check(*pair, dtype, (dtype, stored, page))
        if stored is None:
            key, value = (torch.cat(reference.gather_pages(c, table, lengths)).to(dtype) for c in caches)
            ends = torch.tensor([0, *lengths.tolist()]).cumsum(0)
            dense = attn_ext.sdpa_packed_with_lse(query, key, value, starts, ends, 0.0, True, enable_gqa=True)
            assert all(map(torch.equal, actual, dense)), (dtype, page)
    return len(calls)


def main() -> None:
    """All of both."""
    print(f"{attn_ext.cpu_capability()}: {check_packed()} packed and {check_paged()} paged calls agree")


if __name__ == "__main__":
    main()
