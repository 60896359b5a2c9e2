"""Jagged nested tensors in the public functions: packed sequences by another name.

A jagged (B, H, j, D), or (B, j, D) of one head, holds its sequences one after the other, as
:func:`attn_ext.sdpa_packed` wants them.
"""

from typing import Any

import torch
from torch import Tensor

_EXPECTED = "expected query, key and value as jagged nested tensors of shape (batch, heads, j, head dim)"


def like(rows: Tensor, tensor: Any) -> Tensor:
    """`rows` as the values of a jagged tensor with the very offsets of `tensor`, (B, j, ...).

    Of other offsets torch holds that the shapes differ, be they equal.
    """
    result: Tensor = torch.nested.nested_tensor_from_jagged(rows, tensor.offsets(), tensor.lengths())
    return result


def _rows(tensor: Any, name: str) -> Any:
    """(B, j, H, D) of a jagged (B, H, j, D) or (B, j, D)."""
    if not isinstance(tensor, Tensor) or not tensor.is_nested or tensor.layout != torch.jagged:
        kind = f"a tensor of layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise RuntimeError(f"attn_ext: {_EXPECTED}, but got {kind} for {name}")
    ragged_dim = tensor._ragged_idx  # type: ignore[attr-defined]
    if tensor.dim() not in (3, 4) or ragged_dim != tensor.dim() - 2:
        raise RuntimeError(f"attn_ext: {_EXPECTED}, but got shape {list(tensor.shape)} for {name}")
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor.unsqueeze(2)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two nested tensors' offsets, or lengths, are equal; None where there are no holes."""
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    query_offset: int = 0,
    **options: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The arguments of the packed ops, those of the public ops given."""
    if attn_mask is not None:
        raise RuntimeError("attn_ext: expected no attn_mask with nested tensors")
    q, k, v = _rows(query, "query"), _rows(key, "key"), _rows(value, "value")
    of_query, of_key, of_value = q.offsets(), k.offsets(), v.offsets()
    if not (_same(of_key, of_value) and _same(k.lengths(), v.lengths())):
        raise RuntimeError("attn_ext: expected key and value with the same lengths")
    options["query_offsets"] = torch.full_like(of_query[1:], query_offset)
    options["seqlens_q"], options["seqlens_k"] = q.lengths(), k.lengths()
    tensors = (q.values(), k.values(), v.values(), of_query, of_key)
    return (*tensors, dropout_p, is_causal), options  # type: ignore[return-value]


def sdpa(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """:func:`attn_ext.sdpa` of jagged tensors: the output is jagged as the query is."""
    arguments, options = _packed(query, *args, **kwargs)
    return _output(torch.ops.attn_ext.sdpa_packed(*arguments, **options), query)


def sdpa_with_lse(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """:func:`attn_ext.sdpa_with_lse` of jagged tensors: a jagged output, and lse, (B, H, j) or (B, j)."""
    arguments, options = _packed(query, *args, **kwargs)
    output, lse = torch.ops.attn_ext.sdpa_packed_with_lse(*arguments, **options)
    return _output(output, query), _output(lse.transpose(0, 1), query)


def _output(rows: Tensor, query: Tensor) -> Tensor:
    """(Tq, H, ...) in the shape of the query's."""
    if query.dim() == 3:
        return like(rows.squeeze(1), query)
    return like(rows, query).transpose(1, 2)


def refuse(name: str) -> Any:
    """For ops that give a number a pair of query and key, or a key."""

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"attn_ext: expected no nested tensors in {name}: call it on each sequence, or on a padded batch"
        )

    return refused


FUNCTIONS = {
    "sdpa": sdpa,
    "sdpa_with_lse": sdpa_with_lse,
    "sdpa_with_weights": refuse("sdpa_with_weights"),
    "sdpa_with_key_mass": refuse("sdpa_with_key_mass"),
}
