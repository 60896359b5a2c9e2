"""What the attention modules share."""

import operator

from torch import Tensor, nn

from ..functional import sdpa, sdpa_with_weights


class AttentionModule(nn.Module):
    """Base of the attention modules: dropout in training only, and weights kept on request.

    Attributes:
        keep_weights: set it to True, and every forward keeps its weights in ``last_weights``, to be looked at
            however deep the module sits in a model.
        last_weights: the weights of the last forward with ``keep_weights``, detached, a matrix a head; None
            before.
    """

    keep_weights: bool
    last_weights: Tensor | None

    def __init__(self, dropout: float) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must lie in [0, 1], got {dropout}")
        self.dropout = float(dropout)
        self.keep_weights = False
        self.last_weights = None

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention by the op that gives what is needed and no more."""
        dropout_p = self.dropout if self.training else 0.0
        if not (need_weights or self.keep_weights):
            return sdpa(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa), None
        output, weights = sdpa_with_weights(
            query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa
        )
        if self.keep_weights:
            self.last_weights = weights.detach()
        return output, weights if need_weights else None


def check_sizes(**sizes: int | None) -> None:
    """Refuse the first that is below 1, by its name; None stands for a default.

    ``nn.MultiheadAttention`` refuses its own sizes of 0; ``nn.Linear`` would take them and attend to nothing.
    """
    for name, size in sizes.items():
        if size is None:
            continue
        try:
            operator.index(size)
        except TypeError:
            raise TypeError(f"{name} must be an int, got {size!r}") from None
        if size < 1:
            raise ValueError(f"{name} must be greater than 0, got {size}")


def default_to(value: int | None, default: int) -> int:
    """``value``, or ``default`` if it is None; 0 is a value."""
    return default if value is None else value
