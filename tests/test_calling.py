"""Every way of calling: opcheck, autocast, meta and fake tensors, compile, export, AOTInductor, script."""

import contextlib
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import attn_ext
from attn_ext.testing import (
    DTYPES,
    OPS,
    OPTIONS,
    Case,
    all_outputs,
    backward,
    gradients,
    operator,
    tensors,
)

by_op = pytest.mark.parametrize("op", OPS)

CASES = (
    Case("plain"),
    Case("causal", options={"is_causal": True, "query_offset": 2}),
    Case("bool_mask", mask="dead_row", mask_shape=(2, 1, 5, 7)),
    Case("bias", mask="bias", mask_shape=(3, 5, 7)),
    Case("two_dims", (5, 8), (7, 8), (7, 6), mask="bias", mask_shape=(5, 7)),
    Case("one_key_batch", (2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 6)),
    Case("no_columns", key=(2, 3, 0, 8), value=(2, 3, 0, 6)),
    Case(
        "everything",
        (2, 4, 5, 8),
        (2, 2, 7, 8),
        (2, 2, 7, 6),
        mask="bias",
        mask_shape=(4, 5, 7),
        sinks=True,
        options={
            "enable_gqa": True,
            "window_left": 2,
            "window_right": 3,
            "query_offset": 1,
            "softcap": 2.0,
            "scale": 0.3,
        },
    ),
)
EVERYTHING = CASES[-1]

by_case = pytest.mark.parametrize("case", CASES, ids=str)


def call_list(arguments):
    """The arguments of a public operator, as opcheck and export want them."""
    return (arguments.query, arguments.key, arguments.value), dict(arguments.options)


# opcheck

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("requires_grad", [False, True])
@by_op
@by_case
def test_opcheck(case, op, requires_grad, device):
    arguments = case.build(torch.float32, device)
    if requires_grad:
        arguments = arguments.leaves()
    torch.library.opcheck(operator(op).default, *call_list(arguments), test_utils=OPCHECKS)


@pytest.mark.parametrize("requires_grad", [False, True])
@by_case
def test_opcheck_of_the_internal_forward(case, requires_grad, device):
    arguments = case.build(torch.float32, device)
    if requires_grad:
        arguments = arguments.leaves()
    positional, options = call_list(arguments)
    for dropout_p, seed in ((0.0, None), (0.5, torch.tensor(3, device=device))):
        more = {**OPTIONS, **options, "dropout_p": dropout_p, "dropout_seed": seed, "sequences": None}
        more |= {"need_weights": True, "need_key_mass": True}
        torch.library.opcheck(torch.ops.attn_ext._sdpa_forward.default, positional, more)


@pytest.mark.parametrize("requires_grad", [False, True])
@by_case
def test_opcheck_of_the_internal_backward(case, requires_grad, device):
    arguments = case.build(torch.float32, device)
    output, lse, weights, key_mass = all_outputs(arguments)
    if requires_grad:
        arguments = arguments.leaves()
    grads = tuple(torch.randn_like(t) for t in (output, lse, weights, key_mass))
    positional, options = call_list(arguments)
    more = {**OPTIONS, **options, "dropout_seed": None, "sequences": None, "output": output, "lse": lse}
    differentiable = arguments.differentiable()
    more["output_mask"] = [name in differentiable for name in ("query", "key", "value", "attn_mask", "sinks")]
    op = torch.ops.attn_ext._sdpa_backward.default
    torch.library.opcheck(op, (*grads, *positional), more)


# Autocast

AUTOCAST_DTYPES = (torch.bfloat16, torch.float16)


@by_op
@pytest.mark.parametrize("lower", AUTOCAST_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_dtype_that_torch_gives(dtype, lower, op, device):
    arguments = Case("").build(dtype, device)
    with torch.autocast(device, dtype=lower):
        expected = arguments(F.scaled_dot_product_attention).dtype
        assert tensors(arguments(operator(op)))[0].dtype == expected == lower


@by_op
def test_autocast_computes_what_a_cast_computes(op, device):
    arguments = Case("", mask="bias").build(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        actual = arguments(operator(op))
    lower = arguments.with_tensors({n: getattr(arguments, n).bfloat16() for n in ("query", "key", "value")})
    torch.testing.assert_close(actual, lower(operator(op)), rtol=0, atol=0)


def test_autocast_takes_operands_of_mixed_dtypes(device):
    arguments = Case("").build(torch.float32, device)
    mixed = arguments.with_tensors({"key": arguments.key.bfloat16()})
    with torch.autocast(device, dtype=torch.bfloat16):
        assert mixed(operator("sdpa")).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="key"):
        mixed(operator("sdpa"))


def test_autocast_leaves_float64_alone(device):
    arguments = Case("").build(torch.float64, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert arguments(operator("sdpa")).dtype == torch.float64


def test_gradients_under_autocast_have_the_inputs_dtype(device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        grads = gradients(operator("sdpa"), arguments)
    plain = gradients(operator("sdpa"), arguments)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, plain[name], rtol=0.05, atol=0.05)


def test_autocast_is_off_where_it_is_disabled(device):
    arguments = Case("").build(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        assert arguments(operator("sdpa")).dtype == torch.float32


# Meta and fake tensors


@by_op
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@by_case
def test_meta_tensors_have_the_shapes_and_dtypes_of_real_ones(case, dtype, op):
    real = tensors(case.build(dtype)(operator(op)))
    meta = tensors(case.build(dtype, "meta")(operator(op)))
    for m, r in zip(meta, real, strict=True):
        assert m.is_meta
        assert (m.shape, m.dtype, m.stride()) == (r.shape, r.dtype, r.stride())


@by_case
def test_meta_gradients_have_the_shapes_and_dtypes_of_real_ones(case):
    real, meta = (
        gradients(operator("sdpa_with_weights"), case.build(torch.bfloat16, place))
        for place in ("cpu", "meta")
    )
    for name in real:
        assert (meta[name].shape, meta[name].dtype) == (real[name].shape, real[name].dtype)


@by_op
def test_fake_tensors_keep_symbolic_sizes(op):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    query = mode.from_tensor(torch.randn(3, 4, 11, 8), static_shapes=False)
    key = mode.from_tensor(torch.randn(3, 4, 13, 8), static_shapes=False)
    with mode:
        output, *side = tensors(operator(op)(query, key, key))
    assert isinstance(query.shape[-2], torch.SymInt)
    assert str(output.shape[-2]) == str(query.shape[-2])
    for s in side:
        assert any(isinstance(size, torch.SymInt) for size in s.shape)


# torch.compile


@contextlib.contextmanager
def fresh_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@by_op
@by_case
def test_compiled_gives_what_eager_gives(case, op, backend, device):
    arguments = case.build(torch.float64, device)

    def function(query, key, value, options):
        return operator(op)(query * 1, key, value, **options)

    with fresh_compiler():
        compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)

        def of(f):
            return lambda q, k, v, **options: f(q, k, v, options)

        torch.testing.assert_close(arguments(of(compiled)), arguments(operator(op)))
        actual = gradients(of(compiled), arguments)
    expected = gradients(operator(op), arguments)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_compiled_with_inductor_gives_what_eager_gives(device):
    arguments = EVERYTHING.build(torch.float64, device)

    def function(query, key, value, **options):
        output, key_mass = attn_ext.sdpa_with_key_mass(query + 1, key, value * 2, **options)
        return output.relu(), key_mass

    with fresh_compiler():
        compiled = torch.compile(function, fullgraph=True, dynamic=True)
        torch.testing.assert_close(arguments(compiled), arguments(function))
        actual = gradients(compiled, arguments)
    expected = gradients(function, arguments)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_compiled_once_serves_every_length(device):
    compilations = 0

    def counting(graph, inputs):
        nonlocal compilations
        compilations += 1
        return graph

    with fresh_compiler():
        compiled = torch.compile(
            lambda q, k, v: attn_ext.sdpa(q, k, v, is_causal=True),
            backend=counting,
            fullgraph=True,
            dynamic=True,
        )
        for length in (5, 8, 13, 130):
            query, key, value = (torch.randn(2, 3, length, 8, device=device) for _ in range(3))
            torch.testing.assert_close(
                compiled(query, key, value), attn_ext.sdpa(query, key, value, is_causal=True)
            )
    assert compilations == 1


def test_compiled_offset_that_changes_compiles_at_most_twice(device):
    """A decoding loop: query_offset is a number that grows with every step."""
    compilations = 0

    def counting(graph, inputs):
        nonlocal compilations
        compilations += 1
        return graph

    with fresh_compiler():
        compiled = torch.compile(
            lambda q, k, v, offset: attn_ext.sdpa(
                q, k, v, is_causal=True, query_offset=offset, window_left=offset + 3
            ),
            backend=counting,
            fullgraph=True,
        )
        query = torch.randn(1, 2, 1, 8, device=device)
        key, value = torch.randn(2, 1, 2, 32, 8, device=device)
        for offset in range(2, 9):
            torch.testing.assert_close(
                compiled(query, key, value, offset),
                attn_ext.sdpa(query, key, value, is_causal=True, query_offset=offset, window_left=offset + 3),
            )
    assert compilations <= 2


def test_compiled_dropout_draws_anew_on_each_call_and_follows_the_seed(device):
    arguments = Case("", *[(1, 2, 16, 8)] * 3).build(torch.float32, device)
    with fresh_compiler():
        compiled = torch.compile(
            lambda q, k, v: attn_ext.sdpa(q, k, v, dropout_p=0.5),
            backend="aot_eager",
            fullgraph=True,
        )
        torch.manual_seed(1)
        first, second = (arguments(compiled) for _ in range(2))
        torch.manual_seed(1)
        again = arguments(compiled)
    assert torch.equal(first, again) and not torch.equal(first, second)


# torch.export and AOTInductor


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return attn_ext.sdpa_with_lse(query, key, value, is_causal=True, softcap=3.0)


def exported(device):
    inputs = tuple(torch.randn(2, 3, 7, 8, device=device) for _ in range(3))
    length = torch.export.Dim("length", min=2, max=512)
    shapes = tuple({2: length} for _ in inputs)
    return torch.export.export(Attention(), inputs, dynamic_shapes=shapes)


def assert_same_at_other_lengths(module, device):
    for length in (2, 7, 64, 100):
        inputs = tuple(torch.randn(2, 3, length, 8, device=device) for _ in range(3))
        torch.testing.assert_close(tuple(module(*inputs)), tuple(Attention()(*inputs)))


def test_exported_program_runs_at_other_lengths(device):
    assert_same_at_other_lengths(exported(device).module(), device)


def test_exported_program_can_be_saved_and_loaded(device, tmp_path):
    torch.export.save(exported(device), tmp_path / "attention.pt2")
    loaded = torch.export.load(tmp_path / "attention.pt2")
    assert_same_at_other_lengths(loaded.module(), device)


def test_exported_program_holds_the_operator(device):
    targets = {str(node.target) for node in exported(device).graph.nodes}
    assert any(target.startswith("attn_ext.") for target in targets)


@pytest.mark.slow
def test_aot_inductor_package_runs_at_other_lengths(device, tmp_path):
    path = torch._inductor.aoti_compile_and_package(
        exported(device), package_path=str(tmp_path / "attention.pt2")
    )
    assert_same_at_other_lengths(torch._inductor.aoti_load_package(path), device)


# TorchScript


def scripted_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return attn_ext.sdpa_with_weights(query, key, value, attn_mask, is_causal=True)


def scripted_operator(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.attn_ext.sdpa_with_key_mass(query, key, value, attn_mask, window_left=2, softcap=1.5)


def script(function, saved):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and yet the way into C++
        module = torch.jit.script(function)
        if saved:
            buffer = io.BytesIO()
            torch.jit.save(module, buffer)
            buffer.seek(0)
            module = torch.jit.load(buffer)
        return module


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("function", [scripted_attention, scripted_operator])
def test_scripted_gives_what_eager_gives(function, saved, device):
    arguments = Case("", mask="bias").build(torch.float64, device)
    scripted = script(function, saved)
    for _ in range(3):  # TorchScript specialises after the first runs
        torch.testing.assert_close(arguments(scripted), arguments(function))
        actual, expected = (gradients(f, arguments) for f in (scripted, function))
        for name in expected:
            torch.testing.assert_close(actual[name], expected[name])


def test_scripted_second_derivative(device):
    case = Case("", (1, 2, 3, 2), (1, 2, 4, 2), (1, 2, 4, 2), "bias", (2, 3, 4))
    arguments = case.build(torch.float64, device)
    scripted = script(scripted_attention, saved=True)
    inputs = tuple(arguments.leaves().differentiable().values())
    assert torch.autograd.gradcheck(scripted, inputs)
    assert torch.autograd.gradgradcheck(scripted, inputs, fast_mode=True)


# Modes of autograd


@by_op
def test_inference_mode(op, device):
    arguments = EVERYTHING.build(torch.float32, device)
    with torch.inference_mode():
        inside = arguments.leaves()(operator(op))
    assert all(t.is_inference() for t in tensors(inside))
    torch.testing.assert_close(inside, arguments(operator(op)))


@by_op
def test_no_grad(op, device):
    with torch.no_grad():
        outputs = EVERYTHING.build(torch.float32, device).leaves()(operator(op))
    assert not any(t.requires_grad for t in tensors(outputs))


def test_inference_tensors_may_be_used_outside_of_inference_mode(device):
    with torch.inference_mode():
        arguments = EVERYTHING.build(torch.float32, device)
    assert arguments(operator("sdpa")).isfinite().all()


def test_activation_checkpointing_draws_the_same_dropout(device):
    arguments = Case("", options={"dropout_p": 0.5}).build(torch.float64, device)

    def checkpointed(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(operator("sdpa"), *args, use_reentrant=False, **kwargs)

    torch.manual_seed(3)
    expected = gradients(operator("sdpa"), arguments)
    torch.manual_seed(3)
    actual = gradients(checkpointed, arguments)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


def test_saved_tensors_hooks_see_what_is_kept(device):
    """What autograd keeps: inputs, output and lse, and nothing of Lq x Lk."""
    kept = []
    arguments = Case("", *[(1, 2, 64, 8)] * 3).build(torch.float32, device).leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        arguments(operator("sdpa"))
    assert kept
    assert all(shape[-2:] != (64, 64) for shape in kept)


@by_op
def test_anomaly_mode(op, device):
    arguments = Case("", mask="dead_row").build(torch.float32, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            grads = gradients(operator(op), arguments)
    assert all(g.isfinite().all() for g in grads.values())


# Python's door


@by_op
@by_case
def test_function_gives_what_the_operator_gives(case, op, device):
    arguments = case.build(torch.float32, device)
    expected = tensors(arguments(operator(op)))
    for actual, of_operator in zip(tensors(arguments(getattr(attn_ext, op))), expected, strict=True):
        assert torch.equal(actual, of_operator)


@by_op
def test_function_is_differentiable_like_the_operator(op, device):
    arguments = EVERYTHING.build(torch.float64, device)
    expected = gradients(operator(op), arguments)
    actual = gradients(getattr(attn_ext, op), arguments)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name])


@by_op
def test_function_gives_the_tangents_that_the_operator_gives(op, device):
    arguments = EVERYTHING.build(torch.float64, device)
    inputs = arguments.differentiable()
    directions = {name: torch.randn_like(t) for name, t in inputs.items()}

    def tangents(function):
        with torch.autograd.forward_ad.dual_level():
            duals = {
                name: torch.autograd.forward_ad.make_dual(t, directions[name]) for name, t in inputs.items()
            }
            outputs = tensors(arguments.with_tensors(duals)(function))
            return [torch.autograd.forward_ad.unpack_dual(t).tangent for t in outputs]

    torch.testing.assert_close(tangents(getattr(attn_ext, op)), tangents(operator(op)))


@by_op
def test_output_is_the_same_with_and_without_autograd(op, device):
    arguments = EVERYTHING.build(torch.float32, device)
    expected = tensors(arguments.leaves()(operator(op)))
    with torch.no_grad():
        without = tensors(arguments(operator(op)))
    with torch.inference_mode():
        inference = tensors(arguments(operator(op)))
    for a, b, c in zip(expected, without, inference, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@by_op
def test_function_takes_integers_for_floats(op, device):
    query, key, value = torch.randn(3, 2, 4, 8, device=device)
    function = getattr(attn_ext, op)
    expected = function(query, key, value, None, 0.0, scale=1.0, softcap=2.0)
    torch.testing.assert_close(function(query, key, value, None, 0, scale=1, softcap=2), expected)


@by_op
def test_function_refuses_scalars_that_would_lose_a_gradient_or_are_no_flags(op, device):
    function = getattr(attn_ext, op)
    inputs = torch.randn(3, 2, 4, 8, device=device)
    learned = torch.tensor(0.5, device=device, requires_grad=True)
    for name in ("scale", "softcap", "dropout_p"):
        with pytest.raises(
            TypeError, match=f"expected {name} to be a number, but got a tensor that requires"
        ):
            function(*inputs, **{name: learned})
    for flag, got in ((None, "NoneType"), (1, "int"), (torch.tensor(True), "Tensor")):
        with pytest.raises(TypeError, match=f"expected is_causal to be a bool, but got {got}"):
            function(*inputs, is_causal=flag)
    torch.testing.assert_close(
        function(*inputs, scale=learned.detach()), function(*inputs, scale=0.5), rtol=0, atol=0
    )


@by_op
def test_function_refuses_what_is_no_tensor(op, device):
    query = torch.randn(2, 4, 8, device=device)
    with pytest.raises(RuntimeError, match="key to be a tensor"):
        getattr(attn_ext, op)(query, None, query)


@by_op
def test_torch_function_modes_and_subclasses_see_the_function(op, device):
    seen = []

    class Log(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Tagged(torch.Tensor):
        pass

    query, key, value = torch.randn(3, 2, 4, 8, device=device)
    with Log():
        getattr(attn_ext, op)(query, key, value)
    assert any(op in func for func in seen)
    outputs = getattr(attn_ext, op)(query.as_subclass(Tagged), key, value)
    assert all(isinstance(output, Tagged) for output in tensors(outputs))


def test_dispatch_modes_see_the_internal_operator(device):
    seen = []

    class Log(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    arguments = Case("").build(torch.float32, device).leaves()
    with Log():
        arguments(operator("sdpa")).sum().backward()
    assert torch.ops.attn_ext._sdpa_forward.default in seen
    assert torch.ops.attn_ext._sdpa_backward.default in seen


def test_internal_backward_agrees_with_autograd(device):
    arguments = EVERYTHING.build(torch.float64, device)
    output, lse = arguments(torch.ops.attn_ext.sdpa_with_lse)
    direct = backward((torch.ones_like(output), None, None, None), arguments, output, lse)
    leaves = arguments.leaves()
    inputs = leaves.differentiable()
    expected = torch.autograd.grad(leaves(operator("sdpa")).sum(), list(inputs.values()))
    torch.testing.assert_close(tuple(direct), expected)
