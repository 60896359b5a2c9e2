"""Packed sequences for ONNX: one call over all rows, in which a mask says who sees whom.

The mask is (query rows, key rows): a graph holds what the op itself never does.
"""

from typing import Any

import torch
from torch import Tensor

from .tracing import traced


def _inside(starts: Tensor, lengths: Tensor | None, rows: Tensor) -> Tensor:
    """(rows, sequences): whose row each is."""
    ends = starts[1:] if lengths is None else starts[:-1] + lengths
    return (rows.unsqueeze(-1) >= starts[:-1]) & (rows.unsqueeze(-1) < ends)


def _of_row(inside: Tensor, numbers: Tensor) -> Tensor:
    """(rows,): the number of a row's sequence, 0 where it has none."""
    return (inside.long() * numbers).sum(-1)


def _visible(
    tensors: tuple[Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    lengths: tuple[Tensor | None, Tensor | None],
    offsets: Tensor | None,
    rule: tuple[bool, int | None, int | None],
) -> Tensor:
    """(query rows, key rows), True where the key is visible."""
    is_causal, window_left, window_right = rule
    rows, keys = (torch.arange(t.shape[0], device=t.device) for t in tensors)
    of_query, of_key = (_inside(*side) for side in zip(starts, lengths, (rows, keys), strict=True))
    if offsets is None:
        spans = [
            s[1:] - s[:-1] if length is None else length for s, length in zip(starts, lengths, strict=True)
        ]
        offsets = spans[1] - spans[0]
    place = (rows + _of_row(of_query, offsets - starts[0][:-1])).unsqueeze(-1)
    key_place = keys - _of_row(of_key, starts[1][:-1])
    visible: Tensor = of_query.float() @ of_key.float().T > 0
    if is_causal:
        visible = visible & (key_place <= place)
    if window_left is not None:
        visible = visible & (key_place >= place - window_left)
    if window_right is not None:
        visible = visible & (key_place <= place + window_right)
    return visible


def _call(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    **options: Any,
) -> Any:
    of_key = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    starts = (cu_seqlens_q.long(), of_key.long())
    lengths = tuple(None if length is None else length.long() for length in (seqlens_q, seqlens_k))
    offsets = None if query_offsets is None else query_offsets.long()
    rule = (is_causal, window_left, window_right)
    visible = _visible((query, key), starts, lengths, offsets, rule)  # type: ignore[arg-type]
    tensors = (t.transpose(0, 1) for t in (query, key, value))
    return traced(name)(*tensors, visible, dropout_p, **options)


def sdpa_packed(*args: Any, **kwargs: Any) -> Tensor:
    """The op of this name."""
    output: Tensor = _call("sdpa", *args, **kwargs)
    return output.transpose(0, 1)


def sdpa_packed_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The op of this name."""
    output, lse = _call("sdpa_with_lse", *args, **kwargs)
    return output.transpose(0, 1), lse


PACKED = {"sdpa_packed": sdpa_packed, "sdpa_packed_with_lse": sdpa_packed_with_lse}
