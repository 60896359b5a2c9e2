"""Training without padding: sequences in one row give what each gives alone, by transformers' eager."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

hf = pytest.importorskip("transformers")

import attn_ext  # noqa: E402
from attn_ext.integrations import _transformers_packed as packed  # noqa: E402
from attn_ext.integrations import transformers as integration  # noqa: E402

integration.register()
hf.logging.set_verbosity_error()

VOCABULARY, WINDOW = 61, 4
LENGTHS = [5, 1, 9, 6]
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # wide enough that wrong attention shows
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


def llama() -> tuple[type, Any]:
    return hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)


def mistral() -> tuple[type, Any]:
    return hf.MistralForCausalLM, hf.MistralConfig(**GROUPED, sliding_window=WINDOW)


def qwen2() -> tuple[type, Any]:
    sizes = {name: value for name, value in GROUPED.items() if name != "head_dim"}
    return hf.Qwen2ForCausalLM, hf.Qwen2Config(**sizes, **LAYERS, use_sliding_window=True)


def gemma2() -> tuple[type, Any]:
    return hf.Gemma2ForCausalLM, hf.Gemma2Config(**GROUPED, **LAYERS, attn_logit_softcapping=2.0)


def gpt_oss() -> tuple[type, Any]:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    return hf.GptOssForCausalLM, hf.GptOssConfig(**GROUPED, **LAYERS, **experts)


def gpt2() -> tuple[type, Any]:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
    return hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=VOCABULARY, **sizes, bos_token_id=1, eos_token_id=2)


def bert() -> tuple[type, Any]:
    return hf.BertForMaskedLM, hf.BertConfig(**TEXT)


def modern_bert() -> tuple[type, Any]:
    config = hf.ModernBertConfig(
        **{name: value for name, value in TEXT.items() if name != "initializer_range"},
        initializer_cutoff_factor=100.0,
        initializer_range=0.3,
        local_attention=2 * WINDOW,
        global_attn_every_n_layers=2,
    )
    return hf.ModernBertForMaskedLM, config


DECODERS = [llama, mistral, qwen2, gemma2, gpt_oss, gpt2]
ENCODERS = [bert, modern_bert]


def build(make: Any, implementation: str = "attn_ext", **changes: Any) -> nn.Module:
    """The model with the same weights every time, without dropout."""
    model_class, config = make()
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    for name, value in changes.items():
        assert hasattr(config, name)
        setattr(config, name, value)
    torch.manual_seed(1)
    model = model_class._from_config(config, attn_implementation=implementation)
    with torch.no_grad():  # zeros, as sinks and biases begin, would hide what is done with them
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def sequences() -> list[Tensor]:
    return [torch.randint(4, VOCABULARY, (length,)) for length in LENGTHS]


def row(sequences: list[Tensor], *names: str) -> dict[str, Tensor]:
    """Inputs of a model, with what of ``positions`` and ``lengths`` is named."""
    inputs: dict[str, Any] = {"input_ids": torch.cat(sequences)[None]}
    if "positions" in names:
        inputs["position_ids"] = torch.cat([torch.arange(len(s)) for s in sequences])[None]
    if "lengths" in names:
        starts = torch.tensor([0, *map(len, sequences)]).cumsum(0).int()
        longest = max(map(len, sequences))
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    return inputs


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    factors = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    (logits * factors).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(make: Any, sequences: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and gradients of eager attention, which sees one sequence at a time."""
    model = build(make, "eager")
    logits = torch.cat([model(s[None]).logits[0] for s in sequences])
    return logits.detach(), gradients(model, logits)


def assert_same(actual: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(actual[1][name] / scale, gradient / scale, rtol=0, atol=1e-3, msg=name)


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    """Grows by one with each call of the packed op."""
    seen: list[Any] = []
    original = packed.sdpa_packed

    def counted(*arguments: Any, **options: Any) -> Tensor:
        seen.append((arguments, options))
        return original(*arguments, **options)

    monkeypatch.setattr(packed, "sdpa_packed", counted)
    return seen


@pytest.fixture
def no_masks(monkeypatch) -> None:
    """No mask of all pairs of tokens is made."""

    def made(self: Any) -> Tensor:
        raise AssertionError("a mask was made")

    monkeypatch.setattr(packed.PackedMask, "made", made)


WAYS = [("positions", "lengths"), ("positions",), ("lengths",)]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("make", DECODERS)
def test_decoders(make, way, sequences, calls, request):
    """With ``positions`` there is no mask either, as under Trainer and its collator."""
    if (make, way) in [(gpt2, ("lengths",)), (gpt_oss, ("positions",))]:
        pytest.skip("GPT-2 has absolute positions; gpt-oss makes its masks without them, whatever attends")
    told = "positions" in way and make is not gpt_oss
    if told:
        request.getfixturevalue("no_masks")
    model = build(make)
    logits = model(**row(sequences, *way), use_cache=False).logits[0]
    windows = sum(kind == "sliding_attention" for kind in getattr(model.config, "layer_types", None) or [])
    windows = 2 if make is mistral else windows
    # transformers makes the mask of windows over the whole row where no position tells it of sequences.
    assert len(calls) == (2 if told else 2 - windows)
    assert_same((logits.detach(), gradients(model, logits)), alone(make, sequences))


@pytest.mark.parametrize("make", [llama, mistral, gemma2])
def test_decoders_with_a_cache(make, sequences, calls):
    """With one, transformers does not look whether positions start again; lengths say it."""
    model = build(make)
    logits = model(**row(sequences, "positions", "lengths"), use_cache=True).logits[0]
    assert len(calls) == {llama: 2, mistral: 0, gemma2: 1}[make]
    assert_same((logits.detach(), gradients(model, logits)), alone(make, sequences))


@pytest.mark.parametrize("make", ENCODERS)
def test_encoders(make, sequences, calls):
    model = build(make)
    logits = model(**row(sequences, "positions", "lengths")).logits[0]
    assert len(calls) == {bert: 2, modern_bert: 1}[make]  # windows come in a mask
    assert_same((logits.detach(), gradients(model, logits)), alone(make, sequences))


@pytest.mark.parametrize("make", [llama, bert])
def test_a_padded_batch_with_dropout_drops_the_same(make, sequences):
    name = "attention_dropout" if make is llama else "attention_probs_dropout_prob"
    model = build(make, **{name: 0.4}).train()
    batch = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    real = nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    torch.manual_seed(2)
    apart = model(batch, attention_mask=real).logits[real.bool()]
    torch.manual_seed(2)
    together = model(**row(sequences, "positions", "lengths")).logits[0]
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(together, model.eval()(**row(sequences, "positions", "lengths")).logits[0])


@pytest.mark.parametrize("way", WAYS[:2], ids="-".join)
@pytest.mark.parametrize("make", [llama, gemma2])
def test_weights(make, way, sequences):
    """A block for each sequence, and 0 beside them."""
    eager = build(make, "eager")
    inputs = row(sequences, *way)
    weights = build(make)(**inputs, use_cache=False, output_attentions=True).attentions
    expected = [eager(s[None], output_attentions=True).attentions for s in sequences]
    for layer, actual in enumerate(weights):
        heads = [[of[layer][0, head] for of in expected] for head in range(4)]
        blocks = torch.stack([torch.block_diag(*of_head) for of_head in heads])
        torch.testing.assert_close(actual[0], blocks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_record_holds_these_weights(way, sequences):
    model, inputs = build(llama), row(sequences, *way)
    expected = model(**inputs, use_cache=False, output_attentions=True).attentions
    with attn_ext.record(model, what="weights") as seen:
        model(**inputs, use_cache=False)
    for path, weights in zip(seen.layers, expected, strict=True):
        torch.testing.assert_close(seen[path][0], weights)


@pytest.mark.parametrize("make", [llama, mistral])
def test_rows_of_a_batch_hold_different_sequences(make, no_masks):
    """By their positions."""
    lengths = [[5, 1, 9], [8, 7]]
    rows = [[torch.randint(4, VOCABULARY, (n,)) for n in of_row] for of_row in lengths]
    tokens = torch.stack([torch.cat(of_row) for of_row in rows])
    places = torch.stack([torch.cat([torch.arange(n) for n in of_row]) for of_row in lengths])
    logits = build(make)(tokens, position_ids=places, use_cache=False).logits
    expected, _ = alone(make, [s for of_row in rows for s in of_row])
    torch.testing.assert_close(logits.flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [llama, mistral])
def test_compiled(make, sequences):
    torch._dynamo.reset()
    model = build(make)
    inputs = row(sequences, "positions", "lengths")

    def run(inputs: dict[str, Tensor]) -> Tensor:
        return model(**inputs, use_cache=False).logits[0]

    logits = torch.compile(run, fullgraph=True, backend="aot_eager")(inputs)
    assert_same((logits.detach(), gradients(model, logits)), alone(make, sequences))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, sequences):
    model = build(mistral).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    logits = model(**row(sequences, "positions", "lengths"), use_cache=False).logits[0]
    assert_same((logits.detach(), gradients(model, logits)), alone(mistral, sequences))


class TestTrainer:
    """What transformers offers for it: a collator that flattens, and Trainer."""

    @pytest.mark.parametrize("lengths", [False, True])
    def test_the_collator(self, lengths, sequences, no_masks):
        collate = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths, return_tensors="pt")
        inputs = collate([{"input_ids": s.tolist()} for s in sequences])
        assert ("cu_seq_lens_q" in inputs) == lengths
        loss = build(llama)(**inputs, use_cache=False).loss
        logits, _ = alone(llama, sequences)
        shifted = [(of[:-1], s[1:]) for of, s in zip(logits.split(LENGTHS), sequences, strict=True)]
        expected = F.cross_entropy(*(torch.cat(side) for side in zip(*shifted, strict=True)))
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)

    def test_training_is_that_of_padded_batches(self, sequences, tmp_path, no_masks):
        pytest.importorskip("accelerate")
        results = []
        for implementation, collator in (
            ("eager", padded_batch),
            ("attn_ext", hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True)),
        ):
            model = build(llama, implementation)
            arguments = hf.TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=2,
                max_steps=3,
                learning_rate=1e-2,
                optim="sgd",
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
            )
            data = [{"input_ids": s.tolist(), "labels": s.tolist()} for s in sequences]
            hf.Trainer(model, arguments, train_dataset=data, data_collator=collator).train()
            results.append(model.state_dict())
        assert not torch.equal(results[0]["lm_head.weight"], build(llama).lm_head.weight)
        for name, weight in results[0].items():
            torch.testing.assert_close(results[1][name], weight, rtol=1e-4, atol=1e-4, msg=name)


def padded_batch(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    rows = {name: [torch.tensor(f[name]) for f in features] for name in ("input_ids", "labels")}
    rows["attention_mask"] = [torch.ones_like(of) for of in rows["input_ids"]]
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = nn.utils.rnn.pad_sequence
    return {name: pad(of, batch_first=True, padding_value=fill[name]) for name, of in rows.items()}


class TestCalls:
    """The attention function by itself, as a layer calls it, with two sequences of 2 and 4 queries."""

    STARTS = torch.tensor([0, 2, 6])

    @pytest.fixture
    def inputs(self) -> list[Tensor]:
        return [torch.randn(1, heads, 6, 8) for heads in (4, 2, 2)]

    def attend(self, inputs: list[Tensor], mask: Tensor | None = None, **options: Any) -> Tensor:
        options = {"cu_seq_lens_q": self.STARTS, "cu_seq_lens_k": self.STARTS} | options
        return integration.attention_forward(nn.Module(), *inputs, mask, **options)[0]

    def by_mask(self, inputs: list[Tensor], visible: Tensor, bias: Tensor | None = None) -> Tensor:
        mask = torch.zeros(visible.shape) if bias is None else bias
        mask = mask.masked_fill(~visible, -math.inf)
        key, value = (t.repeat_interleave(2, dim=1) for t in inputs[1:])
        output = F.scaled_dot_product_attention(inputs[0], key, value, mask)
        return output.nan_to_num().transpose(1, 2)

    def blocks(self, causal: bool = False, reach: int = 9) -> Tensor:
        number, place = torch.tensor([0, 0, 1, 1, 1, 1]), torch.arange(6)
        distance = place[:, None] - place
        visible = (number[:, None] == number) & (distance.abs() <= reach)
        return visible & (distance >= 0) if causal else visible

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("window", [None, 1, 2, 3])
    def test_windows(self, inputs, causal, window, calls):
        """The token itself is one of a causal window."""
        output = self.attend(inputs, is_causal=causal, sliding_window=window)
        reach = 9 if window is None else window - 1
        torch.testing.assert_close(output, self.by_mask(inputs, self.blocks(causal, reach)))
        assert len(calls) == 1

    def test_lengths_of_queries_alone(self, inputs):
        torch.testing.assert_close(
            self.attend(inputs, is_causal=True, cu_seq_lens_k=None), self.attend(inputs, is_causal=True)
        )

    @pytest.mark.parametrize("floating", [False, True])
    def test_a_mask_holds_beside_them(self, inputs, floating):
        visible = torch.rand(1, 1, 6, 6) > 0.3
        mask = torch.where(visible, 0.5, -math.inf) if floating else visible
        output = self.attend(inputs, mask, is_causal=True, sliding_window=1)  # both are in the mask
        torch.testing.assert_close(output, self.by_mask(inputs, visible & self.blocks()))

    @pytest.mark.parametrize("causal", [False, True])
    def test_a_position_bias(self, inputs, causal):
        bias = torch.randn(1, 4, 6, 6)
        output = self.attend(inputs, is_causal=causal, position_bias=bias)
        torch.testing.assert_close(output, self.by_mask(inputs, self.blocks(causal), bias))

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("weights", [False, True])
    def test_keys_of_other_lengths(self, weights, causal):
        """Causality is aligned with the end of a sequence's keys, with weights and without."""
        inputs = [torch.randn(1, 2, length, 8) for length in (6, 9, 9)]
        starts = torch.tensor([0, 5, 9])
        of_row, of_key = torch.tensor([0, 0, 1, 1, 1, 1]), torch.tensor([0] * 5 + [1] * 4)
        place, at = torch.tensor([3, 4, 0, 1, 2, 3]), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
        visible = of_row[:, None] == of_key
        if causal:
            visible &= place[:, None] >= at
        output = self.attend(inputs, cu_seq_lens_k=starts, is_causal=causal, output_attentions=weights)
        expected = F.scaled_dot_product_attention(*inputs, visible).transpose(1, 2)
        torch.testing.assert_close(output, expected)

    @pytest.mark.parametrize("weights", [False, True])
    def test_rows_behind_the_last_sequence_are_0(self, inputs, weights):
        starts = torch.tensor([0, 2, 5])
        options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "output_attentions": weights}
        output = self.attend(inputs, is_causal=True, **options)
        assert not output[:, 5:].any()
        torch.testing.assert_close(output[:, :5], self.attend(inputs, is_causal=True)[:, :5])

    def test_softcap_sinks_and_scaling(self, inputs, calls):
        options = {"softcap": 2.0, "s_aux": torch.randn(4), "scaling": 0.7, "is_causal": True}
        output = self.attend(inputs, **options)
        assert len(calls) == 1
        torch.testing.assert_close(output, self.attend(inputs, **options, output_attentions=True))

    def test_one_sequence_is_none(self, inputs, calls):
        starts = torch.tensor([0, 6])
        output = self.attend(inputs, cu_seq_lens_q=starts, cu_seq_lens_k=starts, is_causal=True)
        assert not calls
        torch.testing.assert_close(output, self.by_mask(inputs, torch.ones(6, 6).tril().bool()))

    def test_a_batch_of_rows_is_refused(self):
        inputs = [torch.randn(2, 4, 6, 8)] * 3
        with pytest.raises(
            NotImplementedError,
            match=r"expects packed sequences, 2 by cu_seq_lens_q, in a batch of one row .* Module has 2",
        ):
            self.attend(inputs)

    def test_lengths_beyond_the_row_are_refused(self, inputs):
        with pytest.raises(RuntimeError, match="attn_ext: expected cu_seqlens_q"):
            self.attend(inputs, cu_seq_lens_q=torch.tensor([0, 2, 7]))


class TestPackedMask:
    NUMBER = torch.tensor([[0, 0, 1, 1, 1, 2]])
    PLACES = torch.tensor([[0, 1, 0, 1, 2, 0]])

    def mask(self, inner: Any = None, in_order: bool = True, **options: Any) -> Tensor:
        from transformers import masking_utils

        inner = inner or masking_utils.causal_mask_function
        remapped = masking_utils.remap_positions_for_packed_sequence(inner, self.PLACES)
        same = masking_utils.packed_sequence_mask_function(self.NUMBER)
        function = masking_utils.and_masks(*((same, remapped) if in_order else (remapped, same)))
        sizes = {"batch_size": 1, "q_length": 6, "kv_length": 6, "config": hf.LlamaConfig()}
        usual = {"mask_function": function, "allow_is_causal_skip": False}
        return integration.attention_mask_function(**sizes, **usual | options)

    def expected(self, reach: int = 9) -> Tensor:
        distance = torch.arange(6)[:, None] - torch.arange(6)
        same = self.NUMBER[0][:, None] == self.NUMBER[0]
        return (same & (distance >= 0) & (distance < reach))[None, None]

    def test_shape_and_dtype_need_no_mask(self, no_masks):
        mask = self.mask()
        assert (mask.shape, mask.ndim, mask.dim(), mask.size(-1)) == ((1, 1, 6, 6), 4, 4, 6)
        assert mask.dtype == torch.bool

    @pytest.mark.parametrize("in_order", [True, False])
    def test_it_says_where_sequences_begin(self, in_order):
        """In the order of transformers before 5.24, and from then on."""
        from transformers.masking_utils import sliding_window_causal_mask_function

        sequences = self.mask(sliding_window_causal_mask_function(2), in_order).sequences
        assert sequences.cu_seqlens_q.tolist() == sequences.cu_seqlens_k.tolist() == [0, 2, 5, 6]
        assert sequences[2:] == (True, 1, None)
        assert torch.equal(packed.block_mask(sequences, 6, 6), self.expected(reach=2)[0, 0])

    @pytest.mark.parametrize(
        "look",
        [
            torch.clone,
            copy.deepcopy,
            lambda mask: mask & True,
            lambda mask: True & mask,
            lambda mask: mask[:, :, :, :],
            lambda mask: mask.to("cpu", torch.uint8).bool(),
            lambda mask: torch.where(mask, 1, 0).bool(),
            lambda mask: torch.cat([mask, mask])[:1],
            lambda mask: torch.tensor(mask.tolist()),
        ],
    )
    def test_whoever_looks_sees_the_mask(self, look):
        seen = look(self.mask())
        assert type(seen) is Tensor
        assert torch.equal(seen, self.expected())

    @pytest.mark.parametrize(
        "attend", [attn_ext.sdpa, torch.ops.attn_ext.sdpa, F.scaled_dot_product_attention]
    )
    def test_as_a_mask_of_attention(self, attend):
        query, key, value = torch.randn(3, 1, 4, 6, 8)
        output = attend(query, key, value, self.mask())
        torch.testing.assert_close(output, attend(query, key, value, self.expected()))

    def test_it_is_made_once(self):
        mask = self.mask()
        assert mask.made() is mask.made()

    def test_what_says_more_is_a_plain_mask(self):
        from transformers import masking_utils

        causal = masking_utils.causal_mask_function
        same_parity = lambda b, h, q, k: (q - k) % 2 == 0  # noqa: E731
        for inner, options in (
            (masking_utils.and_masks(same_parity, causal), {}),
            (masking_utils.or_masks(same_parity, causal), {}),
            (masking_utils.bidirectional_mask_function, {}),
            (masking_utils.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.long)), {}),
            (causal, {"attention_mask": torch.tensor([[True] * 5 + [False]])}),
        ):
            mask = self.mask(inner, **options)
            assert type(mask) is Tensor
            assert not torch.equal(mask, self.expected())
