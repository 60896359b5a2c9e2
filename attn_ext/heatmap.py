"""Attention weights as a picture: one panel a head, words along both sides, one colour bar for all."""

import math
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

__all__ = ["check_picture", "draw_heatmap", "save_heatmap"]

INK = "#22223b"
FAINT_INK = "#6b6b83"
CELL_INCHES = 0.27  # of a word with its label
PANEL_INCHES = (1.9, 6.0)  # smallest and largest side of a panel
LABEL_INCHES = 0.15  # the least distance of two labels: where words are closer, only some are named
SLANT_INCHES = 0.24  # from this distance on, the labels of the columns slant instead of standing upright
LABEL_LENGTH = 14  # longer words are cut
GRID_WORDS = 32  # up to so many words, cells are set apart and dots mark the largest weights

# From paper by apricot and rose to ink. CIELAB lightness falls evenly, 97 to 11, so that equal steps of the
# weight look equal, and the picture can be read in grey.
COLORS = (
    "#faf6f1",
    "#f5d1b4",
    "#f9a77e",
    "#ef7b71",
    "#de4d72",
    "#b13578",
    "#7b2d74",
    "#462460",
    "#1a193d",
)

# Scripts that matplotlib's own font lacks, by the fonts that systems commonly have for them.
FALLBACK_FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Micro Hei",
    "Hiragino Sans",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Emoji",
)


def check_picture(path: Path) -> None:
    """Refuse, before any work, a picture that cannot be written.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the file's extension is not a picture that matplotlib writes.
        OSError: its folder does not exist.
    """
    figure_class = _figure_class()
    known = sorted(figure_class().canvas.get_supported_filetypes())
    extension = path.suffix.lstrip(".").lower()
    if extension not in known:
        named = f"'.{extension}' is not one" if extension else "it has no extension"
        raise ValueError(f"cannot write {path} as a picture: {named} of {', '.join(known)}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")


def save_heatmap(
    path: Path, weights: Tensor, rows: Sequence[str], columns: Sequence[str], title: str
) -> None:
    """Draw the weights and write the picture; see :func:`draw_heatmap`."""
    figure = draw_heatmap(weights, rows, columns, title)
    with warnings.catch_warnings():
        # A character that no installed font has is a box in the picture, which says enough.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=160, facecolor="white")


def draw_heatmap(weights: Tensor, rows: Sequence[str], columns: Sequence[str], title: str) -> "Figure":
    """A figure of weights (heads, rows, columns), floats on the CPU: a panel a head, all in one colour scale.

    Up to GRID_WORDS words a dot marks the largest weight of each row; beyond, the darkest colour stands for
    the largest 0.5 % of the weights, so that the others can still be told apart.
    """
    heads, num_rows, num_columns = weights.shape
    height, width = _panel_inches(num_rows), _panel_inches(num_columns)
    across = _panels_across(heads, width / height)
    down = math.ceil(heads / across)

    import matplotlib

    with matplotlib.rc_context({"font.family": _font_families(), "text.color": INK, "svg.fonttype": "none"}):
        figure = _figure_class()(figsize=(across * (width + 0.25) + 2.3, down * (height + 0.4) + 2.0))
        figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.03)
        panels = figure.subplots(down, across, squeeze=False)
        top = _largest_shown(weights)
        for number, axes in enumerate(panels.flat):
            if number >= heads:
                axes.set_axis_off()
                continue
            image = _draw_panel(axes, weights[number], top)
            if heads > 1:
                axes.set_title(f"head {number + 1}", loc="left", fontsize=9, color=FAINT_INK, pad=4)
            axes.set(xticks=[], yticks=[])
            if number % across == 0:
                _name_rows(axes, rows, height)
            if number + across >= heads:
                _name_columns(axes, columns, width)
        extend = "max" if float(weights.max()) > top else "neither"
        bar = figure.colorbar(image, ax=panels, shrink=0.6, aspect=28, pad=0.02, extend=extend)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8, colors=FAINT_INK)
        bar.set_label("attention weight", fontsize=8, color=FAINT_INK)
        figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", parse_math=False)
        caption = textwrap.fill(_caption(num_rows, num_columns), width=int(15 * figure.get_figwidth()))
        figure.supxlabel(caption, x=0.02, ha="left", fontsize=8, color=FAINT_INK, parse_math=False)
    return figure


def _draw_panel(axes: "Axes", weights: Tensor, top: float) -> Any:
    """The weights (rows, columns) of one head as an image."""
    num_rows, num_columns = weights.shape
    image = axes.imshow(weights.numpy(), cmap=_color_map(), vmin=0.0, vmax=top, aspect="auto")
    axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if _is_small(num_rows, num_columns):
        axes.set_xticks([j - 0.5 for j in range(1, num_columns)], minor=True)
        axes.set_yticks([i - 0.5 for i in range(1, num_rows)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
        axes.tick_params(which="minor", length=0)
        largest, places = weights.max(-1)
        colors = ["white" if share > top / 3 else INK for share in largest.tolist()]
        axes.scatter(places.tolist(), range(num_rows), s=8, color=colors, linewidths=0)
    return image


def _name_rows(axes: "Axes", words: Sequence[str], inches: float) -> None:
    step = _label_step(words, inches)
    axes.set_yticks(
        range(0, len(words), step), [_shortened(word) for word in words[::step]], parse_math=False
    )


def _name_columns(axes: "Axes", words: Sequence[str], inches: float) -> None:
    step = _label_step(words, inches)
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "va": "top", "rotation_mode": "anchor"}
    style = slant if inches * step / len(words) >= SLANT_INCHES else {"rotation": 90}
    named = [_shortened(word) for word in words[::step]]
    axes.set_xticks(range(0, len(words), step), named, parse_math=False, **style)


def _label_step(words: Sequence[str], inches: float) -> int:
    """Every word is named, or where they are too close, every so-manieth."""
    return max(1, math.ceil(LABEL_INCHES * len(words) / inches))


def _shortened(word: str) -> str:
    return word if len(word) <= LABEL_LENGTH else word[: LABEL_LENGTH - 1] + "…"


def _panel_inches(words: int) -> float:
    smallest, largest = PANEL_INCHES
    return min(max(CELL_INCHES * words, smallest), largest)


def _panels_across(heads: int, panel_ratio: float) -> int:
    """How many panels side by side: the whole picture about 4:3, and few places left empty."""

    def flaw(across: int) -> float:
        down = math.ceil(heads / across)
        ratio = panel_ratio * across / down
        return abs(math.log(ratio / (4 / 3))) + 2 * (across * down - heads) / heads

    return min(range(1, heads + 1), key=flaw)


def _is_small(num_rows: int, num_columns: int) -> bool:
    return max(num_rows, num_columns) <= GRID_WORDS


def _largest_shown(weights: Tensor) -> float:
    """The weight that gets the darkest colour."""
    if _is_small(*weights.shape[1:]):
        return float(weights.max()) or 1.0
    return float(weights.flatten().kthvalue(math.ceil(0.995 * weights.numel())).values) or 1.0


def _caption(num_rows: int, num_columns: int) -> str:
    caption = "Each row shares the attention of one word among the columns and sums to 1"
    return caption + ("; a dot marks its largest weight." if _is_small(num_rows, num_columns) else ".")


def _color_map() -> "LinearSegmentedColormap":
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("paper_to_ink", COLORS)


def _font_families() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(font for font in FALLBACK_FONTS if font in installed)]


def _figure_class() -> "type[Figure]":
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the picture needs matplotlib: pip install matplotlib") from None
    return Figure
