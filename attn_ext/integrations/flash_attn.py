"""The functions of the flash-attn package by their own names and arguments, on any device and in any dtype.

    from attn_ext.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
    from attn_ext.integrations.flash_attn import flash_attn_with_kvcache

Tensors are (batch, length, heads, head dim), or (rows of all sequences, heads, head dim). Causality and
windows are aligned with the end of the keys, heads of key and value may be fewer than the query's, and a row
that sees no key gives 0 (its log-sum-exp is -inf, where flash-attn's is inf). What FlashAttention leaves to
chance is here always the same: ``deterministic`` changes nothing.
"""

from typing import Any

import torch
from torch import Tensor

from .. import functional
from ._flash_attn_cache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

#: The output, or with it the log-sum-exp and, in flash-attn, a tensor of the dropout's draw.
Result = Tensor | tuple[Tensor, Tensor, None]


def _bound(size: int) -> int | None:
    """A side of a window, of which flash-attn's -1 is open."""
    return None if size < 0 else size


def _check_probs(return_attn_probs: bool, dropout_p: float) -> None:
    if return_attn_probs and dropout_p > 0:
        raise NotImplementedError(
            "attn_ext: return_attn_probs with dropout_p > 0 is flash-attn's own format of the draw: expected "
            "dropout_p=0, or attn_ext.sdpa_with_weights, which returns the weights after dropout"
        )


def _check_no_training(inputs: tuple[Tensor, ...], dropout_p: float) -> None:
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if wanted or dropout_p > 0:
        raise NotImplementedError(
            "attn_ext: expected no block_table where a gradient or dropout is wanted: pages are for inference"
        )


def _alibi(slopes: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """-slope |i + Lk - Lq - j|, (batch or 1, heads, Lq, Lk)."""
    rows, keys = query.shape[1], key.shape[1]
    places = torch.arange(rows, device=query.device)[:, None] + keys - rows
    distance = (places - torch.arange(keys, device=query.device)).abs()
    slopes = slopes.reshape(-1, query.shape[2], 1, 1)
    return -slopes.float() * distance


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    r"""Attention of (batch, length, heads, head dim).

    Args:
        q: :math:`(B, L_q, H_q, D)`.
        k: :math:`(B, L_k, H_{kv}, D)`.
        v: :math:`(B, L_k, H_{kv}, D_v)`.
        dropout_p: the probability of a weight to be dropped.
        softmax_scale: :math:`1/\sqrt{D}` if None.
        causal: query ``i`` sees key ``j`` iff ``j <= i + Lk - Lq``.
        window_size: and iff ``i + Lk - Lq - left <= j <= i + Lk - Lq + right``; -1 is open.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 is off.
        alibi_slopes: :math:`(H_q)` or :math:`(B, H_q)`, float32; ``-slope * |i + Lk - Lq - j|`` is added to
            the scores. Takes memory of :math:`H_q L_q L_k` numbers.
        deterministic: results always are.
        return_attn_probs: return the log-sum-exp, too.

    Returns:
        The output, :math:`(B, L_q, H_q, D_v)`; or that, the log-sum-exp, :math:`(B, H_q, L_q)`, and None.

    Raises:
        RuntimeError: what :func:`attn_ext.sdpa` refuses.
        NotImplementedError: ``return_attn_probs`` with dropout.

    Source:
        Dao 2023, "FlashAttention-2"; the arguments are those of the flash-attn package, 2.8.

    Example:
        >>> import torch
        >>> from attn_ext.integrations.flash_attn import flash_attn_func
        >>> flash_attn_func(*torch.randn(3, 1, 6, 2, 8), causal=True).shape
        torch.Size([1, 6, 2, 8])
    """
    _check_probs(return_attn_probs, dropout_p)
    output, lse = functional.sdpa_with_lse(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None if alibi_slopes is None else _alibi(alibi_slopes, q, k),
        dropout_p,
        causal,
        scale=softmax_scale,
        enable_gqa=True,
        window_left=_bound(window_size[0]),
        window_right=_bound(window_size[1]),
        query_offset=k.shape[1] - q.shape[1],
        softcap=softcap,
    )
    output = output.transpose(1, 2)
    return (output, lse, None) if return_attn_probs else output


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    r"""Attention of sequences that lie one after the other: :func:`attn_ext.sdpa_packed`.

    Args:
        q: :math:`(T_q, H_q, D)`.
        k: :math:`(T_k, H_{kv}, D)`.
        v: :math:`(T_k, H_{kv}, D_v)`.
        cu_seqlens_q: :math:`(N + 1,)`, where each sequence begins in ``q``.
        cu_seqlens_k: the same for ``k`` and ``v``.
        max_seqlen_q: not needed.
        max_seqlen_k: not needed.
        dropout_p: as in :func:`flash_attn_func`, as all that follows, in each sequence.
        softmax_scale: the same.
        causal: the same.
        window_size: the same.
        softcap: the same.
        deterministic: the same.
        return_attn_probs: the same.
        alibi_slopes: None.
        block_table: :math:`(N, \text{most pages})`: ``k`` and ``v`` are pages,
            :math:`(P, \text{page}, H_{kv}, D)`, as in :func:`attn_ext.sdpa_paged`; ``cu_seqlens_k`` says how
            many keys each sequence has. Without gradients and dropout.

    Returns:
        The output, :math:`(T_q, H_q, D_v)`; or that, the log-sum-exp, :math:`(H_q, T_q)`, and None.

    Raises:
        RuntimeError: what :func:`attn_ext.sdpa_packed` or :func:`attn_ext.sdpa_paged` refuses.
        NotImplementedError: ``alibi_slopes``; a gradient or dropout with ``block_table``;
            ``return_attn_probs`` with dropout.

    Source:
        As :func:`flash_attn_func`.

    Example:
        >>> import torch
        >>> from attn_ext.integrations.flash_attn import flash_attn_varlen_func
        >>> starts = torch.tensor([0, 2, 6])
        >>> flash_attn_varlen_func(*torch.randn(3, 6, 2, 8), starts, starts, 4, 4, causal=True).shape
        torch.Size([6, 2, 8])
    """
    _check_probs(return_attn_probs, dropout_p)
    if alibi_slopes is not None:
        raise NotImplementedError("attn_ext: expected no alibi_slopes in flash_attn_varlen_func")
    options: dict[str, Any] = {
        "scale": softmax_scale,
        "enable_gqa": True,
        "window_left": _bound(window_size[0]),
        "window_right": _bound(window_size[1]),
        "softcap": softcap,
    }
    if block_table is None:
        output, lse = functional.sdpa_packed_with_lse(
            q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, causal, **options
        )
    else:
        _check_no_training((q, k, v), dropout_p)
        lengths = torch.diff(cu_seqlens_k)
        output, lse = functional.sdpa_paged_with_lse(
            q, k, v, block_table, lengths, cu_seqlens_q, causal, **options
        )
    return (output, lse, None) if return_attn_probs else output


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """:func:`flash_attn_func` of one tensor (B, L, 3, H, D); the other arguments are those after ``v``."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """:func:`flash_attn_func` with keys and values in one tensor (B, Lk, 2, Hkv, D)."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *args: Any, **kwargs: Any
) -> Result:
    """:func:`flash_attn_varlen_func` of one tensor (T, 3, H, D)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Result:
    """:func:`flash_attn_varlen_func` with keys and values in one tensor (Tk, 2, Hkv, D)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)
