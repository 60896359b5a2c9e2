"""Export to ONNX: the ops in standard operators, for ``torch.onnx.export(..., dynamo=True)``."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

__all__ = ["translation_table"]

#: What `translation_table` knows: the opsets whose `Attention` node has what a lowering uses.
OPSETS = (23, 24)


def translation_table(opset: int = 23) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The ops of ``torch.ops.attn_ext`` in standard ONNX operators, as ``custom_translation_table``.

    A call of :func:`attn_ext.sdpa` and its kin, and the modules, need no table: ``torch.onnx.export`` traces
    them into standard operators by itself. A table is for ``torch.ops.attn_ext.*`` called by name, and for a
    program that ``torch.export.export`` made before.

    Args:
        opset: the version of the operators, 23 or 24, at most the ``opset_version`` of the export.

    Returns:
        A translation for each op, in every dtype. float16 is computed in float16 where one ``Attention`` node
        says it all, bfloat16 in float32.

    Raises:
        ValueError: another opset. While exporting: ``dropout_p`` other than 0; a dynamic number of heads
            where heads are grouped; a dynamic head dim without ``scale``.
        ImportError: onnxscript is not installed.

    Source:
        ONNX ``Attention``, opset 23.

    Example:
        >>> import torch, attn_ext, attn_ext.onnx
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.ops.attn_ext.sdpa(x, x, x, is_causal=True)
        >>> program = torch.export.export(Attention(), (torch.randn(1, 2, 5, 8),))
        >>> options = {"opset_version": 23, "custom_translation_table": attn_ext.onnx.translation_table()}
        >>> model = torch.onnx.export(program, dynamo=True, verbose=False, **options)
        >>> [node.op_type for node in model.model.graph]
        ['Attention']
    """
    if opset not in OPSETS:
        raise ValueError(
            f"attn_ext: expected opset {' or '.join(map(str, OPSETS))}, which have Attention, got {opset}"
        )
    if find_spec("onnxscript") is None:
        raise ImportError("attn_ext.onnx needs onnxscript: pip install 'attn_ext[onnx]'")
    from ._onnx.nodes import table

    return table(opset)
