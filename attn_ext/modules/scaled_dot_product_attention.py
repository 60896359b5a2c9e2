from torch import Tensor
from typing_extensions import Unpack

from ._base import AttentionModule, ModuleOptions, check_sizes
from ._masks import to_attn_mask


class ScaledDotProductAttention(AttentionModule):
    r"""Scaled dot-product attention without projections, which always returns its weights.

    .. math::
        \mathrm{weights} = \mathrm{dropout}\bigl(\mathrm{softmax}(Q K^T / \sqrt{D} + \mathrm{mask})\bigr),
        \qquad \mathrm{output} = \mathrm{weights}\; V

    Args:
        dropout: probability that a weight is dropped, in training only.
        num_heads: :math:`H`; only sinks need to know.
        options: ``device`` and ``dtype`` of the parameters; ``scale``, ``window_left``, ``window_right``,
            ``softcap`` and ``sinks``, meant as in :func:`attn_ext.sdpa`; ``sinks=True`` learns one a head,
            and needs ``num_heads``.

    Raises:
        ValueError: a ``num_heads`` that is not greater than 0, or none with ``sinks=True``; a ``dropout``
            outside of [0, 1]; a negative window or softcap.

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

    def __init__(
        self, dropout: float = 0.0, *, num_heads: int | None = None, **options: Unpack[ModuleOptions]
    ) -> None:
        check_sizes(num_heads=num_heads)
        if num_heads is None and options.get("sinks", False):
            raise ValueError("sinks=True needs num_heads, to learn one a head")
        super().__init__(dropout, num_heads or 1, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        query_offset: int = 0,
    ) -> tuple[Tensor, Tensor]:
        r"""Attend from ``query`` to ``key``.

        Args:
            query: :math:`(\dots, H, L_q, D)`.
            key: :math:`(\dots, H, L_k, D)`.
            value: :math:`(\dots, H, L_k, D_v)`.
            mask: broadcasts to :math:`(\dots, H, L_q, L_k)`. Bool: **True is masked out**, the contrary of
                the op's ``attn_mask``. Floating: added to the scores.
            query_offset: position of the first query row among the keys, for window.

        Returns:
            The output :math:`(\dots, H, L_q, D_v)`, and the weights :math:`(\dots, H, L_q, L_k)` after
            dropout.

        Raises:
            ValueError: a mask that is neither bool nor floating.
            RuntimeError: what :func:`attn_ext.sdpa` refuses.
        """
        output, weights = self._attend(query, key, value, to_attn_mask(mask, None), False, query_offset, True)
        assert weights is not None
        return output, weights
