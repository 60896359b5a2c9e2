"""``nn.MultiheadAttention`` as it is, computed by the op."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from ..functional import sdpa, sdpa_with_weights
from ..modules._masks import to_attn_mask
from ..modules._projection import project_packed, split_bias, split_heads
from .override import is_plain


class ConvertedMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose forward is attn_ext's; :func:`attn_ext.convert` makes them in place.

    Arguments, results, parameters and state dict are those of :class:`torch.nn.MultiheadAttention`. It
    differs where that gives NaN: a row that sees no key gets weights of 0 and the bias of the output
    projection. What a seed's dropout drops differs too. Nested tensors, tensor subclasses and arguments that
    do not fit go to PyTorch's forward, which says what is wrong with them.
    """

    if TYPE_CHECKING:
        in_proj_weight: nn.Parameter | None  # type: ignore[assignment]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`torch.nn.MultiheadAttention.forward`."""
        if not is_scripting():  # noqa: SIM102 (TorchScript)
            if not self._takes(query, key, value, key_padding_mask, attn_mask, is_causal):
                return nn.MultiheadAttention.forward(
                    self._as_torch(),
                    query,
                    key,
                    value,
                    key_padding_mask,
                    need_weights,
                    attn_mask,
                    average_attn_weights,
                    is_causal,
                )
        sequence_first = not self.batch_first and query.dim() == 3
        # As PyTorch: the hint is followed where it is the whole mask, and nothing but the output is wanted.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._joint_mask(query, key, attn_mask, key_padding_mask)
        query, key, value = self._project(query, key, value)
        if sequence_first:  # what was (L, H, B, D)
            query, key, value = query.transpose(0, 2), key.transpose(0, 2), value.transpose(0, 2)
        output, weights = self._attend(query, key, value, mask, causal, need_weights)
        if sequence_first:
            output = output.transpose(0, 2)
        output = F.linear(output.transpose(-3, -2).flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=-3)
        return output, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, features = self.num_heads, self.head_dim
        if self.in_proj_weight is not None:
            weight, bias = self.in_proj_weight, self.in_proj_bias
            return project_packed(query, key, value, weight, bias, [heads] * 3, [features] * 3)
        biases = split_bias(self.in_proj_bias, [self.embed_dim] * 3)
        return (
            split_heads(F.linear(query, self.q_proj_weight, biases[0]), heads, features),
            split_heads(F.linear(key, self.k_proj_weight, biases[1]), heads, features),
            split_heads(F.linear(value, self.v_proj_weight, biases[2]), heads, features),
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout_p = self.dropout if self.training else 0.0
        if not need_weights:
            return sdpa(query, key, value, mask, dropout_p, causal), None
        return sdpa_with_weights(query, key, value, mask, dropout_p, causal)

    def _joint_mask(
        self, query: Tensor, key: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """Both masks as one that broadcasts to (B, H, Lq, Lk), or (H, Lq, Lk) unbatched."""
        if query.dim() == 3:
            if attn_mask is not None and attn_mask.dim() == 3:
                batch = attn_mask.size(0) // self.num_heads
                attn_mask = torch.unflatten(attn_mask, 0, [batch, self.num_heads])
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(-2).unsqueeze(-2)
        return to_attn_mask(attn_mask, key_padding_mask)

    @torch.jit.unused
    def _takes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> bool:
        """Whether these are plain tensors that PyTorch would take."""
        if is_causal and attn_mask is None:
            return False
        if not (is_plain(query) and is_plain(key) and is_plain(value) and self._fit(query, key, value)):
            return False
        if attn_mask is None and key_padding_mask is None:
            return True
        # Without a batch: as if the batch were of 1.
        length = 1 if self.batch_first and query.dim() == 3 else 0
        batch = [query.size(1 - length)] if query.dim() == 3 else []
        pairs = [query.size(length), key.size(length)]
        heads = [self.num_heads * (batch[0] if batch else 1)]
        return (attn_mask is None or _is_mask(attn_mask, pairs, heads + pairs)) and (
            key_padding_mask is None or _is_mask(key_padding_mask, batch + pairs[1:])
        )

    @torch.jit.unused
    def _fit(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the three are of shapes that go together, and none is nested."""
        dims = query.dim()
        if query is key and key is value:
            size = query.size(-1) if dims in (2, 3) and not query.is_nested else -1
            return (size, size, size) == (self.embed_dim, self.kdim, self.vdim)
        if query.is_nested or key.is_nested or value.is_nested:
            return False
        if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
            return False
        batch = 0 if self.batch_first else 1
        return (
            (query.size(-1), key.size(-1), value.size(-1)) == (self.embed_dim, self.kdim, self.vdim)
            and key.shape[:-1] == value.shape[:-1]
            and (dims == 2 or query.size(batch) == key.size(batch))
        )

    @torch.jit.unused
    def _as_torch(self) -> nn.MultiheadAttention:
        """The same module, its parameters shared, as it was before."""
        module = nn.MultiheadAttention.__new__(nn.MultiheadAttention)
        module.__dict__ = {**self.__dict__, "_qkv_same_embed_dim": self.in_proj_weight is not None}
        return module


def _is_mask(mask: Tensor, *shapes: list[int]) -> bool:
    kind = mask.dtype == torch.bool or mask.is_floating_point()
    return is_plain(mask) and kind and list(mask.shape) in shapes
