"""transformers: ``attn_implementation="attn_ext"``.

:func:`register` adds attn_ext to the attention functions of transformers and to its mask functions, by the
name ``"attn_ext"``. A model then takes it when it is built or loaded, or later::

    from attn_ext.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn_ext")
    model.set_attn_implementation("attn_ext")

Classes whose attention does not go through ``AttentionInterface`` are refused when they are built.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from attn_ext.functional import sdpa, sdpa_with_weights

from ._transformers_packed import PackedMask, Sequences, attend, block_mask, plain, sequences_of
from ._transformers_support import calls_interface, computes_attention, refusal, traits

__all__ = ["NAME", "TESTED_VERSIONS", "convert", "register"]

#: What `attn_implementation` is.
NAME = "attn_ext"
#: The first and the last version of transformers that the tests were run with.
TESTED_VERSIONS = ("5.18", "5.24")

#: Tensors that models hand on to every attention and that say nothing which the mask does not say.
HARMLESS = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "position_ids",
        "seq_idx",
        "token_type_ids",
    }
)
UNDO = 'use another attention for this model: set_attn_implementation("eager")'


def register() -> None:
    """Make ``attn_implementation="attn_ext"`` known to transformers.

    Adds an attention function and a mask function by that name, and makes classes that cannot take it say so
    when they are built: a check in front of ``PreTrainedModel.get_correct_attn_implementation``, which leaves
    every other name alone. May be called any number of times.

    Raises:
        ImportError: transformers is not installed, or is a version without what this needs; then nothing has
            been registered. A version outside those tested is a warning.
    """
    library = _checked_library()
    library.modeling_utils.AttentionInterface.register(NAME, attention_forward)
    library.masking_utils.AttentionMaskInterface.register(NAME, attention_mask_function)
    _check_when_built(library.modeling_utils.PreTrainedModel)


def _weights_are_collected() -> bool:
    """Whether a model that was asked for its weights collects them, though the flag has not come this far.

    GPT-2 and others drop ``output_attentions`` on the way: under eager all weights there are pass by anyway.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or torch.compiler.is_compiling():
        return False
    return any("attentions" in key for key in collector.get() or ())


def _is_recorded() -> bool:
    """Whether :func:`attn_ext.record` looks on, which reads weights of rows and keys of one sequence."""
    watch = sys.modules.get("attn_ext.recording._watch")
    return watch is not None and not torch.compiler.is_compiling() and bool(watch._thread.watchers)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: what a layer of transformers calls.

    Shape:
        query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), ``attention_mask`` broadcasts to
        (B, Hq, Lq, Lk): bool, True takes part, or floating, added. Without one the triangle of causality is
        aligned top-left, also over the keys of a static cache that are not filled yet.

    ``cu_seq_lens_q`` and ``cu_seq_lens_k``, among ``others``, say where sequences begin among the rows of
    the batch, with a mask or without. ``sliding_window`` is read only with them and without a mask: else it
    is in the mask already.

    Returns:
        The output (B, Lq, Hq, Dv), and the weights (B, Hq, Lq, Lk) if they were asked for, else None.

    Raises:
        NotImplementedError: a paged cache, sparse ``indices``, or a tensor whose meaning is not known.
    """
    _refuse_unknown(module, others)
    sinks = _one_sink_a_head(module, query, s_aux if sinks is None else sinks)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    need_weights = output_attentions or _weights_are_collected()
    # What packed sequences do not have.
    in_full = need_weights or position_bias is not None or _is_recorded()
    sequences, mask = _packed(module, query, attention_mask, causal, in_full, others)
    if sequences is not None and mask is None and not in_full:
        return attend(query, key, value, sequences, dropout, scaling, softcap or 0.0, sinks), None
    if sequences is not None:
        mask = _with_blocks(block_mask(sequences, query.shape[2], key.shape[2]), mask)
    causal = causal and mask is None and query.shape[2] > 1
    mask = _joined(mask, position_bias)
    grouped = query.shape[1] != key.shape[1]
    rest = (None, None, 0, softcap or 0.0, sinks)
    if need_weights:
        output, weights = sdpa_with_weights(query, key, value, mask, dropout, causal, scaling, grouped, *rest)
        return output.transpose(1, 2), weights
    return sdpa(query, key, value, mask, dropout, causal, scaling, grouped, *rest).transpose(1, 2), None


def _packed(
    module: nn.Module,
    query: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool,
    in_full: bool,
    others: dict[str, Any],
) -> tuple[Sequences | None, Tensor | None]:
    """The sequences that the rows hold, if somebody says that there are several, and the mask beside them.

    Without a mask beside them they say it all, causality and window, too.
    """
    known = attention_mask.sequences if isinstance(attention_mask, PackedMask) and not in_full else None
    starts = others.get("cu_seq_lens_q")
    if not isinstance(starts, Tensor) or starts.shape[-1] <= 2:
        return (None, plain(attention_mask)) if known is None else (known, None)
    if query.shape[0] != 1:
        raise NotImplementedError(
            f"attn_ext expects packed sequences, {starts.shape[-1] - 1} by cu_seq_lens_q, in a batch of one "
            f"row of tokens, and {type(module).__name__} has {query.shape[0]}: {UNDO}"
        )
    of_keys: Tensor | None = others.get("cu_seq_lens_k")
    of_keys = starts if of_keys is None else of_keys
    if attention_mask is None:
        window = others.get("sliding_window")
        left = None if window is None else window - 1
        return Sequences(starts, of_keys, is_causal, left, None if is_causal else left), None
    if known is not None and all(torch.equal(s, known.cu_seqlens_q.to(s)) for s in (starts, of_keys)):
        return known, None
    return Sequences(starts, of_keys, is_causal=False), plain(attention_mask)


def _with_blocks(blocks: Tensor, mask: Tensor | None) -> Tensor:
    """The mask of both."""
    if mask is None:
        return blocks
    return blocks & mask if mask.dtype == torch.bool else torch.where(blocks, mask, float("-inf"))


def _refuse_unknown(module: nn.Module, others: dict[str, Any]) -> None:
    name = type(module).__name__
    if others.get("cache") is not None:
        raise NotImplementedError(f"attn_ext cannot read the paged cache that {name} works on: {UNDO}")
    for chosen in ("indices", "block_indices"):
        if others.get(chosen) is not None:
            raise NotImplementedError(f"attn_ext cannot choose keys by the {chosen!r} of {name}: {UNDO}")
    for key, tensor in others.items():
        if isinstance(tensor, Tensor) and key not in HARMLESS:
            raise NotImplementedError(
                f"attn_ext does not know the tensor {key!r} that {name} hands to its attention: {UNDO}"
            )


def _one_sink_a_head(module: nn.Module, query: Tensor, sinks: Tensor | None) -> Tensor | None:
    if sinks is not None and tuple(sinks.shape) != (query.shape[1],):
        raise NotImplementedError(
            f"attn_ext takes one sink a head, ({query.shape[1]},), and {type(module).__name__} has sinks of "
            f"shape {tuple(sinks.shape)}: {UNDO}"
        )
    return sinks


def _joined(attention_mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """Mask and position bias as the one mask that the op takes."""
    if position_bias is None or attention_mask is None:
        return attention_mask if position_bias is None else position_bias
    if attention_mask.dtype == torch.bool:
        return torch.where(attention_mask, position_bias, float("-inf"))
    return position_bias + attention_mask


def attention_mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *arguments: Any,
    mask_function: Callable[..., Tensor] | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """The mask function: a bool mask (B, 1, Lq, Lk), True takes part, or None.

    None stands for causality alone, or for every key where the layer is not causal. The mask is that of
    ``"sdpa"``. Where it is the same for every query row, as padding alone is, one row is made and expanded.
    That of packed sequences is made when somebody looks at it: :func:`attention_forward` does not.

    Raises:
        ValueError: the model of ``config`` does not use AttentionInterface, so it would misread the mask.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    known = traits(type(config))
    if known.refusal is not None:
        raise ValueError(_refused(known.refusal))
    rows = q_length
    if mask_function is bidirectional_mask_function and not use_vmap:
        rows = 1
    make = partial(
        sdpa_mask,
        batch_size,
        rows,
        kv_length,
        *arguments,
        mask_function=mask_function or causal_mask_function,
        allow_is_causal_skip=allow_is_causal_skip and not known.needs_mask,
        use_vmap=use_vmap,
        config=config,
        **others,
    )
    sequences = None
    if others.get("attention_mask") is None and q_length == kv_length and not _is_traced():
        sequences = sequences_of(mask_function, (batch_size, kv_length))
    if sequences is not None:
        return PackedMask.of(sequences, (batch_size, 1, q_length, kv_length), make)
    mask: Tensor | None = make()
    return mask if mask is None or rows == q_length else mask.expand(-1, -1, q_length, -1)


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or bool(torch._C._get_tracing_state())


def _refused(reason: str) -> str:
    return f'attn_implementation="{NAME}" cannot be used: {reason}; leave attn_implementation out for it'


def _check_when_built(pretrained_model: Any) -> None:
    """Refuse classes that cannot take attn_ext where transformers asks whether they support a name."""
    original = pretrained_model.get_correct_attn_implementation
    if getattr(original, "_attn_ext", False):
        return

    def get_correct_attn_implementation(
        self: Any, requested_attention: str | None, *arguments: Any, **keywords: Any
    ) -> str:
        reason = refusal(type(self)) if requested_attention == NAME else None
        if reason is not None:
            raise ValueError(_refused(reason))
        result: str = original(self, requested_attention, *arguments, **keywords)
        return result

    get_correct_attn_implementation._attn_ext = True  # type: ignore[attr-defined]
    pretrained_model.get_correct_attn_implementation = get_correct_attn_implementation


def convert(model: nn.Module) -> tuple[dict[str, str], dict[str, str], Callable[[], None]]:
    """Let every attention of transformers in ``model`` that can take attn_ext take it.

    Returns:
        Module path of each attention layer -> what was done; of each that was not reached -> why not; and a
        function that puts back what this call changed. Two empty dicts for a model that holds no
        ``PreTrainedModel``.

    Raises:
        ImportError: as :func:`register`, which is called first.
    """
    if "transformers" not in sys.modules:  # then nothing in the model is of that library
        return {}, {}, lambda: None
    from transformers import PreTrainedModel

    owners = {path: m for path, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    if not owners:
        return {}, {}, lambda: None
    register()
    reasons = {path: refusal(type(owner)) for path, owner in owners.items()}
    refused = {id(owners[path].config): reason for path, reason in reasons.items() if reason is not None}
    configs = [owners[path].config for path, reason in reasons.items() if reason is None]
    reached: dict[str, str] = {}
    not_reached: dict[str, str] = {}
    for path, layer in model.named_modules():
        owner = _owner(path, owners)
        if owner is None or path in owners:
            continue
        if calls_interface(type(layer)):
            config = layer.config
            reason = reasons[owner] or refused.get(id(config))
            if reason is None:
                configs.append(config)
                was = config._attn_implementation
                reached[path] = f"{type(layer).__name__}: attn_implementation {was!r} -> {NAME!r}"
            else:
                not_reached[path] = reason
        elif _is_own_attention(layer):
            not_reached[path] = reasons[owner] or f"{type(layer).__name__} computes attention itself"
    if not reached:
        return reached, not_reached, lambda: None
    return reached, not_reached, _switch([config for config in configs if id(config) not in refused])


def _owner(path: str, owners: dict[str, Any]) -> str | None:
    """The path of the nearest PreTrainedModel that holds this module."""
    while path not in owners:
        if not path:
            return None
        path = path.rpartition(".")[0]
    return path


def _is_own_attention(layer: nn.Module) -> bool:
    """Attention by itself, and not a shell around the layer that is."""
    inner = {type(m) for m in layer.modules() if m is not layer}
    holds_attention = any(calls_interface(kind) or computes_attention(kind) for kind in inner)
    return computes_attention(type(layer)) and not holds_attention


def _switch(configs: list[Any]) -> Callable[[], None]:
    """Set these configurations, and none below them, to attn_ext; the result puts them back."""
    before = {id(config): (config, config._attn_implementation) for config in configs}
    for config, _ in before.values():
        config._attn_implementation = {"": NAME}

    def undo() -> None:
        for config, was in before.values():
            if config._attn_implementation == NAME:  # else somebody has set it to something else since
                config._attn_implementation = {"": was}

    return undo


def _checked_library() -> Any:
    """The package transformers, with all that this needs; a sentence where it lacks something."""
    if find_spec("transformers") is None:
        raise ImportError("transformers is not installed: pip install 'attn_ext[transformers]'")
    import transformers
    from transformers import masking_utils, modeling_utils

    needed = {
        "AttentionInterface": modeling_utils,
        "AttentionMaskInterface": masking_utils,
        "sdpa_mask": masking_utils,
        "bidirectional_mask_function": masking_utils,
    }
    first, last = TESTED_VERSIONS
    missing = [name for name, module in needed.items() if not hasattr(module, name)]
    if not hasattr(modeling_utils.PreTrainedModel, "get_correct_attn_implementation"):
        missing.append("PreTrainedModel.get_correct_attn_implementation")
    if missing:
        raise ImportError(
            f"attn_ext is tested with transformers {first} to {last}, and transformers "
            f"{transformers.__version__} has no {missing[0]}: pip install 'attn_ext[transformers]'"
        )
    version = _minor(transformers.__version__)
    if not _minor(first) <= version <= _minor(last):
        warnings.warn(
            f"attn_ext is tested with transformers {first} to {last}, and this is "
            f"{transformers.__version__}: compare what models give with another attn_implementation",
            stacklevel=3,
        )
    return transformers


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
