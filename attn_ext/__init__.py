"""Masked scaled dot-product attention for PyTorch, as a C++ operator with every derivative."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _flops, _vmap
from . import _library as _library
from ._build_info import version as __version__
from ._explain import Explanation, available_cpu_capabilities, cpu_capability, explain
from ._saved_weights import save_weights_for_backward
from .caches import KeyValueCache
from .functional import (
    cache_write_,
    merge_partials,
    sdpa,
    sdpa_packed,
    sdpa_packed_with_lse,
    sdpa_paged,
    sdpa_paged_with_lse,
    sdpa_with_key_mass,
    sdpa_with_lse,
    sdpa_with_weights,
)
from .modules import CrossAttention, MultiHeadAttention, ScaledDotProductAttention, SelfAttention

if TYPE_CHECKING:
    from . import onnx, plot, recording, reference
    from .integrations.convert import convert
    from .integrations.override import override_sdpa
    from .recording import record

#: For CMake's CMAKE_PREFIX_PATH, as `torch.utils.cmake_prefix_path` is: find_package(attn_ext) looks there.
cmake_prefix_path: str = _library.CMAKE_PREFIX_PATH

_vmap.register()
_flops.register()

__all__ = [
    "CrossAttention",
    "Explanation",
    "KeyValueCache",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "SelfAttention",
    "__version__",
    "available_cpu_capabilities",
    "cache_write_",
    "cmake_prefix_path",
    "convert",
    "cpu_capability",
    "explain",
    "merge_partials",
    "onnx",
    "override_sdpa",
    "plot",
    "record",
    "recording",
    "reference",
    "save_weights_for_backward",
    "sdpa",
    "sdpa_packed",
    "sdpa_packed_with_lse",
    "sdpa_paged",
    "sdpa_paged_with_lse",
    "sdpa_with_key_mass",
    "sdpa_with_lse",
    "sdpa_with_weights",
]


#: What not every program needs is imported when it is first asked for.
_LAZY = {
    "convert": ".integrations.convert",
    "override_sdpa": ".integrations.override",
    "record": ".recording",
}
_LAZY_MODULES = ("onnx", "plot", "recording", "reference")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    if name in _LAZY_MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
