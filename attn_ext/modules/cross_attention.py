from torch import Tensor, nn
from typing_extensions import Unpack

from ._base import AttentionModule, ModuleOptions, check_sizes, default_to, of_parameters
from ._masks import to_attn_mask


class CrossAttention(AttentionModule):
    r"""Attention of one head from one sequence to another, without an output projection.

    .. math::
        Q = X W_q^T + b_q, \quad K = C W_k^T + b_k, \quad V = C W_v^T + b_v, \qquad
        \mathrm{output} = \mathrm{softmax}(Q K^T / \sqrt{D} + \mathrm{mask})\; V

    Args:
        embed_dim: features of the sequence that asks, :math:`E`.
        context_dim: features of the sequence that is asked, :math:`E_c`; ``embed_dim`` if None.
        head_dim: features of queries and keys, :math:`D`; ``embed_dim`` if None.
        value_dim: features of values and output, :math:`D_v`; ``head_dim`` if None.
        bias: whether the three projections have biases.
        dropout: probability that a weight is dropped, in training only.
        options: ``device`` and ``dtype`` of the parameters; ``scale``, ``window_left``, ``window_right``,
            ``softcap`` and ``sinks``, meant as in :func:`attn_ext.sdpa`; ``sinks=True`` learns one.

    Raises:
        ValueError: a size that is not greater than 0; a ``dropout`` outside of [0, 1]; a negative window or
            softcap.

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.3, "encoder-decoder attention".

    Example:
        >>> import torch, attn_ext
        >>> attention = attn_ext.CrossAttention(16, head_dim=24, value_dim=28)
        >>> output, weights = attention(torch.randn(9, 16), torch.randn(8, 16), need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([9, 28]), torch.Size([9, 8]))
    """

    def __init__(
        self,
        embed_dim: int,
        context_dim: int | None = None,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        **options: Unpack[ModuleOptions],
    ) -> None:
        super().__init__(dropout, 1, **options)
        check_sizes(embed_dim=embed_dim, context_dim=context_dim, head_dim=head_dim, value_dim=value_dim)
        context_dim = default_to(context_dim, embed_dim)
        head_dim = default_to(head_dim, embed_dim)
        value_dim = default_to(value_dim, head_dim)
        where = of_parameters(options)
        self.query_proj = nn.Linear(embed_dim, head_dim, bias, **where)
        self.key_proj = nn.Linear(context_dim, head_dim, bias, **where)
        self.value_proj = nn.Linear(context_dim, value_dim, bias, **where)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        query_offset: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from every row of ``x`` to every row of ``context``.

        Args:
            x: :math:`(\dots, L_q, E)`; :math:`(L_q, E)` is one sequence.
            context: :math:`(\dots, L_k, E_c)`.
            mask: broadcasts to :math:`(\dots, L_q, L_k)`. Bool: **True is masked out**, the contrary of the
                op's ``attn_mask``. Floating: added to the scores.
            key_padding_mask: :math:`(\dots, L_k)`, **True is ignored** as a key. Floating: added to the
                scores.
            need_weights: also return the weights.
            query_offset: position of the first query row among the keys, for window.

        Returns:
            The output :math:`(\dots, L_q, D_v)`, and the weights :math:`(\dots, L_q, L_k)` after dropout, or
            None.

        Raises:
            ValueError: a mask that is neither bool nor floating; a ``key_padding_mask`` of other columns than
                there are keys.
            RuntimeError: what :func:`attn_ext.sdpa` refuses.
        """
        if x.dim() == context.dim() and not x.is_nested:
            for ours, theirs in zip(x.shape[:-2], context.shape[:-2]):  # noqa: B905 (TorchScript)
                if ours != theirs and ours != 1 and theirs != 1:
                    raise RuntimeError(
                        "attn_ext: expected x and context of one batch, but got shapes "
                        f"{list(x.shape)} and {list(context.shape)}"
                    )
        query, key, value = self.project(x, context)
        if key_padding_mask is not None:
            self._check_padding(key_padding_mask, context.size(-2))
            key_padding_mask = key_padding_mask.unsqueeze(-2)
        attn_mask = to_attn_mask(mask, key_padding_mask)
        return self._attend(query, key, value, attn_mask, False, query_offset, need_weights)

    def project(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The query, key and value that the op is given."""
        return self.query_proj(x), self.key_proj(context), self.value_proj(context)
