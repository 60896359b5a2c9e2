import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]
from typing_extensions import Unpack

from .._nested import like
from ..caches import KeyValueCache
from ._base import AttentionModule, ModuleOptions, ParameterOptions, check_sizes, default_to, of_parameters
from ._masks import to_attn_mask
from ._projection import project_packed, split_heads


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
        packed: whether the three projections are one parameter, so that self-attention takes one product for
            all of them; None: where the three inputs have ``embed_dim`` features. Not packed, they are the
            modules ``query_proj``, ``key_proj`` and ``value_proj``, to be shared or changed one by one.
        dropout: probability that a weight is dropped, in training only.
        options: ``device`` and ``dtype`` of the parameters; ``scale``, ``window_left``, ``window_right``,
            ``softcap`` and ``sinks``, meant as in :func:`attn_ext.sdpa`; ``sinks=True`` learns one a head.
            ``context_parallel``, a :class:`attn_ext.distributed.SequenceLayout`, has the module attend over a
            sequence whose rows lie on several ranks, by ``context_parallel_method``: each rank passes and
            gets its own rows, and masks have these rows and the columns of all ranks.

    Attributes:
        in_proj_weight: packed, the weights of query, key and value one above the other,
            :math:`(H D + H_{kv} D + H_{kv} D_v,\, E)`, as in :class:`torch.nn.MultiheadAttention`, whose
            state dict fits a module with as many query as key/value heads. None if not packed.
        in_proj_bias: their biases; None if not packed, or without any.

    A state dict of either layout loads into the other. Projections begin as :class:`torch.nn.Linear` does,
    also packed; :class:`torch.nn.MultiheadAttention` begins with Xavier's weights and biases of 0.

    Raises:
        ValueError: a size that is not greater than 0; ``num_heads`` does not divide ``embed_dim`` and no
            ``head_dim`` is given; ``num_kv_heads`` does not divide ``num_heads``; ``packed=True`` with inputs
            of other features than ``embed_dim``; a ``dropout`` outside of [0, 1]; a negative window or
            softcap.

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

    if TYPE_CHECKING:
        in_proj_weight: nn.Parameter | None
        in_proj_bias: nn.Parameter | None

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
        packed: bool | None = None,
        dropout: float = 0.0,
        **options: Unpack[ModuleOptions],
    ) -> None:
        check_sizes(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            key_dim=key_dim,
            value_in_dim=value_in_dim,
        )
        super().__init__(dropout, num_heads, **options)
        self.num_heads = num_heads
        self.num_kv_heads = default_to(num_kv_heads, num_heads)
        _check_heads(embed_dim, self.num_heads, self.num_kv_heads, head_dim)
        self.enable_gqa = self.num_kv_heads != self.num_heads
        self.head_dim = default_to(head_dim, embed_dim // num_heads)
        self.value_dim = default_to(value_dim, self.head_dim)
        # False is the other layout of nn.MultiheadAttention, (L, B, E); only from_torch sets it.
        self.batch_first = True

        in_dims = [embed_dim, default_to(key_dim, embed_dim), default_to(value_in_dim, embed_dim)]
        self.out_dims = [num_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        self.out_dims.append(self.num_kv_heads * self.value_dim)
        same = in_dims == [embed_dim] * 3
        if packed and not same:
            raise ValueError(
                f"packed=True needs inputs of embed_dim features, got {in_dims} for query, key, value"
            )
        where = of_parameters(options)
        self._make_projections(in_dims, bias, same if packed is None else packed, where)
        joined = num_heads * self.value_dim
        self.out_proj = nn.Linear(joined, embed_dim, bias, **where) if out_proj else nn.Identity()

    def _make_projections(
        self, in_dims: list[int], bias: bool, packed: bool, where: ParameterOptions
    ) -> None:
        if packed:
            weight = torch.empty(sum(self.out_dims), in_dims[0], **where)
            self.in_proj_weight = nn.Parameter(weight)
            self.register_parameter("in_proj_bias", nn.Parameter(weight[:, 0].clone()) if bias else None)
            _reset_as_linear(self.in_proj_weight, self.in_proj_bias)
            return
        self.register_parameter("in_proj_weight", None)
        self.register_parameter("in_proj_bias", None)
        self.query_proj, self.key_proj, self.value_proj = (
            nn.Linear(size, out, bias, **where) for size, out in zip(in_dims, self.out_dims, strict=True)
        )

    def reset_parameters(self) -> None:
        """Begin all parameters anew, as the constructor does; after ``to_empty()``, for example."""
        if self.in_proj_weight is not None:
            _reset_as_linear(self.in_proj_weight, self.in_proj_bias)
        super().reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiHeadAttention":
        """A module with copies of the weights of ``module``, called with inputs of the same layout.

        Dropout, training mode, dtype, device, ``batch_first`` and which parameters require grad are taken
        over too. What differs is the call: ``attn_mask`` is ``mask`` and stands before ``key_padding_mask``
        (pass both by name), weights are returned on request only, and a matrix a head unless
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
        theirs = dict(module.named_parameters())
        for name, parameter in result.named_parameters():
            parameter.requires_grad_(theirs[_name_in_torch(name)].requires_grad)
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
        query_offset: int = 0,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from ``query`` to ``key``; self-attention if ``key`` is left out.

        Args:
            query: :math:`(\dots, L_q, E)`; :math:`(L_q, E)` is one sequence; a jagged nested tensor
                :math:`(B, j, E)` is sequences of different lengths, which takes no mask and gives no weights.
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
            query_offset: position of the first query row among the keys, for window and causal triangle.
            cache: the keys and values are written behind those that it has, and the query attends to all of
                them, its last row standing at the last key. For inference, with inputs :math:`(B, L, E)`, no
                mask, no weights and no ``query_offset``.

        Returns:
            The output :math:`(\dots, L_q, E)`, or :math:`(\dots, L_q, H D_v)` without an output projection,
            and the weights after dropout, :math:`(\dots, H, L_q, L_k)` or :math:`(\dots, L_q, L_k)` if
            averaged, or None.

        Raises:
            ValueError: a mask that is neither bool nor floating, or that has three dims of which the first is
                neither 1 nor :math:`B H`; a ``key_padding_mask`` of other columns than there are keys.
            RuntimeError: what :func:`attn_ext.sdpa` refuses, or the cache; a cache with what it cannot have.
        """
        if key is None:
            key = query
        if value is None:
            value = key
        if cache is not None:
            if mask is not None or key_padding_mask is not None or need_weights or query_offset != 0:
                raise RuntimeError("attn_ext: expected no mask, weights or query_offset with a cache")
            if self.context_parallel is not None:
                raise RuntimeError("attn_ext: expected no context_parallel with a cache")
            return self._attend_cache(query, key, value, is_causal, cache), None
        transposed = not self.batch_first and query.dim() == 3
        batch_shape = [query.size(1)] if transposed else list(query.shape[:-2])

        if key_padding_mask is not None:
            self._check_padding(key_padding_mask, key.size(0) if transposed else key.size(-2))
        attn_mask = self._attn_mask(mask, key_padding_mask, batch_shape)
        query, key, value = self.project(query, key, value)
        if transposed:
            query, key, value = query.transpose(0, 2), key.transpose(0, 2), value.transpose(0, 2)
        output, weights = self._attend(query, key, value, attn_mask, is_causal, query_offset, need_weights)

        if transposed:
            output = output.transpose(0, 2)
        output = self.out_proj(output.transpose(-3, -2).flatten(-2))
        if weights is not None and average_weights:
            weights = weights.mean(dim=-3)
        return output, weights

    def _attend_cache(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, cache: KeyValueCache
    ) -> Tensor:
        nested = not is_scripting() and query.is_nested
        if query.dim() != 3 or nested or (self.training and self.dropout > 0):
            shape = "of a nested tensor" if nested else f"{list(query.shape)}"
            raise RuntimeError(
                "attn_ext: expected a query of shape (batch, length, features) with a cache, and no dropout "
                f"in training, but got shape {shape} and dropout {self.dropout if self.training else 0.0}"
            )
        if not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        query, key, value = self.project(query, key, value)
        cache.append(key, value)
        attended = cache.attend(
            query,
            is_causal,
            self.scale,
            self.enable_gqa,
            self.window_left,
            self.window_right,
            self.softcap,
            self.sinks,
        )
        output: Tensor = self.out_proj(attended.transpose(-3, -2).flatten(-2))
        return output if self.batch_first else output.transpose(0, 1)

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value that the op is given: (…, heads, length, features of a head)."""
        if not is_scripting() and query.is_nested:
            return self._project_jagged(query, key, value)
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        features = [self.head_dim, self.head_dim, self.value_dim]
        if self.in_proj_weight is not None:
            return project_packed(query, key, value, self.in_proj_weight, self.in_proj_bias, heads, features)
        return (
            split_heads(self.query_proj(query), heads[0], features[0]),
            split_heads(self.key_proj(key), heads[1], features[1]),
            split_heads(self.value_proj(value), heads[2], features[2]),
        )

    @torch.jit.unused
    def _project_jagged(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of all sequences at once: torch cannot take the gradient of a nested tensor's split."""
        query_rows = query.values()
        key_rows = query_rows if key is query else key.values()
        value_rows = key_rows if value is key else value.values()
        projected = self.project(query_rows, key_rows, value_rows)
        jagged = [
            like(heads.transpose(0, 1), tensor).transpose(1, 2)
            for heads, tensor in zip(projected, (query, key, value), strict=True)
        ]
        return jagged[0], jagged[1], jagged[2]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Loads either layout; `state_dict` is load_state_dict's own copy."""
        for kind in ("weight", "bias"):
            packed = f"{prefix}in_proj_{kind}"
            apart = [f"{prefix}{name}_proj.{kind}" for name in ("query", "key", "value")]
            if self.in_proj_weight is None and packed in state_dict:
                parameter = state_dict.pop(packed)
                if parameter.size(0) != sum(self.out_dims):
                    errors: list[str] = arguments[-1]
                    errors.append(
                        f"size mismatch for {packed}: expected {sum(self.out_dims)} rows of query, key and "
                        f"value, got shape {list(parameter.shape)}"
                    )
                    continue
                state_dict.update(zip(apart, parameter.split(self.out_dims), strict=True))
            elif self.in_proj_weight is not None and all(name in state_dict for name in apart):
                state_dict[packed] = torch.cat([state_dict.pop(name) for name in apart])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

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
        return ", ".join([*parts, super().extra_repr()])


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


def _reset_as_linear(weight: Tensor, bias: Tensor | None) -> None:
    """As three ``nn.Linear`` would begin: the features that go in are the same."""
    bound = 1 / math.sqrt(weight.size(1))
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)


def _state_from_torch(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """The state dict of a MultiHeadAttention with the weights of ``module``."""
    state = module.state_dict()
    for name, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        if f"{theirs}_proj_weight" in state:
            state[f"{name}_proj.weight"] = state.pop(f"{theirs}_proj_weight")
    return state


def _name_in_torch(name: str) -> str:
    """The parameter of nn.MultiheadAttention that becomes, or holds, ours of this name."""
    kind, _, part = name.partition("_proj.")
    if kind not in ("query", "key", "value"):
        return name
    return f"{kind[0]}_proj_weight" if part == "weight" else "in_proj_bias"
