"""NaN, Inf and numbers at the ends of their range reach what sees them, as IEEE arithmetic would, and nothing
else: in inputs and in incoming gradients, on every path of both passes."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import reference

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Few keys, tiles, few rows against many keys, few keys again, one block of many keys, key pieces.
SHAPES = [(20, 20, 8), (100, 200, 16), (5, 300, 16), (100, 40, 64), (3, 7, 5), (24, 1100, 16)]
MASKS = ["none", "causal", "bool", "float"]


def make_mask(kind: str, rows: int, keys: int) -> tuple[dict, Tensor]:
    """The arguments of a mask of which row 0 sees nothing ("bool", "float"), and what it lets through."""
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if kind == "none":
        return {}, visible
    if kind == "causal":
        return {"is_causal": True}, visible.tril()
    visible = torch.rand(rows, keys) > 0.5
    visible[0] = False
    bias = torch.zeros(rows, keys).masked_fill(~visible, -INF)
    return {"attn_mask": visible if kind == "bool" else bias}, visible


def formula(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, visible: Tensor) -> list[Tensor]:
    """Output and gradients in float64, every sum over the visible pairs alone."""
    query, key, value, grad = (
        t.double().unsqueeze(d) for t, d in zip((query, key, value, grad), (1, 0, 0, 1), strict=True)
    )
    seen, scale = visible.unsqueeze(-1), query.shape[-1] ** -0.5
    dots = torch.where(seen, query * key, 0.0).sum(-1) * scale
    scores = dots.masked_fill(~visible, -INF)
    dead = (scores == -INF).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(dead | ~visible, 0.0)
    products = torch.where(visible, (grad * value).sum(-1), 0.0)
    delta = torch.where(visible, weights * products, 0.0).sum(-1, keepdim=True)
    scores_grad = torch.where(visible, weights * (products - delta), 0.0)

    def over_visible(left: Tensor, right: Tensor, dim: int) -> Tensor:
        return torch.where(seen, left.unsqueeze(-1) * right, 0.0).sum(dim)

    return [
        over_visible(weights, value, 1),
        over_visible(scores_grad, key, 1) * scale,
        over_visible(scores_grad, query, 0) * scale,
        over_visible(weights, grad, 0),
    ]


def run(function, tensors: list[Tensor], grad: Tensor, **options) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = function(*leaves, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def assert_same(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}.get(dtype, 0.1)
    for name, a, e in zip(("output", "query", "key", "value"), actual, expected, strict=True):
        torch.testing.assert_close(
            a.double(),
            e,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(shape, kind, dtype):
    rows, keys, dim = shape
    torch.manual_seed(rows * keys)
    for where in ("query", "key", "value", "grad"):
        for special in (NAN, INF):
            tensors = {
                name: torch.randn(n, dim).to(dtype)
                for name, n in (("query", rows), ("key", keys), ("value", keys), ("grad", rows))
            }
            tensors[where][len(tensors[where]) // 2, 0] = special
            options, visible = make_mask(kind, rows, keys)
            expected = formula(*tensors.values(), visible)
            grad = tensors.pop("grad")
            actual = run(attn_ext.sdpa, list(tensors.values()), grad, **options)
            for name, a, e in zip(
                ("output", "grad_query", "grad_key", "grad_value"), actual, expected, strict=True
            ):
                assert torch.equal(a.isfinite(), e.isfinite()), (where, special, name)
                # An Inf in dP comes out as NaN or as Inf, depending on how delta is made; P and values say.
                if name in ("output", "grad_value"):
                    assert torch.equal(a.isnan(), e.isnan()), (where, special, name)
            finite = [torch.where(e.isfinite(), a.double(), e) for a, e in zip(actual, expected, strict=True)]
            assert_same(finite, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (3, 5), (20, 40), (70, 70), (3, 300), (70, 230)], ids=str)
@pytest.mark.parametrize("kind", ["none", "causal", "bool"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_visible_score_of_minus_infinity_is_not_a_hidden_one(shape, kind, dtype, sign):
    """Its weight is 0 as well, but NaN times that is NaN, and beside a score of +inf it is NaN itself.

    Whatever gradients are asked for, and where a negative scale makes it of +inf.
    """
    rows, keys = shape
    torch.manual_seed(rows + keys)
    options, visible = make_mask(kind, rows, keys)
    visible[1:, 0] = True  # so that no row's scores are all -inf
    signs = torch.ones(keys, 1)
    signs[::2] = -1
    query, key, value, grad = torch.rand(rows, 4) + 0.1, torch.randn(keys, 4), *torch.randn(2, keys, 4)
    query_of_both, key_of_minus, bad_value = query.clone(), key.clone(), value.clone()
    query_of_both[0] = -INF
    key_of_minus[1, 1], bad_value[1, 2] = -INF, NAN
    for given in [(query_of_both, key.abs() * signs, value), (query, key_of_minus, bad_value)]:
        tensors = [t.to(dtype) for t in given]
        expected = formula(*tensors, grad[:rows].to(dtype), visible)[1:]
        for wanted in itertools.product([False, True], repeat=3):
            leaves = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
            if any(wanted):
                output = attn_ext.sdpa(leaves[0] * sign, *leaves[1:], scale=0.5 * sign, **options)
                got = torch.autograd.grad(
                    output, [t for t in leaves if t.requires_grad], grad[:rows].to(dtype)
                )
                for a, e in zip(got, itertools.compress(expected, wanted), strict=True):
                    assert torch.equal(a.isnan(), e.isnan()), wanted


@pytest.mark.parametrize("kind", ["causal", "bool"])
def test_the_reference_agrees_with_the_formula(kind):
    torch.manual_seed(1)
    query, key, value, grad = (torch.randn(6, 4) for _ in range(4))
    grad[2, 1], value[3, 0] = NAN, INF
    options, visible = make_mask(kind, 6, 6)
    expected = formula(query, key, value, grad, visible)
    for a, e in zip(run(reference.sdpa, [query, key, value], grad, **options), expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("rows", [3, 20, 200])
@pytest.mark.parametrize("sinks", [None, 0.5])
def test_a_row_that_sees_no_key_gives_nothing_of_its_gradient(rows, sinks):
    query, key, value = (torch.randn(1, rows, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(rows, rows, dtype=torch.bool)
    mask[1] = False
    options = {} if sinks is None else {"sinks": torch.full((1,), sinks, requires_grad=True)}
    grad = torch.randn(1, rows, 8)
    grad[0, 1] = NAN
    output = attn_ext.sdpa(query, key, value, mask, **options)
    inputs = [query, key, value, *options.values()]
    for name, got in zip(
        ("query", "key", "value", "sinks"), torch.autograd.grad(output, inputs, grad), strict=False
    ):
        assert got.isfinite().all(), name


@pytest.mark.parametrize("given", [INF, -INF, NAN])
@pytest.mark.parametrize("rows", [1, 3, 200])
@pytest.mark.parametrize("module", [attn_ext, reference], ids=["attn_ext", "reference"])
def test_a_row_without_key_and_sink_gives_nothing_of_its_lse(module, rows, given):
    """A sink of -inf is none: 0 is its weight, and not 0 times what comes in. Second derivatives, too."""
    inputs = [torch.randn(1, rows, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.full((1,), -INF, dtype=torch.float64, requires_grad=True))
    *tensors, sinks = inputs
    mask = torch.ones(rows, rows, dtype=torch.bool)
    mask[0] = False
    grad = torch.randn(1, rows, dtype=torch.float64)
    grad[0, 0] = given
    lse = module.sdpa_with_lse(*tensors, mask, sinks=sinks)[1]
    grads = torch.autograd.grad(lse, inputs, grad, create_graph=True, allow_unused=True)
    total = sum(g.sum() for g in grads if g is not None)
    seconds = torch.autograd.grad(total, inputs, allow_unused=True)
    for name, got in zip(("query", "key", "value", "sinks") * 2, grads + seconds, strict=True):
        assert got is None or got.isfinite().all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (15, 2), (20, 40), (70, 70), (3, 300)], ids=str)
def test_a_bias_under_a_negative_scale_hides_no_score_of_minus_infinity(shape, dtype):
    """NaN of the value whose weight is 0 reaches query, and finite gradients are those of the formulas."""
    rows, keys = shape
    torch.manual_seed(0)
    query, key, value = torch.rand(rows, 4) + 0.1, torch.randn(keys, 4), torch.randn(keys, 3)
    key[0, 0], value[0, 0] = INF, NAN
    bias, grad = torch.randn(rows, keys), torch.randn(rows, 3)
    tensors, grad = [t.to(dtype) for t in (query, key, value)], grad.to(dtype)
    actual = run(attn_ext.sdpa, tensors, grad, attn_mask=bias.to(dtype), scale=-1.0)
    expected = run(reference.sdpa, tensors, grad, attn_mask=bias.to(dtype), scale=-1.0)
    assert actual[1].isnan().all()
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.isfinite(), e.isfinite())


@pytest.mark.parametrize("where", ["query", "value", "grad_output", "grad_lse"])
@pytest.mark.parametrize("shape", [(1, 3), (3, 5), (3, 300), (20, 40), (200, 9)], ids=str)
@pytest.mark.parametrize("module", [attn_ext, reference], ids=["attn_ext", "reference"])
def test_a_sink_of_minus_inf_takes_no_gradient_of_what_is_not_a_number(module, shape, where):
    """It is none, as a bias of -inf is a mask; a sink beside it is one. Second derivatives, too."""
    rows, keys = shape
    torch.manual_seed(0)
    given = {
        "query": torch.randn(2, rows, 8),
        "key": torch.randn(2, keys, 8),
        "value": torch.randn(2, keys, 8),
    }
    given |= {"grad_output": torch.randn(2, rows, 8), "grad_lse": torch.randn(2, rows)}
    given[where][:, 0] = NAN
    query, key, value, grad_output, grad_lse = (t.double().requires_grad_() for t in given.values())
    sinks = torch.tensor([-INF, 0.5], dtype=torch.double, requires_grad=True)
    outputs = module.sdpa_with_lse(query, key, value, sinks=sinks)
    grads = torch.autograd.grad(outputs, (sinks, query), (grad_output, grad_lse), create_graph=True)
    (second,) = torch.autograd.grad(grads[1], sinks, torch.randn(2, rows, 8, dtype=torch.double))
    for name, got in (("first", grads[0]), ("second", second)):
        assert got[0] == 0 and got[1].isnan(), (name, got)


@pytest.mark.parametrize("value_dim", [0, 1])
@pytest.mark.parametrize("shape", [(1, 3), (1, 129), (20, 40), (16, 700), (100, 1500)], ids=str)
def test_an_infinite_score_reaches_its_sink_from_values_of_no_dim_and_from_lse_alone(shape, value_dim):
    """The weights are NaN then, and so is their sum with gradients that are 0, or of nothing."""
    rows, keys = shape
    query, key, value = torch.randn(1, rows, 4), torch.randn(1, keys, 4), torch.randn(1, keys, value_dim)
    bias, sinks = torch.randn(rows, keys), torch.tensor([-3000.0], requires_grad=True)
    bias[0, 0] = INF
    output, lse = attn_ext.sdpa_with_lse(query, key, value, bias, sinks=sinks)
    for result in (output, lse):
        (grad,) = torch.autograd.grad(result.sum(), sinks, retain_graph=True)
        assert grad.isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (20, 40), (20, 300)], ids=str)
def test_without_a_head_dim_all_keys_weigh_the_same(shape, dtype):
    rows, keys = shape
    value = torch.randn(2, keys, 4).to(dtype)
    inputs = [torch.ones(2, rows, 0, dtype=dtype), torch.ones(2, keys, 0, dtype=dtype), value]
    actual = run(attn_ext.sdpa, inputs, torch.ones(2, rows, 4))
    torch.testing.assert_close(actual[0], value.double().mean(-2, keepdim=True).expand(2, rows, 4).to(dtype))
    torch.testing.assert_close(
        actual[3].double(), torch.full((2, keys, 4), rows / keys).double(), rtol=1e-2, atol=1e-3
    )


@pytest.mark.parametrize("shape", [(3, 5), (20, 40), (20, 300), (2, 300)], ids=str)
@pytest.mark.parametrize("sink", [3000.0, -3000.0, -INF, 50.0])
@pytest.mark.parametrize("bias", [0.0, -6e4])
def test_sinks_far_from_the_scores(shape, sink, bias):
    rows, keys = shape
    torch.manual_seed(3)
    tensors = [torch.randn(2, n, 8) for n in (rows, keys, keys)]
    grad, sinks, mask = torch.randn(2, rows, 8), torch.full((2,), sink), torch.full((rows, keys), bias)
    actual = run(attn_ext.sdpa, tensors, grad, sinks=sinks, attn_mask=mask)
    expected = run(reference.sdpa, tensors, grad, sinks=sinks, attn_mask=mask)
    tolerance = 1e-5 if bias == 0.0 else 1e-2  # a score of -6e4 is rounded to 0.004
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 5), (20, 40), (20, 300), (40, 1200)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_bias_at_the_end_of_the_range_chooses_or_hides(shape, dtype, sign):
    rows, keys = shape
    torch.manual_seed(5)
    tensors = [torch.randn(2, n, 8).to(dtype) for n in (rows, keys, keys)]
    mask = torch.zeros(rows, keys, dtype=dtype)
    mask[:, ::3] = sign * torch.finfo(dtype).max
    grad = torch.randn(2, rows, 8)
    options = {"attn_mask": mask}
    actual, expected = (run(f, tensors, grad, **options) for f in (attn_ext.sdpa, reference.sdpa))
    for a, e in zip(actual[:1] + actual[3:], expected[:1] + expected[3:], strict=True):
        torch.testing.assert_close(
            a.double(), e.double(), rtol=0.03, atol=0.03 if dtype == torch.bfloat16 else 1e-4
        )
    # Beside such a bias nothing is left of the scores: their gradients are what rounding leaves.
    assert actual[1].isfinite().all() and actual[2].isfinite().all()


@pytest.mark.parametrize("softcap", [1e-46, 1e-300, 1e-40, 1e25, 1e38, 1e300])
@pytest.mark.parametrize("shape", [(3, 5), (20, 300), (2, 300)], ids=str)
def test_softcaps_at_the_ends_of_the_range(softcap, shape):
    rows, keys = shape
    torch.manual_seed(7)
    tensors = [torch.randn(2, n, 8) for n in (rows, keys, keys)]
    grad = torch.randn(2, rows, 8)
    actual, expected = (run(f, tensors, grad, softcap=softcap) for f in (attn_ext.sdpa, reference.sdpa))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (20, 200), (20, 20)], ids=str)
@pytest.mark.parametrize("score", [1e3, 1e5, 1e8, 1e12, 1e20])
def test_large_scores_weigh_as_they_should(lengths, score):
    rows, keys = lengths
    query, key = torch.ones(1, rows, 1), torch.zeros(1, keys, 1)
    key[0, 0] = score
    value = torch.randn(1, keys, 4)
    actual = run(attn_ext.sdpa, [query * 0.7, key, value], torch.ones(1, rows, 4))
    torch.testing.assert_close(actual[0], value[:, :1].expand(1, rows, 4))
    torch.testing.assert_close(actual[3][0, 0], torch.full((4,), float(rows)))


@pytest.mark.parametrize("lengths", [(2, 2), (20, 200), (2, 200)], ids=str)
def test_a_nan_shows_in_all_of_its_rows_weights(lengths):
    rows, keys = lengths
    query, key, value = torch.ones(1, rows, 4), torch.ones(1, keys, 4), torch.ones(1, keys, 4)
    key[0, 0] = INF
    mask = torch.ones(rows, keys, dtype=torch.bool)
    mask[0, 0] = mask[1, 1] = False
    _, weights = attn_ext.sdpa_with_weights(query, key, value, mask)
    assert weights[0, 0].isfinite().all()
    assert torch.equal(weights[0, 1:].isnan(), mask[1:])
    _, key_mass = attn_ext.sdpa_with_key_mass(query, key, value, mask)
    assert key_mass.isnan().all() if rows > 2 else key_mass[0].isnan().sum() == keys - 1


@pytest.mark.parametrize("shape", [(1, 16), (5, 1), (13, 5), (20, 40), (20, 300), (3, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_score_outweighs_a_bias_at_the_end_of_the_range(shape, dtype, sign):
    rows, keys = shape
    query, key, value = (torch.randn(2, n, 5).to(dtype) for n in (rows, keys, keys))
    key[:, -1, -1] = sign * INF  # scores of either sign
    bias = torch.zeros(rows, keys, dtype=dtype)
    bias[torch.rand(rows, keys) > 0.5] = torch.finfo(dtype).max
    actual, lse = attn_ext.sdpa_with_lse(query, key, value, bias)
    expected, expected_lse = reference.sdpa_with_lse(query, key, value, bias)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(lse == INF, expected_lse == INF)


@pytest.mark.parametrize("shape", [(1, 16), (13, 5), (20, 40), (20, 300), (3, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("of_a_key", [NAN, -INF])
def test_a_bias_of_inf_does_not_outweigh_what_is_not_a_number(shape, dtype, softcap, of_a_key):
    rows, keys = shape
    query, key, value = torch.ones(rows, 5), torch.randn(keys, 5), torch.randn(keys, 5)
    key[-1, -1] = of_a_key  # and a score of -inf and a bias of inf are NaN, but -softcap and inf are inf
    bias = torch.zeros(rows, keys)
    bias[torch.rand(rows) > 0.5, -1] = INF
    bias[0, -1] = INF
    arguments = [t.to(dtype) for t in (query, key, value, bias)]
    actual, lse = attn_ext.sdpa_with_lse(*arguments, softcap=softcap)
    expected, expected_lse = reference.sdpa_with_lse(*arguments, softcap=softcap)
    assert lse[0].isnan() == (softcap == 0 or of_a_key is NAN)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert torch.equal(lse == INF, expected_lse == INF)


@pytest.mark.parametrize("shape", [(1, 16), (13, 5), (20, 40), (20, 300), (3, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_visible_score_of_minus_inf_weighs_nothing_beside_the_lowest_bias(shape, dtype):
    rows, keys = shape
    query, key, value = (torch.rand(n, 4, dtype=torch.float64).to(dtype) for n in (rows, keys, keys))
    key[-1] = -INF
    bias = torch.full((rows, keys), torch.finfo(torch.float32).min).to(
        torch.promote_types(dtype, torch.float32)
    )
    leaves = [t.requires_grad_() for t in (query, key, value, bias)]
    incoming = torch.randn(rows, 4).to(dtype)
    grads = torch.autograd.grad(attn_ext.sdpa(*leaves), leaves, incoming)
    expected = torch.autograd.grad(reference.sdpa(*leaves), leaves, incoming)
    assert not grads[1][-1].any()
    assert not grads[2][-1].any()
    assert not grads[3][:, -1].any()
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 2e-2}
    torch.testing.assert_close(grads[2].float(), expected[2].float(), **tolerance)


@pytest.mark.parametrize("shape", [(1, 16), (13, 5), (20, 40), (20, 300), (3, 300)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("of_hidden", "of_others"), [(0, -1), (-0.7, -1), (1, 0.7)])
def test_lse_is_that_of_large_biases_whatever_the_bias_of_a_score_of_minus_inf(
    shape, dtype, of_hidden, of_others
):
    rows, keys = shape
    query, key, value = (torch.rand(n, 4, dtype=torch.float64).to(dtype) for n in (rows, keys, keys))
    key[-1] = -INF
    most = torch.finfo(dtype).max
    bias = torch.full((rows, keys), of_others * most, dtype=dtype)
    bias[:, -1] = of_hidden * most
    output, lse = attn_ext.sdpa_with_lse(query, key, value, bias)
    wide = (t.double() for t in (query, key[:-1], value[:-1], bias[:, :-1]))
    expected, expected_lse = reference.sdpa_with_lse(*wide)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=0)
    torch.testing.assert_close(output.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("product", [-1.1e38, -1.177e38, -1.3e38, -2e38])
def test_lse_of_low_products_is_theirs_beside_the_lowest_bias(product):
    query, key, value = torch.tensor([[1.0, 0.0]]), torch.zeros(3, 2), torch.randn(3, 4)
    key[:, 0] = product
    bias = torch.zeros(1, 3)
    bias[:, -1] = torch.finfo(torch.float32).min
    lse = attn_ext.sdpa_with_lse(query, key, value, bias, scale=1.0)[1]
    torch.testing.assert_close(lse.item(), product, rtol=1e-6, atol=0)


def test_rows_of_visible_scores_of_minus_inf_take_no_gradient():
    query, key, value = torch.randn(1, 1, 9), torch.randn(1, 3, 9), torch.randn(1, 3, 4)
    query[..., 0] = 1.0
    key[..., 0], value[..., 0] = -INF, NAN
    leaves = [t.requires_grad_() for t in (query, key, value)]
    grads = torch.autograd.grad(attn_ext.sdpa(*leaves), leaves, torch.randn(1, 1, 4), create_graph=True)
    assert torch.equal(grads[0][..., 1:], torch.zeros(1, 1, 8))
    assert torch.equal(grads[2], torch.zeros(1, 3, 4))


def test_a_batch_of_none_adds_nothing_to_what_it_shares():
    query, key, value = torch.randn(1, 2, 4), torch.randn(2, 4), torch.randn(0, 2, 4)
    key[0, 0] = INF
    leaves = [t.requires_grad_() for t in (query, key, value)]
    for grad in torch.autograd.grad(attn_ext.sdpa(*leaves).sum(), leaves):
        assert torch.equal(grad, torch.zeros_like(grad))
