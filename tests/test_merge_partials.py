"""Attention over all keys from attention over parts of them."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import attn_ext

TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = TOLERANCE.keys()
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
CUTS = {"one": [0, 9], "two": [0, 4, 9], "empty_parts": [0, 0, 5, 5, 9], "each": list(range(10))}


def tensors(dtype: torch.dtype = torch.float64, grad: bool = False) -> list[Tensor]:
    shapes = ((2, 3, 6, 5), (2, 3, 9, 5), (2, 3, 9, 4))
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]


def merged(query: Tensor, key: Tensor, value: Tensor, cuts: list[int], **options) -> tuple[Tensor, Tensor]:
    """By parts of the keys, each as causal as it would be in the whole."""
    outputs, lses = [], []
    for begin, end in pairwise(cuts):
        part = (query, key[..., begin:end, :], value[..., begin:end, :])
        output, lse = attn_ext.sdpa_with_lse(*part, query_offset=-begin, **options)
        outputs.append(output)
        lses.append(lse)
    return attn_ext.merge_partials(outputs, lses)


@by_dtype
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_parts_make_the_whole_with_its_gradients(cuts, is_causal, dtype):
    leaves = tensors(dtype, grad=True)
    actual = merged(*leaves, cuts, is_causal=is_causal)
    expected = attn_ext.sdpa_with_lse(*leaves, is_causal=is_causal)
    along = [torch.randn(t.shape, dtype=torch.float64).to(t.dtype) for t in expected]
    pairs = [*zip(actual, expected, strict=True)]
    pairs += zip(*(torch.autograd.grad(r, leaves, along) for r in (actual, expected)), strict=True)
    for a, e in pairs:
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=0, atol=TOLERANCE[dtype] * (1 + float(e.abs().max())))


def test_rows_without_a_key_add_nothing_whatever_they_hold():
    outputs = [torch.tensor([[math.nan], [math.inf], [2.0]]), torch.tensor([[1.0], [math.nan], [4.0]])]
    lses = [torch.tensor([-math.inf, -math.inf, 0.0]), torch.tensor([3.0, -math.inf, 0.0])]
    leaves = [t.requires_grad_() for t in (*outputs, *lses)]
    output, lse = attn_ext.merge_partials(leaves[:2], leaves[2:])
    torch.testing.assert_close(output, torch.tensor([[1.0], [0.0], [3.0]]))
    torch.testing.assert_close(lse, torch.tensor([3.0, -math.inf, math.log(2)]))
    grads = torch.autograd.grad(output.sum() + lse[[0, 2]].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][:2].any()


def test_what_is_not_a_number_shows():
    output, lse = attn_ext.merge_partials(
        [torch.tensor([[math.nan], [1.0], [1.0]]), torch.ones(3, 1)],
        [torch.tensor([0.0, math.nan, math.inf]), torch.zeros(3)],
    )
    assert output.isnan().all()
    assert not lse[0].isnan()
    assert lse[1].isnan()
    assert lse[2] == math.inf


def test_lses_far_from_0_neither_overflow_nor_vanish():
    for far in (-1e4, 1e4, 3e38):
        lses = [torch.tensor([far]), torch.tensor([far])]
        output, lse = attn_ext.merge_partials([torch.ones(1, 2), 3 * torch.ones(1, 2)], lses)
        torch.testing.assert_close(output, 2 * torch.ones(1, 2))
        torch.testing.assert_close(lse, lses[0] + math.log(2))


def test_every_derivative_and_way_of_calling():
    outputs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def function(*args):
        return attn_ext.merge_partials(list(args[:3]), list(args[3:]))

    assert torch.autograd.gradcheck(function, (*outputs, *lses), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (*outputs, *lses))
    together = torch.vmap(function)(*outputs, *lses)
    for actual, expected in zip(together, function(*outputs, *lses), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.library.opcheck(torch.ops.attn_ext.merge_partials.default, (outputs, lses))
    scripted = torch.jit.script(attn_ext.merge_partials)
    assert all(map(torch.equal, scripted(outputs, lses), function(*outputs, *lses)))
    meta = attn_ext.merge_partials([t.to("meta") for t in outputs], [t.to("meta") for t in lses])
    assert [t.shape for t in meta] == [(2, 3), (2,)]


@by_dtype
def test_lses_may_be_float64(dtype):
    outputs = [torch.randn(4, 3).to(dtype) for _ in range(2)]
    far = torch.full((4,), -1e9, dtype=torch.float64)
    lses = [far, far + math.log(3)]
    output, lse = attn_ext.merge_partials(outputs, lses)
    assert output.dtype == dtype
    assert lse.dtype == torch.float64
    torch.testing.assert_close(output, (outputs[0].double() * 0.25 + outputs[1].double() * 0.75).to(dtype))
    torch.testing.assert_close(lse, lses[0] + math.log(4), rtol=0, atol=1e-6)


def test_the_output_lies_as_the_parts_do():
    outputs = [torch.randn(2, 5, 3, 4).transpose(1, 2) for _ in range(2)]
    output, _ = attn_ext.merge_partials(outputs, [torch.randn(2, 3, 5)] * 2)
    assert output.stride() == outputs[0].stride()


OUT, LSE = torch.zeros(2, 3), torch.zeros(2)
BAD = {
    "none": ([], [], "at least one partial output"),
    "counts": ([OUT, OUT], [LSE], r"as many lses as outputs \(2\), but got 1"),
    "integers": ([OUT.int()], [LSE], "floating outputs, but got dtype Int"),
    "no_dimension": ([OUT[0, 0]], [LSE], r"shape \(..., value dim\)"),
    "shapes": ([OUT, OUT[:1]], [LSE, LSE], r"one shape, .* but got \[2, 3\] .* and \[1, 3\] .* place 1"),
    "dtypes": ([OUT, OUT.half()], [LSE, LSE], "one shape, dtype and device"),
    "lse_shape": ([OUT], [OUT], r"without its last dimension .* but got \[2, 3\] at place 0"),
    "lse_dtype": ([OUT.bfloat16()], [LSE.bfloat16()], "lses of dtype Float or all of dtype Double with"),
    "lse_dtypes": ([OUT, OUT], [LSE, LSE.double()], "all of dtype Double .* but got Double at place 1"),
    "lse_device": ([OUT], [LSE.to("meta")], "lses on the device of the outputs"),
}


@pytest.mark.parametrize(("outputs", "lses", "message"), BAD.values(), ids=BAD)
def test_parts_that_do_not_fit_are_refused(outputs, lses, message):
    with pytest.raises(RuntimeError, match=message):
        attn_ext.merge_partials(outputs, lses)
