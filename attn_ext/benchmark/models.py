"""Whole models with random weights: what they are, what they do, and whose attention they do it with.

A model comes from a *factory*, a function that returns ``(model, inputs)``: an ``nn.Module``, and the
arguments of its ``forward``, a dict by keyword or a tuple by place. It may have parameters named ``batch``
and ``length``, with defaults, which the command line sets. Of a dict, ``labels`` go into the training step
alone; if the output then has a ``loss``, that is what is differentiated, else the mean square of the first
floating tensor of the output is.
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import attn_ext
from attn_ext.integrations import transformers as integration

__all__ = ["EAGER", "FACTORIES", "OURS", "TASKS", "Contenders", "ModelError", "Spec", "Workload", "load"]

OURS, EAGER, DEFAULT = "attn_ext", "eager", "default"

#: What is timed.
TASKS = {
    "inference": "a forward pass without gradients",
    "training": "forward and backward, in training mode, without an optimizer",
    "generation": "new tokens after the prompt, greedily, with a cache",
}
#: Arguments of forward that are no part of a prompt.
NOT_OF_A_PROMPT = ("labels", "decoder_input_ids")


class ModelError(Exception):
    """What the user can mend, in a sentence."""


Factory = Callable[..., tuple[nn.Module, Any]]


# The models that have names ------------------------------------------------------------------------


def bert_base(batch: int = 4, length: int = 512) -> tuple[nn.Module, dict[str, Tensor]]:
    """BERT base, 110 million parameters; the texts are padded to one length on the right."""
    hf = _transformers()
    inputs = _text(batch, length, 30522)
    lengths = torch.linspace(length, -(-2 * length // 3), batch).round()
    mask = (torch.arange(length) < lengths[:, None]).long()
    config = hf.BertConfig(max_position_embeddings=max(512, length))
    return hf.BertForMaskedLM(config), {**inputs, "attention_mask": mask}


def gpt2(batch: int = 2, length: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2, 124 million parameters."""
    hf = _transformers()
    config = hf.GPT2Config(n_positions=max(2048, 2 * length))
    return hf.GPT2LMHeadModel(config), _text(batch, length, 50257)


def llama_1b(batch: int = 1, length: int = 1024) -> tuple[nn.Module, dict[str, Tensor]]:
    """The shape of Llama 3.2 1B, 1.24 billion parameters."""
    hf = _transformers()
    config = hf.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    return hf.LlamaForCausalLM(config), _text(batch, length, 128256)


def vit_base(batch: int = 8) -> tuple[nn.Module, dict[str, Tensor]]:
    """ViT-B/16 on images of 224 x 224, 86 million parameters."""
    hf = _transformers()
    labels = torch.arange(batch) % 2
    inputs = {"pixel_values": torch.randn(batch, 3, 224, 224), "labels": labels}
    return hf.ViTForImageClassification(hf.ViTConfig()), inputs


def whisper_small(batch: int = 1, length: int = 64) -> tuple[nn.Module, dict[str, Tensor]]:
    """Whisper small on 30 seconds of sound, 242 million parameters; ``length`` counts tokens of text."""
    hf = _transformers()
    config = hf.WhisperConfig(
        d_model=768,
        encoder_layers=12,
        decoder_layers=12,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
    )
    text = _text(batch, length, config.vocab_size)
    inputs = {"input_features": torch.randn(batch, 80, 3000), "decoder_input_ids": text["input_ids"]}
    return hf.WhisperForConditionalGeneration(config), {**inputs, "labels": text["labels"]}


def t5_small(batch: int = 4, length: int = 512) -> tuple[nn.Module, dict[str, Tensor]]:
    """T5 small, 60 million parameters; the decoder's text is an eighth as long as the encoder's."""
    hf = _transformers()
    config = hf.T5Config(decoder_start_token_id=0)
    short = _text(batch, max(1, length // 8), config.vocab_size)
    inputs = _text(batch, length, config.vocab_size)
    inputs |= {"decoder_input_ids": short["input_ids"], "labels": short["labels"]}
    return hf.T5ForConditionalGeneration(config), inputs


FACTORIES: dict[str, Factory] = {
    "bert-base": bert_base,
    "gpt2": gpt2,
    "llama-1b": llama_1b,
    "vit-base": vit_base,
    "whisper-small": whisper_small,
    "t5-small": t5_small,
}


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ModelError("this model is one of transformers: pip install 'attn_ext[transformers]'")
    import transformers

    return transformers


def _text(batch: int, length: int, vocabulary: int) -> dict[str, Tensor]:
    """What a tokenizer gives: tokens, at random, none of the first thousand, where the special ones are, and
    a mask that hides none; and labels, the tokens themselves."""
    ids = torch.randint(1000, vocabulary, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


# From a name to a workload -------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """What is asked for: a model of FACTORIES or ``path.py:factory``, and its sizes if not its own."""

    name: str
    batch: int | None = None
    length: int | None = None
    dtype: str = "float32"
    new_tokens: int = 32


@dataclass
class Workload:
    """A model with its inputs, ready to run."""

    name: str
    model: nn.Module
    inputs: dict[str, Any] | tuple[Any, ...]
    new_tokens: int

    @property
    def tasks(self) -> list[str]:
        """What this model can do."""
        can_generate = getattr(self.model, "can_generate", None)
        names = list(TASKS)
        if can_generate is None or not can_generate() or not isinstance(self.inputs, dict):
            names.remove("generation")
        return names

    def prepare(self, task: str) -> Callable[[], Any]:
        """The call that is timed; the model is put into the task's mode."""
        self.model.train(task == "training")
        return {"inference": self.infer, "training": self.train, "generation": self.generate}[task]

    def infer(self) -> Any:
        with torch.no_grad():
            return self._forward(self._without("labels"))

    def train(self) -> Any:
        self.model.zero_grad(set_to_none=True)
        _loss(self._forward(self.inputs)).backward()  # type: ignore[no-untyped-call]

    def generate(self) -> Any:
        how = {"do_sample": False, "min_new_tokens": self.new_tokens, "max_new_tokens": self.new_tokens}
        model: Any = self.model
        return model.generate(**self._without(*NOT_OF_A_PROMPT), **how)

    def _without(self, *names: str) -> Any:
        if not isinstance(self.inputs, dict):
            return self.inputs
        return {name: value for name, value in self.inputs.items() if name not in names}

    def _forward(self, inputs: Any) -> Any:
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)


def load(spec: Spec) -> Workload:
    """Build the model with random weights, the same every time.

    Raises:
        ModelError: no such model, file or factory, or a factory that does not keep to what is asked of it.
    """
    factory = FACTORIES.get(spec.name) or _from_file(spec.name)
    sizes = {"batch": spec.batch, "length": spec.length}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    for name in sizes:
        if name not in inspect.signature(factory).parameters:
            raise ModelError(f"{spec.name} takes no --{name}: its factory has no parameter of that name")
    torch.manual_seed(0)
    made = factory(**sizes)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ModelError(f"{spec.name} should return (nn.Module, inputs), got {_kind(made)}")
    if "transformers" in sys.modules:  # what it has to say is said of every call
        sys.modules["transformers"].logging.set_verbosity_error()
    model, inputs = made
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, dict | tuple):
        raise ModelError(f"{spec.name} should return its inputs as a dict or a tuple, got {_kind(inputs)}")
    dtype = getattr(torch, spec.dtype)
    return Workload(spec.name, model.to(dtype), _cast(inputs, dtype), spec.new_tokens)


def _from_file(name: str) -> Factory:
    path, colon, function = name.rpartition(":")
    if not colon and not name.endswith(".py"):
        raise ModelError(
            f"there is no model {name!r}{_close(name, FACTORIES)}; there are {', '.join(FACTORIES)}, "
            "and path.py:factory"
        )
    file = Path(path if colon else name)
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else Path()
        beside = [str(other) for other in folder.glob("*.py")]
        raise ModelError(f"there is no file {file}{_close(str(file), beside)}")
    module = _import(file)
    own = {key: value for key, value in vars(module).items() if inspect.isfunction(value)}
    if function not in own:
        known = ", ".join(own) or "none"
        asked = f"no function {function!r}{_close(function, own)}" if colon else "to be followed by :factory"
        raise ModelError(f"{file} has {asked}; its functions are {known}")
    return own[function]


def _import(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # where pickle and dataclasses look
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _close(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _kind(thing: Any) -> str:
    if isinstance(thing, tuple):
        return f"({', '.join(type(part).__name__ for part in thing)})"
    return type(thing).__name__


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in this dtype."""
    if isinstance(inputs, dict):
        return {name: _cast(value, dtype) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(_cast(value, dtype) for value in inputs)
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return inputs.to(dtype)
    return inputs


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else first_tensor(output).float().square().mean()


def first_tensor(output: Any) -> Tensor:
    """The first floating tensor of an output."""
    for tensor in _tensors(output):
        if tensor.is_floating_point():
            return tensor
    raise ModelError(f"expected a floating tensor in the output of the model, got {type(output).__name__}")


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


# Whose attention -----------------------------------------------------------------------------------


class Contenders:
    """The attention of a model, changed to and fro."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        config = getattr(model, "config", None)
        self.default = str(getattr(config, "_attn_implementation", None) or DEFAULT)

    @contextmanager
    def changing(self) -> Iterator[Callable[[str], None]]:
        """A function that gives the model the attention of a contender; at the end it has its own again."""
        state: list[Any] = [self.default, lambda: None]

        def change(name: str) -> None:
            if name != state[0]:
                state[1]()
                state[:] = [self.default, lambda: None]  # also where the next line raises
                state[:] = [name, self._change(name)]

        try:
            yield change
        finally:
            change(self.default)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The model with the attention of this contender.

        Raises:
            ModelError: nothing in the model can be changed to it.
        """
        with self.changing() as change:
            change(name)
            yield

    def _change(self, name: str) -> Callable[[], None]:
        if name == self.default:
            return lambda: None
        if name == OURS:
            return _convert(self.model)
        if self.default == DEFAULT:
            raise ModelError(f"only models of transformers have an attention by the name of {name!r}")
        model: Any = self.model
        model.set_attn_implementation(name)
        return lambda: model.set_attn_implementation(self.default)


def _convert(model: nn.Module) -> Callable[[], None]:
    """Every attention that can be is ours; the result puts it back."""
    convert = getattr(attn_ext, "convert", None)
    if convert is not None:
        try:
            undo: Callable[[], None] = convert(model).undo
        except ValueError as error:
            raise ModelError(str(error)) from error
        return undo
    reached, not_reached, undo = integration.convert(model)
    if not reached:
        reasons = "; ".join(sorted(set(not_reached.values()))) or "it has none that is known"
        raise ModelError(f"no attention of {type(model).__name__} can be reached: {reasons}")
    return undo
