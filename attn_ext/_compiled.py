"""The op that a traced call becomes."""

from typing import Any

import torch
from torch import Tensor


def compiled(name: str, query: Tensor) -> Any:
    """``torch.ops.attn_ext.<name>``; while torch exports to ONNX, the same in ONNX's operators.

    Of a jagged query what takes it as packed sequences.
    """
    if query.is_nested:
        from ._nested import FUNCTIONS

        return FUNCTIONS[name]
    if torch.onnx.is_in_onnx_export():
        from ._onnx.packed import PACKED
        from ._onnx.tracing import traced

        if name in PACKED:
            return PACKED[name]
        return traced(name)
    return getattr(torch.ops.attn_ext, name)
