"""Stand-ins for the kernels of NVIDIA GPUs, and a CPU whose tensors go where a GPU's do.

What they do as the kernels do: which shapes, dtypes and layouts they take, how a window is counted and
where it is taken as open, and what lse is in a row that sees nothing. What they refuse, the kernels refuse,
or answer with NaN.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import attn_ext
from attn_ext import reference

FLASH, EFFICIENT, CUDNN = 1, 2, 3
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
HALF = (torch.bfloat16, torch.float16)


def is_aligned(tensor: Tensor) -> bool:
    size = tensor.element_size()
    outer = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    return tensor.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in outer) and tensor.stride(-1) == 1


def rows_are_aligned(tensor: Tensor) -> bool:
    """Also where there is one row: the addresses of others are made, though nothing is read there."""
    return is_aligned(tensor) and tensor.stride(-2) * tensor.element_size() % 16 == 0


def scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(N, H, Lq, Lk) of (N, H, Lq, D) and (N, Hkv, Lk, D)."""
    assert query.dtype == key.dtype and query.shape[-1] == key.shape[-1] and query.shape[0] == key.shape[0]
    assert query.shape[1] % key.shape[1] == 0
    return query.float() @ spread(key, query).float().mT * scale


def spread(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def forward(s: Tensor, query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    lse = s.logsumexp(-1)
    weights = (s - lse.unsqueeze(-1)).exp().masked_fill((lse == -math.inf).unsqueeze(-1), 0)
    return (weights @ spread(value, query).float()).to(query.dtype), lse


def backward(
    s: Tensor, scale: float, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = (s - lse.unsqueeze(-1)).exp()  # NaN where -inf meets -inf, as in the kernels
    grad, out = grad.float(), out.float()
    d_weights = grad @ spread(value, query).float().mT
    d_scores = weights * (d_weights - (grad * out).sum(-1, keepdim=True))
    group = query.shape[1] // key.shape[1]

    def summed(t: Tensor) -> Tensor:
        return t.unflatten(1, (-1, group)).sum(2).to(key.dtype)

    return (
        (scale * d_scores @ spread(key, query).float()).to(query.dtype),
        summed(scale * d_scores.mT @ query.float()),
        summed(weights.mT @ grad),
        d_scores,
    )


def flash_mask(rows: int, keys: int, left: int | None, right: int | None) -> Tensor:
    left, right = -1 if left is None else left, -1 if right is None else right
    assert left >= -1 and right >= -1
    left, right = (-1 if side >= keys else side for side in (left, right))
    if left >= 0 and right < 0:
        right = keys
    if right >= 0 and left < 0:
        left = keys
    if left < 0 and right < 0:
        return torch.ones(rows, keys, dtype=torch.bool)
    i, j = torch.arange(rows).unsqueeze(-1) + keys - rows, torch.arange(keys)
    return (j <= i + right) & (j >= i - left)


def flash_scores(query, key, value, keys, is_causal, scale, left, right):
    assert query.dtype in HALF and query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    assert all(map(is_aligned, (query, key, value)))
    assert keys == key.shape[1] and not (is_causal and right not in (0, None))
    mask = flash_mask(query.shape[1], keys, left, 0 if is_causal else right)
    return scores(query.transpose(1, 2), key.transpose(1, 2), scale).masked_fill(~mask, -math.inf)


def flash_forward(query, key, value, cum_q, cum_k, rows, keys, dropout_p, is_causal, debug, *, scale=None,
                  window_size_left=None, window_size_right=None, **_):  # fmt: skip
    assert (cum_q, cum_k, dropout_p, debug) == (None, None, 0.0, False)
    assert rows == query.shape[1]
    s = flash_scores(query, key, value, keys, is_causal, scale, window_size_left, window_size_right)
    out, lse = forward(s, query.transpose(1, 2), value.transpose(1, 2))
    lse = lse.masked_fill((lse == -math.inf) | lse.isnan(), math.inf)
    laid_out = torch.empty_like(query, memory_format=torch.preserve_format).copy_(out.transpose(1, 2))
    none = torch.zeros(())
    return laid_out, lse, none, none, none


def flash_backward(grad, query, key, value, out, lse, cum_q, cum_k, rows, keys, dropout_p, is_causal, rng,
                   unused, *, scale=None, window_size_left=None, window_size_right=None):  # fmt: skip
    s = flash_scores(query, key, value, keys, is_causal, scale, window_size_left, window_size_right)
    tensors = (t.transpose(1, 2) for t in (grad, query, key, value, out))
    return tuple(g.transpose(1, 2).contiguous() for g in backward(s, scale, *tensors, lse)[:3])


def efficient_scores(query, key, value, bias, mask_type, scale, window):
    assert query.shape[2] == key.shape[2] == value.shape[2], "as many key heads as heads"
    assert query.dtype in (*HALF, torch.float32) and all(map(is_aligned, (query, key, value)))
    step = 8 if query.dtype in HALF else 4
    assert query.shape[-1] % step == 0 == value.shape[-1] % step
    s = scores(query.transpose(1, 2), key.transpose(1, 2), scale)
    if bias is not None:
        assert bias.shape == s.shape and bias.dtype == query.dtype and is_aligned(bias)
        assert bias.stride(-2) % 16 == 0
        s = s + bias.float()
    rows, keys = s.shape[-2:]
    last = torch.arange(rows).unsqueeze(-1) + (keys - rows if mask_type == 2 else 0)
    mask = torch.ones(rows, keys, dtype=torch.bool)
    if mask_type:
        mask = torch.arange(keys) <= last
        if window is not None:
            mask &= torch.arange(keys) > last - window
    else:
        assert window is None
    return s.masked_fill(~mask, -math.inf)


def efficient_forward(query, key, value, bias, cu_q, cu_k, max_q, max_k, dropout_p, mask_type, with_lse=False,
                      *, scale=None, seqlen_k=None, window_size=None):  # fmt: skip
    s = efficient_scores(query, key, value, bias, mask_type, scale, window_size)
    out, lse = forward(s, query.transpose(1, 2), value.transpose(1, 2))
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    padded = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf)
    padded[..., : lse.shape[2]] = lse
    none = torch.zeros((), dtype=torch.long)
    rows, keys = s.shape[-2:]
    return out.transpose(1, 2).contiguous(), padded, none, none, rows, keys


def efficient_backward(grad, query, key, value, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout_p, seed,
                       offset, mask_type, wants_bias, *, scale=None, num_splits_key=None, window_size=None,
                       shared_storage_dqdkdv=False):  # fmt: skip
    assert lse.stride(1) % 32 == 0, "LSE is not correctly aligned"
    assert window_size is None, "which the kernel does not heed"
    assert out.is_contiguous(), "whose rows the kernel takes to lie so"
    s = efficient_scores(query, key, value, bias, mask_type, scale, window_size)
    tensors = (t.transpose(1, 2) for t in (grad, query, key, value, out))
    *grads, d_scores = backward(s, scale, *tensors, lse[..., : query.shape[1]])
    return (
        *(g.transpose(1, 2).contiguous() for g in grads),
        d_scores.to(query.dtype) if wants_bias else torch.empty(0),
    )


def cudnn_scores(query, key, value, bias, is_causal, scale):
    assert query.dtype in HALF and all(map(is_aligned, (query, key, value)))
    assert query.shape[-1] % 8 == 0 == value.shape[-1] % 8 and key.shape[-2] > 1
    s = scores(query, key, scale)
    if bias is not None:
        assert bias.shape == s.shape and bias.dtype == query.dtype
        s = s + bias.float()
    mask = torch.ones(s.shape[-2:], dtype=torch.bool)
    return s.masked_fill(~mask.tril(), -math.inf) if is_causal else s


def cudnn_forward(
    query, key, value, bias, with_lse, dropout_p=0.0, is_causal=False, debug=False, *, scale=None
):
    # ATen lays an output of other columns out in the order of the query's strides; cuDNN refuses another
    # than the columns inside.
    if query.shape[-1] != value.shape[-1]:
        dims = [dim for dim in range(4) if query.shape[dim] > 1 or dim == 3]
        assert min(dims, key=query.stride) == 3, "the stride of the last dim of the output is not 1"
    out, lse = forward(cudnn_scores(query, key, value, bias, is_causal, scale), query, value)
    none = torch.zeros((), dtype=torch.long)
    rows, keys = query.shape[-2], key.shape[-2]
    return out, lse.unsqueeze(-1), none, none, rows, keys, none, none, none


def cudnn_backward(grad, query, key, value, out, lse, seed, offset, bias, cum_q, cum_k, rows, keys, dropout_p,
                   is_causal, *, scale=None):  # fmt: skip
    assert grad.stride() == out.stride()
    s = cudnn_scores(query, key, value, bias, is_causal, scale)
    lse = lse.squeeze(-1)
    if bias is not None:  # a row that sees nothing has no gradients
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    return backward(s, scale, grad, query, key, value, out, lse)[:3]


def tile_scores(query, key, mask, scale, softcap, low, high):
    assert query.dtype in HALF and query.shape[-1] == key.shape[-1] and query.shape[-1] % 16 == 0
    assert query.shape[-1] <= 128 and all(map(rows_are_aligned, (query, key)))
    s = scores(query, key, scale)
    slope = torch.ones_like(s)
    if softcap:
        slope = 1 - (s / softcap).tanh() ** 2
        s = softcap * (s / softcap).tanh()
    if mask is not None:
        assert mask.shape == s.shape
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.float()
    i, j = torch.arange(s.shape[-2]).unsqueeze(-1), torch.arange(s.shape[-1])
    return s.masked_fill((j < i + low) | (j > i + high), -math.inf), slope


def tile_draws(query, key, value, mask, seed, draws, scale, softcap, dropout_p, low, high, first_batch,
               batch_step):  # fmt: skip
    """Bits of rows and keys rounded up to 128, in words of 32."""
    assert draws is None
    batches = (query.shape[0] - 1) * batch_step + first_batch + 1
    keep = reference.dropout_keep(seed, dropout_p, (batches, *query.shape[1:3], key.shape[2]))
    keep = keep[first_batch::batch_step]
    padded = torch.nn.functional.pad(keep, (0, -keep.shape[-1] % 128, 0, -keep.shape[-2] % 128))
    return (padded.reshape(-1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)


def tile_multiplier(seed, draws, dropout_p, query, key, *batches):
    if seed is None:
        return 1.0
    if draws is None:
        draws = tile_draws(query, key, None, None, seed, None, 1, 0, dropout_p, 0, 0, *batches)
    rows, keys = query.shape[2], key.shape[2]
    bits = draws.unsqueeze(-1) >> torch.arange(32) & 1
    keep = bits.reshape(*query.shape[:2], rows + -rows % 128, keys + -keys % 128)[..., :rows, :keys]
    return keep * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)


def weights_from(s: Tensor, lse: Tensor) -> Tensor:
    assert lse.is_contiguous() and lse.shape == s.shape[:3] and lse.dtype == torch.float32
    return (s - lse.unsqueeze(-1)).exp().masked_fill(s.isneginf() | lse.isneginf().unsqueeze(-1), 0)


def tile_attend(query, key, value, mask, seed, draws, scale, softcap, dropout_p, low, high, *batches):
    assert rows_are_aligned(value) and value.shape[-1] % 16 == 0 and value.shape[-1] <= 128
    s = tile_scores(query, key, mask, scale, softcap, low, high)[0]
    lse = s.logsumexp(-1)
    weights = weights_from(s, lse) * tile_multiplier(seed, draws, dropout_p, query, key, *batches)
    return (weights @ spread(value, query).float()).to(query.dtype), lse


def tile_weights(query, key, value, mask, seed, draws, scale, softcap, dropout_p, low, high, first_batch,
                 batch_step, lse, first_head, heads, row_begin, rows):  # fmt: skip
    s = tile_scores(query, key, mask, scale, softcap, low, high)[0]
    assert draws is None
    weights = weights_from(s, lse) * tile_multiplier(
        seed, draws, dropout_p, query, key, first_batch, batch_step
    )
    part = weights.flatten(0, 1)[first_head : first_head + heads, row_begin : row_begin + rows]
    return part.to(query.dtype).contiguous()


def tile_grads(query, key, value, mask, seed, draws, scale, softcap, dropout_p, low, high, first_batch,
               batch_step, grad_output, output, lse, grad_lse):  # fmt: skip
    assert all(map(rows_are_aligned, (value, grad_output, output)))
    assert value.shape[-1] == grad_output.shape[-1] == output.shape[-1] and value.shape[-1] % 16 == 0
    s, slope = tile_scores(query, key, mask, scale, softcap, low, high)
    weights = weights_from(s, lse)
    multiplier = tile_multiplier(seed, draws, dropout_p, query, key, first_batch, batch_step)
    grad = grad_output.float()
    delta = torch.where(output == 0, 0.0, grad * output).sum(-1)
    if grad_lse is not None:
        assert grad_lse.is_contiguous() and grad_lse.shape == lse.shape and grad_lse.dtype == torch.float32
        delta = delta - grad_lse
    d_weights = grad @ spread(value, query).float().mT * multiplier
    d_scores = (weights * (d_weights - delta.unsqueeze(-1)) * slope).masked_fill(s.isneginf(), 0) * scale

    def of_keys(grads: Tensor) -> Tensor:
        return grads.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype)

    return (
        (d_scores @ spread(key, query).float()).to(query.dtype),
        of_keys(d_scores.mT @ query.float()),
        of_keys((weights * multiplier).mT @ grad),
        delta,
    )


def choice(allowed: tuple[int, ...], math_is_allowed: bool) -> Any:
    """`_fused_sdp_choice`, of what is allowed the first that takes the tensors."""

    def chosen(query, key, value, mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        grouped = query.shape[1] != key.shape[1]
        assert grouped == enable_gqa and query.dim() == key.dim() == value.dim() == 4
        half, dims = query.dtype in HALF, (query.shape[-1], value.shape[-1])
        takes = {
            CUDNN: half and max(dims) <= 256 and key.shape[-2] > 1 and (mask is None or mask.stride(-1) == 1),
            FLASH: half
            and mask is None
            and dims[0] == dims[1] <= 256
            and not (is_causal and query.shape[-2] != key.shape[-2]),
            EFFICIENT: (mask is None or mask.stride(-1) == 1)
            and query.dtype != torch.float64
            and not grouped,
        }
        found = next((backend for backend in allowed if takes[backend]), 0)
        if not found and not math_is_allowed:
            raise RuntimeError("No available kernel. Aborting execution.")
        return found

    return chosen


@contextmanager
def on_gpu(*allowed: int, tiles: bool = True, math: bool = True) -> Iterator[list[str]]:
    """Sends calls on the CPU's tensors where those on an NVIDIA GPU go, with the backends that `allowed`
    names as ATen prefers them, and with kernels of our own or without; gives the names of the kernels that
    were called."""
    called: list[str] = []
    aten = torch.library.Library("aten", "IMPL")
    own = torch.library.Library("attn_ext", "IMPL")
    kernels = {
        "_fused_sdp_choice": choice(allowed, math),
        "_flash_attention_forward": flash_forward,
        "_flash_attention_backward": flash_backward,
        "_efficient_attention_forward": efficient_forward,
        "_efficient_attention_backward": efficient_backward,
        "_scaled_dot_product_cudnn_attention": cudnn_forward,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    }

    def noting(name: str, kernel: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            if name != "_fused_sdp_choice":
                called.append(name)
            return kernel(*args, **more)

        return call

    def as_on_gpu(name: str) -> Any:
        op = getattr(torch.ops.attn_ext, name).default
        return lambda *args, **more: op.redispatch(CUDA, *args, **more)

    try:
        for name, kernel in kernels.items():
            aten.impl(name, noting(name, kernel), "CPU", allow_override=True)
        if tiles:
            for name, kernel in (
                ("_tile_draws", tile_draws),
                ("_tile_attend", tile_attend),
                ("_tile_weights", tile_weights),
                ("_tile_grads", tile_grads),
            ):
                own.impl(name, noting(name, kernel), "CPU")
        for name in ("_sdpa_forward", "_sdpa_forward_saving_draws", "_sdpa_backward"):
            own.impl(name, as_on_gpu(name), "CPU", allow_override=True)
        own.impl(
            "sdpa", lambda *a, **m: attn_ext.sdpa_with_lse(*a, **m)[0], "AutogradCPU", allow_override=True
        )
        with attn_ext.save_weights_for_backward(False):
            yield called
    finally:
        aten._destroy()
        own._destroy()
