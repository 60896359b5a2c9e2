"""Attention over a cache of keys and values in pages, and writing to it."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_scripting  # type: ignore[attr-defined]

from . import _library

#: Untyped, because one variable holds its functions or the ops.
_C: Any = _library._C


def sdpa_paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    r"""Attention of some new query rows of many sequences to their keys and values in a paged cache.

    Key ``j`` of sequence :math:`n` is row ``j % page`` of page ``block_table[n, j // page]``; pages may be
    shared between sequences, and lie in any order. Decoding (a row a sequence), prefill in chunks (some rows)
    and mixes of them are one call. **Causality is aligned with the end**: the last query row of a sequence
    stands at its last key, which has been written before (:func:`cache_write_`). For inference: there is no
    gradient. A sequence has the same bits as in a call of its own, and in :func:`attn_ext.sdpa` over
    contiguous keys.

    Args:
        query: :math:`(T_q, H_q, D)`.
        key_pages: :math:`(P, \text{page}, H_{kv}, D)`, of any strides with a contiguous last dim.
        value_pages: :math:`(P, \text{page}, H_{kv}, D_v)`, the same.
        block_table: :math:`(N, \text{most pages})`, int32 or int64, the pages of each sequence; what comes
            after those that it needs is not looked at (-1, say).
        seqlens_k: :math:`(N,)`, int32 or int64: keys of each sequence, the new ones among them.
        cu_seqlens_q: :math:`(N + 1,)`, where the query rows of each sequence begin, and where the last end;
            if None, row ``n`` is sequence ``n``.
        is_causal: query row ``i`` of a sequence sees key ``j`` iff ``j <= i + keys - query rows``.
        scale: as in :func:`attn_ext.sdpa`.
        enable_gqa: as there.
        window_left: as there, with the sequence's own offset.
        window_right: the same.
        softcap: as there.
        sinks: :math:`(H_q,)`, as there; the same for every sequence.
        key_scale: a factor of the keys, float32: of all of them, :math:`()`; of a head, :math:`(H_{kv},)`; or
            of a key and head, :math:`(P, \text{page}, H_{kv}, 1)`.
        value_scale: the same of the values.

    Returns:
        The output, :math:`(T_q, H_q, D_v)`, in the dtype of ``query``; rows of no sequence are 0.

    Dtypes:
        Queries of those of :func:`attn_ext.sdpa`; pages of the query's, of a narrower floating one (bfloat16
        or float16 under float32), int8, or float8_e4m3fn.

    Raises:
        RuntimeError: shapes or dtypes that do not fit; offsets that fall or leave ``query``; a length beyond
            the pages of its row of the table; a page that is not there.

    Source:
        Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".

    Example:
        >>> import torch, attn_ext
        >>> pages = torch.randn(2, 4, 16, 1, 8)  # 4 pages of 16 rows, of keys and of values
        >>> table = torch.tensor([[2, 0], [3, -1]])
        >>> lengths = torch.tensor([20, 7])
        >>> attn_ext.sdpa_paged(torch.randn(2, 1, 8), pages[0], pages[1], table, lengths).shape
        torch.Size([2, 1, 8])
    """
    if is_scripting() or is_compiling():  # noqa: SIM108 (TorchScript)
        call = torch.ops.attn_ext.sdpa_paged
    else:
        call = _C.sdpa_paged
    output: Tensor = call(
        query,
        key_pages,
        value_pages,
        block_table,
        seqlens_k,
        cu_seqlens_q,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return output


def sdpa_paged_with_lse(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attention over a paged cache that also returns the log-sum-exp of each row of scores.

    Arguments, dtypes and errors are those of :func:`sdpa_paged`.

    Returns:
        The output, :math:`(T_q, H_q, D_v)`, and the log-sum-exp, :math:`(H_q, T_q)`, in float32 (float64 for
        float64 queries), -inf in rows of no sequence.

    Source:
        As :func:`sdpa_paged` and :func:`attn_ext.sdpa_with_lse`.

    Example:
        >>> import torch, attn_ext
        >>> pages, table = torch.randn(4, 16, 1, 8), torch.tensor([[2, 0], [3, -1]])
        >>> query, lengths = torch.randn(2, 1, 8), torch.tensor([20, 7])
        >>> output, lse = attn_ext.sdpa_paged_with_lse(query, pages, pages, table, lengths)
        >>> lse.shape
        torch.Size([1, 2])
    """
    if is_scripting() or is_compiling():
        call = torch.ops.attn_ext.sdpa_paged_with_lse
    else:
        call = _C.sdpa_paged_with_lse
    outputs: tuple[Tensor, Tensor] = call(
        query,
        key_pages,
        value_pages,
        block_table,
        seqlens_k,
        cu_seqlens_q,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return outputs


def cache_write_(
    key_pages: Tensor,
    value_pages: Tensor,
    key: Tensor,
    value: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    r"""Write new keys and values to their slots of a paged cache, in place.

    Slot :math:`s` is row ``s % page`` of page ``s // page``. A narrower page holds the nearest numbers; with
    a scale, those of ``key / key_scale``. int8 keeps them within -127 to 127 and NaN as 0, float8_e4m3fn
    within -448 to 448.

    Args:
        key_pages: :math:`(P, \text{page}, H_{kv}, D)`, written to.
        value_pages: :math:`(P, \text{page}, H_{kv}, D_v)`, written to.
        key: :math:`(T, H_{kv}, D)`.
        value: :math:`(T, H_{kv}, D_v)`.
        slot_mapping: :math:`(T,)`, int32 or int64; -1: that row is not written. Of a slot that is named twice
            one of the rows is kept.
        key_scale: as in :func:`sdpa_paged`; of a key and head, it is read at the key's slot.
        value_scale: the same of the values.

    Raises:
        RuntimeError: shapes or dtypes that do not fit, a slot that is not there, pages that overlap in
            memory; then nothing has been written.

    Source:
        As :func:`sdpa_paged`.

    Example:
        >>> import torch, attn_ext
        >>> key_pages, value_pages = torch.zeros(2, 4, 16, 1, 8)
        >>> key, value = torch.randn(2, 3, 1, 8)
        >>> attn_ext.cache_write_(key_pages, value_pages, key, value, torch.tensor([32, 33, -1]))
        >>> torch.equal(key_pages[2, :2], key[:2])
        True
    """
    torch.ops.attn_ext.cache_write_(
        key_pages, value_pages, key, value, slot_mapping, key_scale=key_scale, value_scale=value_scale
    )
