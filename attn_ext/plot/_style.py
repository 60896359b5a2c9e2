"""Colours, fonts and labels that all pictures share; what needs matplotlib imports it when it is called."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._text import characters, cut

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

# From paper by apricot and rose to ink. CIELAB lightness falls evenly, 97 to 11, so that equal steps of the
# weight look equal, and the picture can be read in grey.
LIGHT_COLORS = (
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
DARK_COLORS = LIGHT_COLORS[::-1]

LABEL_SIZE = 8.5
LABEL_WIDTH = 1.25  # inches: longer words are cut
LABEL_INCHES = 0.15  # the least distance of two labels: where words are closer, only some are named
SLANT_INCHES = 0.24  # from this distance on, the labels of the columns slant instead of standing upright

# Scripts that matplotlib's own font lacks, by the fonts that systems commonly have for them.
FALLBACK_FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "WenQuanYi Micro Hei",
    "Hiragino Sans",
    "Noto Sans Arabic",
    "Noto Sans Devanagari",
    "Noto Emoji",
    "Symbola",
)


@dataclass(frozen=True)
class Theme:
    """Colours of a picture beside those of its weights."""

    paper: str
    ink: str
    faint: str
    line: str
    accent: str
    colors: tuple[str, ...]


LIGHT = Theme("#ffffff", "#22223b", "#6b6b83", "#e4e2e8", "#b13578", LIGHT_COLORS)
DARK = Theme("#121120", "#ece8f3", "#a29fb8", "#322f4d", "#f9a77e", DARK_COLORS)


def theme_of(dark: bool) -> Theme:
    return DARK if dark else LIGHT


def figure_class() -> "type[Figure]":
    """Of matplotlib.

    Raises:
        ImportError: it is missing; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the picture takes matplotlib; to have it: pip install 'attn_ext[plot]'") from None
    return Figure


def new_figure(width: float, height: float, theme: Theme) -> "Figure":
    """A figure of so many inches."""
    figure = figure_class()(figsize=(width, height), facecolor=theme.paper)
    figure.set_layout_engine("constrained", w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.03)
    return figure


def axes_or_new(axes: "Axes | None", width: float, height: float, theme: Theme) -> "Axes":
    if axes is not None:
        return axes
    made: Axes = new_figure(width, height, theme).subplots()
    made.set_facecolor(theme.paper)
    return made


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """Fonts and colours of what is drawn meanwhile."""
    figure_class()
    import matplotlib

    style: Any = {
        "font.family": font_families(),
        "svg.fonttype": "none",
        "text.color": theme.ink,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.line,
        "axes.labelcolor": theme.faint,
        "axes.titlecolor": theme.ink,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
    }
    with matplotlib.rc_context(style):
        yield


def color_map(theme: Theme) -> "LinearSegmentedColormap":
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("paper_to_ink", theme.colors)


@cache
def font_families() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(font for font in FALLBACK_FONTS if font in installed)]


@cache
def _font_characters() -> frozenset[int]:
    """Code points that one of the fonts has."""
    from matplotlib import font_manager

    found: set[int] = set()
    for family in font_families():
        path = font_manager.findfont(font_manager.FontProperties(family=[family]))
        found |= font_manager.get_font(path).get_charmap().keys()
    return frozenset(found)


def missing_glyphs(texts: Iterable[str]) -> list[str]:
    """What is read as one character and no font of the pictures has, each once."""
    known = _font_characters()
    found = dict.fromkeys(
        character
        for text in texts
        for character in characters(text)
        if any(ord(part) not in known and part.isprintable() and not part.isspace() for part in character)
    )
    return list(found)


def warn_of_missing_glyphs(texts: Iterable[str]) -> None:
    """In a line that says what to install."""
    missing = missing_glyphs(texts)
    if missing:
        some = " ".join(missing[:8]) + (" …" if len(missing) > 8 else "")
        warnings.warn(
            f"no installed font has {some}: they are drawn as boxes; a font such as {_font_for(missing[0])} "
            "has them",
            stacklevel=4,
        )


def _font_for(character: str) -> str:
    import unicodedata

    name = unicodedata.name(character[0], "")
    for script, font in (
        ("CJK", "Noto Sans CJK JP"),
        ("HIRAGANA", "Noto Sans CJK JP"),
        ("KATAKANA", "Noto Sans CJK JP"),
        ("HANGUL", "Noto Sans CJK JP"),
        ("ARABIC", "Noto Sans Arabic"),
        ("DEVANAGARI", "Noto Sans Devanagari"),
    ):
        if name.startswith(script):
            return font
    return "Noto Emoji" if ord(character[0]) > 0x1F000 else "Symbola"


@cache
def text_inches(text: str, size: float = LABEL_SIZE) -> float:
    """The width of a text in the fonts of the pictures."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=font_families(), size=size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        width: float = text_to_path.get_text_width_height_descent(text, font, False)[0]
    return width / 72


def shortened(word: str) -> str:
    """The word, or as much of it as LABEL_WIDTH takes; line ends and tabs as signs."""
    shown = word.replace("\n", "⏎").replace("\t", "⇥")
    return cut(shown, LABEL_WIDTH, text_inches)


def name_rows(axes: "Axes", words: Sequence[str], inches: float, step: int = 1) -> None:
    """Words along the left of an image with a row for each ``step`` words."""
    places, named, every = _named(words, inches, step)
    axes.set_yticks(places, named, parse_math=False)
    axes.tick_params(axis="y", length=2.5 if every > step else 0)


def name_columns(axes: "Axes", words: Sequence[str], inches: float, step: int = 1) -> None:
    """Words below an image with a column for each ``step`` words."""
    places, named, every = _named(words, inches, step)
    slant: dict[str, Any] = {"rotation": 45, "ha": "right", "va": "top", "rotation_mode": "anchor"}
    distance = inches * every / max(1, len(words))
    style = slant if distance >= SLANT_INCHES else {"rotation": 90}
    if max(map(text_inches, named), default=0.0) + 0.08 <= distance:
        style = {"rotation": 0}
    axes.set_xticks(places, named, parse_math=False, **style)
    axes.tick_params(axis="x", length=2.5 if every > step else 0)


def _named(words: Sequence[str], inches: float, step: int) -> tuple[list[float], list[str], int]:
    """Places in the image and words of those that are named, and how many words lie between two of them."""
    cells = ceil(len(words) / step)
    every = step * max(1, ceil(LABEL_INCHES * cells / inches))
    return (
        [place / step for place in range(0, len(words), every)],
        [shortened(w) for w in words[::every]],
        every,
    )


def check_picture(path: Path) -> None:
    """Refuse, before any work, a picture that cannot be written.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: the file's extension is not a picture that matplotlib writes.
        OSError: its folder does not exist.
    """
    known = sorted(figure_class()().canvas.get_supported_filetypes())
    extension = path.suffix.lstrip(".").lower()
    if extension not in known:
        named = f"'.{extension}' is not one" if extension else "it has no extension"
        raise ValueError(f"cannot write {path} as a picture: {named} of {', '.join(known)}")
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")


def save(figure: "Figure", path: "str | Path") -> None:
    """Write a picture: png, pdf, svg and what else matplotlib writes; nothing is left of one that fails.

    Raises:
        ValueError: the extension is not a picture.
        OSError: it cannot be written there.

    Example:
        >>> import tempfile, torch, attn_ext
        >>> axes = attn_ext.plot.heatmap(torch.eye(3), ["a", "b", "c"])
        >>> attn_ext.plot.save(axes.figure, f"{tempfile.mkdtemp()}/heat.png")
    """
    from ..recording._files import whole_file

    path = Path(path)
    check_picture(path)
    with warnings.catch_warnings(), whole_file(path) as file:
        # What no font has was named when it was drawn.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(
            file, dpi=160, format=path.suffix.lstrip(".").lower(), facecolor=figure.get_facecolor()
        )
