"""Results as bars: how near each contender comes to the limit of the machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .machine import Machine
from .peers import BASELINE, OURS
from .report import Result, describe, grouped, ordered_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_bars", "save_bars"]

INK, FAINT_INK, LINE = "#22223b", "#6b6b83", "#e4e2e8"
#: Ours stands out; the peers are shades that stay apart in grey too.
COLORS = {
    OURS: "#de4d72",
    "F.sdpa": "#3d4a7a",
    "eager": "#9aa3c7",
    "onnxruntime": "#5f8f8b",
    "openvino": "#b9d2c0",
    BASELINE: "#f5c4b4",
}
BAR_INCHES, GAP_INCHES, PANEL_INCHES = 0.14, 0.16, 5.2


def save_bars(path: Path, results: Sequence[Result], machine: Machine) -> None:
    """Draw the results and write the picture; see :func:`draw_bars`."""
    draw_bars(results, machine).savefig(path, dpi=160, facecolor="white")


def draw_bars(results: Sequence[Result], machine: Machine) -> "Figure":
    """A figure with a panel for each dtype and mode, a group of bars for each cell.

    A bar's length is the share of the machine's limit that the contender reaches: of the multiply-add peak,
    or of the memory read rate where reading takes longer. Beside ours stands its ratio to the best peer. What
    bounds calls of some microseconds is not the silicon: they are held against the fastest instead.
    """
    import matplotlib
    from matplotlib.figure import Figure

    groups = grouped(results)
    names = ordered_names(results)
    rows = max(len(group) for _, group in groups)
    height = rows * (len(names) * BAR_INCHES + GAP_INCHES) + 1.7
    note: Any = {"ha": "center", "va": "center", "fontsize": 8, "color": FAINT_INK}
    style: Any = {
        "text.color": INK,
        "axes.labelcolor": FAINT_INK,
        "xtick.color": FAINT_INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(len(groups) * PANEL_INCHES + 1.2, max(height, 2.6)))
        figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08, wspace=0.04)
        panels = figure.subplots(1, len(groups), squeeze=False)[0]
        for axes, (title, group) in zip(panels, groups, strict=True):
            _draw_panel(axes, group, names)
            axes.set_title(title, loc="left", fontsize=10, color=INK, pad=8)
            if [_label(r) for r in group] == [_label(r) for r in groups[0][1]] and axes is not panels[0]:
                axes.set_yticklabels([])
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9
        )
        title = "How near attention comes to the limit of the machine"
        figure.suptitle(f"{title}\n", fontsize=12.5, color=INK)
        figure.text(0.5, 1 - 0.42 / figure.get_figheight(), describe(machine), **note)
    return figure


def _draw_panel(axes: "Axes", results: Sequence[Result], names: Sequence[str]) -> None:
    step = len(names) * BAR_INCHES + GAP_INCHES
    for i, name in enumerate(names):
        places = [row * step + i * BAR_INCHES for row in range(len(results))]
        lengths = [_share(result, name) for result in results]
        axes.barh(places, lengths, BAR_INCHES * 0.86, color=COLORS[name], label=name)
        if name == OURS:
            for place, length, result in zip(places, lengths, results, strict=True):
                _write_ratio(axes, result, length, place)
    middle = (len(names) - 1) * BAR_INCHES / 2
    axes.set_yticks([row * step + middle for row in range(len(results))], [_label(r) for r in results])
    axes.set_ylim(len(results) * step - GAP_INCHES / 2 - BAR_INCHES / 2, -BAR_INCHES / 2 - GAP_INCHES)
    longest = max(_share(result, name) for result in results for name in names)
    axes.set_xlim(0, max(1.08, longest * 1.12))
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25", "50", "75", "100 %"])
    axes.axvline(1.0, color=FAINT_INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.tick_params(length=0, labelsize=8.5)
    axes.grid(axis="x", color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _share(result: Result, name: str) -> float:
    """Of the limit; of the fastest where nothing in the silicon bounds the call."""
    if name not in result.seconds:
        return 0.0
    if result.fraction is None or not result.bounded:
        return min(result.seconds.values()) / result.seconds[name]
    return result.fraction * result.seconds[OURS] / result.seconds[name]


def _label(result: Result) -> str:
    if not result.bounded:
        return f"{result.cell}\n(of the fastest)"
    return f"{result.cell}\n(of the read rate)" if result.memory_bound else result.cell


def _write_ratio(axes: "Axes", result: Result, length: float, place: float) -> None:
    if result.ratio is not None:
        text = f"{result.ratio:#.2g} x" if result.ratio < 9.95 else f"{result.ratio:.0f} x"
        text = "~" * result.rough + text
        axes.text(length + 0.012, place, text, va="center", fontsize=7.5, color=COLORS[OURS], weight="bold")
