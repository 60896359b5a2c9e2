"""Masked scaled dot-product attention for PyTorch, as a C++ operator with every derivative."""

from typing import TYPE_CHECKING, Any

from . import _flops, _vmap, reference
from . import _library as _library
from ._build_info import version as __version__
from ._explain import Explanation, available_cpu_capabilities, cpu_capability, explain
from .functional import sdpa, sdpa_with_key_mass, sdpa_with_lse, sdpa_with_weights
from .integrations.convert import convert
from .integrations.override import override_sdpa
from .modules import CrossAttention, MultiHeadAttention, ScaledDotProductAttention, SelfAttention

if TYPE_CHECKING:
    from . import onnx, plot, recording
    from .recording import record

#: For CMake's CMAKE_PREFIX_PATH, as `torch.utils.cmake_prefix_path` is: find_package(attn_ext) looks there.
cmake_prefix_path: str = _library.CMAKE_PREFIX_PATH

_vmap.register()
_flops.register()

__all__ = [
    "CrossAttention",
    "Explanation",
    "MultiHeadAttention",
    "ScaledDotProductAttention",
    "SelfAttention",
    "__version__",
    "available_cpu_capabilities",
    "cmake_prefix_path",
    "convert",
    "cpu_capability",
    "explain",
    "onnx",
    "override_sdpa",
    "plot",
    "record",
    "recording",
    "reference",
    "sdpa",
    "sdpa_with_key_mass",
    "sdpa_with_lse",
    "sdpa_with_weights",
]


def __getattr__(name: str) -> Any:
    """What not every program needs is imported when it is first asked for."""
    if name == "record":
        from .recording import record

        return record
    if name in ("onnx", "plot", "recording"):
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
