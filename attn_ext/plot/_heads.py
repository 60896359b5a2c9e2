"""Heat maps: of one head, of the heads of a layer, and of all layers and heads."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from ._style import (
    Theme,
    axes_or_new,
    color_map,
    name_columns,
    name_rows,
    new_figure,
    styled,
    theme_of,
    warn_of_missing_glyphs,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELL_INCHES = 0.27  # of a word with its label
PANEL_INCHES = (1.9, 6.0)  # smallest and largest side of a panel
TILE_INCHES = 0.8  # of a head in the grid
GRID_WORDS = 32  # up to so many words, cells are set apart and dots mark the largest weights
MAX_CELLS = 1000  # along a side: of more words, neighbours are joined to their largest
TILE_CELLS = 64


def heatmap(
    weights: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    row_tokens: Sequence[str] | None = None,
    axes: "Axes | None" = None,
    title: str = "",
    dark: bool = False,
    largest: float | None = None,
) -> "Axes":
    """The weights of one head as an image, words along both sides.

    Up to 32 words a dot marks the largest weight of each row; beyond, the strongest colour stands for the
    largest 0.5 % of the weights, so that the others can still be told apart. Beyond 1000 words a cell is the
    largest of a block of weights, and the label of the axis says so.

    Args:
        weights: (Lq, Lk).
        tokens: the words of the keys, and of the rows where there are as many; numbers if None.
        row_tokens: the words of the rows where they are others.
        axes: where to draw; by default a figure of its own.
        title: above the image.
        dark: for a dark background.
        largest: the weight of the strongest colour, to compare pictures.

    Returns:
        The axes; their ``figure`` can be saved by :func:`~attn_ext.plot.save`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: weights of other dims; tokens that do not fit.

    Example:
        >>> import torch, attn_ext
        >>> weights = torch.rand(3, 3).softmax(-1)
        >>> axes = attn_ext.plot.heatmap(weights, ["a", "b", "c"])
        >>> [label.get_text() for label in axes.get_xticklabels()]
        ['a', 'b', 'c']
    """
    if weights.dim() != 2:
        raise ValueError(f"expected the weights of one head, (Lq, Lk), got {tuple(weights.shape)}")
    rows, columns = fitting_words(weights.shape, tokens, row_tokens)
    theme = theme_of(dark)
    weights = weights.detach().float().cpu()
    with styled(theme):
        height, width = panel_inches(len(rows)), panel_inches(len(columns))
        axes = axes_or_new(axes, width + 1.8, height + 1.4, theme)
        small, step = joined(weights, MAX_CELLS)
        _draw_panel(axes, small, largest or largest_shown(weights), theme)
        name_rows(axes, rows, height, step)
        name_columns(axes, columns, width, step)
        if step > 1:
            axes.set_xlabel(f"each cell is the largest of {step} by {step} weights", fontsize=8)
        axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    warn_of_missing_glyphs([*rows, *columns, title])
    return axes


def heads(
    weights: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    row_tokens: Sequence[str] | None = None,
    title: str = "",
    names: Sequence[str] | None = None,
    dark: bool = False,
) -> "Figure":
    """A picture of the heads of a layer: a heat map a head, all in one colour scale.

    Args:
        weights: (H, Lq, Lk).
        tokens: as in :func:`~attn_ext.plot.heatmap`.
        row_tokens: the same.
        dark: the same.
        title: above all.
        names: above each head; "head 1" and so on if None.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: weights of other dims; tokens that do not fit.

    Example:
        >>> import torch, attn_ext
        >>> figure = attn_ext.plot.heads(torch.rand(4, 3, 3).softmax(-1), ["a", "b", "c"])
        >>> len(figure.axes)  # four heads and the colour bar
        5
    """
    if weights.dim() != 3:
        raise ValueError(f"expected the weights of a layer's heads, (H, Lq, Lk), got {tuple(weights.shape)}")
    rows, columns = fitting_words(weights.shape[1:], tokens, row_tokens)
    weights = weights.detach().float().cpu()
    number, theme = weights.shape[0], theme_of(dark)
    height, width = panel_inches(len(rows)), panel_inches(len(columns))
    across = _panels_across(number, width / height)
    down = math.ceil(number / across)
    with styled(theme):
        figure = new_figure(across * (width + 0.25) + 2.3, down * (height + 0.4) + 2.0, theme)
        panels = figure.subplots(down, across, squeeze=False)
        top = largest_shown(weights)
        small, step = joined(weights, MAX_CELLS // max(across, down) if number > 1 else MAX_CELLS)
        for head, axes in enumerate(panels.flat):
            if head >= number:
                axes.set_axis_off()
                continue
            image = _draw_panel(axes, small[head], top, theme)
            axes.set(xticks=[], yticks=[])
            if number > 1:
                name = names[head] if names else f"head {head + 1}"
                axes.set_title(name, loc="left", fontsize=9, color=theme.faint, pad=4)
            if head % across == 0:
                name_rows(axes, rows, height, step)
            if head + across >= number:
                name_columns(axes, columns, width, step)
        _add_bar(figure, image, panels, float(weights.max()) > top, theme)
        _add_title(figure, title, _caption(len(rows), len(columns), step), theme)
    warn_of_missing_glyphs([*rows, *columns, title])
    return figure


def grid(
    weights: Sequence[Tensor],
    names: Sequence[str] | None = None,
    *,
    title: str = "",
    dark: bool = False,
) -> "Figure":
    """All layers and heads in small: a row a layer, a column a head, each head in a scale of its own.

    A cell is the largest of a block of weights where a head has more than 64 words.

    Args:
        weights: one tensor a layer, (H, Lq, Lk).
        names: the names of the layers; numbers if None.
        title: as in :func:`~attn_ext.plot.heatmap`.
        dark: the same.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: weights of other dims.

    Example:
        >>> import torch, attn_ext
        >>> figure = attn_ext.plot.grid([torch.rand(4, 9, 9).softmax(-1) for _ in range(3)])
        >>> len(figure.axes)
        12
    """
    for layer in weights:
        if layer.dim() != 3:
            raise ValueError(f"expected (H, Lq, Lk) a layer, got {tuple(layer.shape)}")
    if not weights:
        raise ValueError("expected the weights of at least one layer, got none")
    theme, across = theme_of(dark), max(layer.shape[0] for layer in weights)
    names = list(names) if names is not None else [str(number) for number in range(len(weights))]
    with styled(theme):
        figure = new_figure(across * TILE_INCHES + 1.6, len(weights) * TILE_INCHES + 1.2, theme)
        panels = figure.subplots(len(weights), across, squeeze=False)
        for layer, name, line in zip(weights, names, panels, strict=True):
            for head, axes in enumerate(line):
                if head >= layer.shape[0]:
                    axes.set_axis_off()
                    continue
                tile, _ = joined(layer[head].detach().float().cpu(), TILE_CELLS)
                axes.imshow(
                    tile.numpy(), cmap=color_map(theme), vmin=0.0, vmax=largest_shown(tile), aspect="auto"
                )
                axes.set(xticks=[], yticks=[])
                _without_frame(axes)
            line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8, parse_math=False)
        for head, axes in enumerate(panels[0]):
            axes.set_title(str(head), fontsize=8, color=theme.faint, pad=3)
        caption = (
            "Rows of squares are layers, columns are heads; in each, a row shares the attention of one word."
        )
        _add_title(figure, title, caption, theme)
    return figure


def fitting_words(
    shape: Sequence[int], tokens: Sequence[str] | None, row_tokens: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The words of rows and columns, or numbers.

    Raises:
        ValueError: they do not fit.
    """
    num_rows, num_keys = shape
    if tokens is not None and len(tokens) != num_keys:
        raise ValueError(
            f"tokens has {len(tokens)} words for weights of {num_keys} keys: pass one word a key"
        )
    if row_tokens is not None and len(row_tokens) != num_rows:
        raise ValueError(
            f"row_tokens has {len(row_tokens)} words for weights of {num_rows} rows: pass one word a row"
        )
    columns = list(map(str, tokens)) if tokens is not None else [str(i) for i in range(num_keys)]
    if row_tokens is not None:
        return list(map(str, row_tokens)), columns
    return (columns if num_rows == num_keys else [str(i) for i in range(num_rows)]), columns


def joined(weights: Tensor, most: int) -> tuple[Tensor, int]:
    """(…, rows, columns) with blocks joined to their largest, so that no side has more than ``most``."""
    step = math.ceil(max(weights.shape[-2:]) / most)
    if step <= 1 or weights.numel() == 0:
        return weights, 1
    return F.max_pool2d(weights.unsqueeze(0), step, ceil_mode=True).squeeze(0), step


def largest_shown(weights: Tensor) -> float:
    """The weight that gets the strongest colour."""
    if weights.numel() == 0:
        return 1.0
    if _is_small(*weights.shape[-2:]):
        return float(weights.max()) or 1.0
    every = max(1, weights.numel() // 1_000_000)  # of so many, a sample says as much
    values = weights.flatten()[::every]
    return float(values.kthvalue(math.ceil(0.995 * values.numel())).values) or float(weights.max()) or 1.0


def panel_inches(words: int) -> float:
    smallest, largest = PANEL_INCHES
    return min(max(CELL_INCHES * words, smallest), largest)


def _draw_panel(axes: "Axes", weights: Tensor, top: float, theme: Theme) -> Any:
    """The weights (rows, columns) of one head as an image."""
    if weights.numel() == 0:
        weights = weights.new_zeros(1, 1)
    num_rows, num_columns = weights.shape
    image = axes.imshow(weights.numpy(), cmap=color_map(theme), vmin=0.0, vmax=top, aspect="auto")
    axes.tick_params(length=0, labelsize=8.5, labelcolor=theme.ink, color=theme.faint)
    _without_frame(axes)
    if _is_small(num_rows, num_columns):
        axes.set_xticks([j - 0.5 for j in range(1, num_columns)], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, num_rows)], minor=True)
        axes.grid(which="minor", color=theme.paper, linewidth=1.2)
        axes.tick_params(which="minor", length=0)
        largest, places = weights.max(-1)
        colors = [theme.paper if share > top / 3 else theme.ink for share in largest.tolist()]
        axes.scatter(places.tolist(), range(num_rows), s=8, color=colors, linewidths=0)
    return image


def _without_frame(axes: "Axes") -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)


def _add_bar(figure: "Figure", image: Any, panels: Any, beyond: bool, theme: Theme) -> None:
    extend = "max" if beyond else "neither"
    bar = figure.colorbar(image, ax=panels, shrink=0.6, aspect=28, pad=0.02, extend=extend)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=theme.faint)
    bar.set_label("attention weight", fontsize=8, color=theme.faint)


def _add_title(figure: "Figure", title: str, caption: str, theme: Theme) -> None:
    if title:
        figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", parse_math=False)
    wrapped = textwrap.fill(caption, width=int(15 * figure.get_figwidth()))
    figure.supxlabel(wrapped, x=0.02, ha="left", fontsize=8, color=theme.faint, parse_math=False)


def _panels_across(number: int, panel_ratio: float) -> int:
    """How many panels side by side: the whole picture about 4:3, and few places left empty."""

    def flaw(across: int) -> float:
        down = math.ceil(number / across)
        ratio = panel_ratio * across / down
        return abs(math.log(ratio / (4 / 3))) + 2 * (across * down - number) / number

    return min(range(1, number + 1), key=flaw)


def _is_small(num_rows: int, num_columns: int) -> bool:
    return max(num_rows, num_columns) <= GRID_WORDS


def _caption(num_rows: int, num_columns: int, step: int) -> str:
    caption = "Each row shares the attention of one word among the columns and sums to 1"
    if step > 1:
        return f"{caption}; each cell is the largest of {step} by {step} weights."
    return caption + ("; a dot marks its largest weight." if _is_small(num_rows, num_columns) else ".")
