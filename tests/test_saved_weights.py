"""Weights that the forward pass saves for the backward pass: when, how many, and nothing else changes."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attn_ext
from attn_ext.testing import LAYOUTS, Case, assert_gradients_accurate, on_threads

OPS = torch.ops.attn_ext
#: The instruction sets that save weights of a dtype. Each test runs for all of these, as DTYPE.
SAVING = {
    torch.bfloat16: ("avx512", "avx512_bf16", "neon_bf16"),
    torch.float16: ("avx512", "avx512_bf16", "amx"),
}
DTYPE = torch.bfloat16


@pytest.fixture(autouse=True, params=SAVING, ids=str)
def dtype_of_the_calls(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "DTYPE", request.param)


def set_saves():
    """Whether the instruction set in use saves weights of DTYPE."""
    return attn_ext.cpu_capability() in SAVING[DTYPE]


@pytest.fixture
def only_where_saved(dtype_of_the_calls):
    if not set_saves():
        pytest.skip("this instruction set saves no weights")


# name: (Lq, Lk, D, Dv), heads of query and key, masks and other options
SHAPES = {
    "tiles": (197, 197, 64, 64),
    "long": (300, 1024, 256, 256),
    "odd": (33, 131, 37, 41),
    "few_keys": (49, 49, 32, 32),
    "few_keys_of_many_rows": (500, 77, 40, 40),
    "few_keys_odd": (19, 23, 17, 9),
    "few_keys_of_many_dims": (8, 8, 320, 320),
}
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 20, "window_right": 3},
    "dead_rows": {"window_left": 5, "query_offset": -30},
    "padding": {"attn_mask": torch.arange(197) < 160},
    "bool_mask": {"attn_mask": torch.rand(197, 197, generator=torch.Generator().manual_seed(0)) < 0.5},
    "bias": {"attn_mask": torch.randn(2, 1, 197, 197, generator=torch.Generator().manual_seed(1))},
    "bias_of_keys": {"attn_mask": torch.randn(197, generator=torch.Generator().manual_seed(2))},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, float("inf"), 3.0])},
    "scale": {"scale": -0.3},
}


def inputs(name="tiles", key_heads=4, dtype=None, seed=0):
    """(2, 4, Lq, D), and so many key heads."""
    query_len, key_len, dim, value_dim = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = (4, query_len, dim), (key_heads, key_len, dim), (key_heads, key_len, value_dim)
    return [
        torch.randn(2, *shape, generator=generator).to(dtype or DTYPE).requires_grad_() for shape in shapes
    ]


def latent(query_len=4, key_len=300, dim=320, value_dim=290):
    """Eight query heads of a few rows on one key head of many dims."""
    generator = torch.Generator().manual_seed(0)
    shapes = (8, query_len, dim), (1, key_len, dim), (1, key_len, value_dim)
    return [torch.randn(2, *shape, generator=generator).to(DTYPE).requires_grad_() for shape in shapes]


def saved_shapes(function, *args, **options):
    """Of all tensors that autograd saves."""
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        function(*args, **options)
    return saved


def saves(tensors, op=attn_ext.sdpa, **options):
    query, key, _ = tensors
    shape = torch.Size((*query.shape[:-1], key.shape[-2]))
    saved = shape in saved_shapes(op, *tensors, **options)
    if op is attn_ext.sdpa:
        bytes_of = shape.numel() * 2 if saved else 0
        assert attn_ext.explain(*tensors, **options).saved_bytes == bytes_of
    return saved


def sized(case, name):
    query_len, key_len, dim, value_dim = SHAPES[name]
    return replace(
        case,
        query=(2, 2, query_len, dim),
        key=(2, 2, key_len, dim),
        value=(2, 2, key_len, value_dim),
        mask_shape=(2, 1, query_len, key_len),
    )


def internal_backward(tensors, change, **more):
    """Gradients from the weights of the forward pass, changed."""
    scalars = (0.0, False, None, False, None, None, 0, 0.0)
    none = (None,) * 4
    output, lse, weights, _ = OPS._sdpa_forward(*tensors, *none, *scalars, True, False)
    return OPS._sdpa_backward(
        torch.ones_like(output),
        *(None,) * 3,
        *tensors,
        *none,
        output,
        lse,
        *scalars,
        [True] * 3 + [False] * 2,
        weights=change(weights),
        **more,
    )


class TestRule:
    @pytest.mark.parametrize("name", SHAPES)
    def test_kept_where_they_are_no_larger_than_the_rest(self, name):
        assert saves(inputs(name)) == set_saves()

    @pytest.mark.parametrize("call", CALLS)
    def test_masks_do_not_matter(self, call):
        assert saves(inputs(), **CALLS[call]) == (
            set_saves() and not (call == "sinks" and torch.float16 == DTYPE)
        )

    @pytest.mark.parametrize("sink", [17.0, 18.0])
    def test_a_sink_that_takes_nearly_everything_keeps_small_weights(self, sink):
        query, key = (torch.zeros(1, 1, 197, 64, dtype=DTYPE, requires_grad=True) for _ in range(2))
        value = torch.ones(1, 1, 197, 64, dtype=DTYPE, requires_grad=True)
        output = attn_ext.sdpa(query, key, value, sinks=torch.tensor([sink]))
        grad = torch.autograd.grad(output, value, torch.full_like(output, 1000.0))[0]
        expected = 197 * 1000.0 / (197 + torch.tensor(sink).double().exp())
        torch.testing.assert_close(grad.double(), expected.expand_as(grad), rtol=0.01, atol=1e-6)

    @pytest.mark.parametrize(("length", "saved"), [(16, False), (17, True), (64, True), (65, False)])
    def test_limits_of_lengths(self, length, saved):
        """(D + Dv) * 2 * L numbers, so up to L = 2 * (D + Dv)."""
        dims = (20, 20, 12)
        tensors = [torch.randn(2, 1, length, dim).to(DTYPE).requires_grad_() for dim in dims]
        assert saves(tensors) == (set_saves() and saved)

    @pytest.mark.parametrize(("key_len", "saved"), [(1024, True), (1025, False)])
    def test_limits_of_keys(self, key_len, saved):
        query, key = torch.randn(1, 1, 24, 64), torch.randn(1, 1, key_len, 64)
        assert saves([x.to(DTYPE).requires_grad_() for x in (query, key, key.clone())]) == (
            set_saves() and saved
        )

    @pytest.mark.parametrize(("dim", "saved"), [(256, False), (257, True)])
    @pytest.mark.parametrize("key_len", [129, 3000])
    def test_a_handful_of_rows_of_many_dims_whose_heads_share_keys(self, key_len, dim, saved):
        tensors = latent(key_len=key_len, dim=dim)
        assert saves(tensors, enable_gqa=True) == (set_saves() and saved)
        heads_apart = [tensors[0], *(x.expand(-1, 8, -1, -1) for x in tensors[1:])]
        assert not saves(heads_apart)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True, "query_offset": 179},
            {"window_left": 90},
            {"attn_mask": torch.arange(197) < 160},
            {"attn_mask": torch.linspace(-2, 2, 4 * 197).view(4, 1, 197)},
            {"sinks": torch.tensor([0.5, -1.0, 0.0, 3.0])},
        ],
        ids=lambda options: "_".join(options) or "plain",
    )
    @pytest.mark.parametrize("query_len", [18, 30])
    def test_what_is_saved_is_read(self, query_len, options):
        """18 rows are few where vectors are of floats; joined with those of their group they are not."""
        sizes = ((4, query_len), (2, 197), (2, 197))
        tensors = [torch.randn(1, *size, 64).to(DTYPE).requires_grad_() for size in sizes]
        options = {"enable_gqa": True, **options}
        saved = attn_ext.explain(*tensors, **options).saved_bytes > 0
        output = attn_ext.sdpa(*tensors, **options)
        with attn_ext.save_weights_for_backward(False):
            again = attn_ext.sdpa(*tensors, **options)
        grad = torch.randn_like(output)
        pair = [torch.autograd.grad(x, tensors, grad) for x in (output, again)]
        assert saved != all(torch.equal(a, b) for a, b in zip(*pair, strict=True))

    def test_groups_count_their_keys_once(self):
        """4 x 192 x 192 weights; 5 x 192 rows of 64 + 64 where the heads share a key head, else 8 x 192."""
        for key_heads, saved in ((1, False), (4, True)):
            heads = (4, key_heads, key_heads)
            tensors = [torch.randn(1, n, 192, 64).to(DTYPE).requires_grad_() for n in heads]
            assert saves(tensors, enable_gqa=True) == (set_saves() and saved)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_not_of_other_dtypes(self, dtype):
        assert not saves(inputs(dtype=dtype))

    @pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"softcap": 5.0}])
    def test_not_with_dropout_or_softcap(self, options):
        assert not saves(inputs(), **options)

    @pytest.mark.parametrize("op", [attn_ext.sdpa_with_weights, attn_ext.sdpa_with_key_mass])
    def test_not_beside_weights_and_key_mass(self, op):
        """What was handed out may be written to."""
        assert (2, 4, 197, 197) not in saved_shapes(op, *inputs())
        output, side = op(*inputs())
        side.mul_(2)
        output.sum().backward()

    def test_beside_lse(self):
        assert saves(inputs(), op=attn_ext.sdpa_with_lse) == set_saves()

    def test_not_without_a_gradient(self):
        tensors = [x.detach() for x in inputs()]
        assert attn_ext.explain(*tensors).saved_bytes == 0
        with torch.no_grad():
            assert attn_ext.explain(*inputs()).saved_bytes == 0

    def test_of_a_mask_that_alone_has_a_gradient(self):
        query, key, value = (x.detach() for x in inputs())
        bias = torch.zeros(197, 197, dtype=DTYPE, requires_grad=True)
        assert saves((query, key, value), attn_mask=bias) == set_saves()

    def test_wrong_calls_are_refused_as_ever(self):
        x = torch.randn(3, dtype=DTYPE, requires_grad=True)
        with pytest.raises(RuntimeError, match="attn_ext: expected query"):
            attn_ext.sdpa(x, x, x)

    @pytest.mark.usefixtures("only_where_saved")
    def test_explain_says_it(self):
        assert "saved       620,944 bytes, weights for backward" in str(attn_ext.explain(*inputs()))


class TestRefusal:
    def test_context_decorator_and_nesting(self):
        with attn_ext.save_weights_for_backward(False):
            assert not saves(inputs())
            with attn_ext.save_weights_for_backward(True):
                assert saves(inputs()) == set_saves()
            assert not saves(inputs())
        assert saves(inputs()) == set_saves()
        refusing = attn_ext.save_weights_for_backward(False)(saves)
        assert not refusing(inputs())
        with pytest.raises(ValueError, match="left"), attn_ext.save_weights_for_backward(False):
            raise ValueError("left")
        assert saves(inputs()) == set_saves()

    def test_a_thread_has_its_own(self):
        seen = []
        with attn_ext.save_weights_for_backward(False):
            thread = threading.Thread(target=lambda: seen.append(saves(inputs())))
            thread.start()
            thread.join()
        assert seen == [set_saves()]

    def test_a_decorated_function_runs_in_threads(self):
        """The first to begin is the first to end."""
        begun, leave = [threading.Event() for _ in "ab"], [threading.Event() for _ in "ab"]
        seen = {}

        @attn_ext.save_weights_for_backward(True)
        def wait(i):
            begun[i].set()
            leave[i].wait()

        def run(i):
            with attn_ext.save_weights_for_backward(i == 0):
                wait(i)
                seen[i] = saves(inputs())

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for i, thread in enumerate(threads):
            thread.start()
            begun[i].wait()
        for i, thread in enumerate(threads):
            leave[i].set()
            thread.join()
        assert seen == {0: set_saves(), 1: False}

    @pytest.mark.parametrize(("value", "allowed"), [("0", False), ("1", True)])
    def test_environment(self, value, allowed):
        program = (
            f"import torch, attn_ext; x = torch.randn(1, 1, 99, 64).to({DTYPE}).requires_grad_();"
            "print(attn_ext.explain(x, x, x).saved_bytes)"
        )
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "ATTN_EXT_SAVE_WEIGHTS": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(run.stdout) == (99 * 99 * 2 if allowed and set_saves() else 0)

    @pytest.mark.parametrize("enabled", [0, None, "no"])
    def test_only_a_bool(self, enabled):
        with pytest.raises(TypeError, match="expected enabled to be a bool, but got"):
            attn_ext.save_weights_for_backward(enabled)


class TestResults:
    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_outputs_have_the_same_bits(self, name, is_causal):
        tensors = inputs(name)
        saved = attn_ext.sdpa_with_lse(*tensors, is_causal=is_causal)
        with attn_ext.save_weights_for_backward(False):
            refused = attn_ext.sdpa_with_lse(*tensors, is_causal=is_causal)
        with torch.no_grad():
            plain = attn_ext.sdpa_with_lse(*tensors, is_causal=is_causal)
        for a, b, c in zip(saved, refused, plain, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.arange(300) > 7}])
    @pytest.mark.parametrize("query_len", [1, 4, 16])
    def test_outputs_of_many_dims_have_the_same_bits(self, query_len, options):
        tensors = latent(query_len)
        saved = attn_ext.sdpa_with_lse(*tensors, enable_gqa=True, **options)
        with attn_ext.save_weights_for_backward(False):
            refused = attn_ext.sdpa_with_lse(*tensors, enable_gqa=True, **options)
        for a, b in zip(saved, refused, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize(
        "case",
        [
            Case("plain"),
            Case("padding", mask="bool", mask_shape=(300,)),
            Case("dead", mask="dead_row", mask_shape=(2, 1, 4, 300)),
            Case("causal", options={"is_causal": True, "query_offset": 296}),
            Case("sinks", sinks=True),
        ],
        ids=lambda case: case.name,
    )
    def test_gradients_of_many_dims_are_accurate(self, case):
        case = replace(
            case,
            query=(2, 8, 4, 320),
            key=(2, 1, 300, 320),
            value=(2, 1, 300, 290),
            options={**case.options, "enable_gqa": True},
        )
        assert_gradients_accurate("sdpa_with_lse", case.build(DTYPE))

    @pytest.mark.parametrize("name", SHAPES)
    @pytest.mark.parametrize(
        "case",
        [
            Case("plain"),
            Case("causal", options={"is_causal": True}),
            Case("window", options={"window_left": 9, "window_right": 4}),
            Case("dead_row", mask="dead_row"),
            Case("bias", mask="bias"),
            Case("bias_with_minus_inf", mask="bias_with_minus_inf"),
            Case("huge_negative_bias", mask="huge_negative_bias"),
            Case("sinks", sinks=True),
        ],
        ids=lambda case: case.name,
    )
    @pytest.mark.parametrize("op", ["sdpa", "sdpa_with_lse"])
    def test_gradients_are_accurate(self, op, case, name):
        assert_gradients_accurate(op, sized(case, name).build(DTYPE))

    @pytest.mark.parametrize("mask_shape", [(1,), (44, 1)])
    @pytest.mark.parametrize("key_len", [2, 40])
    def test_the_gradient_of_a_bias_that_all_keys_share_is_made_of_exact_weights(self, key_len, mask_shape):
        case = Case(
            "shared",
            query=(3, 3, 3, 44, 4),
            key=(3, 3, 3, key_len, 4),
            value=(3, 3, 3, key_len, 1),
            mask="bias",
            mask_shape=mask_shape,
            mask_dtype=torch.float32,
        )
        assert_gradients_accurate("sdpa_with_lse", case.build(DTYPE))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", ["tiles", "few_keys"])
    def test_gradients_of_any_layout_are_accurate(self, name, layout):
        case = sized(Case("", layout=layout), name)
        assert_gradients_accurate("sdpa", case.build(DTYPE))

    @pytest.mark.parametrize("name", ["tiles", "few_keys"])
    def test_gradients_of_groups_and_broadcast_batches_are_accurate(self, name):
        query_len, key_len, dim, value_dim = SHAPES[name]
        case = Case(
            "",
            query=(2, 1, 3, 2 * 2, query_len // 2, dim),
            key=(3, 2, key_len // 2, dim),
            value=(2, 1, 2, key_len // 2, value_dim),
            options={"enable_gqa": True},
        )
        assert_gradients_accurate("sdpa", case.build(DTYPE))

    @pytest.mark.parametrize("name", SHAPES)
    def test_bits_do_not_depend_on_threads_or_neighbours(self, name):
        tensors = inputs(name)
        grad = torch.randn_like(attn_ext.sdpa(*tensors))

        def gradients(tensors=tensors, grad=grad):
            return torch.autograd.grad(attn_ext.sdpa(*tensors), tensors, grad)

        alone = on_threads(1, gradients)
        for threads in (2, 5, 64):
            assert all(map(torch.equal, alone, on_threads(threads, gradients)))
        part = gradients([x[1:, 2:3].detach().requires_grad_() for x in tensors], grad[1:, 2:3])
        assert all(torch.equal(a[1:, 2:3], b) for a, b in zip(alone, part, strict=True))

    @pytest.mark.parametrize("name", ["tiles", "few_keys"])
    @pytest.mark.parametrize("where", ["query", "key", "value", "grad"])
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_what_is_not_finite_reaches_what_it_reaches_without_them(self, name, where, bad):
        tensors = dict(zip(("query", "key", "value"), inputs(name), strict=True))
        mask = torch.rand(*(tensors[x].shape[-2] for x in ("query", "key"))) < 0.7
        if where != "grad":
            tensors[where].data[1, 2, 7, 3] = bad
        output = attn_ext.sdpa(**tensors, attn_mask=mask)
        grad = torch.randn_like(output)
        if where == "grad":
            grad[0, 1, 20, 5] = bad
        saved = torch.autograd.grad(output, [*tensors.values()], grad)
        with attn_ext.save_weights_for_backward(False):
            refused = torch.autograd.grad(attn_ext.sdpa(**tensors, attn_mask=mask), [*tensors.values()], grad)
        for a, b in zip(saved, refused, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite())
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05, equal_nan=True)

    @pytest.mark.parametrize("where", ["grad_lse", "value"])
    def test_nan_shows_in_weights_that_are_0_for_want_of_range(self, where):
        tensors = [torch.randn(1, 1, n, 64).to(DTYPE).requires_grad_() for n in (120, 300, 300)]
        bias = torch.zeros(300, dtype=DTYPE)
        bias[140:] = -1e4
        if where == "value":
            tensors[2].data[0, 0, 3] = torch.nan
        output, lse = attn_ext.sdpa_with_lse(*tensors, attn_mask=bias)
        grads = [torch.randn_like(output), torch.randn_like(lse)]
        if where == "grad_lse":
            grads[1][0, 0, 5] = torch.nan
        found = torch.autograd.grad((output, lse), tensors, grads)
        assert found[1].isnan().any(-1).all()

    def test_nan_shows_where_a_sink_takes_everything(self):
        query, key, value = (torch.full((1, 1, 100, 64), x).to(DTYPE) for x in (-1.0, 14.0, 1.0))
        sinks = torch.tensor([20.0])
        leaves = [x.requires_grad_() for x in (query, key, value)]
        grad = torch.zeros(1, 1, 100, 64, dtype=DTYPE)
        grad[0, 0, 5, 3] = torch.nan
        found = torch.autograd.grad(attn_ext.sdpa(*leaves, sinks=sinks), leaves, grad)
        with attn_ext.save_weights_for_backward(False):
            refused = torch.autograd.grad(attn_ext.sdpa(*leaves, sinks=sinks), leaves, grad)
        assert [x.isfinite().tolist() for x in found] == [x.isfinite().tolist() for x in refused]

    @pytest.mark.usefixtures("only_where_saved")
    @pytest.mark.parametrize("name", SHAPES)
    def test_backward_reads_them(self, name):
        """Else all of the above would hold for nothing."""
        tensors = [x.detach() for x in inputs(name)]
        grads = internal_backward(tensors, lambda weights: weights)
        doubled = internal_backward(tensors, lambda weights: 2 * weights)
        assert not torch.allclose(grads[2], doubled[2])
        torch.testing.assert_close(doubled[2], 2 * grads[2])

    def test_second_derivatives_are_those_without_them(self):
        tensors = inputs()

        def second():
            first = torch.autograd.grad(
                attn_ext.sdpa(*tensors).float().square().sum(), tensors, create_graph=True
            )
            return torch.autograd.grad(sum(g.float().square().sum() for g in first), tensors)

        saved = second()
        with attn_ext.save_weights_for_backward(False):
            for a, b in zip(saved, second(), strict=True):
                torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * b.abs().max().item())

    def test_checkpointing(self):
        tensors = inputs()
        direct = torch.autograd.grad(attn_ext.sdpa(*tensors).sum(), tensors)
        for reentrant in (False, True):
            again = checkpoint(attn_ext.sdpa, *tensors, use_reentrant=reentrant)
            again.sum().backward()
            assert all(torch.equal(a, x.grad) for a, x in zip(direct, tensors, strict=True))
            for x in tensors:
                x.grad = None

    def test_backward_twice_and_after_release(self):
        tensors = inputs()
        output = attn_ext.sdpa(*tensors).sum()
        first = torch.autograd.grad(output, tensors, retain_graph=True)
        assert all(map(torch.equal, first, torch.autograd.grad(output, tensors)))
        with pytest.raises(RuntimeError, match="a second time"):
            output.backward()

    def test_vmap(self):
        samples = [torch.randn(3, 2, 100, 64).to(DTYPE) for _ in range(3)]

        def gradients(*sample):
            return torch.func.grad(lambda *x: attn_ext.sdpa(*x).float().square().sum(), (0, 1, 2))(*sample)

        together = torch.vmap(gradients)(*samples)
        for i in range(3):
            for a, b in zip(together, gradients(*(x[i] for x in samples)), strict=True):
                assert torch.equal(a[i], b)

    def test_operations_that_are_counted(self):
        def counted():
            with FlopCounterMode(display=False) as counter:
                attn_ext.sdpa(*inputs()).sum().backward()
            return counter.get_total_flops()

        product = 2 * 2 * 4 * 197 * 197 * 64
        assert counted() == (6 if set_saves() else 7) * product
        with attn_ext.save_weights_for_backward(False):
            assert counted() == 7 * product


class TestCompiled:
    def gradients(self, function, tensors):
        return torch.autograd.grad(function(*tensors).float().square().sum(), tensors)

    @pytest.mark.parametrize("backend", ["aot_eager", "eager"])
    def test_as_eager(self, backend):
        torch._dynamo.reset()
        compiled = torch.compile(attn_ext.sdpa, backend=backend, fullgraph=True, dynamic=False)
        tensors = inputs()
        assert all(
            map(torch.equal, self.gradients(attn_ext.sdpa, tensors), self.gradients(compiled, tensors))
        )

    def test_symbolic_sizes_save_nothing(self):
        torch._dynamo.reset()
        compiled = torch.compile(attn_ext.sdpa, backend="aot_eager", fullgraph=True, dynamic=True)
        tensors = inputs()
        with attn_ext.save_weights_for_backward(False):
            refused = self.gradients(attn_ext.sdpa, tensors)
        assert all(map(torch.equal, refused, self.gradients(compiled, tensors)))

    def test_exported_programs_make_none(self):
        class Attention(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(64, dtype=DTYPE))

            def forward(self, x):
                return attn_ext.sdpa(x * self.weight, x, x)

        program = torch.export.export(Attention(), (torch.randn(1, 2, 197, 64).to(DTYPE),))
        for graph in (program.graph, program.run_decompositions({}).graph):
            calls = [node for node in graph.nodes if "sdpa" in str(node.target)]
            assert calls
            assert all(node.target is not OPS._sdpa_forward.default for node in calls) or not any(
                node.args[15] for node in calls
            )


class TestInternalOp:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda w: w[..., :-1], r"expected weights to have shape .*197, 197.*, but got"),
            (lambda w: w.float(), r"expected weights of dtype (BFloat16|Half) .*, but got Float"),
        ],
    )
    def test_weights_that_do_not_fit(self, change, message):
        with pytest.raises(RuntimeError, match=message):
            internal_backward([x.detach() for x in inputs()], change)

    @pytest.mark.parametrize("more", ["dropout", "delta", "sequences"])
    def test_what_weights_do_not_go_with(self, more):
        scalars = (0.5 if more == "dropout" else 0.0, False, None, False, None, None, 0, 0.0)
        query, key, value = (x.detach()[0] for x in inputs())
        seed = torch.tensor(1) if more == "dropout" else None
        sequences = None
        if more == "sequences":
            sequences = OPS._packed_sequences(torch.tensor([0, 197]), None, None, None, None, 197, 197)
        tensors = (query, key, value, None, None, seed, sequences)
        output, lse, _, _ = OPS._sdpa_forward(*tensors, *scalars, False, False)
        given = {"weights": query.new_zeros(4, 197, 197), "delta": lse if more == "delta" else None}
        with pytest.raises(
            RuntimeError, match="expected weights with neither dropout nor a delta nor packed"
        ):
            OPS._sdpa_backward(
                output,
                *(None,) * 3,
                *tensors,
                output,
                lse,
                *scalars,
                [True] * 3 + [False] * 2,
                **given,
            )

    def test_weights_of_any_strides(self):
        tensors = [x.detach() for x in inputs()]
        expected = internal_backward(tensors, lambda w: w)
        for change in (lambda w: w.mT.contiguous().mT, lambda w: torch.cat([w, w], -1)[..., :197]):
            for a, b in zip(internal_backward(tensors, change)[:3], expected[:3], strict=True):
                assert torch.equal(a, b)
