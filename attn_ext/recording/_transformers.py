"""Models of transformers whose attention calls nothing that can be watched, while a record is open."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: Implementations of transformers that call what is watched.
_WATCHED = ("sdpa", "attn_ext")


@contextmanager
def reached_by_transformers(model: nn.Module) -> Iterator[None]:
    """Models of transformers in ``model`` attend by "attn_ext" where they would by "eager" or "flash_…"."""
    changed: list[tuple[Any, Any]] = []
    try:
        for part in _models(model):
            _change(part, changed)
        yield
    finally:
        for part, before in reversed(changed):
            part.set_attn_implementation(before)


def _models(model: nn.Module) -> list[Any]:
    library = sys.modules.get("transformers")
    kind = getattr(library, "PreTrainedModel", None)
    if kind is None:
        return []
    return [module for module in model.modules() if isinstance(module, kind)]


def _change(part: Any, changed: list[tuple[Any, Any]]) -> None:
    before = getattr(part.config, "_attn_implementation", None)
    if before is None or before in _WATCHED:
        return
    from ..integrations.transformers import register

    register()
    try:
        part.set_attn_implementation("attn_ext")
    except ValueError:
        return  # a class without the interface; the record says that it saw nothing there
    changed.append((part, before))
