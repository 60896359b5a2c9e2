"""attn_implementation="attn_ext" against "eager", on small random models of transformers."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hf = pytest.importorskip("transformers")

from attn_ext.integrations import transformers as integration  # noqa: E402
from attn_ext.integrations._transformers_support import calls_interface  # noqa: E402

integration.register()
hf.logging.set_verbosity_error()

VOCABULARY, LENGTH, WINDOW = 61, 11, 5
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
#: Wide enough that wrong attention shows.
WIDE = 0.3


def bert() -> tuple[type, Any]:
    return hf.BertForMaskedLM, hf.BertConfig(**TEXT, initializer_range=WIDE)


def bert_decoder() -> tuple[type, Any]:
    return hf.BertLMHeadModel, hf.BertConfig(**TEXT, initializer_range=WIDE, is_decoder=True)


def gpt2() -> tuple[type, Any]:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    more = {"scale_attn_by_inverse_layer_idx": True, "initializer_range": WIDE}
    return hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **special, **more)


def llama() -> tuple[type, Any]:
    return hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED, initializer_range=WIDE)


def gemma2() -> tuple[type, Any]:
    config = hf.Gemma2Config(**GROUPED, **LAYERS, attn_logit_softcapping=2.0, initializer_range=WIDE)
    return hf.Gemma2ForCausalLM, config


def gemma3() -> tuple[type, Any]:
    return hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**GROUPED, **LAYERS, initializer_range=WIDE)


def gemma4() -> tuple[type, Any]:
    sizes = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 8}
    layers = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
    usual = {**GROUPED, "num_hidden_layers": 4, "sliding_window": 50}
    return hf.Gemma4ForCausalLM, hf.Gemma4TextConfig(**usual, **sizes, **layers, initializer_range=WIDE)


def gpt_oss() -> tuple[type, Any]:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return hf.GptOssForCausalLM, hf.GptOssConfig(**GROUPED, **LAYERS, **experts, initializer_range=WIDE)


def t5() -> tuple[type, Any]:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration, hf.T5Config(
        vocab_size=VOCABULARY, **sizes, **special, initializer_factor=2.0, dropout_rate=0.0
    )


def whisper() -> tuple[type, Any]:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    more = {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_source_positions": 20, "init_std": WIDE}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    return hf.WhisperForConditionalGeneration, hf.WhisperConfig(
        vocab_size=VOCABULARY, **sizes, **heads, **more, **special
    )


VISION = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}


def vit() -> tuple[type, Any]:
    return hf.ViTForImageClassification, hf.ViTConfig(**VISION, initializer_range=WIDE)


def clip() -> tuple[type, Any]:
    text = {**TEXT, "max_position_embeddings": 32, "projection_dim": 16}
    return hf.CLIPModel, hf.CLIPConfig(
        text_config=text,
        vision_config={**VISION, "projection_dim": 16},
        projection_dim=16,
        initializer_factor=20.0,
    )


DECODERS = [gpt2, llama, gemma2, gemma3, gpt_oss]
WITH_TEXT = [bert, bert_decoder, *DECODERS, t5, clip]
ALL = [*WITH_TEXT, whisper, vit]


def build(make: Callable[[], Any], implementation: str, **changes: Any) -> nn.Module:
    """The model with the same weights every time, in evaluation."""
    model_class, config = make()
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    torch.manual_seed(1)
    model = model_class._from_config(config, attn_implementation=implementation)
    with torch.no_grad():  # zeros, as sinks and biases begin, would hide what is done with them
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=WIDE)
    return model.eval()


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(4, VOCABULARY, (batch, length), generator=generator)


def padding(side: str) -> Tensor | None:
    """(2, LENGTH); the second sequence is the shorter one."""
    if side == "none":
        return None
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, slice(0, 4) if side == "left" else slice(-4, None)] = 0
    return mask


def inputs_of(make: Callable[[], Any], mask: Tensor | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    if make is vit:
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=generator)}
    if make is whisper:
        return {
            "input_features": torch.randn(2, 8, 40, generator=generator),
            "decoder_input_ids": tokens(),
        }
    inputs = {"input_ids": tokens()} | ({} if mask is None else {"attention_mask": mask})
    if make is t5:
        inputs["decoder_input_ids"] = tokens(length=7)
    if make is clip:  # it takes the output of the largest token, which must be a real one
        last = (LENGTH - 1) if mask is None else (mask * torch.arange(LENGTH)).argmax(-1)
        inputs["input_ids"] = inputs["input_ids"].clamp(max=VOCABULARY - 2)
        inputs["input_ids"][torch.arange(2), last] = VOCABULARY - 1
        inputs["pixel_values"] = torch.randn(2, 3, 12, 12, generator=generator)
    return inputs


def result_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The output that everything went into, at real tokens."""
    output = model(**inputs)
    if "logits_per_text" in output:
        return torch.cat([output.text_embeds, output.image_embeds])
    logits = output.logits
    mask = inputs.get("attention_mask")
    if mask is not None and logits.shape[:2] == mask.shape:
        return logits[mask.bool()]
    return logits


@dataclass
class Gradients:
    result: Tensor
    of: dict[str, Tensor]


def with_gradients(model: nn.Module, inputs: dict[str, Tensor]) -> Gradients:
    model.zero_grad()
    result = result_of(model, inputs)
    factors = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    (result * factors).mean().backward()
    of = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Gradients(result.detach(), of)


def assert_same(actual: Gradients, expected: Gradients) -> None:
    torch.testing.assert_close(actual.result, expected.result, rtol=1e-4, atol=1e-4)
    more = actual.of.keys() - expected.of.keys()
    assert not any(actual.of[name].any() for name in more)  # zeros, where compiled code gives them
    for name, gradient in expected.of.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(actual.of[name] / scale, gradient / scale, rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("make", WITH_TEXT)
def test_logits_and_gradients_with_padding(make, side):
    inputs = inputs_of(make, padding(side))
    expected = with_gradients(build(make, "eager"), inputs)
    assert_same(with_gradients(build(make, "attn_ext"), inputs), expected)


@pytest.mark.parametrize("make", [whisper, vit])
def test_logits_and_gradients(make):
    inputs = inputs_of(make)
    expected = with_gradients(build(make, "eager"), inputs)
    assert_same(with_gradients(build(make, "attn_ext"), inputs), expected)


@pytest.mark.parametrize("make", [llama, gemma2, gemma3])
def test_packed_sequences(make):
    """Two in one row, told apart by position_ids; and each of them as it is alone.

    Without a cache: with one, transformers does not look whether sequences are packed.
    """
    inputs = inputs_of(make) | {"use_cache": False}
    inputs["position_ids"] = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(2, -1)
    model = build(make, "attn_ext")
    actual = with_gradients(model, inputs)
    assert_same(actual, with_gradients(build(make, "eager"), inputs))
    with torch.no_grad():
        alone = model(inputs["input_ids"][:, 4:]).logits
    torch.testing.assert_close(actual.result[:, 4:], alone, rtol=1e-4, atol=1e-4)


class TestGenerate:
    def generated(self, make, implementation: str, **how: Any) -> tuple[Tensor, Tensor]:
        """The tokens, and the logits that chose them."""
        model = build(make, implementation)
        model.generation_config.eos_token_id = None
        prompt = {"input_ids": tokens(), "attention_mask": padding("left")}
        common = {"max_new_tokens": 9, "do_sample": False, "output_logits": True}
        output = model.generate(
            **prompt, **common, **how, return_dict_in_generate=True, disable_compile=True, pad_token_id=0
        )
        return output.sequences, torch.stack(output.logits)

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("make", DECODERS)
    def test_greedy(self, make, cache):
        """Beyond the window, so that the caches of gemma and gpt-oss roll."""
        expected, logits = self.generated(make, "eager", cache_implementation=cache)
        actual, found = self.generated(make, "attn_ext", cache_implementation=cache)
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
        assert actual.tolist() == expected.tolist()

    @pytest.mark.parametrize("make", [gpt2, llama, gemma2])
    def test_beam(self, make):
        expected, logits = self.generated(make, "eager", num_beams=3)
        actual, found = self.generated(make, "attn_ext", num_beams=3)
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
        assert actual.tolist() == expected.tolist()

    def test_encoder_and_decoder(self):
        expected, logits = self.generated(t5, "eager")
        actual, found = self.generated(t5, "attn_ext")
        torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3)
        assert actual.tolist() == expected.tolist()

    @pytest.mark.parametrize("static", [False, True])
    def test_a_prompt_in_two_parts(self, static):
        """The second part has several rows, and keys before them."""
        results = []
        for implementation in ("eager", "attn_ext"):
            model = build(llama, implementation)
            cache = hf.StaticCache(model.config, max_cache_len=20) if static else hf.DynamicCache()
            with torch.no_grad():
                first = model(tokens()[:, :6], past_key_values=cache).logits
                results.append(torch.cat([first, model(tokens()[:, 6:], past_key_values=cache).logits], 1))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("how", ["segments", "words"])
    def test_whisper_with_timestamps_twice(self, how):
        """Timestamps of words come out of the weights, for which transformers itself changes to eager."""
        results = []
        for implementation in ("eager", "attn_ext"):
            model = build(whisper, implementation)
            model.generation_config = hf.GenerationConfig(**WHISPER_GENERATION)
            features = inputs_of(whisper)["input_features"]
            for _ in range(2):
                output = model.generate(
                    features, return_timestamps=True, return_token_timestamps=how == "words"
                )
                results.append(
                    [output[name].tolist() for name in output] if how == "words" else output.tolist()
                )
            assert model.config._attn_implementation == ("eager" if how == "words" else implementation)
        assert results[0] == results[1] == results[2] == results[3]


WHISPER_GENERATION = {
    "no_timestamps_token_id": VOCABULARY - 10,
    "alignment_heads": [[0, 0], [1, 2]],
    "decoder_start_token_id": 3,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "is_multilingual": False,
    "max_length": 14,
}


class TestDropout:
    P = 0.5

    def weights(self, implementation: str, p: float) -> Tensor:
        model = build(llama, implementation, attention_dropout=p).train(p > 0)
        return model(tokens(), output_attentions=True).attentions[0].detach()

    def test_weights_are_dropped_or_scaled(self):
        kept = self.weights("eager", 0.0)
        dropped = self.weights("attn_ext", self.P)
        scaled = torch.where(dropped == 0, 0, kept / (1 - self.P))
        torch.testing.assert_close(dropped, scaled, rtol=1e-4, atol=1e-5)
        visible = (kept > 0).sum()
        assert 0.4 * visible < (dropped > 0).sum() < 0.6 * visible

    @pytest.mark.parametrize("make", [bert, gpt2, llama, t5])
    def test_all_dropped_is_as_eager(self, make):
        """With probability 1 in the attention layers, and nowhere else, nothing is left to chance."""
        results = []
        for implementation in ("eager", "attn_ext"):
            model = build(make, implementation)
            for layer in model.modules():
                if calls_interface(type(layer)):
                    layer.training = True
                    for name in {"dropout", "attn_dropout", "attention_dropout"} & {*dir(layer)}:
                        inner = isinstance(getattr(layer, name), nn.Module)
                        setattr(layer, name, nn.Dropout(1.0) if inner else 1.0)
            results.append(with_gradients(model, inputs_of(make)))
        assert_same(*results)

    def test_the_mean_is_that_without(self):
        """Of one attention layer, whose output is linear in the weights."""
        layers = {}
        for p in (0.0, self.P):
            model = build(llama, "attn_ext", attention_dropout=p).train(p > 0)
            model.model.layers[0].self_attn.register_forward_hook(
                lambda module, _, output, p=p: layers.__setitem__(p, output[0].detach())
            )
            with torch.no_grad():
                model(tokens(batch=1).expand(2000, -1) if p else tokens(batch=1))
        error = layers[self.P].std(0) / 2000**0.5
        assert ((layers[self.P].mean(0) - layers[0.0][0]).abs() < 5 * error + 1e-6).all()


class TestWeights:
    @pytest.mark.parametrize("make", [bert, *DECODERS, t5, whisper, vit])
    def test_output_attentions(self, make):
        """Also where the flag is dropped on the way, as in GPT-2."""
        results = []
        for implementation in ("eager", "attn_ext"):
            output = build(make, implementation)(**inputs_of(make), output_attentions=True)
            results.append({name: output[name] for name in output if "attentions" in name})
        expected, actual = results
        assert actual.keys() == expected.keys()
        assert any(expected.values())
        for name in expected:
            for found, right in zip(actual[name], expected[name], strict=True):
                torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)

    def test_none_are_computed_unasked(self, monkeypatch):
        monkeypatch.setattr(integration, "sdpa_with_weights", None)
        build(llama, "attn_ext")(tokens())

    def test_their_gradient(self):
        gradients = []
        for implementation in ("eager", "attn_ext"):
            model = build(llama, implementation)
            weights = model(tokens(), output_attentions=True).attentions[-1]
            (weights * torch.arange(LENGTH)).sum().backward()
            gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("make", [bert, llama, gemma2, gpt_oss, t5])
def test_bfloat16(make):
    """As near to float32 as what transformers has, or nearer."""
    inputs = inputs_of(make, padding("right"))
    exact = with_gradients(build(make, "eager"), inputs).result
    errors = {}
    for implementation in ("eager", "attn_ext", "sdpa"):
        if implementation == "sdpa" and make in (gemma2, gpt_oss):  # it has neither softcap nor sinks
            continue
        with torch.no_grad():
            result = result_of(build(make, implementation).bfloat16(), inputs)
        errors[implementation] = (result - exact).pow(2).mean().sqrt().item()
    assert errors.pop("attn_ext") < 1.2 * max(errors.values())


class TestCompile:
    def both(self, make, backend: str) -> None:
        inputs = inputs_of(make, padding("left") if "input_ids" in inputs_of(make) else None)
        expected = with_gradients(build(make, "eager"), inputs)
        torch.compiler.reset()
        model = build(make, "attn_ext")
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        torch.testing.assert_close(result_of(compiled, inputs), expected.result, rtol=1e-3, atol=1e-3)
        assert_same(with_gradients(compiled, inputs), rename(expected))

    @pytest.mark.parametrize(
        "make", [llama, *(pytest.param(m, marks=pytest.mark.slow) for m in ALL if m is not llama)]
    )
    def test_in_one_graph(self, make):
        self.both(make, "aot_eager")

    @pytest.mark.slow
    @pytest.mark.parametrize("make", [llama, t5])
    def test_with_inductor(self, make):
        self.both(make, "inductor")


def rename(gradients: Gradients) -> Gradients:
    """By the names that a compiled module gives to its parameters."""
    return Gradients(gradients.result, {f"_orig_mod.{name}": g for name, g in gradients.of.items()})


#: Attention of their own.
OWN = {
    hf.GPTNeoConfig: {
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "attention_types": [[["global"], 1]],
    },
    hf.FalconConfig: {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    hf.BloomConfig: {"hidden_size": 32, "n_layer": 1, "n_head": 4},
    hf.MptConfig: {"d_model": 32, "n_layers": 1, "n_heads": 4},
}


@pytest.fixture(params=OWN, ids=lambda c: c.model_type)
def config(request):
    return request.param(vocab_size=VOCABULARY, **OWN[request.param])


class TestModelsWithAttentionOfTheirOwn:
    def test_are_refused_when_built(self, config):
        with pytest.raises(
            ValueError, match=r'"attn_ext" cannot be used: \w+ computes attention in code of its'
        ):
            hf.AutoModelForCausalLM.from_config(config, attn_implementation="attn_ext")

    def test_are_refused_when_loaded(self, config, tmp_path):
        hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match='"attn_ext" cannot be used'):
            hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="attn_ext")

    def test_are_refused_when_called(self, config):
        model = hf.AutoModelForCausalLM.from_config(config)
        model.config._attn_implementation = "attn_ext"
        try:
            with pytest.raises(ValueError, match='"attn_ext" cannot be used'):
                model(tokens())
        finally:
            model.config._attn_implementation = "eager"

    def test_are_named_by_convert(self, config):
        model = hf.AutoModelForCausalLM.from_config(config)
        before = model.config._attn_implementation
        reached, not_reached, _ = integration.convert(model)
        assert reached == {}
        (reason,) = not_reached.values()
        assert "computes attention in code of its own" in reason
        assert model.config._attn_implementation == before


class TestRefusals:
    """By a direct call, as a layer would."""

    def call(self, **arguments: Any) -> Tensor:
        query, key, value = torch.randn(3, 1, 4, 6, 8)
        return integration.attention_forward(nn.Module(), query, key, value, None, **arguments)[0]

    def test_what_means_nothing_here_is_taken(self):
        harmless = {"position_ids": torch.arange(6)[None], "num_items_in_batch": torch.tensor(3)}
        flags = {
            "sliding_window": 3,
            "use_cache": True,
            "indices": None,
            "cache": None,
            "deterministic": True,
        }
        assert self.call(**harmless, **flags).shape == (1, 6, 4, 8)

    @pytest.mark.parametrize("name", ["indices", "block_indices"])
    def test_sparse_choices_of_keys(self, name):
        with pytest.raises(NotImplementedError, match=f"cannot choose keys by the '{name}' of Module"):
            self.call(**{name: torch.zeros(1, dtype=torch.long)})

    def test_paged_caches(self):
        with pytest.raises(NotImplementedError, match="cannot read the paged cache"):
            self.call(cache=object())

    def test_unknown_tensors(self):
        with pytest.raises(NotImplementedError, match="does not know the tensor 'decay' that Module hands"):
            self.call(decay=torch.ones(4))

    def test_sinks_of_every_row(self):
        with pytest.raises(NotImplementedError, match=r"one sink a head, \(4,\).* of shape \(1, 4, 6, 1\)"):
            self.call(sinks=torch.zeros(1, 4, 6, 1))


class TestMasks:
    SIZES = {"batch_size": 2, "q_length": 4, "kv_length": 4, "config": hf.BertConfig()}
    PADDING = torch.tensor([[True, True, True, True], [True, True, False, False]])

    def mask(self, **arguments: Any) -> Tensor | None:
        return integration.attention_mask_function(**self.SIZES, **arguments)

    def test_causality_alone_needs_none(self):
        assert self.mask() is None
        assert self.mask(attention_mask=torch.ones_like(self.PADDING)) is None

    def test_true_takes_part(self):
        mask = self.mask(attention_mask=self.PADDING)
        assert (mask.shape, mask.dtype) == ((2, 1, 4, 4), torch.bool)
        assert mask[0, 0].tolist() == torch.ones(4, 4).tril().bool().tolist()
        assert mask[1, 0, 3].tolist() == [True, True, False, False]

    def test_padding_alone_is_one_row(self):
        """Not Lq * Lk, and what transformers itself makes."""
        both = hf.masking_utils.bidirectional_mask_function
        arguments = {"attention_mask": self.PADDING, "mask_function": both, "allow_is_causal_skip": False}
        mask = self.mask(**arguments)
        assert mask.shape == (2, 1, 4, 4)
        assert mask.stride(2) == 0
        assert mask.equal(hf.masking_utils.sdpa_mask(**self.SIZES, **arguments))

    def test_models_that_leave_out_rows_of_the_query(self):
        """Gemma 4 does in its last layers, and then counts on a mask: causality is not top-left any more."""
        for keep in (1, 3):
            results = {}
            for implementation in ("eager", "attn_ext"):
                model = build(gemma4, implementation)
                with torch.no_grad():
                    results[implementation] = model(tokens(), logits_to_keep=keep).logits
            torch.testing.assert_close(results["attn_ext"], results["eager"], rtol=1e-4, atol=1e-4)

    def test_custom_masks_of_four_dims(self):
        generator = torch.Generator().manual_seed(6)
        visible = (torch.rand(2, 1, LENGTH, LENGTH, generator=generator) < 0.5) | torch.eye(LENGTH).bool()
        added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        expected = build(llama, "eager")(tokens(), attention_mask=added).logits
        for mask in (visible, added):
            found = build(llama, "attn_ext")(tokens(), attention_mask=mask).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class TestConvert:
    def test_reaches_every_layer_and_goes_back(self):
        model = nn.ModuleDict(
            {"first": build(llama, "sdpa"), "second": build(t5, "eager"), "other": nn.Linear(2, 2)}
        )
        inputs = inputs_of(llama, padding("left"))
        before = model["first"](**inputs).logits
        reached, not_reached, undo = integration.convert(model)
        assert set(reached) == {
            name
            for name, layer in model.named_modules()
            if type(layer).__name__ in ("LlamaAttention", "T5Attention")
        }
        assert (
            reached["first.model.layers.0.self_attn"]
            == "LlamaAttention: attn_implementation 'sdpa' -> 'attn_ext'"
        )
        assert not_reached == {}
        assert model["first"].config._attn_implementation == "attn_ext"
        after = model["first"](**inputs).logits
        torch.testing.assert_close(after[padding("left").bool()], before[padding("left").bool()])
        undo()
        assert model["first"].config._attn_implementation == "sdpa"
        assert model["second"].encoder.config._attn_implementation == "eager"

    def test_a_model_of_two_kinds(self):
        """Each part by its own class."""
        encoder, decoder = vit()[1], hf.TrOCRConfig(**TROCR)
        config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        model = hf.VisionEncoderDecoderModel(config)
        reached, not_reached, undo = integration.convert(model)
        assert {path.split(".")[0] for path in reached} == {"encoder"}
        assert {path.split(".")[0] for path in not_reached} == {"decoder"}
        assert model.encoder.config._attn_implementation == "attn_ext"
        assert model.decoder.config._attn_implementation != "attn_ext"
        ids = torch.tensor([[3, 4, 5]])
        inputs = {"pixel_values": inputs_of(vit)["pixel_values"][:1], "decoder_input_ids": ids}
        found = model.eval()(**inputs).logits
        undo()
        torch.testing.assert_close(found, model(**inputs).logits, rtol=1e-4, atol=1e-4)

    def test_parts_of_a_configuration(self):
        model = build(clip, "eager")
        reached, _, undo = integration.convert(model)
        assert len(reached) == 4
        assert model.vision_model.config._attn_implementation == "attn_ext"
        undo()
        assert model.vision_model.config._attn_implementation == model.config._attn_implementation == "eager"

    def test_what_was_set_since_stays(self):
        model = build(llama, "eager")
        _, _, undo = integration.convert(model)
        model.set_attn_implementation("sdpa")
        undo()
        assert model.config._attn_implementation == "sdpa"

    def test_a_model_of_another_library(self):
        reached, not_reached, undo = integration.convert(nn.TransformerEncoderLayer(8, 2))
        assert (reached, not_reached) == ({}, {})
        undo()


TROCR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "cross_attention_hidden_size": 32,
}


class TestRegister:
    @pytest.fixture
    def unregistered(self, monkeypatch):
        mappings = (
            hf.AttentionInterface._global_mapping,
            hf.masking_utils.AttentionMaskInterface._global_mapping,
        )
        for mapping in mappings:
            monkeypatch.delitem(mapping, "attn_ext")
        return mappings

    def test_is_quiet_with_the_tested_versions(self, unregistered):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            integration.register()
        assert all("attn_ext" in mapping for mapping in unregistered)

    @pytest.mark.parametrize("version", ["4.57.1", "5.99.0", "6.0.0.dev0"])
    def test_warns_of_versions_that_were_not_tested(self, monkeypatch, version):
        monkeypatch.setattr("transformers.__version__", version)
        with pytest.warns(UserWarning, match=f"is tested with transformers .* and this is {version}"):
            integration.register()

    @pytest.mark.parametrize("name", ["AttentionMaskInterface", "sdpa_mask"])
    def test_refuses_versions_without_the_interface(self, monkeypatch, unregistered, name):
        """And leaves nothing half done."""
        monkeypatch.delattr(hf.masking_utils, name)
        with pytest.raises(
            ImportError, match=f"is tested with transformers .* has no {name}: pip install 'attn_ext"
        ):
            integration.register()
        assert not any("attn_ext" in mapping for mapping in unregistered)

    def test_says_how_to_install_transformers(self, monkeypatch):
        monkeypatch.setattr(integration, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install 'attn_ext\[transformers\]'"):
            integration.register()

    def test_is_checked_once_however_often_it_is_called(self):
        method = hf.PreTrainedModel.get_correct_attn_implementation
        integration.register()
        assert hf.PreTrainedModel.get_correct_attn_implementation is method

    def test_importing_imports_nothing(self):
        code = "import sys, attn_ext.integrations.transformers as t; t.convert(t.nn.Linear(1, 1)); "
        code += "assert 'transformers' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_the_documentation_names_the_tested_versions():
    text = (Path(__file__).parents[1] / "docs/transformers.md").read_text(encoding="utf-8")
    first, last = integration.TESTED_VERSIONS
    assert f"Tested with transformers {first} to {last}." in text
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"transformers>={first}' in pyproject
