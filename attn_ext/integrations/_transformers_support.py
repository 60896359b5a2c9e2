"""Which classes of transformers hand their attention to AttentionInterface: what their source code says.

transformers has no flag for it: ``_supports_sdpa`` and ``_supports_attention_backend`` are also false for
classes that use the interface, and true for some that do not. Its own `set_attn_implementation` reads the
source as well; here more is read, because a class that computes attention itself would add a bool mask as
0 and 1, silently.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

__all__ = ["Traits", "calls_interface", "computes_attention", "refusal", "traits"]

CALL = "get_interface("
#: A class that is chosen when the model is built, from a table that lacks other names.
TABLE = re.compile(r"_ATTENTION_CLASSES\[")
BY_NAME = re.compile(r"""_attn_implementation == ["']sdpa["']""")


class Traits(NamedTuple):
    """What the mask function has to know of the models of a configuration."""

    refusal: str | None
    #: The model treats "sdpa" apart from other names where a mask is None, so it gets none.
    needs_mask: bool


def refusal(model_class: type) -> str | None:
    """Why attention of this PreTrainedModel class cannot be reached; None if it can."""
    code = _module_source(model_class.__module__)
    name = model_class.__name__
    if code is None:
        return f"the source of {name}, module {model_class.__module__!r}, cannot be read"
    if CALL not in code:
        if re.search(r"^class \w*Attention\w*\(nn\.Module\b", code, re.MULTILINE):
            return f"{name} computes attention in code of its own, not through AttentionInterface"
        return None  # no attention at all, or that of other models, which are asked themselves
    if TABLE.search(code):
        return f"{name} chooses a class of its own for its attention by name when it is built"
    own = _own_attention(code)
    if own and not getattr(model_class, "_supports_sdpa", False):
        return f"{name} computes a part of its attention in code of its own, {own}"
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traits(config_class: type) -> Traits:
    """What the mask function has to know; a constant in compiled code."""
    return _traits(config_class)


@cache
def _traits(config_class: type) -> Traits:
    from transformers import PreTrainedModel

    classes = [c for c in _subclasses(PreTrainedModel) if c.config_class is config_class]
    refusals = [refusal(c) for c in classes]
    # A configuration that several model files share is refused where none of them can be reached.
    refused = None if None in refusals or not refusals else refusals[0]
    codes = {_module_source(c.__module__) or "" for c in classes}
    return Traits(refused, any(BY_NAME.search(code) for code in codes))


def calls_interface(module_class: type) -> bool:
    """Whether this layer asks AttentionInterface for its function."""
    return CALL in _class_source(module_class)


def computes_attention(module_class: type) -> bool:
    """Whether this layer is attention with code of its own."""
    if module_class.__module__.startswith(("torch.", "attn_ext.")):  # for others to convert
        return False
    return "Attention" in module_class.__name__ and _has_own_attention(_class_source(module_class))


def _has_own_attention(code: str) -> bool:
    return CALL not in code and ("softmax" in code or "scaled_dot_product_attention" in code)


@cache
def _own_attention(code: str) -> str | None:
    """The first attention class of a model file that takes a mask and does not ask the interface."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef) and "Attention" in node.name:
            text = ast.get_source_segment(code, node) or ""
            if "mask" in text and _has_own_attention(text):
                return node.name
    return None


@cache
def _module_source(name: str) -> str | None:
    module = sys.modules.get(name)
    try:
        return inspect.getsource(module) if module is not None else None
    except (OSError, TypeError):
        return None


@cache
def _class_source(module_class: type) -> str:
    """The class and those that it inherits from, up to nn.Module."""
    parts = []
    for base in module_class.__mro__:
        if base.__module__.startswith(("torch.", "builtins")):
            continue
        try:
            parts.append(inspect.getsource(base))
        except (OSError, TypeError):
            continue
    return "\n".join(parts)


def _subclasses(root: Any) -> Iterator[Any]:
    for child in root.__subclasses__():
        yield child
        yield from _subclasses(child)
