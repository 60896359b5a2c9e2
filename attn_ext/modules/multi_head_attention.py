from torch import Tensor, nn

from ._base import AttentionModule, check_sizes, default_to
from ._masks import to_attn_mask


class MultiHeadAttention(AttentionModule):
    r"""Attention of several heads, with grouped key/value heads and head sizes of one's own.

    .. math::
        \mathrm{head}_h = \mathrm{softmax}(Q_h K_{g(h)}^T / \sqrt{D} + \mathrm{mask})\; V_{g(h)}, \qquad
        \mathrm{output} = \mathrm{concat}(\mathrm{head}_1, \dots, \mathrm{head}_H)\; W_o^T + b_o

    with :math:`g(h) = \lfloor h / (H / H_{kv}) \rfloor`, the key/value head that head :math:`h` reads.

    Args:
        embed_dim: features of the query and of the output projection, :math:`E`.
        num_heads: query heads, :math:`H`.
        num_kv_heads: key/value heads, :math:`H_{kv}`, a divisor of ``num_heads``; ``num_heads`` if None.
        head_dim: features of a head's queries and keys, :math:`D`; ``embed_dim // num_heads`` if None.
        value_dim: features of a head's values, :math:`D_v`; ``head_dim`` if None.
        key_dim: features of the key input; ``embed_dim`` if None.
        value_in_dim: features of the value input; ``embed_dim`` if None.
        bias: whether the projections have biases.
        out_proj: whether the concatenated heads are projected to ``embed_dim``. Without it the output has
            :math:`H D_v` features.
        dropout: probability that a weight is dropped, in training only.

    Raises:
        ValueError: a size that is not greater than 0; ``num_heads`` does not divide ``embed_dim`` and no
            ``head_dim`` is given; ``num_kv_heads`` does not divide ``num_heads``; a ``dropout`` outside of
            [0, 1].

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2; :class:`torch.nn.MultiheadAttention`,
        whose weights :meth:`from_torch` takes over; Ainslie et al. 2023, "GQA", for the grouped heads.

    Example:
        >>> import torch, attn_ext
        >>> attention = attn_ext.MultiHeadAttention(512, 8, num_kv_heads=2, dropout=0.1).eval()
        >>> x = torch.randn(2, 32, 512)
        >>> padding = torch.arange(32) >= torch.tensor([[32], [20]])  # (2, 32), True = ignored
        >>> output, weights = attention(x, key_padding_mask=padding, is_causal=True, need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 32, 512]), torch.Size([2, 8, 32, 32]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        key_dim: int | None = None,
        value_in_dim: int | None = None,
        bias: bool = True,
        out_proj: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dropout)
        check_sizes(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            key_dim=key_dim,
            value_in_dim=value_in_dim,
        )
        self.num_heads = num_heads
        self.num_kv_heads = default_to(num_kv_heads, num_heads)
        _check_heads(embed_dim, self.num_heads, self.num_kv_heads, head_dim)
        self.head_dim = default_to(head_dim, embed_dim // num_heads)
        self.value_dim = default_to(value_dim, self.head_dim)
        # False is the other layout of nn.MultiheadAttention, (L, B, E); only from_torch sets it.
        self.batch_first = True

        self.query_proj = nn.Linear(embed_dim, self.num_heads * self.head_dim, bias)
        self.key_proj = nn.Linear(default_to(key_dim, embed_dim), self.num_kv_heads * self.head_dim, bias)
        self.value_proj = nn.Linear(
            default_to(value_in_dim, embed_dim), self.num_kv_heads * self.value_dim, bias
        )
        self.out_proj = nn.Linear(num_heads * self.value_dim, embed_dim, bias) if out_proj else nn.Identity()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A module with copies of the weights of ``module``, called with inputs of the same layout.

        Dropout, training mode, dtype, device and ``batch_first`` are taken over too. What differs is the
        call: ``attn_mask`` is ``mask``, weights are returned on request only, and a matrix a head unless
        ``average_weights=True``.

        Raises:
            ValueError: ``module`` has ``add_bias_kv`` or ``add_zero_attn``, which have no counterpart here.

        Example:
            >>> import torch, attn_ext
            >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
            >>> ours = attn_ext.MultiHeadAttention.from_torch(theirs)
            >>> x = torch.randn(2, 5, 16)
            >>> torch.testing.assert_close(ours(x)[0], theirs(x, x, x)[0])
        """
        if module.bias_k is not None or module.bias_v is not None:
            raise ValueError(
                "add_bias_kv=True has no counterpart in MultiHeadAttention: its extra key is not a weight"
            )
        if module.add_zero_attn:
            raise ValueError(
                "add_zero_attn=True has no counterpart in MultiHeadAttention: its extra key is zero"
            )
        result = cls(
            module.embed_dim,
            module.num_heads,
            key_dim=module.kdim,
            value_in_dim=module.vdim,
            bias=module.in_proj_bias is not None,
            dropout=module.dropout,
        )
        result.batch_first = module.batch_first
        result.to(module.out_proj.weight).load_state_dict(_state_from_torch(module))
        return result.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        average_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from ``query`` to ``key``; self-attention if ``key`` is left out.

        Args:
            query: :math:`(\dots, L_q, E)`; :math:`(L_q, E)` is one sequence.
            key: :math:`(\dots, L_k, E_k)`; ``query`` if None.
            value: :math:`(\dots, L_k, E_v)`; ``key`` if None.
            mask: broadcasts to :math:`(\dots, H, L_q, L_k)`. Bool: **True is masked out**, the contrary of
                the op's ``attn_mask``. Floating: added to the scores. With three dims it is
                :class:`~torch.nn.MultiheadAttention`'s :math:`(B H, L_q, L_k)`, or :math:`(1, L_q, L_k)`.
            key_padding_mask: :math:`(\dots, L_k)`, **True is ignored** as a key. Floating: added to the
                scores.
            is_causal: row ``i`` sees only the keys up to ``i``.
            need_weights: also return the weights.
            average_weights: return the mean of the weights over the heads.

        Returns:
            The output :math:`(\dots, L_q, E)`, or :math:`(\dots, L_q, H D_v)` without an output projection,
            and the weights after dropout, :math:`(\dots, H, L_q, L_k)` or :math:`(\dots, L_q, L_k)` if
            averaged, or None.

        Raises:
            ValueError: a mask that is neither bool nor floating, or that has three dims of which the first is
                neither 1 nor :math:`B H`.
            RuntimeError: what :func:`attn_ext.sdpa` refuses.
        """
        if key is None:
            key = query
        if value is None:
            value = key
        transposed = not self.batch_first and query.dim() == 3
        if transposed:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        attn_mask = self._attn_mask(mask, key_padding_mask, list(query.shape[:-2]))
        query, key, value = self.project(query, key, value)
        grouped = self.num_kv_heads != self.num_heads
        output, weights = self._attend(query, key, value, attn_mask, is_causal, grouped, need_weights)

        output = self.out_proj(output.transpose(-3, -2).flatten(-2))
        if transposed:
            output = output.transpose(0, 1)
        if weights is not None and average_weights:
            weights = weights.mean(dim=-3)
        return output, weights

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value that the op is given: (…, heads, length, features of a head)."""
        return (
            self.query_proj(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(-3, -2),
            self.key_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(-3, -2),
            self.value_proj(value).unflatten(-1, (self.num_kv_heads, self.value_dim)).transpose(-3, -2),
        )

    def _attn_mask(
        self, mask: Tensor | None, key_padding_mask: Tensor | None, batch_shape: list[int]
    ) -> Tensor | None:
        """Both masks as one that broadcasts to (…, H, Lq, Lk)."""
        if mask is not None and mask.dim() == 3 and mask.size(0) != 1:
            # A mask a sequence, (B, Lq, Lk), would be taken for one a head wherever B happens to be H.
            expected = self.num_heads
            for size in batch_shape:
                expected *= size
            if mask.size(0) != expected:
                raise ValueError(
                    f"the first of a mask's three dims must be 1 or batch * heads = {expected}, got "
                    f"{mask.size(0)}: pass (batch, 1, Lq, Lk) for a mask a sequence, (1, heads, Lq, Lk) for "
                    "one a head"
                )
            shape = batch_shape + [self.num_heads, mask.size(1), mask.size(2)]  # noqa: RUF005 (TorchScript)
            mask = mask.reshape(shape)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(-2).unsqueeze(-2)
        return to_attn_mask(mask, key_padding_mask)

    def extra_repr(self) -> str:
        parts = [f"num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts.append(f"head_dim={self.head_dim}")
        if self.value_dim != self.head_dim:
            parts.append(f"value_dim={self.value_dim}")
        if not self.batch_first:
            parts.append("batch_first=False")
        return ", ".join([*parts, f"dropout={self.dropout}"])


def _check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    if num_heads % num_kv_heads != 0:
        raise ValueError(
            f"num_kv_heads must divide num_heads, got num_heads={num_heads}, num_kv_heads={num_kv_heads}"
        )
    if head_dim is None and embed_dim % num_heads != 0:
        raise ValueError(
            f"num_heads must divide embed_dim, got embed_dim={embed_dim}, num_heads={num_heads}: "
            "pass head_dim to have heads of another size"
        )


def _state_from_torch(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The state dict of a MultiHeadAttention with the weights of ``module``."""
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    state = {
        f"{name}_proj.weight": weight for name, weight in zip(("query", "key", "value"), weights, strict=True)
    }
    state["out_proj.weight"] = module.out_proj.weight
    if module.in_proj_bias is not None:
        query_bias, key_bias, value_bias = module.in_proj_bias.chunk(3)
        state |= {"query_proj.bias": query_bias, "key_proj.bias": key_bias, "value_proj.bias": value_bias}
        state["out_proj.bias"] = module.out_proj.bias
    return state
