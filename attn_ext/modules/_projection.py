"""The projections of query, key and value whose weights are one parameter."""

import torch
import torch.nn.functional as F
from torch import Tensor


def project_packed(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """One product for what is one tensor; ``sizes`` says how many rows of ``weight`` are for which."""
    if query is key and key is value:
        projected = F.linear(query, weight, bias).split_with_sizes(sizes, dim=-1)
        return projected[0], projected[1], projected[2]
    weights = weight.split_with_sizes(sizes)
    query_bias, key_bias, value_bias = split_bias(bias, sizes)
    query = F.linear(query, weights[0], query_bias)
    if key is value:
        rest_bias = None if bias is None else bias[sizes[0] :]
        rest = F.linear(key, weight[sizes[0] :], rest_bias).split_with_sizes(sizes[1:], dim=-1)
        return query, rest[0], rest[1]
    return query, F.linear(key, weights[1], key_bias), F.linear(value, weights[2], value_bias)


def split_bias(bias: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The biases of query, key and value; None for each if there are none."""
    if bias is None:
        return None, None, None
    parts = bias.split_with_sizes(sizes)
    return parts[0], parts[1], parts[2]


def split_heads(x: Tensor, heads: int, features: int) -> Tensor:
    """(…, length, heads * features) to (…, heads, length, features)."""
    return torch.unflatten(x, -1, [heads, features]).transpose(-3, -2)
