"""`attn_ext.record`: what it keeps, of which calls, under which names, and what it refuses."""
# ruff: noqa: PT012, SIM117

import contextlib
import copy
import errno
import io
import json
import re
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import attn_ext
from attn_ext import recording, reference
from attn_ext.recording import _call, _store
from attn_ext.recording._call import Call

KINDS = ("weights", "key_mass", "lse", "entropy", "top")

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Ours(nn.Module):
    """One head, many heads, groups of heads."""

    def __init__(self):
        super().__init__()
        self.one = attn_ext.SelfAttention(16)
        self.many = attn_ext.MultiHeadAttention(16, 4)
        self.grouped = attn_ext.MultiHeadAttention(16, 4, num_kv_heads=2)

    def forward(self, x):
        x = self.many(self.one(x, is_causal=True)[0], is_causal=True)[0]
        return self.grouped(x)[0]


class Theirs(nn.Module):
    """Attention by the function of torch."""

    def __init__(self, **options):
        super().__init__()
        self.proj = nn.Linear(16, 48)
        self.options = options

    def forward(self, x):
        query, key, value = self.proj(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        output = F.scaled_dot_product_attention(query, key, value, **self.options)
        return output.transpose(-3, -2).flatten(-2)


@pytest.fixture
def x():
    return torch.randn(2, 5, 16)


def expected_of(weights):
    """Every kind from the weights, in float64; lse apart."""
    p = weights.double()
    return {
        "weights": p,
        "key_mass": p.sum(-2),
        "entropy": -torch.special.xlogy(p, p).sum(-1),
        "top": p.topk(min(3, p.shape[-1])).values,
    }


class TestSideOutputs:
    """What is computed of one call, against the float64 reference."""

    CASES = {
        "plain": {},
        "causal": {"is_causal": True},
        "offset": {"is_causal": True, "query_offset": 3},
        "window": {"window_left": 2, "window_right": 1},
        "scale": {"scale": 0.0},
        "groups": {"enable_gqa": True},
        "bool mask": {"attn_mask": torch.arange(9) % 3 != 0},
        "mask a head": {"attn_mask": torch.rand(4, 6, 9) < 0.6},
        "bias": {"attn_mask": torch.randn(2, 1, 6, 9)},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.randn(4)},
    }

    @pytest.fixture
    def make(self):
        def make(case, dtype=torch.float32):
            key_heads = 2 if case == "groups" else 4
            query, key = torch.randn(2, 4, 6, 8), torch.randn(2, key_heads, 9, 8)
            arguments = {
                name: value.to(dtype)
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
                for name, value in self.CASES[case].items()
            }
            return Call(
                query.to(dtype), key.to(dtype), torch.randn(2, key_heads, 9, 5).to(dtype), **arguments
            )

        return make

    @staticmethod
    def reference(call):
        arguments = {name: getattr(call, name) for name in Call.__dataclass_fields__}
        return reference.sdpa_with_weights(**arguments)[1], reference.sdpa_with_lse(**arguments)[1]

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("heads", [None, [2, 0]], ids=["all heads", "some heads"])
    @pytest.mark.parametrize("rows", [None, [1, 2, 5], slice(-2, None)], ids=["all rows", "some", "last two"])
    def test_agree_with_the_reference(self, make, case, heads, rows):
        call = make(case)
        weights, lse = self.reference(call)
        if heads is not None:
            weights, lse = weights[:, heads], lse[:, heads]
        if rows is not None:
            weights, lse = weights[:, :, rows], lse[:, :, rows]
        calls = call.of_heads(heads).of_rows(rows)
        expected = expected_of(weights) | {"lse": lse}
        for what in ("weights", "key_mass", "lse", "entropy"):
            actual = getattr(_call, what)(calls)
            torch.testing.assert_close(actual.double(), expected[what].double(), rtol=1e-5, atol=2e-6)
        values, keys = _call.top(calls, 3)
        torch.testing.assert_close(values.double(), expected["top"], rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(weights.double().gather(-1, keys), expected["top"], rtol=1e-5, atol=2e-6)

    @pytest.mark.parametrize("case", CASES)
    def test_in_chunks_of_rows(self, make, case, monkeypatch):
        call = make(case)
        whole = _call.entropy([call]), *_call.top([call], 3)
        monkeypatch.setattr(_call, "CHUNK_BYTES", 2 * 4 * 4 * 9 * 2)  # two rows
        assert len(call.in_chunks()) == 3
        for part, all_at_once in zip((_call.entropy([call]), *_call.top([call], 3)), whole, strict=True):
            torch.testing.assert_close(part, all_at_once)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_entropy_of_half_inputs_has_the_accuracy_of_float32(self, make, dtype):
        call = make("plain", dtype)
        weights = self.reference(call.in_float())[0]
        torch.testing.assert_close(
            _call.entropy([call]).double(), expected_of(weights)["entropy"].double(), rtol=1e-5, atol=1e-5
        )

    def test_a_row_that_sees_no_key_has_no_entropy(self, make):
        mask = torch.ones(6, 9, dtype=torch.bool)
        mask[3] = False
        call = make("plain")
        call = Call(call.query, call.key, call.value, mask)
        assert torch.equal(_call.entropy([call])[:, :, 3], torch.zeros(2, 4))

    def test_hidden_nan_shows_nowhere(self):
        query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
        key[..., 2, :] = torch.nan
        call = Call(query, key, key, torch.tensor([True, True, False]))
        for what in ("weights", "key_mass", "lse", "entropy"):
            assert getattr(_call, what)([call]).isfinite().all()

    @pytest.mark.parametrize("what", ["key_mass", "lse", "entropy"])
    def test_hold_no_matrix(self, what):
        """Of 16 GB here."""
        query = torch.randn(1, 1, 64, 8).expand(1, 1024, 64, 8)
        key = torch.randn(1, 1, 1, 8).expand(1, 1024, 65536, 8)
        assert getattr(_call, what)([Call(query[:, :1], key[:, :1], key[:, :1])]).isfinite().all()
        assert Call(query, key, key).in_chunks()[0].num_rows == 1


class TestRoutes:
    def test_our_modules(self, x):
        model = Ours()
        with attn_ext.record(model, what=KINDS, top=3) as seen:
            model(x)
        assert seen.layers == ("one", "many", "grouped")
        assert seen["one"][0].shape == (2, 1, 5, 5)
        weights = model.many(model.one(x, is_causal=True)[0], is_causal=True, need_weights=True)[1]
        torch.testing.assert_close(seen["many"][0], weights.detach())
        for what, expected in expected_of(weights.detach()).items():
            actual = seen["many", what][0]
            actual = actual.values if what == "top" else actual
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize(
        "options", [{}, {"is_causal": True}, {"attn_mask": torch.tensor([[True, False] * 2 + [True]])}]
    )
    def test_the_function_of_torch(self, x, options):
        model = nn.Sequential(Theirs(**options), Theirs(**options))
        before = model(x)
        with attn_ext.record(model) as seen:
            assert torch.equal(model(x), before)
        query, key, value = model[0].proj(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        torch.testing.assert_close(
            seen["0"][0], attn_ext.sdpa_with_weights(query, key, value, **options)[1].detach()
        )
        assert seen.layers == ("0", "1")

    def test_the_function_of_torch_taken_over_by_its_name(self, x, monkeypatch):
        monkeypatch.setitem(globals(), "scaled_dot_product_attention", F.scaled_dot_product_attention)

        class Early(nn.Module):
            def forward(self, x):
                return scaled_dot_product_attention(x, x, x)  # noqa: F821

        model = Early()
        with attn_ext.record(model) as seen:
            model(x)
        assert seen.as_tuple()[0].shape == (1, 2, 5, 5)
        assert scaled_dot_product_attention is F.scaled_dot_product_attention  # noqa: F821

    @pytest.mark.parametrize("mode", ["LOWER_RIGHT", "UPPER_LEFT"])
    def test_causal_bias(self, mode):
        from torch.nn.attention.bias import causal_lower_right, causal_upper_left

        bias = {"LOWER_RIGHT": causal_lower_right, "UPPER_LEFT": causal_upper_left}[mode](3, 5)

        class Biased(nn.Module):
            def forward(self, query, key):
                return F.scaled_dot_product_attention(query, key, key, bias)

        model, query, key = Biased(), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
        before = model(query, key)
        with attn_ext.record(model) as seen:
            assert torch.equal(model(query, key), before)
        visible = torch.ones(3, 5).tril(2 if mode == "LOWER_RIGHT" else 0)
        assert torch.equal((seen[0][0] > 0).float(), visible.expand(1, 2, 3, 5))

    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize(
        "extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 8, "vdim": 8}]
    )
    @pytest.mark.parametrize("need_weights", [True, False])
    def test_multihead_attention_of_torch(self, batch_first, extra, need_weights):
        model = nn.MultiheadAttention(16, 4, batch_first=batch_first, **extra).eval()
        query = torch.randn(2, 5, 16)
        key = torch.randn(2, 7, extra.get("kdim", 16))
        padding = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
        if not batch_first:
            query, key = query.transpose(0, 1), key.transpose(0, 1)
        call = lambda **more: model(query, key, key, key_padding_mask=padding, **more)  # noqa: E731
        output, weights = call(need_weights=True, average_attn_weights=False)
        with attn_ext.record(model) as seen:
            recorded_output, _ = call(need_weights=need_weights)
        torch.testing.assert_close(recorded_output, output)
        torch.testing.assert_close(seen[0][0], weights.detach())

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_transformer_encoder(self, x, context):
        """Whose fused path in evaluation calls nothing that could be seen."""
        layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        fused = torch.backends.mha.get_fastpath_enabled()
        with context():
            before = model(x)
            with attn_ext.record(model) as seen:
                assert torch.allclose(model(x), before, atol=1e-6)
        assert seen.layers == ("layers.0.self_attn", "layers.1.self_attn")
        assert not seen[0][0].is_inference()
        torch.testing.assert_close(seen[1][0].sum(-1), torch.ones(2, 4, 5))
        assert torch.backends.mha.get_fastpath_enabled() == fused

    def test_transformer_decoder_has_two_attentions_a_layer(self, x):
        model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, batch_first=True), 1).eval()
        with attn_ext.record(model) as seen:
            model(x, torch.randn(2, 7, 16))
        assert seen.layers == ("layers.0.self_attn", "layers.0.multihead_attn")
        assert [t.shape[-1] for t in seen.as_tuple()] == [5, 7]

    @pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
    def test_torchscript_names_the_modules_inside(self, x, context, tmp_path):
        model = Ours()
        torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
        with attn_ext.record(model) as expected:
            model(x)
        for scripted in (torch.jit.script(model), torch.jit.load(tmp_path / "model.pt")):
            with context(), attn_ext.record(scripted) as seen:
                scripted(x)
                scripted(x)
            assert seen.layers == expected.layers
            for path in seen.layers:
                torch.testing.assert_close(seen[path], expected[path] * 2)

    def test_torchscript_that_calls_the_function_of_torch(self, x):
        class Plain(nn.Module):
            def forward(self, x):
                return F.scaled_dot_product_attention(x, x, x)

        model = torch.jit.script(nn.Sequential(Plain(), Plain()))
        with torch.inference_mode(), attn_ext.record(model) as seen:
            model(x)
        assert seen.layers == ("0", "1")

    def test_exported_programs_name_the_modules_that_were_in_them(self, x):
        model = Ours()
        exported = torch.export.export(model, (x,)).module()
        with attn_ext.record(model, what=("weights", "entropy")) as expected:
            model(x)
        for context in (torch.enable_grad, torch.inference_mode):
            with context(), attn_ext.record(exported, what=("weights", "entropy")) as seen:
                exported(x)
            assert seen.layers == expected.layers
            torch.testing.assert_close(seen.as_tuple(), expected.as_tuple())
        with attn_ext.record(exported, layers="many") as seen:
            exported(x)
        assert seen.layers == ("many",)

    def test_compiled_models(self, x):
        model = Ours()
        compiled = torch.compile(model, backend="eager")
        compiled(x)
        with attn_ext.record(compiled) as seen:
            compiled(x)
        assert seen.layers == ("one", "many", "grouped")

    def test_autocast(self, x):
        for model in (attn_ext.MultiHeadAttention(16, 4), Theirs()):
            with torch.autocast("cpu", torch.bfloat16), attn_ext.record(model, what=KINDS) as seen:
                model(x)
            assert seen[0][0].dtype == torch.bfloat16
            assert seen[0, "entropy"][0].dtype == torch.float32

    def test_a_model_that_is_trained(self, x):
        model, twin = Ours(), None
        twin = copy.deepcopy(model)
        twin(x).sum().backward()
        with attn_ext.record(model, what=KINDS) as seen:
            model(x).sum().backward()
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
        )
        assert not seen["many"][0].requires_grad

    def test_checkpointed_layers_are_recorded_once(self, x):
        model = Ours()
        model.register_forward_hook(lambda *_: None)

        class Saving(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

        saving = Saving()
        with attn_ext.record(saving) as seen:
            saving(x.requires_grad_()).sum().backward()
        assert {len(calls) for calls in seen.calls.values()} == {1}

    def test_dropout_is_left_out(self, x):
        for make in (lambda p: attn_ext.MultiHeadAttention(16, 4, dropout=p), lambda p: Theirs(dropout_p=p)):
            dropped, plain = make(0.5), make(0.0)
            plain.load_state_dict(dropped.state_dict())
            with attn_ext.record(dropped) as seen, attn_ext.record(plain) as expected:
                dropped(x), plain(x)
            assert torch.equal(seen[0][0], expected[0][0])

    def test_the_generator_of_random_numbers_goes_on_as_it_would(self, x):
        model = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
        torch.manual_seed(3)
        expected = model(x, x, x)[0]
        torch.manual_seed(3)
        with attn_ext.record(model, what=KINDS):
            assert torch.equal(model(x, x, x)[0], expected)

    def test_key_value_cache_gives_a_tensor_a_call(self):
        class Cached(nn.Module):
            def forward(self, query, key):
                return attn_ext.sdpa(
                    query, key, key, is_causal=True, query_offset=key.shape[-2] - query.shape[-2]
                )

        model, keys = Cached(), torch.randn(1, 2, 7, 4)
        with attn_ext.record(model, rows=-1) as seen:
            model(keys[..., :5, :], keys[..., :5, :])
            for length in (6, 7):
                model(keys[..., length - 1 : length, :], keys[..., :length, :])
        assert [tuple(t.shape) for t in seen[0]] == [(1, 2, 1, 5), (1, 2, 1, 6), (1, 2, 1, 7)]
        whole = attn_ext.sdpa_with_weights(keys, keys, keys, is_causal=True)[1]
        torch.testing.assert_close(seen[0][2], whole[..., 6:, :])
        steps = seen.as_tuple()
        assert len(steps) == 3
        assert len(steps[0]) == 1


class TestChoice:
    def test_layers_by_path_part_pattern_and_number(self, x):
        layer = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        model = nn.TransformerEncoder(layer, 3)
        names = [f"layers.{i}.self_attn" for i in range(3)]
        for layers, expected in (
            ("layers.1.self_attn", names[1:2]),
            ("layers.2", names[2:]),
            ("*.self_attn", names),
            ("layers.[01].*", names[:2]),
            (1, names[1:2]),
            ([0, "layers.2"], [names[0], names[2]]),
        ):
            with attn_ext.record(model, layers=layers) as seen:
                model(x)
            assert list(seen.layers) == expected

    def test_heads_and_rows(self, x):
        model = attn_ext.MultiHeadAttention(16, 4, num_kv_heads=2)
        with attn_ext.record(model) as whole:
            model(x, is_causal=True)
        with attn_ext.record(model, heads=[3, 1], rows=[0, 1, 4]) as seen:
            model(x, is_causal=True)
        torch.testing.assert_close(seen[0][0], whole[0][0][:, [3, 1]][:, :, [0, 1, 4]])
        assert seen.calls[""][0] == recording._recording.CallShape(5, 5, [0, 1, 4], [3, 1])

    def test_nothing_is_kept_that_was_not_asked_for(self, x):
        model = Ours()
        with attn_ext.record(model, what="lse", layers="many") as seen:
            model(x)
        assert {what for what, _ in seen._store.tensors} == {"lse"}
        with pytest.raises(KeyError, match="'weights' was not recorded, but lse"):
            seen["many", "weights"]
        with pytest.raises(KeyError, match="'man' was not recorded; close to it: 'many'"):
            seen["man"]

    def test_more_than_may_be_kept(self, x):
        model = attn_ext.MultiHeadAttention(16, 4)
        size = 2 * 4 * 5 * 5 * 4
        with attn_ext.record(model, max_bytes=size) as seen:
            model(x)
        with pytest.raises(MemoryError, match=f"to {2 * size:,} bytes, and max_bytes is {size:,}"):
            with attn_ext.record(model, max_bytes=size) as seen:
                model(x)
                model(x)
        assert len(seen[0]) == 1
        model(x)

    def test_more_than_may_be_kept_inside_of_torchscript(self, x):
        """Which loses the messages of errors."""
        model = torch.jit.script(Ours())
        with (
            pytest.raises(MemoryError, match="max_bytes is 10: ask for less"),
            attn_ext.record(model, max_bytes=10),
        ):
            model(x)

    def test_a_refusal_that_the_model_catches_is_raised_at_the_end(self, x):
        class Catches(nn.Module):
            def forward(self, x):
                try:
                    return attn_ext.sdpa(x, x, x)
                except MemoryError:
                    return x

        model = Catches()
        with pytest.raises(MemoryError), attn_ext.record(model, max_bytes=10):
            model(x)

    def test_the_default_limit_refuses_before_it_computes(self):
        """A terabyte of weights."""
        query, key = torch.empty(1, 1, 256, 1), torch.empty(1).expand(1, 1, 1 << 30, 1)
        watch = attn_ext.record(nn.Identity())
        watch.__enter__()
        try:
            with pytest.raises(MemoryError, match=f"max_bytes is {2 << 30:,}"):
                watch._check_bytes("", [Call(query, key, key)])
        finally:
            watch._exit.close()


class TestRefusals:
    MODEL = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"what": "weight"}, "what='weight' is not one of .*; close to it: weights"),
            ({"what": []}, "what is empty"),
            ({"layers": "layers.0.self_atn"}, "no such module; close to it: layers.[01].self_attn"),
            ({"layers": "nowhere.*"}, "no such module$"),
            ({"layers": []}, "layers is empty"),
            ({"layers": -1}, "name it by its path"),
            ({"top": 0}, "top must be at least 1, got 0"),
        ],
    )
    def test_before_anything_runs(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            attn_ext.record(self.MODEL, **arguments)

    def test_what_is_no_module(self):
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got dict: of a pipeline"):
            attn_ext.record({})

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"layers": 2}, "no attention ran in layers=2: it ran in layers.0.self_attn, layers.1.self_attn"),
            ({"layers": "layers.0.linear1"}, "no attention ran in layers='layers.0.linear1'"),
        ],
    )
    def test_layers_that_do_not_attend(self, x, arguments, message):
        with pytest.raises(ValueError, match=message), attn_ext.record(self.MODEL, **arguments):
            self.MODEL(x)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"heads": 4}, "heads=4: there is no 4 in an attention of 4 heads"),
            ({"rows": [0, -6]}, r"there is no -6 in an attention of 5 rows"),
        ],
    )
    def test_heads_and_rows_that_are_not_there(self, x, arguments, message):
        with pytest.raises(IndexError, match=message), attn_ext.record(self.MODEL, **arguments):
            self.MODEL(x)

    def test_a_model_without_attention(self, x):
        model = nn.Linear(16, 16)
        with pytest.raises(ValueError, match="no attention ran in the with block"), attn_ext.record(model):
            model(x)

    def test_attention_of_its_own_is_named(self, x):
        class OwnAttention(nn.Module):
            def forward(self, x):
                return (x @ x.mT).softmax(-1) @ x

        own = OwnAttention()
        with pytest.raises(ValueError, match="the model: it computes attention by code of its own"):
            with attn_ext.record(own):
                own(x)
        both = nn.Sequential(OwnAttention(), attn_ext.MultiHeadAttention(16, 4))
        with pytest.warns(UserWarning, match="not recorded: 0: it computes attention by code of its own"):
            with attn_ext.record(both) as seen:
                both(x)
        assert seen.layers == ("1",)
        assert list(seen.not_recorded) == ["0"]

    def test_layers_called_unequally_are_no_tuple(self, x):
        model = Ours()
        with attn_ext.record(model) as seen:
            model(x)
            model.many(x)
        with pytest.raises(ValueError, match="one was called 1 times and many 2 times"):
            seen.as_tuple()


class TestWhereItHolds:
    def test_an_exception_inside_leaves_nothing_behind(self, x):
        before = F.scaled_dot_product_attention, F.multi_head_attention_forward
        model = Ours()
        with pytest.raises(ZeroDivisionError), attn_ext.record(model) as seen:
            model(x)
            1 / 0  # noqa: B018
        assert (F.scaled_dot_product_attention, F.multi_head_attention_forward) == before
        assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
        assert len(seen["many"]) == 1
        model(x)
        assert len(seen["many"]) == 1

    def test_an_exception_inside_the_model_that_is_caught(self, x):
        class Fails(nn.Module):
            def forward(self, x):
                raise ZeroDivisionError

        class Tries(nn.Module):
            def __init__(self):
                super().__init__()
                self.fails, self.attends = Fails(), Theirs()

            def forward(self, x):
                try:
                    self.fails(x)
                except ZeroDivisionError:
                    return self.attends(x) + F.scaled_dot_product_attention(x, x, x)

        model = Tries()
        with attn_ext.record(model) as seen:
            model(x)
        assert seen.layers == ("attends", "")

    def test_other_models_are_left_out(self, x):
        model, other = Ours(), Ours()
        with attn_ext.record(model) as seen:
            other(x)
            model(x)
            attn_ext.sdpa(x, x, x)
            F.scaled_dot_product_attention(x, x, x)
        assert {len(calls) for calls in seen.calls.values()} == {1}

    @pytest.mark.parametrize("make", [Ours, Theirs, lambda: TestRefusals.MODEL])
    def test_nested(self, x, make):
        model = make()
        with attn_ext.record(model, what=KINDS) as outer:
            with attn_ext.record(model, what=("weights", "entropy")) as inner:
                model(x)
            model(x)
        for path in inner.layers:
            assert len(inner[path]) == 1
            assert len(outer[path]) == 2
            assert torch.equal(inner[path][0], outer[path][0])

    def test_threads_record_their_own_calls(self, x):
        import torch._dynamo

        model = nn.Sequential(Theirs(), Ours())
        barrier = threading.Barrier(3)
        seen = {}

        def run(name):
            with attn_ext.record(model, what=KINDS) as seen[name]:
                barrier.wait()
                for _ in range(name):
                    model(x)
                barrier.wait()

        threads = [threading.Thread(target=run, args=(n,)) for n in (1, 2, 3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for name in (1, 2, 3):
            assert {len(calls) for calls in seen[name].calls.values()} == {name}
        assert F.scaled_dot_product_attention.__name__ == torch._C._nn.scaled_dot_product_attention.__name__
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
        assert torch._dynamo.eval_frame._stance.stance == "default"  # compiled models compile again

    def test_modules_that_run_in_other_threads_name_nothing(self, x):
        entered, leave = threading.Event(), threading.Event()

        class Waits(nn.Module):
            def forward(self, x):
                attn_ext.sdpa(x, x, x)
                entered.set()
                leave.wait(10)

        class Meets(nn.Module):
            def __init__(self):
                super().__init__()
                self.waits = Waits()

            def forward(self, x):
                thread = threading.Thread(target=self.waits, args=(x,))
                thread.start()
                assert entered.wait(10)
                output = attn_ext.sdpa(x, x, x)
                leave.set()
                thread.join()
                return output

        model = Meets()
        with attn_ext.record(model) as seen:
            model(x)
        assert seen.layers == ("",)
        assert len(seen[0]) == 1

    def test_shared_modules_have_one_name(self, x):
        shared = Theirs()
        model = nn.Sequential(shared, shared)
        with attn_ext.record(model) as seen:
            model(x)
        assert seen.layers == ("0",)
        assert len(seen[0]) == 2


class TestFile:
    @pytest.fixture(autouse=True)
    def _numpy(self):
        pytest.importorskip("numpy")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    def test_holds_what_memory_would(self, x, tmp_path, dtype):
        model = Ours().to(dtype)
        x = x.to(dtype)
        with attn_ext.record(model, what=KINDS, rows=[0, 2]) as expected:
            model(x)
        with attn_ext.record(model, what=KINDS, rows=[0, 2], to=tmp_path / "seen.npz") as seen:
            model(x)
            assert not (tmp_path / "seen.npz").exists()
            with pytest.raises(RuntimeError, match="can be read after the with block"):
                seen["many"]
        for file in (seen, recording.load(tmp_path / "seen.npz")):
            assert file.layers == expected.layers
            assert file.calls == expected.calls
            for path in file.layers:
                for what in KINDS:
                    torch.testing.assert_close(file[path, what], expected[path, what], rtol=0, atol=0)
        assert [path.name for path in tmp_path.iterdir()] == ["seen.npz"]

    def test_opens_in_numpy(self, x, tmp_path):
        import numpy

        model = Ours()
        with attn_ext.record(model, to=tmp_path / "seen.npz") as seen:
            model(x)
        with numpy.load(tmp_path / "seen.npz") as arrays:
            assert numpy.array_equal(arrays["weights/many/0"], seen["many"][0].numpy())

    def test_has_no_limit_unless_one_is_given(self, x, tmp_path):
        model = Ours()
        assert attn_ext.record(model, to=tmp_path / "a.npz")._max_bytes is None
        with pytest.raises(MemoryError), attn_ext.record(model, to=tmp_path / "a.npz", max_bytes=10):
            model(x)
        assert list(tmp_path.iterdir()) == []

    def test_a_full_disk_while_streaming(self, x, tmp_path, monkeypatch):
        model = Ours()
        model(x)
        before = F.scaled_dot_product_attention

        class Full:
            """Takes 3000 bytes."""

            def __init__(self, file):
                self.file = file

            def __getattr__(self, name):
                return getattr(self.file, name)

            def write(self, data):
                if self.file.tell() + len(data) > 3000:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return self.file.write(data)

        zip_file = zipfile.ZipFile
        monkeypatch.setattr(
            _store.zipfile,
            "ZipFile",
            lambda file, mode="r", *more, **kw: zip_file(
                Full(file) if mode == "w" else file, mode, *more, **kw
            ),
        )
        with (
            pytest.raises(
                OSError, match=r"cannot write .*seen.npz: No space left on device; nothing is left of it"
            ),
            attn_ext.record(model, to=tmp_path / "seen.npz"),
        ):
            for _ in range(10):
                model(x)
        assert list(tmp_path.iterdir()) == []
        assert F.scaled_dot_product_attention is before
        assert all(not m._forward_hooks for m in model.modules())
        model(x)

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
    def test_an_exception_leaves_no_file(self, x, tmp_path, error):
        model = Ours()
        (tmp_path / "seen.npz").write_text("older")
        with pytest.raises(error), attn_ext.record(model, to=tmp_path / "seen.npz"):
            model(x)
            raise error
        assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]

    def test_where_it_cannot_be_written(self, tmp_path):
        for path, message in (
            (tmp_path, "it is a folder"),
            (tmp_path / "no/such.npz", "No such file or directory"),
        ):
            with pytest.raises(OSError, match=f"cannot write .*{message}"), attn_ext.record(Ours(), to=path):
                pass

    @pytest.mark.parametrize("name", ["seen.csv", "seen"])
    def test_a_file_of_another_kind_is_refused(self, tmp_path, name):
        with pytest.raises(ValueError, match=f"cannot write .*{name} as a record: expected .* .npz"):
            attn_ext.record(Ours(), to=tmp_path / name)

    def test_what_is_no_record(self, tmp_path):
        (tmp_path / "text").write_text("text")
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
            archive.writestr("a", json.dumps({}))
        for name in ("text", "other.zip"):
            with pytest.raises(ValueError, match="is not a record of"):
                recording.load(tmp_path / name)


class TestTable:
    @pytest.fixture
    def pandas(self):
        return pytest.importorskip("pandas")

    def test_a_row_a_number(self, pandas, x):
        model = Ours()
        with attn_ext.record(model, what=KINDS, rows=[1, 4], heads=[0], top=2) as seen:
            model(x)
        table = seen.to_dataframe()
        assert list(table.columns) == ["layer", "call", "batch", "head", "row", "key", "weight"]
        assert len(table) == 3 * 2 * 1 * 2 * 5
        row = table[(table.layer == "grouped") & (table.batch == 1) & (table.row == 4) & (table.key == 3)]
        assert row.weight.item() == seen["grouped"][0][1, 0, 1, 3].item()
        assert set(table.row) == {1, 4}
        assert list(seen.to_dataframe("entropy").columns) == [
            "layer",
            "call",
            "batch",
            "head",
            "row",
            "entropy",
        ]
        assert list(seen.to_dataframe("key_mass").columns) == [
            "layer",
            "call",
            "batch",
            "head",
            "key",
            "key_mass",
        ]
        top = seen.to_dataframe("top")
        assert list(top.columns) == ["layer", "call", "batch", "head", "row", "rank", "key", "weight"]
        assert (top.weight[top["rank"] == 0].to_numpy() >= top.weight[top["rank"] == 1].to_numpy()).all()

    def test_small_weights_can_be_left_out(self, pandas, x):
        model = Ours()
        with attn_ext.record(model, layers="many") as seen:
            model(x)
        table = seen.to_dataframe(at_least=0.2)
        assert len(table) == (seen["many"][0] >= 0.2).sum()
        assert (table.weight >= 0.2).all()

    def test_says_what_is_missing(self, x, monkeypatch):
        import sys

        model = Ours()
        with attn_ext.record(model) as seen:
            model(x)
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(
            ImportError, match=r"a DataFrame takes pandas; to have it: pip install 'attn_ext\[record\]'"
        ):
            seen.to_dataframe()


def test_examples_of_the_documentation(tmp_path, monkeypatch):
    """Line by line in one session; `print(...)  # text` prints that text."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("numpy")
    monkeypatch.chdir(tmp_path)
    document = Path(__file__).parents[1] / "docs" / "weights.md"
    text = document.read_text(encoding="utf-8")
    session: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "weights.md", "exec"), session)
        assert printed.getvalue().splitlines() == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    assert {path.name for path in tmp_path.iterdir()} == {
        "layer0.png",
        "mass.png",
        "entropy.png",
        "page.html",
    }
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert 10_000 < (document.parent / picture).stat().st_size < 150_000


class TestIntegrations:
    """Models of other libraries, and the other ways to bring the op to them."""

    @pytest.fixture
    def override_sdpa(self):
        return pytest.importorskip("attn_ext.integrations.override").override_sdpa

    def test_after_override(self, x, override_sdpa):
        model = nn.Sequential(Theirs(is_causal=True), Theirs())
        with attn_ext.record(model) as expected:
            model(x)
        with override_sdpa() as calls, attn_ext.record(model) as inside:
            model(x)
        assert calls.taken == 2
        with attn_ext.record(model) as outside, override_sdpa() as calls:
            model(x)
        assert calls.taken == 2
        for seen in (inside, outside):
            assert seen.layers == expected.layers
            assert [len(seen[path]) for path in seen.layers] == [1, 1]
            torch.testing.assert_close(seen.as_tuple(), expected.as_tuple())
        assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention

    def test_after_convert(self, x):
        convert = pytest.importorskip("attn_ext.integrations.convert").convert
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, batch_first=True), 2).eval()
        with attn_ext.record(model) as expected:
            model(x)
        report = convert(model)
        with attn_ext.record(model) as seen:
            model(x)
        assert seen.layers == expected.layers
        torch.testing.assert_close(seen.as_tuple(), expected.as_tuple())
        report.undo()

    @pytest.fixture
    def transformers(self):
        pytest.importorskip("attn_ext.integrations.transformers")
        try:
            transformers = pytest.importorskip("transformers")
            transformers.LlamaForCausalLM  # noqa: B018
        except ModuleNotFoundError as error:
            pytest.skip(str(error))
        return transformers

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    def test_transformers_agree_with_their_own_weights(self, transformers, implementation):
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()
        ids = torch.randint(0, 64, (2, 7))
        before = model(ids).logits
        with attn_ext.record(model) as seen:
            torch.testing.assert_close(model(ids).logits, before)
        assert model.config._attn_implementation == implementation
        assert seen.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
        model.set_attn_implementation("eager")
        torch.testing.assert_close(seen.as_tuple(), model(ids, output_attentions=True).attentions)
        model.set_attn_implementation(implementation)
        with attn_ext.record(model, rows=-1) as seen:
            model.generate(ids[:1], max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert [tuple(t.shape) for t in seen[1]] == [(1, 4, 1, 7), (1, 4, 1, 8), (1, 4, 1, 9)]

    def test_timm(self):
        try:
            timm = pytest.importorskip("timm")
        except RuntimeError as error:
            pytest.skip(str(error))
        model = timm.create_model(
            "vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, embed_dim=32, num_heads=4
        ).eval()
        image = torch.randn(1, 3, 32, 32)
        with torch.no_grad(), attn_ext.record(model, what=("weights", "entropy")) as seen:
            model(image)
        assert seen.layers == ("blocks.0.attn", "blocks.1.attn")
        assert seen[0][0].shape == (1, 4, 5, 5)


class Packed(nn.Module):
    """Attention of three sequences in one tensor, of which the second has a row of nobody behind it."""

    OPTIONS = {
        "cu_seqlens_q": torch.tensor([0, 3, 6, 9]),
        "cu_seqlens_k": torch.tensor([0, 5, 8, 9]),
        "seqlens_q": torch.tensor([3, 2, 3]),
        "is_causal": True,
        "window_left": 2,
    }

    def forward(self, x):
        return attn_ext.sdpa_packed(x, x, x, **self.OPTIONS)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_packed_sequences_see_their_own_keys_alone(mode):
    x, model = torch.randn(9, 2, 4), Packed()
    with mode(), attn_ext.record(model, what=("weights", "lse")) as seen:
        model(x)
    weights, lse = (seen[0, what][0] for what in ("weights", "lse"))
    _, expected_lse = attn_ext.sdpa_packed_with_lse(x, x, x, **Packed.OPTIONS)
    torch.testing.assert_close(lse.squeeze(0).float(), expected_lse)
    torch.testing.assert_close(
        torch.einsum("hij,jhd->ihd", weights.squeeze(0).float(), x), model(x), rtol=0, atol=1e-5
    )
