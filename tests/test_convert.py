"""`convert`: models as they are, with their attention computed by attn_ext, and back."""

import copy
import io
import itertools
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

import attn_ext
from attn_ext.integrations import convert as integration
from attn_ext.integrations.multihead import ConvertedMultiheadAttention

DONE = "nn.MultiheadAttention, now computed by attn_ext"

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


def converted(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    attn_ext.convert(twin)
    return twin


def randomize(module: nn.Module) -> nn.Module:
    """Biases too, which begin as zeros."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.fixture
def count_calls(monkeypatch):
    """How often attn_ext computes attention in a function's call."""
    from attn_ext.integrations import multihead

    seen = []
    for name in ("sdpa", "sdpa_with_weights"):
        original = getattr(multihead, name)
        monkeypatch.setattr(multihead, name, lambda *a, _f=original: (seen.append(1), _f(*a))[1])
    return seen


class TestMultiheadAttention:
    def masks(self, batch: int | None):
        """No mask, and every pair of an attn_mask and a key_padding_mask; each row sees key 0."""
        pairs = torch.rand(5, 7) < 0.4
        heads = torch.rand(4 * (batch or 1), 5, 7) < 0.4
        padding = torch.rand(*([batch] if batch else []), 7) < 0.4
        for mask in (pairs, heads, padding):
            mask[..., 0] = False
        as_float = [torch.randn(mask.shape).masked_fill(mask, -torch.inf) for mask in (pairs, heads, padding)]
        return itertools.product((None, pairs, heads, *as_float[:2]), (None, padding, as_float[2]))

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("layout", ["batch_first", "sequence_first", "unbatched"])
    @pytest.mark.parametrize("dims", [{}, {"kdim": 12, "vdim": 10}], ids=["same dims", "other dims"])
    def test_returns_what_torch_returns(self, dims, layout, bias, training, count_calls):
        theirs = randomize(
            nn.MultiheadAttention(16, 4, bias=bias, batch_first=layout == "batch_first", **dims)
        )
        ours = converted(theirs.train(training))
        batch = None if layout == "unbatched" else 2
        sizes = ((5, 16), (7, dims.get("kdim", 16)), (7, dims.get("vdim", 16)))
        query, key, value = (torch.randn(*([batch] if batch else []), *size) for size in sizes)
        if layout == "sequence_first":
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        ways = [{"need_weights": False}, {}, {"average_attn_weights": False}]
        for (mask, padding), way in itertools.product(self.masks(batch), ways):
            options = {"attn_mask": mask, "key_padding_mask": padding, **way}
            expected = theirs(query, key, value, **options)
            actual = ours(query, key, value, **options)
            assert_close(actual, expected)
            assert (actual[1] is None) == (expected[1] is None)
        assert len(count_calls) == 15 * 3

    @pytest.mark.parametrize("gradients", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_one_tensor_for_all(self, batch_first, gradients):
        theirs = randomize(nn.MultiheadAttention(16, 4, batch_first=batch_first)).eval()
        ours, x = converted(theirs), torch.randn(5, 5, 16)
        with torch.set_grad_enabled(gradients):
            assert_close(ours(x, x, x), theirs(x, x, x))
            assert_close(ours(x, x + 1, x + 1), theirs(x, x + 1, x + 1))

    def test_gradients(self):
        theirs = randomize(nn.MultiheadAttention(16, 4))
        ours = converted(theirs)
        results = []
        for module in (theirs, ours):
            x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
            output, weights = module(x, x, x)
            (output.square().sum() + weights.square().sum()).backward()
            results.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        assert_close(*results, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("need_weights", [True, False])
    @pytest.mark.parametrize("padded", [True, False])
    def test_is_causal_is_the_hint_that_it_is_for_torch(self, need_weights, padded):
        theirs = randomize(nn.MultiheadAttention(16, 4, batch_first=True)).eval()
        ours, x = converted(theirs), torch.randn(2, 5, 16)
        options = {"need_weights": need_weights, "is_causal": True}
        if padded:
            options["key_padding_mask"] = torch.arange(5).expand(2, 5) > 3
        # A hint that is not true shows whether the mask or the hint is followed.
        for mask in (torch.ones(5, 5, dtype=torch.bool).triu(1), torch.eye(5, dtype=torch.bool).roll(1, 0)):
            theirs.train()  # its fused kernel goes by the mask
            assert_close(ours(x, x, x, attn_mask=mask, **options), theirs(x, x, x, attn_mask=mask, **options))

    def test_dropout_acts_in_training_only(self):
        ours = converted(nn.MultiheadAttention(16, 4, dropout=0.5))
        x = torch.randn(5, 2, 16)
        assert ours(x, x, x, average_attn_weights=False)[1].eq(0).any()
        assert_close(ours.eval()(x, x, x), ours(x, x, x))

    def test_a_row_that_sees_nothing_gets_no_nan(self):
        ours, x = converted(nn.MultiheadAttention(16, 4, batch_first=True)), torch.randn(2, 5, 16)
        padding = torch.tensor([[True] * 5, [False] * 5])
        output, weights = ours(x, x, x, key_padding_mask=padding)
        assert weights[0].eq(0).all()
        assert_close(output[0], ours.out_proj.bias.expand(5, 16))

    @pytest.mark.parametrize("gradients", [True, False])
    def test_under_autocast(self, gradients):
        theirs = randomize(nn.MultiheadAttention(16, 4, batch_first=True)).eval()
        ours, x = converted(theirs), torch.randn(2, 5, 16)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(gradients):
            for need_weights in (True, False):
                expected = theirs(x, x, x, need_weights=need_weights)
                actual = ours(x, x, x, need_weights=need_weights)
                assert_close(actual, expected, atol=5e-2, rtol=5e-2)

    @pytest.mark.parametrize(
        ("shapes", "options"),
        [
            (((5, 2, 15),) * 3, {}),
            (((5, 2, 16), (7, 2, 16), (6, 2, 16)), {}),
            (((5, 2, 16), (7, 1, 16), (7, 1, 16)), {}),
            (((5, 2, 16), (7, 16), (7, 16)), {}),
            (((2, 5, 2, 16),) * 3, {}),
            (((5, 2, 16),) * 3, {"is_causal": True}),
            (((5, 2, 16),) * 3, {"attn_mask": torch.zeros(5, 4)}),
            (((5, 2, 16),) * 3, {"attn_mask": torch.zeros(2, 5, 5)}),
            (((5, 2, 16),) * 3, {"attn_mask": torch.zeros(5, 5, dtype=torch.int64)}),
            (((5, 2, 16),) * 3, {"key_padding_mask": torch.zeros(5, 2)}),
        ],
        ids=str,
    )
    def test_what_does_not_fit_gets_the_errors_of_torch(self, shapes, options):
        theirs = nn.MultiheadAttention(16, 4)
        ours = converted(theirs)
        inputs = [torch.randn(shape) for shape in shapes]
        with pytest.raises(Exception) as expected:  # noqa: PT011
            theirs(*inputs, **options)
        with pytest.raises(expected.type) as actual:
            ours(*inputs, **options)
        assert str(actual.value) == str(expected.value)

    def test_nested_tensors_go_to_torch(self):
        theirs = nn.MultiheadAttention(16, 4, batch_first=True).eval()
        ours = converted(theirs)
        x = torch.nested.nested_tensor([torch.randn(5, 16), torch.randn(3, 16)])
        with torch.no_grad():
            actual, expected = (m(x, x, x, need_weights=False)[0].to_padded_tensor(0) for m in (ours, theirs))
        assert_close(actual, expected)

    @pytest.mark.parametrize("need_weights", [True, False])
    def test_script_compile_export_and_pickle(self, need_weights):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = randomize(nn.MultiheadAttention(16, 4, batch_first=True))
                self.need_weights = need_weights

            def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
                output, weights = self.attention(
                    x, x, x, key_padding_mask=padding, need_weights=self.need_weights
                )
                return output if weights is None else output.sum() + weights

        model = Model().eval()
        inputs = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
        expected = model(*inputs)
        attn_ext.convert(model)
        torch.compiler.reset()
        assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(*inputs), expected)
        program = torch.export.export(model, inputs)
        assert "attn_ext.sdpa" in str(program.graph)
        assert_close(program.module()(*inputs), expected)
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(model), file)
        file.seek(0)
        assert_close(torch.jit.load(file)(*inputs), expected)
        attention = pickle.loads(pickle.dumps(model.attention))
        assert type(attention) is ConvertedMultiheadAttention

    def test_our_module_takes_over_its_weights(self):
        ours, x = converted(nn.MultiheadAttention(16, 4, batch_first=True)), torch.randn(2, 5, 16)
        assert_close(attn_ext.MultiHeadAttention.from_torch(ours)(x)[0], ours(x, x, x)[0])


class TestTransformersOfTorch:
    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("gradients", [True, False])
    def test_encoder(self, gradients, batch_first, norm_first, count_calls):
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first, norm_first=norm_first)
        theirs = nn.TransformerEncoder(randomize(layer), 2).eval()
        ours = converted(theirs)
        x = torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)
        padding = torch.arange(5) >= torch.tensor([[5], [3]])
        visible = ~padding if batch_first else ~padding.T
        triangle = nn.Transformer.generate_square_subsequent_mask(5)
        options = [{}, {"src_key_padding_mask": padding}, {"mask": triangle}]
        options += [
            {"mask": triangle, "is_causal": True},
            {"mask": triangle, "src_key_padding_mask": padding},
        ]
        with torch.set_grad_enabled(gradients):
            for option in options:
                actual, expected = ours(x, **option), theirs(x, **option)
                assert_close(actual[visible], expected[visible], atol=1e-4, rtol=1e-4)
        assert len(count_calls) == 2 * len(options)

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_transformer(self, batch_first, count_calls):
        theirs = nn.Transformer(16, 4, 1, 2, 32, batch_first=batch_first).eval()
        ours, report = copy.deepcopy(theirs), None
        report = attn_ext.convert(ours)
        assert set(report.reached) == {
            "encoder.layers.0.self_attn",
            *(f"decoder.layers.{i}.{name}" for i in range(2) for name in ("self_attn", "multihead_attn")),
        }
        assert report.not_reached == {}
        source, target = torch.randn(7, 2, 16), torch.randn(5, 2, 16)
        if batch_first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        padding = torch.arange(7) >= torch.tensor([[7], [4]])
        options = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5)}
        options |= {
            "src_key_padding_mask": padding,
            "memory_key_padding_mask": padding,
            "tgt_is_causal": True,
        }
        assert_close(ours(source, target, **options), theirs(source, target, **options))
        assert len(count_calls) == 5
        with torch.no_grad():
            assert_close(ours(source, target, **options), theirs(source, target, **options))
        assert len(count_calls) == 10

    def test_a_step_of_an_optimizer_made_before(self):
        theirs = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        ours, x = copy.deepcopy(theirs), torch.randn(5, 2, 16)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (theirs, ours)]
        attn_ext.convert(ours)
        for module, optimizer in zip((theirs, ours), optimizers, strict=True):
            module(x).square().sum().backward()
            optimizer.step()
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert_close(ours.state_dict(), theirs.state_dict(), atol=1e-4, rtol=1e-4)

    def test_nested_tensors_are_allowed_again_after_undo(self):
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 1).eval()
        x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [3]])
        with torch.no_grad():
            expected = encoder(x, src_key_padding_mask=padding)
            report = attn_ext.convert(encoder)
            assert not encoder.use_nested_tensor
            report.undo()
            assert encoder.use_nested_tensor
            assert_close(encoder(x, src_key_padding_mask=padding), expected, rtol=0, atol=0)


class TestReport:
    def test_keeps_what_a_module_is(self):
        module = nn.MultiheadAttention(16, 4)
        parameters, state = list(module.parameters()), list(module.state_dict())
        report = attn_ext.convert(module)
        assert report.reached == {"": DONE}
        assert isinstance(module, nn.MultiheadAttention)
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        assert list(module.state_dict()) == state

    def test_hooks_stay(self):
        module, seen = nn.MultiheadAttention(16, 4), []
        module.register_forward_hook(lambda *_: seen.append("forward"))
        attn_ext.convert(module)
        x = torch.randn(5, 2, 16)
        module(x, x, x)
        assert seen == ["forward"]

    def test_a_module_at_two_paths(self):
        attention = nn.MultiheadAttention(16, 4)
        model = nn.ModuleDict({"a": attention, "b": attention})
        report = attn_ext.convert(model)
        assert report.reached == {"a": DONE, "b": DONE}
        report.undo()
        assert type(model["b"]) is nn.MultiheadAttention

    def test_twice_and_undone_twice(self):
        model = nn.TransformerEncoderLayer(16, 4)
        first = attn_ext.convert(model)
        second = attn_ext.convert(model)
        assert second.reached == first.reached
        second.undo()  # had changed nothing
        assert type(model.self_attn) is ConvertedMultiheadAttention
        first.undo()
        first.undo()
        assert type(model.self_attn) is nn.MultiheadAttention
        assert model.self_attn._qkv_same_embed_dim
        assert attn_ext.convert(model).reached == first.reached

    def test_what_others_did_since_stays(self):
        module = nn.MultiheadAttention(16, 4)
        report = attn_ext.convert(module)

        class Later(ConvertedMultiheadAttention):
            pass

        module.__class__ = Later
        report.undo()
        assert type(module) is Later

    def test_parametrized_after_it(self):
        theirs = nn.MultiheadAttention(16, 4)
        ours, x = converted(theirs), torch.randn(5, 2, 16)
        for module in (theirs, ours):
            parametrizations.weight_norm(module, "in_proj_weight")
        assert_close(ours(x, x, x), theirs(x, x, x))

    def test_names_what_is_not_reached_and_why(self):
        class Own(nn.MultiheadAttention):
            pass

        class CallsSdpa(nn.Module):
            def forward(self, x):
                def inner(y):
                    return F.scaled_dot_product_attention(y, y, y)

                return inner(x)

        class WindowAttention(nn.Module):
            def forward(self, x):
                return (x @ x.mT).softmax(-1) @ x

        class Processor:
            def __call__(self, x):
                return F.scaled_dot_product_attention(x, x, x)

        replaced = nn.MultiheadAttention(16, 4)
        replaced.forward = lambda *_: None
        parametrized = parametrizations.weight_norm(nn.MultiheadAttention(16, 4), "in_proj_weight")
        assert parametrize.is_parametrized(parametrized)
        switched_off = CallsSdpa()
        switched_off.fused_attn = False
        with_processor = nn.Module()
        with_processor.processor = Processor()
        model = nn.ModuleDict(
            {
                "good": nn.MultiheadAttention(16, 4),
                "ours": attn_ext.SelfAttention(16),
                "bias_kv": nn.MultiheadAttention(16, 4, add_bias_kv=True),
                "zero": nn.MultiheadAttention(16, 4, add_zero_attn=True),
                "quantizable": torch.ao.nn.quantizable.MultiheadAttention(16, 4),
                "parametrized": parametrized,
                "subclass": Own(16, 4),
                "replaced": replaced,
                "calls": CallsSdpa(),
                "switched_off": switched_off,
                "processor": with_processor,
                "own": WindowAttention(),
                "linear": nn.Linear(16, 16),
            }
        )
        report = attn_ext.convert(model)
        assert report.reached == {"good": DONE, "ours": "attn_ext's own module"}
        assert {path: reason.split(":")[0] for path, reason in report.not_reached.items()} == {
            "bias_kv": "add_bias_kv=True",
            "zero": "add_zero_attn=True",
            "quantizable": "a quantised attention, "
            "torch.ao.nn.quantizable.modules.activation.MultiheadAttention",
            "parametrized": "its parameters are parametrized",
            "subclass": "a subclass of nn.MultiheadAttention, Own, which may compute something else",
            "replaced": "its forward has been replaced, by accelerate or the like",
            "calls": "calls F.scaled_dot_product_attention",
            "switched_off": "its fused_attn is False, so it does not call F.scaled_dot_product_attention",
            "processor": "calls F.scaled_dot_product_attention",
            "own": "WindowAttention has an attention of its own",
        }

    def test_other_devices_are_named(self, monkeypatch):
        module = nn.MultiheadAttention(16, 4)
        fake = types.SimpleNamespace(type="cuda")
        monkeypatch.setattr(
            nn.Linear, "__getattr__", lambda self, name: types.SimpleNamespace(device=fake), raising=False
        )
        reason = integration._why_not(module)
        monkeypatch.undo()
        assert reason == "its parameters are on cuda, and attn_ext is fast on the CPU"

    @pytest.mark.parametrize("columns", [40, 80, 200])
    def test_prints_a_table_that_fits(self, columns, monkeypatch):
        monkeypatch.setenv("COLUMNS", str(columns))
        long_name = "a_module_with_a_long_name_" * 2
        long = nn.ModuleDict({long_name: nn.TransformerEncoderLayer(16, 4)})
        long["other"] = nn.MultiheadAttention(16, 4, add_zero_attn=True)
        lines = str(attn_ext.convert(long)).splitlines()
        assert max(map(len, lines)) <= columns
        assert lines[0] == "reached: 1"
        assert "not reached: 1" in lines
        if columns == 200:
            assert lines[1] == f"  {long_name}.self_attn  {DONE}"
            assert lines[3] == f"  {'other':5}  add_zero_attn=True: its extra key has no counterpart"

    def test_is_the_table_that_the_page_about_models_shows(self):
        page = (Path(__file__).parents[1] / "docs/models.md").read_text(encoding="utf-8")
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        assert str(attn_ext.convert(nn.TransformerEncoder(layer, num_layers=2))) in page

    def test_nothing_to_convert_is_an_error_that_names_what_there_is(self):
        with pytest.raises(
            ValueError,
            match=r"^expected a model with attention, but found none among the 2 modules of Sequential$",
        ):
            attn_ext.convert(nn.Sequential(nn.Linear(2, 2)))
        model = nn.ModuleList(nn.MultiheadAttention(16, 4, add_zero_attn=True) for _ in range(5))
        with pytest.raises(
            ValueError,
            match=r"^found no attention in ModuleList that can be converted, but only "
            r"0 \(add_zero_attn=True: .*\); 1 \(.*\); 2 \(.*\), and 2 more$",
        ):
            attn_ext.convert(model)
        with pytest.raises(TypeError, match=r"^expected a torch.nn.Module, got str$"):
            attn_ext.convert("model")

    def test_a_failure_halfway_leaves_nothing_done(self, monkeypatch):
        model = nn.ModuleList([nn.MultiheadAttention(16, 4), nn.MultiheadAttention(16, 4)])
        original = integration._why_not
        monkeypatch.setattr(integration, "_why_not", lambda m: 1 / 0 if m is model[1] else original(m))
        with pytest.raises(ZeroDivisionError):
            attn_ext.convert(model)
        assert [type(module) for module in model] == [nn.MultiheadAttention] * 2
        assert model[0]._qkv_same_embed_dim


class TestTransformersLibrary:
    """The part that is another file's, by a stand-in that keeps its contract."""

    @pytest.fixture
    def model(self, monkeypatch):
        class PreTrainedModel(nn.Module):
            def __init__(self):
                super().__init__()
                self.self_attention = nn.Identity()
                self.attention = nn.MultiheadAttention(16, 4)

        modeling = types.ModuleType("transformers.modeling_utils")
        modeling.PreTrainedModel = PreTrainedModel
        monkeypatch.setitem(sys.modules, "transformers.modeling_utils", modeling)
        self.log = []

        def convert(model):
            self.log.append(model)
            undo = types.MethodType(lambda log: log.append("undone"), self.log)
            return {"inner.self_attention": "set to attn_ext"}, {"inner.other": "a reason"}, undo

        stand_in = types.ModuleType("attn_ext.integrations.transformers")
        stand_in.convert = convert
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        return nn.ModuleDict({"inner": PreTrainedModel(), "outer": nn.MultiheadAttention(16, 4)})

    def test_is_asked_once_and_its_answer_joined(self, model):
        report = attn_ext.convert(model)
        assert self.log == [model]
        assert report.reached == {
            "inner.self_attention": "set to attn_ext",
            "inner.attention": DONE,
            "outer": DONE,
        }
        assert report.not_reached == {"inner.other": "a reason"}
        report.undo()
        assert self.log == [model, "undone"]
        assert type(model["outer"]) is nn.MultiheadAttention

    def test_is_undone_when_the_rest_fails(self, model, monkeypatch):
        monkeypatch.setattr(integration, "_why_not", lambda m: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attn_ext.convert(model)
        assert self.log == [model, "undone"]

    def test_is_not_asked_without_a_model_of_its_own(self, model):
        attn_ext.convert(model["outer"])
        assert self.log == []


class TestModelsOfOthers:
    @pytest.mark.parametrize("gradients", [True, False])
    def test_torchvision(self, gradients, count_calls):
        torchvision = pytest.importorskip("torchvision")
        theirs = torchvision.models.VisionTransformer(32, 16, 2, 4, 32, 64, num_classes=3).eval()
        nn.init.normal_(theirs.heads.head.weight)
        ours = converted(theirs)
        x = torch.randn(1, 3, 32, 32)
        with torch.set_grad_enabled(gradients):
            assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)
        assert len(count_calls) == 2

    def test_torchvision_swin_has_its_own(self):
        torchvision = pytest.importorskip("torchvision")
        swin = torchvision.models.SwinTransformer([4, 4], 16, [2], [2], [4, 4])
        with pytest.raises(ValueError, match=r"ShiftedWindowAttention has an attention of its own"):
            attn_ext.convert(swin)

    @pytest.mark.parametrize("gradients", [True, False])
    def test_open_clip(self, gradients, count_calls):
        open_clip = pytest.importorskip("open_clip")
        theirs = open_clip.transformer.Transformer(32, 2, 4).eval()
        ours = copy.deepcopy(theirs)
        report = attn_ext.convert(ours)
        assert report.reached == {f"resblocks.{i}.attn": DONE for i in range(2)}
        assert report.not_reached == {}
        x, triangle = torch.randn(2, 5, 32), nn.Transformer.generate_square_subsequent_mask(5)
        with torch.set_grad_enabled(gradients):
            assert_close(ours(x), theirs(x))
            assert_close(ours(x, attn_mask=triangle), theirs(x, attn_mask=triangle))
        assert len(count_calls) == 4

    def test_timm_calls_f_sdpa(self):
        timm = pytest.importorskip("timm")
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
        with pytest.raises(
            ValueError, match=r"blocks\.0\.attn \(calls F\.scaled_dot_product_attention: attn"
        ):
            attn_ext.convert(model)

    def test_diffusers_calls_f_sdpa(self):
        models = pytest.importorskip("diffusers.models.attention_processor")
        attention = nn.ModuleDict({"attn1": models.Attention(16, heads=2, dim_head=8)})
        with pytest.raises(ValueError, match=r"attn1 \(calls F\.scaled_dot_product_attention"):
            attn_ext.convert(attention)
