"""Every derivative of every operator: first, second, forward mode, and through torch.func."""

import math
import warnings
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import attn_ext  # noqa: F401  (loads the operators)
from attn_ext import reference
from attn_ext.testing import DERIVATIVE_CASES, OPS, Case, operator, tensors, with_seed

by_op = pytest.mark.parametrize("op", OPS)
by_case = pytest.mark.parametrize("case", DERIVATIVE_CASES, ids=str)

SEED = 5


def function_and_inputs(op, case, device):
    """The operator as a function of the case's floating tensors, and those tensors.

    With dropout the draw is that of a fixed seed. Where lse is -inf it is replaced by 0, for a
    numerical derivative of it would be NaN.
    """
    arguments = case.build(torch.float64, device).leaves()
    names = list(arguments.differentiable())
    dropout = case.options.get("dropout_p", 0.0) > 0
    call = with_seed(op, SEED) if dropout else operator(op)

    def function(*inputs):
        outputs = tensors(arguments.with_tensors(dict(zip(names, inputs, strict=True)))(call))
        return tuple(t.masked_fill(t == -math.inf, 0.0) for t in outputs)

    return function, tuple(arguments.differentiable().values())


@pytest.fixture
def no_warnings():
    """Every warning an error: vmap warns where it falls back to a loop over the samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own, in jvp
        yield


# gradcheck


@by_op
@by_case
def test_gradcheck(case, op, device):
    function, inputs = function_and_inputs(op, case, device)
    assert gradcheck(
        function,
        inputs,
        check_undefined_grad=True,
        check_batched_grad=True,
        check_forward_ad=True,
        check_batched_forward_grad=True,
    )


@by_op
@by_case
def test_gradgradcheck(case, op, device):
    function, inputs = function_and_inputs(op, case, device)
    assert gradgradcheck(
        function,
        inputs,
        check_undefined_grad=True,
        check_batched_grad=True,
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        fast_mode=True,
    )


@by_op
@pytest.mark.slow
@by_case
def test_gradgradcheck_of_the_whole_jacobian(case, op, device):
    function, inputs = function_and_inputs(op, case, device)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_batched_grad=True)


@by_op
def test_gradcheck_in_each_input_alone(op, device):
    case = Case("", (1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 3), "bias", (2, 3, 4), sinks=True)
    function, inputs = function_and_inputs(op, case, device)
    for alone in range(len(inputs)):
        frozen = tuple(t if i == alone else t.detach().clone() for i, t in enumerate(inputs))
        if op == "sdpa_with_lse" and alone == 2:  # lse does not depend on value
            assert gradcheck(lambda *a, f=function: f(*a)[0], frozen, check_forward_ad=True)
        else:
            assert gradcheck(function, frozen, check_forward_ad=True)
            assert gradgradcheck(function, frozen, fast_mode=True)


@by_op
def test_third_derivative(op, device):
    case = Case("", (2, 2), (3, 2), (3, 1))
    function, inputs = function_and_inputs(op, case, device)

    def second(*args):
        total = sum(t.pow(2).sum() for t in function(*args))
        first = torch.autograd.grad(total, args, create_graph=True)
        return torch.autograd.grad(sum(t.pow(2).sum() for t in first), args, create_graph=True)

    assert gradcheck(second, inputs, fast_mode=True)


@pytest.mark.parametrize("case", [c for c in DERIVATIVE_CASES if c.name == "plain"], ids=str)
def test_second_derivatives_are_the_reference_s(case, device):
    arguments = case.build(torch.float64, device)

    def second(function):
        leaves = arguments.leaves()
        inputs = list(leaves.differentiable().values())
        first = torch.autograd.grad(
            sum(t.sin().sum() for t in tensors(leaves(function))), inputs, create_graph=True
        )
        return torch.autograd.grad(sum(t.cos().sum() for t in first), inputs)

    for op in OPS:
        for actual, exact in zip(second(operator(op)), second(getattr(reference, op)), strict=True):
            torch.testing.assert_close(actual, exact)


# torch.func


def random_inputs(device, batch=(2,), heads=2, lq=3, lk=4, d=2, dv=3):
    shapes = (*batch, heads, lq, d), (*batch, heads, lk, d), (*batch, heads, lk, dv)
    return tuple(torch.randn(s, dtype=torch.float64, device=device) for s in shapes)


def total(function):
    """A scalar of all outputs, not linear in any."""

    def scalar(*args, **kwargs):
        return sum(t.sin().sum() for t in tensors(function(*args, **kwargs)))

    return scalar


@by_op
def test_func_grad(op, device):
    inputs = random_inputs(device)
    actual = grad(total(operator(op)), argnums=(0, 1, 2))(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    exact = torch.autograd.grad(total(getattr(reference, op))(*leaves), leaves)
    torch.testing.assert_close(actual, exact)


@by_op
def test_func_vjp(op, device):
    inputs = random_inputs(device)
    outputs, pullback = vjp(operator(op), *inputs)
    exact, exact_pullback = vjp(getattr(reference, op), *inputs)
    torch.testing.assert_close(outputs, exact)
    cotangents = torch.utils._pytree.tree_map(torch.randn_like, outputs)
    torch.testing.assert_close(pullback(cotangents), exact_pullback(cotangents))


@by_op
def test_func_jvp(op, device):
    inputs = random_inputs(device)
    directions = tuple(torch.randn_like(t) for t in inputs)
    actual = jvp(operator(op), inputs, directions)
    torch.testing.assert_close(actual, jvp(getattr(reference, op), inputs, directions))


@by_op
@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_func_jacobian(transform, op, device, no_warnings):
    inputs = random_inputs(device, batch=(), heads=1)
    actual = transform(operator(op), argnums=(0, 1, 2))(*inputs)
    leaves = tuple(t.clone().requires_grad_() for t in inputs)
    exact = torch.autograd.functional.jacobian(getattr(reference, op), leaves)
    torch.testing.assert_close(actual, exact)


@by_op
def test_func_hessian(op, device, no_warnings):
    inputs = random_inputs(device, batch=(), heads=1, lq=2, lk=3)
    actual = hessian(total(operator(op)), argnums=(0, 1, 2))(*inputs)
    exact = torch.autograd.functional.hessian(total(getattr(reference, op)), inputs)
    torch.testing.assert_close(actual, exact)


@by_op
def test_func_forward_over_forward(op, device):
    query, key, value = random_inputs(device, batch=(), heads=1, lq=2, lk=3)

    def of(function):
        return jacfwd(jacfwd(lambda q: total(function)(q, key, value)))(query)

    exact = torch.autograd.functional.hessian(lambda q: total(getattr(reference, op))(q, key, value), query)
    torch.testing.assert_close(of(operator(op)), exact)


# vmap

V = 3
NAMES = ("query", "key", "value", "attn_mask", "sinks")
IN_DIMS = [
    (0, 0, 0, None, None),
    (0, None, None, None, None),
    (None, 0, None, None, None),
    (None, None, 0, None, None),
    (1, 2, -1, None, None),
    (-1, 0, 1, 0, None),
    (0, 0, 0, -1, 0),
    (0, 0, 0, 1, 1),
    (None, 0, 0, None, 0),
    (None, None, None, 0, None),
    (None, None, None, None, 0),
    (None, None, None, -1, 1),
]

# One sample's arguments
VMAP_CASES = (
    Case("four_dims", (2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 3), "bias", (2, 2, 3, 4), sinks=True),
    Case("three_dims", (2, 3, 2), (2, 4, 2), (2, 4, 3), "bias", (2, 3, 4), sinks=True),
    Case("two_dims", (3, 2), (4, 2), (4, 3), "bias", (3, 4), sinks=True),
    Case("small_mask", (2, 2, 3, 2), (2, 2, 4, 2), (2, 2, 4, 3), "bias", (1, 4), sinks=True),
    Case("bool_mask", (2, 3, 2), (2, 4, 2), (2, 4, 3), "dead_row", (3, 4), sinks=True),
    Case("mixed_ranks", (2, 2, 3, 2), (2, 4, 2), (1, 2, 4, 3), "bias", (2, 1, 1, 4), sinks=True),
    Case(
        "grouped_causal",
        (4, 3, 2),
        (2, 4, 2),
        (2, 4, 3),
        "bias",
        (4, 1, 4),
        sinks=True,
        options={"enable_gqa": True, "is_causal": True, "query_offset": 1, "softcap": 2.0},
    ),
)

by_vmap_case = pytest.mark.parametrize("case", VMAP_CASES, ids=str)
by_in_dims = pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)


def samples(case, in_dims, device):
    """Tensors with a mapped dim where `in_dims` says so, and the V separate calls."""
    per_sample = []
    for i in range(V):
        arguments = Case(**{**case.__dict__, "seed": i}).build(torch.float64, device)
        all_tensors = (arguments.query, arguments.key, arguments.value)
        all_tensors += (arguments.options["attn_mask"], arguments.options["sinks"])
        per_sample.append(all_tensors)
    stacked = []
    for n, dim in enumerate(in_dims):
        if dim is None:
            for i in range(1, V):
                per_sample[i] = (*per_sample[i][:n], per_sample[0][n], *per_sample[i][n + 1 :])
            stacked.append(per_sample[0][n])
        else:
            stacked.append(torch.stack([s[n] for s in per_sample]).movedim(0, dim))
    return tuple(stacked), per_sample


def flat(function, case):
    """The function with all tensors positional."""
    return lambda q, k, v, m, s: function(q, k, v, attn_mask=m, sinks=s, **case.options)


def assert_vmap_is_a_loop(function, mapped, per_sample, in_dims, **more):
    actual = vmap(function, in_dims=in_dims, **more)(*mapped)
    looped = [function(*s) for s in per_sample]
    flat_actual, _ = torch.utils._pytree.tree_flatten(actual)
    flat_looped = [torch.utils._pytree.tree_flatten(r)[0] for r in looped]
    for i, a in enumerate(flat_actual):
        torch.testing.assert_close(a, torch.stack([r[i] for r in flat_looped]))


@by_op
@by_in_dims
@by_vmap_case
def test_vmap_is_a_loop(case, in_dims, op, device, no_warnings):
    mapped, per_sample = samples(case, in_dims, device)
    assert_vmap_is_a_loop(flat(operator(op), case), mapped, per_sample, in_dims)


@by_in_dims
@by_vmap_case
def test_vmap_of_grad_is_a_loop(case, in_dims, device, no_warnings):
    mapped, per_sample = samples(case, in_dims, device)
    argnums = (0, 1, 2, 4) if case.mask == "dead_row" else (0, 1, 2, 3, 4)
    for op in ("sdpa_with_weights", "sdpa_with_key_mass"):
        function = grad(total(flat(operator(op), case)), argnums=argnums)
        assert_vmap_is_a_loop(function, mapped, per_sample, in_dims)


@by_in_dims
def test_vmap_of_jvp_is_a_loop(in_dims, device, no_warnings):
    case = VMAP_CASES[0]
    mapped, per_sample = samples(case, in_dims, device)

    def function(*inputs):
        return jvp(flat(operator("sdpa_with_lse"), case), inputs, inputs)

    assert_vmap_is_a_loop(function, mapped, per_sample, in_dims)


@by_in_dims
def test_gradient_of_vmap_is_that_of_the_loop(in_dims, device, no_warnings):
    case = VMAP_CASES[0]
    mapped, _ = samples(case, in_dims, device)
    leaves = [t.detach().clone().requires_grad_() for t in mapped]
    function = flat(operator("sdpa_with_key_mass"), case)

    def loop(*inputs):
        def sample(i):
            return [t if d is None else t.select(d, i) for t, d in zip(inputs, in_dims, strict=True)]

        results = [function(*sample(i)) for i in range(V)]
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    actual = torch.autograd.grad(total(vmap(function, in_dims))(*leaves), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(total(loop)(*leaves), leaves))


@by_op
def test_vmap_in_vmap(op, device, no_warnings):
    query, key, value = random_inputs(device, batch=(2, 3))
    function = operator(op)
    exact = function(query, key, value)
    torch.testing.assert_close(vmap(vmap(function))(query, key, value), exact)
    crossed = vmap(vmap(function, in_dims=(0, None, 0)), in_dims=(1, 0, 1), out_dims=1)
    torch.testing.assert_close(crossed(query, key[0], value), function(query, key[:1], value))


@by_op
def test_vmap_puts_the_mapped_dim_where_out_dims_says(op, device, no_warnings):
    inputs = random_inputs(device, batch=(3,))
    exact = tensors(operator(op)(*inputs))
    actual = tensors(vmap(operator(op), out_dims=-1)(*inputs))
    for a, e in zip(actual, exact, strict=True):
        torch.testing.assert_close(a, e.movedim(0, -1))


@by_op
@pytest.mark.parametrize("differentiated", [False, True])
def test_vmap_with_different_dropout_draws_anew_for_each_sample(op, differentiated, device, no_warnings):
    inputs = random_inputs(device, batch=(), lq=8, lk=8)
    function = partial(operator(op), dropout_p=0.5)
    if differentiated:
        function = grad(total(function))
    many = tuple(t.expand(V, *t.shape) for t in inputs)
    results = tensors(vmap(function, randomness="different")(*many))[0]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


@by_op
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
def test_vmap_with_the_same_dropout_draws_once(op, in_dims, device, no_warnings):
    inputs = random_inputs(device, batch=(), lq=8, lk=8)
    many = tuple(t if d is None else t.expand(V, *t.shape) for t, d in zip(inputs, in_dims, strict=True))
    function = partial(operator(op), dropout_p=0.5)
    results = tensors(vmap(function, in_dims, randomness="same")(*many))[0]
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])
    without_dropout = tensors(operator(op)(*inputs))[0]
    assert not torch.equal(results[0], without_dropout)


def test_vmap_with_dropout_is_an_error_unless_randomness_is_chosen(device):
    inputs = random_inputs(device)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(partial(operator("sdpa"), dropout_p=0.5))(*inputs)


def test_vmap_with_different_dropout_has_the_rate(device, no_warnings):
    inputs = random_inputs(device, batch=(4,), lq=32, lk=32)
    function = partial(operator("sdpa_with_weights"), dropout_p=0.3)
    _, weights = vmap(function, randomness="different")(*inputs)
    assert abs((weights == 0).double().mean().item() - 0.3) < 0.03
    assert not torch.equal(weights[0] == 0, weights[1] == 0)


def test_gradient_under_vmap_with_dropout_uses_the_forward_s_draw(device, no_warnings):
    query, key, value = random_inputs(device, batch=(3,), lq=8, lk=8, dv=8)

    def weights_and_gradient(q, k, v):
        def scalar(v):
            output, weights = operator("sdpa_with_weights")(q, k, v, dropout_p=0.5)
            return output.sum(), weights

        return grad(scalar, has_aux=True)(v)

    gradient, weights = vmap(weights_and_gradient, randomness="different")(query, key, value)
    torch.testing.assert_close(gradient, weights.sum(-2).unsqueeze(-1).expand_as(gradient))


def test_per_sample_gradients_of_a_shared_bias(device, no_warnings):
    query, key, value = random_inputs(device, batch=(V,))
    bias = torch.randn(2, 3, 4, dtype=torch.float64, device=device)
    scalar = total(operator("sdpa"))
    actual = vmap(grad(lambda b, q, k, v: scalar(q, k, v, b)), (None, 0, 0, 0))(bias, query, key, value)
    looped = [grad(lambda b: scalar(query[i], key[i], value[i], b))(bias) for i in range(V)]  # noqa: B023
    torch.testing.assert_close(actual, torch.stack(looped))
