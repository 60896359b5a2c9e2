"""Batching rules of the internal ops for :func:`torch.vmap`; the public ops decompose into these.

A vmapped dim becomes the first batch dim. Tensors that are not vmapped get a first dim of 1 and broadcast,
so nothing is copied for them. The head dim counts from the right, so every sample is padded to the same
number of dims first, to at least three.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Rule = tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]

# Position of the arguments in the schemas.
_FORWARD_TENSORS = 7  # query, key, value, attn_mask, sinks, dropout_seed, sequences
_BACKWARD_GRADS = 4  # grad_output, grad_lse, grad_weights, grad_key_mass
_SCALARS = 8  # dropout_p to softcap
_PART = 2  # dropout_origin, unrounded


def _sample_dims(tensor: Tensor, bdim: int | None) -> int:
    return tensor.dim() - (bdim is not None)


def _to_front(tensor: Tensor, bdim: int | None, sample_dims: int) -> Tensor:
    """(V or 1, sample...) with ones in front of the sample's own dims until it has ``sample_dims``."""
    front = tensor.unsqueeze(0) if bdim is None else tensor.movedim(bdim, 0)
    missing = sample_dims + 1 - front.dim()
    return front.reshape(front.shape[0], *(1,) * missing, *front.shape[1:]) if missing > 0 else front


def _batch_inputs(
    batch_size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], int, int]:
    """The tensors with the vmapped dim in front; the dims of a sample's output, and of it padded."""
    *tensors, sequences = tensors
    if in_dims[-1] is not None:
        raise RuntimeError("attn_ext: expected cu_seqlens and their like not to be vmapped: use in_dims=None")
    operands = tensors[:3]
    output_dims = max(_sample_dims(t, d) for t, d in zip(operands, in_dims, strict=False) if t is not None)
    padded_dims = max(output_dims, 3)
    sample_dims = [padded_dims, padded_dims, padded_dims, padded_dims, padded_dims - 2, 0]
    batched = [
        None if tensor is None else _to_front(tensor, bdim, dims)
        for tensor, bdim, dims in zip(tensors, in_dims[:-1], sample_dims, strict=True)
    ]
    if all(bdim is None for bdim in in_dims[:3]) and batched[0] is not None:
        # Only the mask, the sinks or the seed is vmapped, and these cannot enlarge the batch.
        batched[0] = batched[0].expand(batch_size, *batched[0].shape[1:])
    return [*batched, sequences], output_dims, padded_dims


def _restore(result: Tensor | None, drop_head: bool) -> Tensor | None:
    return result.squeeze(1) if result is not None and drop_head else result


def _forward_rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Rule:
    tensors, output_dims, padded_dims = _batch_inputs(
        info.batch_size, in_dims[:_FORWARD_TENSORS], args[:_FORWARD_TENSORS]
    )
    results = torch.ops.attn_ext._sdpa_forward(*tensors, *args[_FORWARD_TENSORS:])
    outputs = tuple(_restore(result, padded_dims > output_dims) for result in results)
    return outputs, tuple(None if output is None else 0 for output in outputs)


def _backward_rule(info: Any, in_dims: Sequence[int | None], *args: Any) -> Rule:
    grads, grad_dims = args[:_BACKWARD_GRADS], in_dims[:_BACKWARD_GRADS]
    end = _BACKWARD_GRADS + _FORWARD_TENSORS
    inputs, input_dims = args[_BACKWARD_GRADS:end], in_dims[_BACKWARD_GRADS:end]
    output, lse = args[end : end + 2]
    mask = end + 2 + _SCALARS
    scalars, output_mask, part = args[end + 2 : mask], args[mask], args[mask + 1 : mask + 1 + _PART]
    # The last arguments, left out where they and all behind them are None.
    delta, delta_dim, weights, weights_dim = _last(args, in_dims, mask + 1 + _PART, 2)
    size = info.batch_size

    batched, _, padded_dims = _batch_inputs(size, input_dims, inputs)
    wanted = (*output_mask, False, False)
    # Every sample has a gradient of its own, also for an input that all of them share.
    batched = [
        tensor.expand(size, *tensor.shape[1:]) if tensor is not None and want else tensor
        for tensor, want in zip(batched, wanted, strict=True)
    ]

    def outgoing(tensor: Tensor | None, bdim: int | None, tail_dims: int) -> Tensor | None:
        if tensor is None:
            return None
        front = _to_front(tensor, bdim, padded_dims - 2 + tail_dims)
        return front.expand(size, *front.shape[1:])

    tails = (2, 1, 2, 1)
    batched_grads = [outgoing(g, d, tail) for g, d, tail in zip(grads, grad_dims, tails, strict=True)]
    batched_output = None if delta is not None else outgoing(output, in_dims[end], 2)
    batched_lse = outgoing(lse, in_dims[end + 1], 1)
    given = [outgoing(delta, delta_dim, 1), outgoing(weights, weights_dim, 2)]
    results = torch.ops.attn_ext._sdpa_backward(
        *batched_grads, *batched, batched_output, batched_lse, *scalars, output_mask, *part, *given
    )
    restored = tuple(
        None if result is None else result.reshape(size, *_sample_shape(tensor, bdim))
        for result, tensor, bdim in zip(results, inputs[:5], input_dims[:5], strict=True)
    )
    return restored, tuple(None if result is None else 0 for result in restored)


def _last(args: Sequence[Any], in_dims: Sequence[int | None], first: int, count: int) -> list[Any]:
    """Each of the arguments from ``first`` on and its vmapped dim, None where it was left out."""
    padding = [None] * (first + count - len(args))
    pairs = zip([*args, *padding][first:], [*in_dims, *padding][first:], strict=True)
    return [x for pair in pairs for x in pair]


def _sample_shape(tensor: Tensor, bdim: int | None) -> list[int]:
    shape = list(tensor.shape)
    if bdim is not None:
        del shape[bdim]
    return shape


def register() -> None:
    """Registers the rules; once, when the package is imported."""
    torch.library.register_vmap("attn_ext::_sdpa_forward", _forward_rule)
    torch.library.register_vmap("attn_ext::_sdpa_backward", _backward_rule)
