"""Attention of packed sequences, and of parts of the keys put together."""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_scripting  # type: ignore[attr-defined]

from . import _library
from ._compiled import compiled

#: Untyped, because one variable holds its functions or the ops.
_C: Any = _library._C


def sdpa_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    r"""Attention of sequences of different lengths that lie one after the other, without padding.

    Sequence :math:`n` has the query rows from ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` and the key rows
    of ``cu_seqlens_k``; it sees its own keys alone, and gets the same bits as in a call of its own, whatever
    is packed beside it.

    **Causality is aligned with the end** of a sequence's keys: its last query sees its last key, as in
    FlashAttention, and unlike in :func:`attn_ext.sdpa`, whose ``query_offset`` is 0. ``query_offsets`` says
    otherwise.

    Args:
        query: :math:`(T_q, H_q, D)`, the rows of all sequences.
        key: :math:`(T_k, H_{kv}, D)`.
        value: :math:`(T_k, H_{kv}, D_v)`.
        cu_seqlens_q: :math:`(N + 1,)`, int32 or int64: where each sequence begins in ``query``, and where the
            last one ends. It never falls; rows before, between and behind the sequences give 0.
        cu_seqlens_k: the same for ``key`` and ``value``; ``cu_seqlens_q`` if None.
        dropout_p: as in :func:`attn_ext.sdpa`; the draw is that of a padded batch of the sequences.
        is_causal: query row ``i`` of a sequence sees its key ``j`` iff ``j <= i + offset``.
        seqlens_q: :math:`(N,)`, how many of the rows from its begin on a sequence has: fewer leave a hole.
            All of them up to the next sequence if None.
        seqlens_k: the same for its keys.
        query_offsets: :math:`(N,)`, the place of each sequence's first query row among its keys, for
            causality and windows; its keys less its queries if None.
        scale: as in :func:`attn_ext.sdpa`.
        enable_gqa: as there.
        window_left: as there, with the sequence's own offset.
        window_right: the same.
        softcap: as there.
        sinks: :math:`(H_q,)`, as there; the same for every sequence.

    Returns:
        The output, :math:`(T_q, H_q, D_v)`, in the dtype of ``query``.

    Dtypes:
        Those of :func:`attn_ext.sdpa`. Any strides.

    Raises:
        RuntimeError: what :func:`attn_ext.sdpa` refuses; lengths that are not 1-D integers, fall, or leave
            the tensors.

    Source:
        Dao 2023, "FlashAttention-2", ``flash_attn_varlen_func``;
        :func:`torch.nn.attention.varlen.varlen_attn`.

    Example:
        >>> import torch, attn_ext
        >>> first, second = torch.randn(3, 2, 8), torch.randn(5, 2, 8)  # (length, heads, head dim)
        >>> packed = torch.cat([first, second])
        >>> starts = torch.tensor([0, 3, 8])
        >>> output = attn_ext.sdpa_packed(packed, packed, packed, starts, is_causal=True)
        >>> alone = first.transpose(0, 1)
        >>> torch.equal(output[:3].transpose(0, 1), attn_ext.sdpa(alone, alone, alone, is_causal=True))
        True
    """
    if is_scripting():
        call = torch.ops.attn_ext.sdpa_packed
    elif is_compiling():
        call = compiled("sdpa_packed", query)
    else:
        call = _C.sdpa_packed
    output: Tensor = call(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        dropout_p,
        is_causal,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        query_offsets=query_offsets,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        sinks=sinks,
    )
    return output


def sdpa_packed_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attention of packed sequences that also returns the log-sum-exp of each row of scores.

    Arguments, dtypes and errors are those of :func:`sdpa_packed`; the log-sum-exp too is differentiable.

    Returns:
        The output, :math:`(T_q, H_q, D_v)`, and the log-sum-exp, :math:`(H_q, T_q)`, in float32 (float64 for
        float64 inputs): what :func:`attn_ext.sdpa_with_lse` gives, and -inf in rows that belong to no
        sequence.

    Source:
        As :func:`sdpa_packed` and :func:`attn_ext.sdpa_with_lse`.

    Example:
        >>> import torch, attn_ext
        >>> query, key, value = torch.randn(3, 8, 2, 4)
        >>> output, lse = attn_ext.sdpa_packed_with_lse(query, key, value, torch.tensor([0, 3, 8]))
        >>> output.shape, lse.shape
        (torch.Size([8, 2, 4]), torch.Size([2, 8]))
    """
    if is_scripting():
        call = torch.ops.attn_ext.sdpa_packed_with_lse
    elif is_compiling():
        call = compiled("sdpa_packed_with_lse", query)
    else:
        call = _C.sdpa_packed_with_lse
    outputs: tuple[Tensor, Tensor] = call(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        dropout_p,
        is_causal,
        seqlens_q=seqlens_q,
        seqlens_k=seqlens_k,
        query_offsets=query_offsets,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        sinks=sinks,
    )
    return outputs


def merge_partials(outputs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Attention over all keys from attention of the same queries over parts of the keys.

    .. math::
        \text{lse} = \log \sum_i e^{\text{lse}_i}, \qquad
        \text{output} = \sum_i e^{\text{lse}_i - \text{lse}}\, \text{output}_i

    Differentiable in all of its tensors. A row whose log-sum-exp is -inf has seen no key in that part, and
    adds nothing, whatever its output is; where no part has seen any, the output is 0 and the log-sum-exp
    -inf.

    Args:
        outputs: each :math:`(\ldots, D_v)`, in any floating dtype.
        lses: as many, each :math:`(\ldots)`: float64 with float64 outputs, else float32, or all of them
            float64, which tells more of rows whose scores are far from 0. What :func:`attn_ext.sdpa_with_lse`
            gives fits as it is; of :func:`sdpa_packed_with_lse` pass ``lse.T``.

    Returns:
        The output, :math:`(\ldots, D_v)`, in the dtype of ``outputs``, and the log-sum-exp, :math:`(\ldots)`,
        in that of ``lses``. Outputs are summed in float32, of float64 in float64.

    Raises:
        RuntimeError: no outputs; not as many lses; shapes, dtypes or devices that do not fit.

    Source:
        Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Liu et al. 2023, "Ring Attention
        with Blockwise Transformers for Near-Infinite Context".

    Example:
        >>> import torch, attn_ext
        >>> query, key, value = torch.randn(3, 2, 8, 4)
        >>> halves = [attn_ext.sdpa_with_lse(query, key[:, s], value[:, s]) for s in (slice(5), slice(5, 8))]
        >>> outputs, lses = zip(*halves)
        >>> output, lse = attn_ext.merge_partials(list(outputs), list(lses))
        >>> torch.allclose(output, attn_ext.sdpa(query, key, value), atol=1e-6)
        True
    """
    merged: tuple[Tensor, Tensor] = torch.ops.attn_ext.merge_partials(outputs, lses)
    return merged
