"""The gradients of every operator: against the float64 reference, and the contract's edges by name."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

import attn_ext
from attn_ext import reference
from attn_ext.testing import (
    CASES,
    DTYPES,
    OPS,
    Case,
    assert_gradients_accurate,
    backward,
    cotangents,
    gradients,
    operator,
    random_cases,
    tensors,
)

NAN = math.nan
INF = math.inf

CI = bool(os.environ.get("CI"))  # there the random cases are the same in every run

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_op = pytest.mark.parametrize("op", OPS)


@by_op
@by_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_accurate(case, dtype, op, device):
    assert_gradients_accurate(op, case.build(dtype, device))


@settings(
    max_examples=20,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=list(HealthCheck),
)
@given(case=random_cases())
@by_dtype
def test_gradients_of_random_cases_are_accurate(dtype, device, case):
    for op in OPS[1:]:
        assert_gradients_accurate(op, case.build(dtype, device))


def test_gradients_agree_with_torch(device):
    arguments = Case("", mask="bias", mask_shape=(3, 5, 7)).build(torch.float64, device)
    actual = gradients(operator("sdpa"), arguments)
    expected = gradients(F.scaled_dot_product_attention, arguments)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], msg=name)


MASK_SHAPES = [(2, 3, 5, 7), (3, 5, 7), (2, 1, 5, 7), (5, 7), (3, 1, 7), (2, 3, 5, 1), (7,), (1,)]


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_gradient_has_the_mask_s_own_shape(shape, device):
    arguments = Case("", mask="bias", mask_shape=shape).build(torch.float64, device)
    grad = gradients(operator("sdpa"), arguments)["attn_mask"]
    exact = gradients(reference.sdpa, arguments)["attn_mask"]
    assert grad.shape == shape
    torch.testing.assert_close(grad, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradient_of_a_float32_mask_is_float32(dtype, device):
    arguments = Case("", mask="bias", mask_dtype=torch.float32).build(dtype, device)
    assert gradients(operator("sdpa"), arguments)["attn_mask"].dtype == torch.float32


def test_gradient_of_an_expanded_mask_is_not_expanded(device):
    mask = torch.randn(5, 7, device=device, requires_grad=True)
    arguments = Case("").build(torch.float32, device)
    arguments(operator("sdpa"), attn_mask=mask.expand(2, 3, 5, 7)).sum().backward()
    assert mask.grad.shape == (5, 7)


@pytest.mark.parametrize("wanted", ["query", "key", "value", "attn_mask", "sinks"])
def test_one_gradient_alone_is_that_of_all_together(wanted, device):
    case = Case("", mask="bias", mask_shape=(3, 5, 7), sinks=True)
    arguments = case.build(torch.float64, device)
    together = gradients(operator("sdpa"), arguments)[wanted]
    leaf = arguments.differentiable()[wanted].clone().requires_grad_()
    output = arguments.with_tensors({wanted: leaf})(operator("sdpa"))
    (alone,) = torch.autograd.grad(output, leaf, cotangents((output,), torch.float64))
    torch.testing.assert_close(alone, together)


@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("used", [0, 1])
def test_gradient_through_one_output_alone(used, op, device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float64, device)

    def one(function):
        return lambda *args, **kwargs: tensors(function(*args, **kwargs))[used]

    actual = gradients(one(operator(op)), arguments)
    exact = gradients(one(getattr(reference, op)), arguments)
    for name in exact:
        torch.testing.assert_close(actual[name], exact[name], msg=name)


def test_outputs_require_grad_only_if_an_input_does(device):
    arguments = Case("", sinks=True).build(torch.float32, device)
    for op in OPS:
        assert not any(t.requires_grad for t in tensors(arguments(operator(op))))
        assert all(t.requires_grad for t in tensors(arguments.leaves()(operator(op))))


def test_gradients_accumulate_into_leaves(device):
    arguments = Case("").build(torch.float64, device).leaves()
    for _ in range(2):
        arguments(operator("sdpa")).sum().backward()
    grads = gradients(lambda *a, **k: operator("sdpa")(*a, **k).sum(), arguments)
    once = torch.autograd.grad(arguments(operator("sdpa")).sum(), arguments.query)[0]
    torch.testing.assert_close(arguments.query.grad, 2 * once)
    assert set(grads) == {"query", "key", "value"}


def test_saved_tensor_that_changed_in_place_is_an_error(device):
    arguments = Case("").build(torch.float64, device).leaves()
    key = arguments.key * 1
    output = operator("sdpa")(arguments.query, key, arguments.value)
    key.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_second_backward_without_retain_graph_is_an_error(device):
    output = Case("").build(torch.float64, device).leaves()(operator("sdpa")).sum()
    output.backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


# Rows that see no key


@by_op
@by_dtype
def test_dead_row_gives_zero_gradients(dtype, op, device):
    case = Case("", key=(2, 3, 5, 8), value=(2, 3, 5, 6), mask="dead_row", mask_shape=(5, 5))
    grads = gradients(operator(op), case.build(dtype, device))
    assert (grads["query"][:, :, 1] == 0).all()
    assert all(g.isfinite().all() for g in grads.values())


def test_bias_of_minus_infinity_has_gradient_zero(device):
    arguments = Case("", mask="bias_with_minus_inf").build(torch.float64, device)
    grad = gradients(operator("sdpa_with_weights"), arguments)["attn_mask"]
    hidden = arguments.options["attn_mask"] == -INF
    assert (grad[hidden] == 0).all() and (grad[~hidden] != 0).any()


def test_no_keys_give_zero_query_gradients(device):
    query = torch.randn(2, 3, 4, 8, device=device, requires_grad=True)
    empty = torch.randn(2, 3, 0, 8, device=device, requires_grad=True)
    torch.ops.attn_ext.sdpa(query, empty, empty).sum().backward()
    assert (query.grad == 0).all() and empty.grad.shape == empty.shape


@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 0), (4, 0)], ids=str)
def test_a_mask_of_no_keys_is_not_read(shape, kind, device):
    """It has no memory. The sink sees each of the four rows."""
    query, empty = torch.randn(1, 4, 8, device=device), torch.randn(1, 0, 8, device=device)
    sinks = torch.zeros(1, device=device, requires_grad=True)
    mask = torch.ones(1, device=device, dtype=kind).expand(shape)
    _, lse = attn_ext.sdpa_with_lse(query, empty, empty, mask, sinks=sinks)
    assert torch.autograd.grad(lse.sum(), sinks)[0] == 4


# NaN and Inf


@pytest.mark.parametrize("poison", [NAN, INF])
@by_op
@pytest.mark.parametrize("where", ["key", "value"])
def test_hidden_key_and_value_never_reach_a_gradient(where, op, poison, device):
    arguments = Case("", mask="padding", mask_shape=(2, 1, 1, 7)).build(torch.float64, device)
    hidden = ~arguments.options["attn_mask"].squeeze()
    assert hidden.any()
    clean = gradients(operator(op), arguments)
    tensor = getattr(arguments, where)
    poisoned = torch.where(hidden[:, None, :, None], poison, tensor)
    actual = gradients(operator(op), arguments.with_tensors({where: poisoned}))
    for name in clean:
        torch.testing.assert_close(actual[name], clean[name], msg=name)


@pytest.mark.careful
@by_dtype
def test_nan_in_a_query_row_that_sees_nothing_never_reaches_a_gradient(dtype, device):
    arguments = Case("", mask="dead_row", mask_shape=(5, 7)).build(dtype, device)
    arguments.query[:, :, 1] = NAN
    grads = gradients(operator("sdpa_with_lse"), arguments)
    assert all(g.isfinite().all() for g in grads.values())


def test_visible_nan_shows_in_the_gradients_it_reaches(device):
    arguments = Case("").build(torch.float32, device)
    arguments.key[0, 1, 3, 2] = NAN
    grads = gradients(operator("sdpa"), arguments)
    assert grads["query"][0, 1].isnan().all() and grads["value"][0, 1].isnan().all()
    assert grads["query"][1].isfinite().all() and grads["query"][0, 0].isfinite().all()


# Options


def test_softcap_flattens_the_gradient_of_large_scores(device):
    query = torch.full((1, 1, 4), 100.0, device=device, requires_grad=True)
    key, value = torch.randn(2, 1, 3, 4, device=device)
    torch.ops.attn_ext.sdpa(query, 10 * key.abs(), value, softcap=1.0).sum().backward()
    torch.testing.assert_close(query.grad, torch.zeros_like(query))


def test_scale_zero_gives_zero_query_and_key_gradients(device):
    grads = gradients(operator("sdpa"), Case("", options={"scale": 0.0}).build(torch.float32, device))
    assert (grads["query"] == 0).all() and (grads["key"] == 0).all()
    assert (grads["value"] != 0).any()


def test_sink_takes_gradient_through_lse(device):
    arguments = Case("", sinks=True).build(torch.float64, device).leaves()
    _, lse = arguments(torch.ops.attn_ext.sdpa_with_lse)
    sinks = arguments.options["sinks"]
    (grad,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(grad, (sinks[:, None] - lse).exp().sum((0, 2)))


@pytest.mark.parametrize("far", [-1e12, -5e10, -1e9, 1e5, 400.0])
@pytest.mark.parametrize("lengths", [(1, 40), (8, 40), (1, 300), (8, 300), (70, 300)], ids=str)
def test_weights_beside_a_sink_as_far_as_all_scores(lengths, far, device):
    """Of lse, rounded, neither says what the other's share is."""
    query_length, key_length = lengths
    query = torch.zeros(2, query_length, 64, dtype=torch.float64, device=device)
    key, value = torch.randn(2, 2, key_length, 64, dtype=torch.float64, device=device)
    bias = torch.full((1, key_length), far, dtype=torch.float64, device=device)
    along = (
        torch.randn_like(query),
        torch.randn(2, query_length, key_length, dtype=query.dtype, device=device),
    )
    wanted, got = [], []  # results, then gradients
    for op, dtype, found in (
        (reference.sdpa_with_weights, torch.float64, wanted),
        (attn_ext.sdpa_with_weights, torch.float32, got),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in (query, value, bias[0, :2])]
        outputs = op(leaves[0], key.to(dtype), leaves[1], bias.to(dtype), sinks=leaves[2])
        found += outputs
        found += torch.autograd.grad(outputs, leaves, [x.to(dtype) for x in along])
    for x, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("far", [-1e12, -123456.7, 3.3e10, 400.0])
@pytest.mark.parametrize("lengths", [(1, 0), (1, 40), (8, 40), (1, 300), (8, 300), (70, 300)], ids=str)
@pytest.mark.parametrize("hidden", ["by a row", "by keys"])
def test_a_far_sink_has_all_of_a_row_that_sees_no_key(hidden, lengths, far, device):
    query_length, key_length = lengths
    query = torch.randn(2, query_length, 64, device=device)
    key = torch.randn(2, key_length, 64, device=device)
    seen = torch.zeros(query_length, 1 if hidden == "by a row" else key_length, dtype=torch.bool)
    sinks = torch.full((2,), far, device=device, requires_grad=True)
    _, lse = attn_ext.sdpa_with_lse(query, key, key, seen.to(device), sinks=sinks)
    along = torch.randn_like(lse)
    (grad,) = torch.autograd.grad(lse, sinks, along)
    torch.testing.assert_close(grad, along.sum(1))


@pytest.mark.parametrize("sink", [torch.inf, torch.nan])
@pytest.mark.parametrize("hidden", ["by a row", "by keys"])
def test_a_sink_that_is_not_finite_gives_a_row_that_sees_no_key_nan(hidden, sink, device):
    query, key = torch.randn(2, 3, 8, device=device), torch.randn(2, 40, 8, device=device)
    seen = torch.zeros(3, 1 if hidden == "by a row" else 40, dtype=torch.bool, device=device)
    sinks = torch.full((2,), sink, device=device, requires_grad=True)
    _, lse = attn_ext.sdpa_with_lse(query, key, key, seen, sinks=sinks)
    assert torch.autograd.grad(lse.sum(), sinks)[0].isnan().all()


def test_undefined_output_gradients_count_as_zero(device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float64, device)
    output, lse = arguments(torch.ops.attn_ext.sdpa_with_lse)
    grads = backward((None,) * 4, arguments, output, lse)
    for grad, leaf in zip(grads, arguments.differentiable().values(), strict=True):
        assert grad.shape == leaf.shape and (grad == 0).all()


def test_internal_backward_gives_none_for_what_is_not_asked_for(device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float64, device)
    output, lse = arguments(torch.ops.attn_ext.sdpa_with_lse)
    wanted = (False, True, False, True, False)
    grads = backward((torch.ones_like(output), None, None, None), arguments, output, lse, wanted)
    assert tuple(g is not None for g in grads) == wanted
