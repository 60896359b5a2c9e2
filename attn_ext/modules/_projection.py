"""The projections of query, key and value whose weights are one parameter."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_scripting  # type: ignore[attr-defined]
from torch.overrides import has_torch_function_variadic

from .. import _C


def project_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: list[int],
    features: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """One product for what is one tensor, and the heads of each: (…, heads, length, features).

    ``heads`` and ``features`` are those of query, key and value, whose weights follow one another.
    """
    sizes = [heads[0] * features[0], heads[1] * features[1], heads[2] * features[2]]
    if query is key and key is value:
        projected = _linear(query, weight, bias)
        if features[0] == features[2]:  # then all heads are split at once, which short calls feel
            together = torch.unflatten(projected, -1, [heads[0] + heads[1] + heads[2], features[0]])
            parts = together.split_with_sizes(heads, dim=-2)
            return parts[0].transpose(-3, -2), parts[1].transpose(-3, -2), parts[2].transpose(-3, -2)
        parts = projected.split_with_sizes(sizes, dim=-1)
        query, key, value = parts[0], parts[1], parts[2]
    elif key is value:
        rest_bias = None if bias is None else bias[sizes[0] :]
        parts = _linear(key, weight[sizes[0] :], rest_bias).split_with_sizes(sizes[1:], dim=-1)
        query = _linear(query, weight[: sizes[0]], None if bias is None else bias[: sizes[0]])
        key, value = parts[0], parts[1]
    else:
        weights, biases = weight.split_with_sizes(sizes), split_bias(bias, sizes)
        query, key = _linear(query, weights[0], biases[0]), _linear(key, weights[1], biases[1])
        value = _linear(value, weights[2], biases[2])
    return (
        split_heads(query, heads[0], features[0]),
        split_heads(key, heads[1], features[1]),
        split_heads(value, heads[2], features[2]),
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``, by whichever of torch's libraries is faster."""
    if is_scripting() or is_compiling() or has_torch_function_variadic(input, weight, bias):
        return F.linear(input, weight, bias)
    return _C.linear(input, weight, bias)


def split_bias(bias: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The biases of query, key and value; None for each if there are none."""
    if bias is None:
        return None, None, None
    parts = bias.split_with_sizes(sizes)
    return parts[0], parts[1], parts[2]


def split_heads(x: Tensor, heads: int, features: int) -> Tensor:
    """(…, length, heads * features) to (…, heads, length, features)."""
    return torch.unflatten(x, -1, [heads, features]).transpose(-3, -2)
