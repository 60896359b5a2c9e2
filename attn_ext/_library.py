"""Loads the C++ library, which registers ``torch.ops.attn_ext``."""

from pathlib import Path

import torch

from ._version_check import check_build

check_build()

#: The library itself, without Python in it: what a C++ program links.
LIBRARY_PATH = Path(__file__).parent / "lib" / "libattn_ext.so"

#: Above lib/cmake/attn_ext, in which CMake looks.
CMAKE_PREFIX_PATH = str(Path(__file__).resolve().parent)

torch.ops.load_library(LIBRARY_PATH)

from . import _C as _C  # noqa: E402 - it needs the library

_C.cpu_capability()  # an instruction set that cannot be had is refused now, not in the first call
