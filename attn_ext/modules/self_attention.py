from torch import Tensor, nn
from typing_extensions import Unpack

from ._base import AttentionModule, ModuleOptions, check_sizes, default_to, of_parameters
from ._masks import to_attn_mask


class SelfAttention(AttentionModule):
    r"""Self-attention of one head, without an output projection.

    .. math::
        Q = X W_q^T + b_q, \quad K = X W_k^T + b_k, \quad V = X W_v^T + b_v, \qquad
        \mathrm{output} = \mathrm{softmax}(Q K^T / \sqrt{D} + \mathrm{mask})\; V

    Args:
        embed_dim: features of the input, :math:`E`.
        head_dim: features of queries and keys, :math:`D`; ``embed_dim`` if None.
        value_dim: features of values and output, :math:`D_v`; ``head_dim`` if None.
        bias: whether the three projections have biases.
        dropout: probability that a weight is dropped, in training only.
        options: ``device`` and ``dtype`` of the parameters; ``scale``, ``window_left``, ``window_right``,
            ``softcap`` and ``sinks``, meant as in :func:`attn_ext.sdpa`; ``sinks=True`` learns one;
            ``context_parallel`` and ``context_parallel_method`` as in :class:`attn_ext.MultiHeadAttention`.

    Raises:
        ValueError: a size that is not greater than 0; a ``dropout`` outside of [0, 1]; a negative window or
            softcap.

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.

    Example:
        >>> import torch, attn_ext
        >>> attention = attn_ext.SelfAttention(64)
        >>> output, weights = attention(torch.randn(2, 10, 64), is_causal=True, need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 10, 64]), torch.Size([2, 10, 10]))
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        **options: Unpack[ModuleOptions],
    ) -> None:
        super().__init__(dropout, 1, **options)
        check_sizes(embed_dim=embed_dim, head_dim=head_dim, value_dim=value_dim)
        head_dim = default_to(head_dim, embed_dim)
        value_dim = default_to(value_dim, head_dim)
        where = of_parameters(options)
        self.query_proj = nn.Linear(embed_dim, head_dim, bias, **where)
        self.key_proj = nn.Linear(embed_dim, head_dim, bias, **where)
        self.value_proj = nn.Linear(embed_dim, value_dim, bias, **where)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        query_offset: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from every row of ``x`` to every row of it.

        Args:
            x: :math:`(\dots, L, E)`; :math:`(L, E)` is one sequence.
            mask: broadcasts to :math:`(\dots, L, L)`. Bool: **True is masked out**, the contrary of the op's
                ``attn_mask``. Floating: added to the scores.
            key_padding_mask: :math:`(\dots, L)`, **True is ignored** as a key. Floating: added to the scores.
            is_causal: row ``i`` sees only the rows up to ``i``.
            need_weights: also return the weights.
            query_offset: position of the first query row among the keys, for window and causal triangle.

        Returns:
            The output :math:`(\dots, L, D_v)`, and the weights :math:`(\dots, L, L)` after dropout, or None.

        Raises:
            ValueError: a mask that is neither bool nor floating; a ``key_padding_mask`` of other columns than
                there are keys.
            RuntimeError: what :func:`attn_ext.sdpa` refuses.
        """
        query, key, value = self.project(x)
        if key_padding_mask is not None:
            self._check_padding(key_padding_mask, x.size(-2))
            key_padding_mask = key_padding_mask.unsqueeze(-2)
        attn_mask = to_attn_mask(mask, key_padding_mask)
        return self._attend(query, key, value, attn_mask, is_causal, query_offset, need_weights)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value that the op is given."""
        return self.query_proj(x), self.key_proj(x), self.value_proj(x)
