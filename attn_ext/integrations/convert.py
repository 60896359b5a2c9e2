"""Models of any library, with their attention computed by the op."""

import importlib
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..modules._base import AttentionModule
from .multihead import ConvertedMultiheadAttention

__all__ = ["Report", "convert"]


@dataclass(repr=False)
class Report:
    """What became of each attention of a model; printed, it is a table.

    Attributes:
        reached: module path -> what was done.
        not_reached: module path -> why nothing was done.
    """

    reached: dict[str, str] = field(default_factory=dict)
    not_reached: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def undo(self) -> None:
        """Put back everything that this conversion has changed; once more does nothing.

        What others have put in the place of a converted module since stays.
        """
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        parts = [f"reached: {len(self.reached)}", *_rows(self.reached)]
        parts += [f"not reached: {len(self.not_reached)}", *_rows(self.not_reached)]
        return "\n".join(parts)

    def __repr__(self) -> str:
        return f"Report(reached={len(self.reached)}, not_reached={len(self.not_reached)})"


def convert(model: nn.Module) -> Report:
    r"""Let attn_ext compute the attention of a model, which stays the model that it is.

    Every ``nn.MultiheadAttention``, also inside of ``nn.Transformer`` and its layers, becomes a
    subclass of it in place: same object, same parameters, same state dict, same hooks, same results. Models
    of transformers are given the attention implementation ``"attn_ext"``. Copies, pickles and graphs that are
    made of the model afterwards have attn_ext's attention.

    An encoder no longer turns padded batches into nested tensors; its output at padded places, which is 0
    then, is something else.

    Args:
        model: any module; it is changed.

    Returns:
        Report: ``reached`` and ``not_reached``, module path -> what was done, or why not; ``undo()``.
        Code that calls ``F.scaled_dot_product_attention`` is named under ``not_reached``:
        :func:`attn_ext.override_sdpa` reaches it.

    Raises:
        ValueError: the model has no attention that could be reached; it names those that it has.
        TypeError: it is no module.

    Example:
        >>> import torch, attn_ext
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 16)
        >>> expected = model(x)
        >>> report = attn_ext.convert(model)
        >>> report.reached
        {'self_attn': 'nn.MultiheadAttention, now computed by attn_ext'}
        >>> torch.testing.assert_close(model(x), expected)
        >>> report.undo()
        >>> type(model.self_attn)
        <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    report = Report()
    try:
        roots = _convert_transformers(model, report)
        _convert_multihead(model, report)
        _keep_batches_padded(model, report)
        _name_the_others(model, report, roots)
        if not report.reached:
            raise ValueError(_nothing_reached(model, report))
    except BaseException:
        report.undo()
        raise
    return report


def _paths(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Every module by every path, the model itself by the path ''."""
    paths: Iterable[tuple[str, nn.Module]] = model.named_modules(remove_duplicate=False)
    return paths


# transformers ------------------------------------------------------------------------------------


def _convert_transformers(model: nn.Module, report: Report) -> list[str]:
    """Convert what is transformers', and return the paths of its models."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then no module can be one of its models
        return []
    roots = [path for path, module in _paths(model) if isinstance(module, modeling.PreTrainedModel)]
    if roots:
        integration = importlib.import_module("attn_ext.integrations.transformers")
        reached, not_reached, undo = integration.convert(model)
        report._undo.append(undo)
        report.reached.update(reached)
        report.not_reached.update(not_reached)
    return roots


# nn.MultiheadAttention ---------------------------------------------------------------------------


def _convert_multihead(model: nn.Module, report: Report) -> None:
    for path, module in _paths(model):
        if isinstance(module, AttentionModule):
            report.reached[path] = "attn_ext's own module"
        elif not isinstance(module, nn.MultiheadAttention):
            continue
        elif type(module) is ConvertedMultiheadAttention:
            report.reached[path] = "nn.MultiheadAttention, now computed by attn_ext"
        elif reason := _why_not(module):
            report.not_reached[path] = reason
        else:
            report._undo.append(_replace_class(module))
            report.reached[path] = "nn.MultiheadAttention, now computed by attn_ext"


def _why_not(module: nn.MultiheadAttention) -> str | None:
    kind = type(module)
    if kind.__module__.startswith("torch.ao."):
        return f"a quantised attention, {kind.__module__}.{kind.__name__}"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized: convert first, and parametrize then"
    if kind is not nn.MultiheadAttention:
        return f"a subclass of nn.MultiheadAttention, {kind.__name__}, which may compute something else"
    if "forward" in vars(module):
        return "its forward has been replaced, by accelerate or the like: convert before that"
    if module.bias_k is not None or module.bias_v is not None:
        return "add_bias_kv=True: its extra key has no counterpart"
    if module.add_zero_attn:
        return "add_zero_attn=True: its extra key has no counterpart"
    device = module.out_proj.weight.device.type
    if device not in ("cpu", "meta"):
        return f"its parameters are on {device}, and attn_ext is fast on the CPU"
    return None


def _replace_class(module: Any) -> Callable[[], None]:
    """Make it a ConvertedMultiheadAttention, and return what makes it what it was."""
    same_dims = module._qkv_same_embed_dim

    def undo() -> None:
        if type(module) is ConvertedMultiheadAttention:
            module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
            module._qkv_same_embed_dim = same_dims

    module.__class__ = ConvertedMultiheadAttention
    # To nn.TransformerEncoderLayer it says that the weights cannot be handed to its own fused kernel.
    module._qkv_same_embed_dim = False
    return undo


def _keep_batches_padded(model: nn.Module, report: Report) -> None:
    """Stop encoders of converted layers from making nested tensors, which only their fused kernel takes."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder) or not getattr(module, "use_nested_tensor", False):
            continue
        if any(type(child) is ConvertedMultiheadAttention for child in module.modules()):
            module.use_nested_tensor = False
            report._undo.append(_allow_nested(module))


def _allow_nested(encoder: nn.TransformerEncoder) -> Callable[[], None]:
    def undo() -> None:
        encoder.use_nested_tensor = True

    return undo


# The others --------------------------------------------------------------------------------------

_SDPA = "scaled_dot_product_attention"
#: What calls it elsewhere: the function by which diffusers chooses a backend.
_CALLERS = {_SDPA, "dispatch_attention_fn"}


def _name_the_others(model: nn.Module, report: Report, roots: list[str]) -> None:
    """Name every other attention that can be known as one, by its code or by its class's name."""
    known = {**report.reached, **report.not_reached}
    for path, module in _paths(model):
        if path in known or _is_below(path, roots):
            continue
        reason = _why_missed(module)
        if reason is not None and not any(_is_below(other, [path]) for other in known):
            report.not_reached[path] = reason


def _is_below(path: str, roots: Iterable[str]) -> bool:
    return any(root in ("", path) or path.startswith(f"{root}.") for root in roots)


def _why_missed(module: nn.Module) -> str | None:
    """Why the attention that this module itself computes is not reached; None if it seems to compute none."""
    kind = type(module)
    if any(_calls_sdpa(owner) for owner in (kind, type(getattr(module, "processor", None)))):
        if getattr(module, "fused_attn", True) is False:  # timm
            return f"its fused_attn is False, so it does not call F.{_SDPA}"
        return f"calls F.{_SDPA}: attn_ext.override_sdpa() reaches it"
    name = getattr(module, "original_name", kind.__name__)  # of a scripted module
    if "attention" in name.lower() or name.lower().endswith("attn"):
        return f"{name} has an attention of its own"
    return None


def _calls_sdpa(owner: type) -> bool:
    """Whether a function of a class, not PyTorch's, names F.scaled_dot_product_attention."""
    classes = [cls for cls in owner.__mro__ if not cls.__module__.startswith(("torch.", "builtins"))]
    functions = [getattr(f, "__func__", f) for cls in classes for f in vars(cls).values()]
    return any(_names_in(f.__code__) & _CALLERS for f in functions if isinstance(f, types.FunctionType))


def _names_in(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


# Words -------------------------------------------------------------------------------------------


def _nothing_reached(model: nn.Module, report: Report) -> str:
    name = type(model).__name__
    if not report.not_reached:
        return f"expected a model with attention, but found none among the {_count(model)} modules of {name}"
    found = [f"{_shown(path)} ({reason})" for path, reason in report.not_reached.items()]
    more = f", and {len(found) - 3} more" if len(found) > 3 else ""
    return f"found no attention in {name} that can be converted, but only {'; '.join(found[:3])}{more}"


def _count(model: nn.Module) -> int:
    return sum(1 for _ in model.modules())


def _shown(path: str) -> str:
    return path or "the model itself"


def _rows(entries: dict[str, str]) -> list[str]:
    """Two columns, as wide as the terminal is."""
    columns = max(shutil.get_terminal_size().columns, 40)
    wanted = max((len(_shown(path)) for path in entries), default=0)
    width = min(wanted, columns // 2 - 4)
    rows: list[str] = []
    for path, text in entries.items():
        left = textwrap.wrap(_shown(path), width)
        right = textwrap.wrap(text, columns - width - 4)
        height = max(len(left), len(right))
        for i in range(height):
            cells = [part[i] if i < len(part) else "" for part in (left, right)]
            rows.append(f"  {cells[0]:{width}}  {cells[1]}".rstrip())
    return rows
