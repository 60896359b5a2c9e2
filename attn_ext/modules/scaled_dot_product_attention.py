from torch import Tensor

from ._base import AttentionModule
from ._masks import to_attn_mask


class ScaledDotProductAttention(AttentionModule):
    r"""Scaled dot-product attention without projections, which always returns its weights.

    .. math::
        \mathrm{weights} = \mathrm{dropout}\bigl(\mathrm{softmax}(Q K^T / \sqrt{D} + \mathrm{mask})\bigr),
        \qquad \mathrm{output} = \mathrm{weights}\; V

    Args:
        dropout: probability that a weight is dropped, in training only.

    Raises:
        ValueError: a ``dropout`` outside of [0, 1].

    Source:
        Vaswani et al. 2017, "Attention Is All You Need", figure 2, left.

    Example:
        >>> import torch, attn_ext
        >>> attention = attn_ext.ScaledDotProductAttention()
        >>> query, key, value = torch.randn(2, 8, 5, 64), torch.randn(2, 8, 7, 64), torch.randn(2, 8, 7, 64)
        >>> ignore_last_two = torch.arange(7) >= 5  # True = masked out
        >>> output, weights = attention(query, key, value, mask=ignore_last_two)
        >>> output.shape, weights.shape, weights[..., 5:].sum().item()
        (torch.Size([2, 8, 5, 64]), torch.Size([2, 8, 5, 7]), 0.0)
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""Attend from ``query`` to ``key``.

        Args:
            query: :math:`(\dots, H, L_q, D)`.
            key: :math:`(\dots, H, L_k, D)`.
            value: :math:`(\dots, H, L_k, D_v)`.
            mask: broadcasts to :math:`(\dots, H, L_q, L_k)`. Bool: **True is masked out**, the contrary of
                the op's ``attn_mask``. Floating: added to the scores.

        Returns:
            The output :math:`(\dots, H, L_q, D_v)`, and the weights :math:`(\dots, H, L_q, L_k)` after
            dropout.

        Raises:
            ValueError: a mask that is neither bool nor floating.
            RuntimeError: what :func:`attn_ext.sdpa` refuses.
        """
        output, weights = self._attend(query, key, value, to_attn_mask(mask, None), False, False, True)
        assert weights is not None
        return output, weights

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}"
