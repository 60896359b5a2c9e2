"""The op that a traced call becomes."""

from typing import Any

import torch


def compiled(name: str) -> Any:
    """``torch.ops.attn_ext.<name>``; while torch exports to ONNX, the same in ONNX's operators."""
    if torch.onnx.is_in_onnx_export():
        from ._onnx.tracing import traced

        return traced(name)
    return getattr(torch.ops.attn_ext, name)
