"""`override_sdpa`: attn_ext in the place of `F.scaled_dot_product_attention`, in every way of calling."""

import contextlib
import os
import pickle
import sys
import threading
import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

import attn_ext
from attn_ext.integrations import override

BUILTIN = torch._C._nn.scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert F.scaled_dot_product_attention is BUILTIN
    assert torch.backends.mha.get_fastpath_enabled()
    assert F.multi_head_attention_forward.__code__.co_name == "multi_head_attention_forward"


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    return list(torch.randn(3, 2, 4, 5, 8))


def attend(*arguments, **options):
    """As a user's code does: the name is looked up in the call."""
    return F.scaled_dot_product_attention(*arguments, **options)


def recording_backend(graphs: list[list[str]]):
    """Puts the names of a compiled graph's ops into `graphs`, and runs it as it is."""
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    return aot_autograd(fw_compiler=compile_graph)


def ours(graph: list[str]) -> bool:
    return any("attn_ext" in name for name in graph)


class TestTaking:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": True},
            {"scale": 0.0},
            {"scale": 2},
            {"dropout_p": 0},
            {"attn_mask": torch.arange(5) > torch.arange(5)[:, None]},  # the last row sees nothing
            {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5)},
            {"attn_mask": torch.linspace(-1, 1, 40).reshape(2, 4, 1, 5)},
        ],
        ids=str,
    )
    def test_gives_what_the_function_gives(self, inputs, options):
        expected = attend(*inputs, **options)
        with attn_ext.override_sdpa() as calls:
            actual = attend(*inputs, **options)
        assert_close(actual, expected)
        assert (calls.taken, calls.passed_on) == (1, {})

    def test_takes_positions_and_keywords_as_the_function_does(self, inputs):
        query, key, value = inputs
        mask = torch.rand(5, 5) < 0.5
        expected = attend(query, key, value, mask, 0.0, False, scale=0.3)
        with attn_ext.override_sdpa() as calls:
            assert_close(attend(query, key, value, mask, 0.0, False, scale=0.3), expected)
            keywords = {"query": query, "key": key, "value": value, "attn_mask": mask, "dropout_p": 0.0}
            assert_close(attend(**keywords, is_causal=False, scale=0.3, enable_gqa=False), expected)
            with pytest.raises(TypeError):
                attend(query, key, value, mask, 0.0, False, 0.3)
            with pytest.raises(TypeError, match="softcap"):
                attend(query, key, value, softcap=2.0)
        assert calls.taken == 2

    def test_grouped_heads(self, inputs):
        query, key, value = inputs
        expected = attend(query, key[:, :2], value[:, :2], enable_gqa=True)
        with attn_ext.override_sdpa() as calls:
            assert_close(attend(query, key[:, :2], value[:, :2], enable_gqa=True), expected)
        assert calls.taken == 1

    def test_gradients_of_inputs_and_mask(self, inputs):
        leaves = [x.requires_grad_() for x in [*inputs, torch.randn(4, 5, 5)]]
        expected = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
        with attn_ext.override_sdpa() as calls:
            output = attend(*leaves)
        assert_close(torch.autograd.grad(output.square().sum(), leaves), expected)  # after it is off, too
        assert calls.taken == 1

    def test_dropout_drops_in_the_measure_asked_for(self):
        query = torch.zeros(1, 1, 64, 8)
        value = torch.eye(64)[None, None]
        with attn_ext.override_sdpa() as calls:
            weights = attend(query, query, value, dropout_p=0.5)
            assert attend(query, query, value, dropout_p=1.0).eq(0).all()
        assert 0.4 < weights.eq(0).double().mean() < 0.6
        assert_close(weights.max(), torch.tensor(2 / 64))
        assert calls.taken == 2

    @pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
    def test_under_autocast(self, inputs, lower):
        with torch.autocast("cpu", lower):
            expected = attend(*inputs)
            with attn_ext.override_sdpa() as calls:
                actual = attend(*inputs)
        assert actual.dtype == expected.dtype == lower
        assert_close(actual, expected, atol=2e-2, rtol=2e-2)
        assert calls.taken == 1

    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
    def test_without_gradients(self, inputs, mode):
        with mode():
            expected = attend(*inputs)
            with attn_ext.override_sdpa() as calls:
                assert_close(attend(*inputs), expected)
        assert calls.taken == 1

    def test_parameters(self, inputs):
        query, key, value = (nn.Parameter(x) for x in inputs)
        with attn_ext.override_sdpa() as calls:
            attend(query, key, value).sum().backward()
        assert query.grad is not None
        assert (calls.taken, calls.passed_on) == (1, {})

    def test_function_transforms(self, inputs):
        expected = torch.func.vmap(attend)(*inputs)
        with attn_ext.override_sdpa() as calls:
            assert_close(torch.func.vmap(attend)(*inputs), expected)
            torch.func.grad(lambda x: attend(x, x, x).sum())(inputs[0])
        assert calls.taken == 2

    def test_under_a_default_device(self, inputs):
        with attn_ext.override_sdpa() as calls, torch.device("cpu"):
            attend(*inputs)
        assert (calls.taken, calls.passed_on) == (1, {})

    @pytest.mark.parametrize("lengths", [(5, 5), (3, 5), (5, 3)])
    @pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
    @pytest.mark.filterwarnings("ignore:Lower right causal bias")
    def test_causal_bias(self, variant, lengths):
        from torch.nn.attention import bias

        query, key = torch.randn(2, 4, lengths[0], 8), torch.randn(2, 4, lengths[1], 8)
        mask = getattr(bias, variant)(*lengths)
        expected = attend(query, key, key, mask)
        with attn_ext.override_sdpa() as calls:
            assert_close(attend(query, key, key, mask), expected)
        assert (calls.taken, calls.passed_on) == (1, {})


class TestPassingOn:
    def check(self, reason: str, *arguments, **options):
        expected = attend(*arguments, **options)
        with attn_ext.override_sdpa() as calls:
            actual = attend(*arguments, **options)
        assert_close(actual, expected, equal_nan=True)
        assert (calls.taken, calls.passed_on) == (0, {reason: 1})

    def check_error(self, reason: str, *arguments, **options):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            attend(*arguments, **options)
        with attn_ext.override_sdpa() as calls, pytest.raises(expected.type) as actual:
            attend(*arguments, **options)
        assert str(actual.value) == str(expected.value)
        assert actual.value.__context__ is None
        assert (calls.taken, calls.passed_on) == (0, {reason: 1})

    @pytest.mark.parametrize("dims", [2, 4])
    def test_is_causal_with_a_mask_stays_what_it_is(self, inputs, dims):
        """An error, but for the inputs of PyTorch's fused kernel."""
        mask = torch.ones(5, 5, dtype=torch.bool)
        arguments = [x[(0,) * (4 - dims)] for x in inputs] + [mask]
        check = self.check if dims == 4 else self.check_error
        check("is_causal together with attn_mask", *arguments, is_causal=True)

    def test_a_mask_of_one_dim_stays_an_error(self, inputs):
        reason = "an attn_mask of less than two dims"
        self.check_error(reason, *inputs, torch.ones(5, dtype=torch.bool))

    def test_causal_bias_with_is_causal_stays_an_error(self, inputs):
        from torch.nn.attention.bias import causal_upper_left

        reason = "is_causal together with attn_mask"
        self.check_error(reason, *inputs, causal_upper_left(5, 5), is_causal=True)

    def test_mixed_dtypes_stay_an_error(self, inputs):
        query, key, value = inputs
        self.check_error("arguments that attn_ext refuses", query.double(), key, value)

    def test_bad_shapes_stay_an_error(self, inputs):
        query, key, value = inputs
        self.check_error("arguments that attn_ext refuses", query, key[..., :3], value)

    def test_complex_numbers(self, inputs):
        self.check_error("dtype torch.complex64", *(torch.complex(x, x) for x in inputs))

    def test_other_devices(self, inputs):
        self.check("a tensor on meta", *(x.to("meta") for x in inputs))

    def test_values_of_other_heads_than_keys(self, inputs):
        query, key, value = inputs
        reason = "key and value of different numbers of heads"
        self.check(reason, query, key[:, :2], value[:, :1], enable_gqa=True)

    def test_keys_without_values(self, inputs):
        query, key, value = inputs
        self.check("arguments that attn_ext refuses", query, key[..., :6], value[..., :0, :])

    def test_strings_of_words(self, inputs):
        self.check_error("a tensor of class str", "query", *inputs[1:])

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_strided_nested_tensors(self):
        x = torch.nested.nested_tensor([torch.randn(4, 5, 8), torch.randn(4, 3, 8)])
        expected = attend(x, x, x)
        with attn_ext.override_sdpa() as calls:
            actual = attend(x, x, x)
        assert_close(list(actual.unbind()), list(expected.unbind()))
        assert calls.passed_on == {"a nested tensor": 1}

    def test_jagged_nested_tensors(self):
        parts = [torch.randn(5, 4, 8), torch.randn(3, 4, 8)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        expected = attend(x, x, x)
        with attn_ext.override_sdpa() as calls:
            actual = attend(x, x, x)
        assert_close(actual.values(), expected.values())
        assert calls.passed_on["a tensor of class NestedTensor"] == 1

    def test_subclasses_with_a_torch_function(self, inputs):
        seen = []

        class Own(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is BUILTIN:
                    seen.append(func)
                return super().__torch_function__(func, types, args, kwargs or {})

        query, key, value = inputs
        with attn_ext.override_sdpa() as calls:
            output = attend(query.as_subclass(Own), key, value)
        assert seen == [BUILTIN]
        assert type(output) is Own
        assert calls.passed_on == {"a tensor of class Own": 1}

    def test_torch_function_modes_see_the_function(self, inputs):
        seen = []

        class Watching(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        with attn_ext.override_sdpa() as calls, Watching():
            attend(*inputs)
        assert BUILTIN in seen
        assert calls.passed_on == {"an active TorchFunctionMode": 1}

    def test_every_call_is_counted_once(self, inputs):
        with attn_ext.override_sdpa() as calls:
            for _ in range(3):
                attend(*inputs)
            for _ in range(2):
                attend(*(x.to("meta") for x in inputs))
        attend(*inputs)
        assert (calls.taken, calls.passed_on) == (3, {"a tensor on meta": 2})
        assert repr(calls) == "override_sdpa (off): 3 taken, 0 compiled, passed on {'a tensor on meta': 2}"


class TestOnAndOff:
    def test_nothing_at_import(self):
        assert attn_ext.override_sdpa().taken == 0
        assert F.scaled_dot_product_attention is BUILTIN

    def test_nested_in_any_order(self, inputs):
        first, second = attn_ext.override_sdpa(), attn_ext.override_sdpa()
        first.enable()
        attend(*inputs)
        second.enable()
        attend(*inputs)
        first.disable()
        attend(*inputs)
        second.disable()
        attend(*inputs)
        assert (first.taken, second.taken) == (2, 2)

    def test_the_same_object_within_itself(self, inputs):
        with attn_ext.override_sdpa() as calls:
            with calls:
                attend(*inputs)
            attend(*inputs)
        with calls:
            attend(*inputs)
        assert calls.taken == 3

    def test_off_without_on_is_an_error(self):
        calls = attn_ext.override_sdpa()
        with pytest.raises(RuntimeError, match=r"^disable\(\) wants an enable\(\) before it"):
            calls.disable()
        with calls:
            pass
        with pytest.raises(RuntimeError, match=r"wants an enable"):
            calls.disable()

    def test_an_exception_inside(self, inputs):
        calls = attn_ext.override_sdpa()
        with contextlib.suppress(ZeroDivisionError), calls:
            attend(*inputs)
            raise ZeroDivisionError
        assert F.scaled_dot_product_attention is BUILTIN
        assert calls.taken == 1

    def test_a_patch_that_was_there_before_gets_what_is_passed_on(self, inputs, monkeypatch):
        seen = []

        def older(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):  # an older signature
            seen.append(query.device.type)
            return BUILTIN(query, key, value, attn_mask, dropout_p, is_causal)

        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", older)
            with attn_ext.override_sdpa() as calls:
                attend(*inputs)
                attend(*(x.to("meta") for x in inputs))
            assert F.scaled_dot_product_attention is older
        assert seen == ["meta"]
        assert calls.taken == 1

    def test_a_patch_that_came_meanwhile_stays(self, inputs):
        """And calls ours, which lets calls through when off, and ends in no circle when on again."""
        calls = attn_ext.override_sdpa()
        calls.enable()
        inner = F.scaled_dot_product_attention

        def meanwhile(*arguments, **options):
            return inner(*arguments, **options)

        F.scaled_dot_product_attention = meanwhile
        try:
            calls.disable()
            assert F.scaled_dot_product_attention is meanwhile
            assert_close(attend(*inputs), BUILTIN(*inputs))
            assert calls.taken == 0
            with calls:
                attend(*inputs)
                attend(*(x.to("meta") for x in inputs))
            assert F.scaled_dot_product_attention is meanwhile
            assert (calls.taken, calls.passed_on) == (1, {"a tensor on meta": 1})
        finally:
            F.scaled_dot_product_attention = inner  # as they put back what they found
        assert_close(attend(*inputs), BUILTIN(*inputs))
        with calls:
            attend(*inputs)
        assert calls.taken == 2

    def test_who_took_the_function_meanwhile_can_go_on_calling_and_pickling_it(self, inputs):
        with attn_ext.override_sdpa() as calls:
            taken = pickle.loads(pickle.dumps(F.scaled_dot_product_attention))
        assert_close(taken(*inputs, scale=0.5), BUILTIN(*inputs, scale=0.5))
        assert calls.taken == 0

    def test_names_who_bound_the_function_early(self, monkeypatch):
        module = types.ModuleType("bound_early")
        module.attention = BUILTIN
        monkeypatch.setitem(sys.modules, "bound_early", module)
        calls = attn_ext.override_sdpa()
        assert "bound_early" in calls.not_reached
        with calls:
            assert "bound_early" in calls.not_reached
            module.attention = F.scaled_dot_product_attention
            assert "bound_early" not in calls.not_reached
            assert not {"torch.nn.functional", "torch._C._nn"} & set(calls.not_reached)

    def test_threads(self, inputs):
        """Counts are exact, and a thread that leaves does not turn it off for another."""
        outer = attn_ext.override_sdpa()
        start = threading.Barrier(4)
        errors = []

        def work():
            try:
                start.wait()
                for _ in range(50):
                    with attn_ext.override_sdpa() as calls:
                        attend(*inputs)
                    assert calls.taken >= 1
            except BaseException as error:
                errors.append(error)

        with outer:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not errors
        assert outer.taken == 200

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
    def test_a_child_forked_while_another_thread_counts(self, inputs):
        with attn_ext.override_sdpa(), override._patch.lock:
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    attend(*inputs)
                    os._exit(0)
                os._exit(1)
            deadline = time.monotonic() + 20
            while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
            if done == (0, 0):
                os.kill(child, 9)
                os.waitpid(child, 0)
        assert done == (child, 0)


class TestModulesOfTorch:
    def test_mha_forward(self):
        mha, x = nn.MultiheadAttention(16, 4), torch.randn(5, 2, 16)
        tensors = (mha.in_proj_weight, mha.in_proj_bias, None, None, False, 0.0)
        options = {"need_weights": False}
        projection = (mha.out_proj.weight, mha.out_proj.bias)

        def call():
            return F.multi_head_attention_forward(x, x, x, 16, 4, *tensors, *projection, **options)[0]

        expected = call()
        with attn_ext.override_sdpa() as calls:
            assert_close(call(), expected)
        assert calls.taken == 1

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("gradients", [True, False])
    def test_the_short_cuts_of_inference_are_off(self, batch_first, gradients):
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
        x = torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)
        padding = torch.arange(5) >= torch.tensor([[5], [3]])
        with torch.set_grad_enabled(gradients):
            expected = encoder(x, src_key_padding_mask=padding)
            with attn_ext.override_sdpa() as calls:
                actual = encoder(x, src_key_padding_mask=padding)
        visible = ~padding if batch_first else ~padding.T
        assert_close(actual[visible], expected[visible])
        assert (calls.taken, calls.passed_on) == (2, {})

    def test_a_short_cut_that_was_off_stays_off(self):
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with attn_ext.override_sdpa():
                pass
            assert not torch.backends.mha.get_fastpath_enabled()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    def test_scripting_keeps_the_function(self):
        mha, x = nn.MultiheadAttention(16, 4), torch.randn(5, 2, 16)

        def function(x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5)

        with attn_ext.override_sdpa() as calls:
            scripted, module = torch.jit.script(function), torch.jit.script(mha)
            assert_close(scripted(x), BUILTIN(x, x, x, is_causal=True, scale=0.5))
            assert_close(module(x, x, x, need_weights=False)[0], mha(x, x, x, need_weights=False)[0])
        assert "aten::scaled_dot_product_attention" in str(scripted.graph)
        assert calls.taken == 1  # of `mha` itself

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_tracing_keeps_the_op(self, inputs):
        with attn_ext.override_sdpa():
            traced = torch.jit.trace(lambda *x: attend(*x), tuple(inputs))
        assert "attn_ext::sdpa" in str(traced.graph)
        assert_close(traced(*inputs), attend(*inputs))


class TestCompiling:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    def functions(self):
        mha = nn.MultiheadAttention(8, 2, batch_first=True)
        arguments = (8, 2, mha.in_proj_weight, mha.in_proj_bias, None, None, False, 0.0)
        projection = (mha.out_proj.weight, mha.out_proj.bias)
        return {
            "function": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5),
            "module": lambda x: mha(x, x, x, need_weights=False)[0],
            "mha_forward": lambda x: F.multi_head_attention_forward(
                x, x, x, *arguments, *projection, need_weights=False
            )[0],
        }

    @pytest.mark.parametrize("first", [True, False], ids=["on first", "off first"])
    @pytest.mark.parametrize("name", ["function", "module", "mha_forward"])
    def test_no_graph_is_stale_and_none_is_made_twice(self, name, first):
        function, x = self.functions()[name], torch.randn(2, 5, 8)
        graphs: list[list[str]] = []
        compiled = torch.compile(function, backend=recording_backend(graphs), fullgraph=True)
        expected = function(x)
        for on in [first, not first] * 5:
            with attn_ext.override_sdpa() if on else contextlib.nullcontext():
                assert_close(compiled(x), expected)
        assert [ours(graph) for graph in graphs] == [first, not first]

    def test_counts_places_in_graphs_and_not_their_runs(self, inputs):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        with attn_ext.override_sdpa() as calls:
            for _ in range(3):
                compiled(*inputs)
        assert (calls.compiled, calls.taken, calls.passed_on) == (1, 0, {})

    def test_passes_on_and_counts_while_compiling(self, inputs):
        query, key, value = inputs
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        options = {"enable_gqa": True}
        with attn_ext.override_sdpa() as calls:
            actual = compiled(query, key[:, :2], value[:, :1], **options)
        assert_close(actual, BUILTIN(query, key[:, :2], value[:, :1], **options))
        assert calls.compiled == 0
        assert list(calls.passed_on) == ["key and value of different numbers of heads"]

    def test_with_masks_gradients_and_autocast(self, inputs):
        mask = torch.rand(5, 5) < 0.7
        leaves = [x.requires_grad_() for x in inputs]
        graphs: list[list[str]] = []
        compiled = torch.compile(attend, backend=recording_backend(graphs), fullgraph=True)
        with attn_ext.override_sdpa():
            actual = torch.autograd.grad(compiled(*leaves, mask).square().sum(), leaves)
            assert_close(actual, torch.autograd.grad(BUILTIN(*leaves, mask).square().sum(), leaves))
            with torch.autocast("cpu", torch.bfloat16):
                assert compiled(*inputs).dtype == torch.bfloat16
        assert all(map(ours, graphs))

    @pytest.mark.slow
    def test_inductor(self, inputs):
        compiled = torch.compile(attend, fullgraph=True)
        with attn_ext.override_sdpa() as calls:
            assert_close(compiled(*inputs, is_causal=True), BUILTIN(*inputs, is_causal=True))
        assert calls.compiled == 1

    def test_another_override_of_later_uses_the_graph_of_the_first(self, inputs):
        graphs: list[list[str]] = []
        compiled = torch.compile(attend, backend=recording_backend(graphs), fullgraph=True)
        for _ in range(10):
            with attn_ext.override_sdpa(), attn_ext.override_sdpa():
                compiled(*inputs)
        assert len(graphs) == 1

    @pytest.mark.parametrize("strict", [True, False])
    def test_export(self, inputs, strict):
        class Model(nn.Module):
            def forward(self, query, key, value):
                return F.scaled_dot_product_attention(query, key, value)

        with attn_ext.override_sdpa() as calls:
            program = torch.export.export(Model(), tuple(inputs), strict=strict)
        assert ours([str(node.target) for node in program.graph.nodes])
        assert_close(program.module()(*inputs), BUILTIN(*inputs))
        assert calls.compiled == 1
        after = torch.export.export(Model(), tuple(inputs), strict=strict)
        assert not ours([str(node.target) for node in after.graph.nodes])


class TestModelsOfOthers:
    """At random weights; each takes the calls that its attention makes, and gives what it gave."""

    def check(self, model, *inputs, calls_expected: int) -> None:
        model.eval()
        with torch.no_grad():
            expected = model(*inputs)
            with attn_ext.override_sdpa() as calls:
                actual = model(*inputs)
        assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        assert (calls.taken, calls.passed_on) == (calls_expected, {})

    def test_timm(self):
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
        self.check(model, torch.randn(1, 3, 32, 32), calls_expected=2)

    def test_torchvision(self):
        torchvision = pytest.importorskip("torchvision")
        model = torchvision.models.VisionTransformer(32, 16, 2, 4, 32, 64, num_classes=3)
        self.check(model, torch.randn(1, 3, 32, 32), calls_expected=2)

    def test_diffusers(self):
        diffusers = pytest.importorskip("diffusers")
        model = diffusers.UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            norm_num_groups=8,
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=4,
        )
        inputs = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 5, 16)
        self.check(lambda_module(model, lambda x, t, c: model(x, t, c).sample), *inputs, calls_expected=8)

    def test_open_clip(self):
        open_clip = pytest.importorskip("open_clip")
        block = open_clip.transformer.ResidualAttentionBlock(32, 4)
        self.check(block, torch.randn(2, 5, 32), calls_expected=1)


def lambda_module(model: nn.Module, forward) -> nn.Module:
    """A module whose forward is `forward`."""
    wrapper = nn.Module()
    wrapper.model = model
    wrapper.forward = forward
    return wrapper
