"""Models of transformers whose attention calls nothing that can be watched, while a record is open."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

#: Implementations of transformers that call what is watched.
_WATCHED = ("sdpa", "attn_ext")


@contextmanager
def reached_by_transformers(model: nn.Module) -> Iterator[dict[str, str]]:
    """Models of transformers in ``model`` attend by "attn_ext" where they would by "eager" or "flash_…".

    Yields:
        Module path of each attention that computes its weights by itself -> why it is not reached.
    """
    if all(name in _WATCHED for name in _implementations(model)):
        yield {}
        return
    from ..integrations.transformers import convert

    _, not_reached, undo = convert(model)
    try:
        yield not_reached
    finally:
        undo()


def _implementations(model: nn.Module) -> set[str]:
    """The names of what the models of transformers in ``model`` attend by."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if kind is None:
        return set()
    configs = [module.config for module in model.modules() if isinstance(module, kind)]
    configs += [module.config for module in model.modules() if hasattr(module, "config")]
    names = {getattr(config, "_attn_implementation", None) for config in configs}
    return {name for name in names if name is not None}
