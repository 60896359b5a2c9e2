"""The public ops as typed, documented and scriptable functions.

Each function calls the op of its name in ``torch.ops.attn_ext`` and nothing else: in eager mode through a
C function that knows the order of the keywords, which is the same call with less to unpack; and where
``torch.onnx.export`` traces, in ONNX's operators (:mod:`attn_ext.onnx`). The ops take
``scale`` and what follows it by keyword only; the functions do not insist on it, because TorchScript cannot
compile keyword-only parameters that have defaults.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_scripting  # type: ignore[attr-defined]

from . import _library
from ._compiled import compiled
from ._packed import merge_partials, sdpa_packed, sdpa_packed_with_lse
from ._paged import cache_write_, sdpa_paged, sdpa_paged_with_lse

__all__ = [
    "cache_write_",
    "merge_partials",
    "sdpa",
    "sdpa_packed",
    "sdpa_packed_with_lse",
    "sdpa_paged",
    "sdpa_paged_with_lse",
    "sdpa_with_key_mass",
    "sdpa_with_lse",
    "sdpa_with_weights",
]

#: Untyped, because one variable holds its functions or the ops.
_C: Any = _library._C


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    r"""Masked scaled dot-product attention.

    Query row :math:`i` sees key :math:`j` where ``attn_mask``, ``is_causal`` and the window all let it. Over
    the keys that it sees:

    .. math::
        S_{ij} = c \tanh\!\left(\frac{\mathrm{scale}\; q_i \cdot k_j}{c}\right) + \mathrm{bias}_{ij}, \qquad
        P_{ij} = \frac{e^{S_{ij}}}{\sum_j e^{S_{ij}} + e^{\mathrm{sink}}}, \qquad
        o_i = \sum_j P_{ij} v_j

    with no :math:`\tanh` where ``softcap`` :math:`c` is 0, and no :math:`e^{\mathrm{sink}}` without
    ``sinks``. A row that sees no key gives 0, never NaN; what the mask hides never reaches the output, even
    if it holds NaN.

    Args:
        query: :math:`(\dots, H_q, L_q, D)`.
        key: :math:`(\dots, H_{kv}, L_k, D)`.
        value: :math:`(\dots, H_{kv}, L_k, D_v)`.
        attn_mask: broadcasts to :math:`(\dots, H_q, L_q, L_k)`. Bool: **True takes part**. Floating (the
            dtype of ``query``, or float32): added to the scaled scores; it gets a gradient in its own shape.
        dropout_p: probability in [0, 1] that a weight is dropped; those kept are multiplied by
            :math:`1 / (1 - p)`. Applied whenever it is not 0: pass 0 in evaluation.
        is_causal: query row ``i`` sees key ``j`` iff ``j <= i + query_offset``.
        scale: factor of the scores, :math:`1/\sqrt{D}` if None. 0.0 is a scale like any other.
        enable_gqa: let :math:`H_q` be a multiple of :math:`H_{kv}`: query head ``h`` reads key/value head
            ``h // (Hq // Hkv)``. Without it the heads broadcast.
        window_left: row ``i`` sees no key before ``i + query_offset - window_left``; None: no such bound.
        window_right: row ``i`` sees no key after ``i + query_offset + window_right``; None: no such bound.
        query_offset: position of the first query row among the keys: 0 aligns the causal triangle top-left,
            ``Lk - Lq`` bottom-right, as with a key/value cache.
        softcap: bound :math:`c` of the scaled scores; 0 for none.
        sinks: :math:`(H_q,)`, or with batch dims before it, one score a head that takes part in the softmax
            and has no value; -inf is none.

    Returns:
        The output, :math:`(\dots, H_q, L_q, D_v)`, in the dtype of ``query``.

    Shape:
        Any number of leading dims, none included, so that ``(L, D)`` is one head. Leading dims broadcast as
        in :func:`torch.matmul`. Any strides; ``Lq``, ``Lk`` and the batch may be 0.

    Dtypes:
        float64, float32, bfloat16 and float16, the same for query, key and value. Scores, softmax and sums
        are computed in float32 (float64 for float64).

    Devices:
        The CPU has kernels of its own. On NVIDIA GPUs a call goes to the fused kernel that
        :func:`torch.nn.functional.scaled_dot_product_attention` would choose, to another that can take it, or
        to kernels of attn_ext's; there NaN in what is masked may show, but not inside
        ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)``. Elsewhere ATen operators are composed.
        :func:`attn_ext.explain` says which it is.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, ``dropout_p`` outside [0, 1], a negative
            window or softcap. The message says what was expected and what came.
        TypeError: a number that is a tensor which requires grad, as it would get none; ``is_causal`` or
            ``enable_gqa`` that is None, a number or a tensor.

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1. The first six arguments, ``scale``
        and ``enable_gqa`` mean what they mean in :func:`torch.nn.functional.scaled_dot_product_attention`;
        window, offset, softcap and the empty row what they mean in ONNX ``Attention``.

    Example:
        >>> import torch, attn_ext
        >>> query = torch.tensor([[1.0, 2.0, 3.0]])
        >>> key = value = torch.tensor([[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
        >>> attn_ext.sdpa(query, key, value)
        tensor([[6.9999, 7.9999, 8.9999]])
        >>> attn_ext.sdpa(query, key, value, attn_mask=torch.tensor([True, False]))
        tensor([[4., 5., 6.]])

        ALiBi needs no argument of its own: the distance ``i - j`` and the place ``j`` differ by a number that
        is the same along a row, and the softmax does not see it.

        >>> query, key, value = torch.randn(3, 4, 6, 8)
        >>> slopes = 2.0 ** -torch.arange(1, 5)
        >>> bias = slopes[:, None, None] * torch.arange(6)  # (Hq, 1, Lk)
        >>> distance = torch.arange(6)[:, None] - torch.arange(6)
        >>> expected = attn_ext.sdpa(query, key, value, -slopes[:, None, None] * distance, is_causal=True)
        >>> torch.testing.assert_close(attn_ext.sdpa(query, key, value, bias, is_causal=True), expected)
    """
    if is_scripting():
        call = torch.ops.attn_ext.sdpa
    elif is_compiling():
        call = compiled("sdpa", query)
    else:
        call = _C.sdpa
    output: Tensor = call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        softcap=softcap,
        sinks=sinks,
    )
    return output


def sdpa_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Masked scaled dot-product attention that also returns its weights.

    Arguments, dtypes and errors are those of :func:`sdpa`; the weights too are differentiable.

    Returns:
        The output, :math:`(\dots, H_q, L_q, D_v)`, and the weights :math:`P` that were applied, so after
        dropout, :math:`(\dots, H_q, L_q, L_k)`, both in the dtype of ``query``. Without dropout and sinks a
        row of weights sums to 1, or to 0 if it sees no key.

    Source:
        As :func:`sdpa`; the weights are what :class:`torch.nn.MultiheadAttention` calls
        ``attn_output_weights``, not averaged over the heads.

    Example:
        >>> import torch, attn_ext
        >>> x = torch.eye(2)
        >>> output, weights = attn_ext.sdpa_with_weights(x, x, x, is_causal=True)
        >>> weights
        tensor([[1.0000, 0.0000],
                [0.3302, 0.6698]])
    """
    if is_scripting():
        call = torch.ops.attn_ext.sdpa_with_weights
    elif is_compiling():
        call = compiled("sdpa_with_weights", query)
    else:
        call = _C.sdpa_with_weights
    outputs: tuple[Tensor, Tensor] = call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        softcap=softcap,
        sinks=sinks,
    )
    return outputs


def sdpa_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Masked scaled dot-product attention that also returns the log-sum-exp of each row of scores.

    Arguments, dtypes and errors are those of :func:`sdpa`; the log-sum-exp too is differentiable. Two calls
    over two halves of the keys can be joined by it into the call over all of them, as the example shows.

    Returns:
        The output, :math:`(\dots, H_q, L_q, D_v)`, and :math:`\mathrm{lse}_i = \ln \sum_j e^{S_{ij}}`,
        :math:`(\dots, H_q, L_q)`, in float32 (float64 for float64 inputs). It counts a sink, it does not
        depend on dropout, and it is -inf for a row that sees no key.

    Source:
        Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
        "FlashAttention".

    Example:
        >>> import torch, attn_ext
        >>> query, key, value = torch.randn(3, 4, 6, 8)
        >>> left, left_lse = attn_ext.sdpa_with_lse(query, key[:, :2], value[:, :2])
        >>> right, right_lse = attn_ext.sdpa_with_lse(query, key[:, 2:], value[:, 2:])
        >>> share = torch.sigmoid(right_lse - left_lse).unsqueeze(-1)
        >>> torch.testing.assert_close(torch.lerp(left, right, share), attn_ext.sdpa(query, key, value))
    """
    if is_scripting():
        call = torch.ops.attn_ext.sdpa_with_lse
    elif is_compiling():
        call = compiled("sdpa_with_lse", query)
    else:
        call = _C.sdpa_with_lse
    outputs: tuple[Tensor, Tensor] = call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        softcap=softcap,
        sinks=sinks,
    )
    return outputs


def sdpa_with_key_mass(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Masked scaled dot-product attention that also returns how much attention each key received.

    Arguments, dtypes and errors are those of :func:`sdpa`; the key mass too is differentiable. The weights
    themselves are never held in memory.

    Returns:
        The output, :math:`(\dots, H_q, L_q, D_v)`, and :math:`\mathrm{mass}_j = \sum_i P_{ij}`,
        :math:`(\dots, H_q, L_k)`: the applied weights, so after dropout, summed over the query rows.

    Source:
        Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", where this sum chooses the keys that a cache keeps.

    Example:
        >>> import torch, attn_ext
        >>> query, key, value = torch.randn(3, 4, 6, 8)
        >>> output, key_mass = attn_ext.sdpa_with_key_mass(query, key, value)
        >>> _, weights = attn_ext.sdpa_with_weights(query, key, value)
        >>> torch.testing.assert_close(key_mass, weights.sum(dim=-2))
    """
    if is_scripting():
        call = torch.ops.attn_ext.sdpa_with_key_mass
    elif is_compiling():
        call = compiled("sdpa_with_key_mass", query)
    else:
        call = _C.sdpa_with_key_mass
    outputs: tuple[Tensor, Tensor] = call(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        softcap=softcap,
        sinks=sinks,
    )
    return outputs
