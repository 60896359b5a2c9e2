"""Key mass under the words, and entropy by layer."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ._heads import CELL_INCHES
from ._style import axes_or_new, name_columns, styled, theme_of, warn_of_missing_glyphs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 1000


def key_mass(
    mass: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    axes: "Axes | None" = None,
    title: str = "",
    dark: bool = False,
) -> "Axes":
    """How much attention each word receives, as bars over the words: the mean of the heads, and a dot a head.

    Beyond 1000 words a bar is the sum of neighbours, and the label of the axis says so.

    Args:
        mass: (Lk,) or (H, Lk).
        tokens: the words of the keys; numbers if None.
        axes: as in :func:`~attn_ext.plot.heatmap`.
        title: the same.
        dark: the same.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: mass of other dims; tokens that do not fit.

    Example:
        >>> import torch, attn_ext
        >>> axes = attn_ext.plot.key_mass(torch.tensor([2.0, 0.5, 0.5]), ["a", "b", "c"])
        >>> [float(bar.get_height()) for bar in axes.patches]
        [2.0, 0.5, 0.5]
    """
    if mass.dim() not in (1, 2):
        raise ValueError(f"expected key mass (Lk,) or (H, Lk), got {tuple(mass.shape)}")
    heads = mass.detach().float().cpu().reshape(-1, mass.shape[-1])
    num_keys = heads.shape[-1]
    if tokens is not None and len(tokens) != num_keys:
        raise ValueError(
            f"tokens has {len(tokens)} words for a key mass of {num_keys} keys: pass one word a key"
        )
    words = list(map(str, tokens)) if tokens is not None else [str(i) for i in range(num_keys)]
    step = math.ceil(num_keys / MAX_BARS) if num_keys else 1
    padded = heads.new_zeros(len(heads), math.ceil(num_keys / step) * step)
    padded[:, :num_keys] = heads
    bars = padded.reshape(len(padded), -1, step).sum(-1) if num_keys else padded
    theme, width = theme_of(dark), min(max(CELL_INCHES * num_keys, 3.0), 12.0)
    with styled(theme):
        axes = axes_or_new(axes, width + 0.9, 3.2, theme)
        axes.bar(
            range(bars.shape[1]), bars.mean(0).tolist(), 0.82 if num_keys <= 200 else 1.0, color=theme.accent
        )
        if len(heads) > 1 and bars.shape[1] <= 64:
            for head in bars:
                axes.scatter(
                    range(bars.shape[1]), head.tolist(), s=5, color=theme.ink, alpha=0.45, linewidths=0
                )
        axes.set_xlim(-0.6, bars.shape[1] - 0.4)
        axes.tick_params(labelsize=8.5, labelcolor=theme.ink, color=theme.faint)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("key mass", fontsize=8)
        name_columns(axes, words, width, step)
        if step > 1:
            axes.set_xlabel(f"each bar is the sum of {step} words", fontsize=8)
        axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    warn_of_missing_glyphs([*words, title])
    return axes


def entropy(
    entropies: Sequence[Tensor],
    names: Sequence[str] | None = None,
    *,
    axes: "Axes | None" = None,
    title: str = "",
    dark: bool = False,
) -> "Axes":
    """Entropy by layer: a dot a head, the mean over its rows, and a line through the means of the layers.

    A head that looks at one word has entropy 0; one that looks at n words alike has ln n.

    Args:
        entropies: one tensor a layer, (H, Lq).
        names: the names of the layers; numbers if None.
        axes: as in :func:`~attn_ext.plot.heatmap`.
        title: the same.
        dark: the same.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: entropies of other dims, or of no layer.

    Example:
        >>> import torch, attn_ext
        >>> axes = attn_ext.plot.entropy([torch.rand(4, 9) for _ in range(3)])
        >>> len(axes.lines[0].get_xdata())
        3
    """
    if not entropies:
        raise ValueError("expected the entropies of at least one layer, got none")
    for layer in entropies:
        if layer.dim() != 2:
            raise ValueError(f"expected (H, Lq) a layer, got {tuple(layer.shape)}")
    theme, number = theme_of(dark), len(entropies)
    words = list(names) if names is not None else [str(i) for i in range(number)]
    means = [layer.detach().double().cpu().mean(-1) for layer in entropies]
    width = min(max(0.45 * number, 3.0), 12.0)
    with styled(theme):
        axes = axes_or_new(axes, width + 0.9, 3.4, theme)
        for place, heads in enumerate(means):
            axes.scatter(
                [place] * len(heads), heads.tolist(), s=14, color=theme.accent, alpha=0.6, linewidths=0
            )
        axes.plot(range(number), [float(heads.mean()) for heads in means], color=theme.ink, linewidth=1.4)
        axes.set_ylim(bottom=0)
        axes.set_xlim(-0.5, number - 0.5)
        axes.tick_params(labelsize=8.5, labelcolor=theme.ink, color=theme.faint)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylabel("entropy (nats)", fontsize=8)
        name_columns(axes, words, width)
        axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    warn_of_missing_glyphs([*words, title])
    return axes
