"""Results as a table for a terminal, a table for a document, and as numbers for a program."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from .cells import MODES, Problem
from .machine import Machine
from .peers import BASELINE, CONTENDERS, OURS, explain
from .timing import UNSTEADY, Timing

__all__ = ["Result", "as_json", "as_markdown", "as_table", "describe", "make_result", "warning"]

NOTHING = "-"
NOT_MEASURED = "stalled"
MODE_NAMES = {
    "fwd": "forward",
    "bwd": "backward alone",
    "fwdbwd": "forward and backward",
    "weights": "forward, weights returned",
    "dropout": "forward, dropout 0.1",
}


Show = Callable[["Result", str], str]


class Measured(Protocol):
    """What groups of results and warnings are made of."""

    @property
    def cell(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def unsteady(self) -> dict[str, float]: ...
    @property
    def stalled(self) -> tuple[str, ...]: ...


AnyMeasured = TypeVar("AnyMeasured", bound=Measured)


@dataclass(frozen=True)
class Result:
    """One cell, timed."""

    cell: str
    shape: tuple[int, ...]
    mask: str
    dtype: str
    mode: str
    path: str
    flops: float
    kv_bytes: int
    seconds: dict[str, float]
    errors: dict[str, float]
    memory_bound: bool
    fraction: float | None
    """Of the limit: of the multiply-add peak, or of the read rate where reading takes longer. None where ours
    was not measured."""
    spread: dict[str, float | None] = field(default_factory=dict)
    """By how much the blocks of each differ, as a part of their median; None of a single block."""
    stalled: tuple[str, ...] = ()
    """Those whose blocks stalled: they have no time, and what would be held against them no ratio."""

    @property
    def bounded(self) -> bool:
        """Whether the silicon bounds the call, and not what it takes to make one."""
        return self.fraction is not None and self.fraction * self.seconds[OURS] > 10e-6

    @property
    def best_peer(self) -> str | None:
        peers = [name for name in self.seconds if name not in (OURS, BASELINE)]
        return min(peers, key=self.seconds.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer; None unless ours and every peer were measured."""
        if self.best_peer is None or OURS not in self.seconds or self.not_measured:
            return None
        return self.seconds[self.best_peer] / self.seconds[OURS]

    @property
    def not_measured(self) -> list[str]:
        """Of those that the ratio is made of, or could be."""
        return [name for name in self.stalled if name != BASELINE]

    @property
    def unsteady(self) -> dict[str, float]:
        """Those whose blocks differ too much, and by how much."""
        return {name: part for name, part in self.spread.items() if part is not None and part > UNSTEADY}

    @property
    def rough(self) -> bool:
        """Whether one of the two that the ratio is made of is unsteady."""
        return OURS in self.unsteady or self.best_peer in self.unsteady

    @property
    def kept(self) -> float | None:
        """The share of its speed that ours keeps with dropout or mask."""
        known = BASELINE in self.seconds and OURS in self.seconds
        return self.seconds[BASELINE] / self.seconds[OURS] if known else None


def make_result(
    problem: Problem, timings: Mapping[str, Timing], errors: dict[str, float], machine: Machine
) -> Result:
    cell, dtype = problem.cell, problem.dtype
    flops = cell.flops() * MODES[problem.mode]
    reads = 0 if problem.with_grad else cell.kv_bytes(dtype)
    explanation = explain(problem)
    every = {name: timing.seconds for name, timing in timings.items()}
    seconds = {name: time for name, time in every.items() if time is not None}
    return Result(
        cell.name,
        tuple(cell.shape),
        cell.mask,
        str(dtype).removeprefix("torch."),
        problem.mode,
        f"{explanation.path} ({explanation.capability})",
        flops,
        reads,
        seconds,
        errors,
        machine.memory_bound(flops, reads, dtype),
        machine.shortest(flops, reads, dtype) / seconds[OURS] if OURS in seconds else None,
        {name: timings[name].spread for name in seconds},
        tuple(name for name, time in every.items() if time is None),
    )


def describe(machine: Machine) -> str:
    """The machine in a line."""
    return (
        f"{machine.threads} threads, {machine.capability}; measured in this run: "
        f"float32 {machine.float32_peak / 1e9:.0f} GF/s, bfloat16 {machine.bfloat16_peak / 1e9:.0f} GF/s, "
        f"memory read {machine.read_rate / 1e9:.0f} GB/s"
    )


def as_json(results: Sequence[Result], machine: Machine, **more: Any) -> dict[str, Any]:
    """Everything, in seconds, flops and bytes."""
    cells = [{**asdict(r), "best_peer": r.best_peer, "ratio": r.ratio, "share_kept": r.kept} for r in results]
    return {**more, "machine": asdict(machine), "results": cells}


def warning(results: Sequence[Measured]) -> str | None:
    """Which figures are no good, and why; None if all are."""
    rough = [_unsteady_in_words(result) for result in results if result.unsteady]
    stalled = [f"{_place(result)}: {', '.join(result.stalled)}" for result in results if result.stalled]
    if not rough and not stalled:
        return None
    lines = ["warning: something else used this machine while it was measured."]
    if rough:
        lines += [f"blocks differ by more than {UNSTEADY:.0%}, ratios (~) are rough:"]
        lines += [f"  {text}" for text in rough]
    if stalled:
        lines += ["stalled, not measured: a thread waited for a processor, or blocks took twice as long:"]
        lines += [f"  {text}" for text in stalled]
    return "\n".join([*lines, "Measure again when it is idle, or with more --rounds or fewer --threads."])


def _unsteady_in_words(result: Measured) -> str:
    return f"{_place(result)}: " + ", ".join(f"{n} {part:.0%}" for n, part in result.unsteady.items())


def _place(result: Measured) -> str:
    return f"{result.cell}, {result.dtype}, {MODE_NAMES[result.mode]}"


def as_table(results: Sequence[Result]) -> str:
    """Aligned columns, a block for each dtype and mode."""
    blocks = []
    for title, group in grouped(results):
        blocks.append("\n".join([title, "", aligned(_rows(group, _time)), *_mean(group)]))
    return "\n\n".join(blocks)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the header first, in columns of one width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + field.rjust(width) for field, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join(lines)


def as_markdown(results: Sequence[Result]) -> str:
    """Tables for a document, with GF/s beside the times."""
    blocks = []
    for title, group in grouped(results):
        table = in_markdown(_rows(group, _time_and_rate))
        blocks.append("\n".join([f"**{title}**, time · GF/s", "", table, "", *_mean(group)]))
    return "\n\n".join(blocks)


def in_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the header first, as a table of Markdown."""
    header, *others = rows
    marks = ["---", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, marks, *others))


def grouped(results: Sequence[AnyMeasured]) -> list[tuple[str, list[AnyMeasured]]]:
    """By dtype and mode, with a title each."""
    groups: dict[str, list[AnyMeasured]] = {}
    for result in results:
        groups.setdefault(f"{result.dtype}, {MODE_NAMES[result.mode]}", []).append(result)
    return list(groups.items())


def ordered_names(results: Sequence[Result]) -> list[str]:
    """The contenders that took part in any of them, ours first."""
    taking_part = {name for r in results for name in (*r.seconds, *r.errors, *r.stalled)}
    return [contender.name for contender in CONTENDERS if contender.name in taking_part]


def _rows(results: Sequence[Result], show: Show) -> list[list[str]]:
    names = ordered_names(results)
    with_baseline = BASELINE in names
    rows = [["cell", *names, "to the best", "of the limit", *["kept"] * with_baseline, "spread"]]
    for result in results:
        row = [result.cell]
        row += [_shown(result, name, show) for name in names]
        row.append(_ratio(result))
        row.append(_fraction(result))
        if with_baseline:
            row.append(NOTHING if result.kept is None else f"{result.kept:.2f}")
        row.append(_spread(result))
        rows.append(row)
    return rows


def _shown(result: Result, name: str, show: Show) -> str:
    if name in result.seconds:
        return show(result, name)
    if name in result.stalled:
        return NOT_MEASURED
    return "wrong" if name in result.errors else NOTHING


def _ratio(result: Result) -> str:
    if result.ratio is None:
        return NOTHING
    return ("~" if result.rough else "") + f"{result.ratio:.2f} x"


def _spread(result: Result) -> str:
    """The largest of the row."""
    spreads = [spread for spread in result.spread.values() if spread is not None]
    return f"{max(spreads):.0%}" if spreads else NOTHING


def _fraction(result: Result) -> str:
    if result.fraction is None or not result.bounded:
        return NOTHING
    return f"{result.fraction:.2f}" + (" mem" if result.memory_bound else "")


def _mean(results: Sequence[Result]) -> list[str]:
    ratios = [result.ratio for result in results if result.ratio is not None]
    if len(ratios) < 2:
        return []
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    behind = [result.cell for result in results if result.ratio is not None and result.ratio < 1]
    rough = [result.cell for result in results if result.ratio is not None and result.rough]
    absent = [result.cell for result in results if result.not_measured]
    parts = {"behind it in": behind, "rough in": rough, "not measured in": absent}
    text = "".join(f"; {what} {', '.join(where)}" for what, where in parts.items() if where)
    return [f"geometric mean {mean:.2f} x the best peer" + (text or ", ahead of it everywhere")]


def _time(result: Result, name: str) -> str:
    return time_in_words(result.seconds[name])


def time_in_words(seconds: float) -> str:
    """With three digits, in a unit that fits."""
    if seconds >= 10:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e6)} µs" if seconds < 100e-6 else f"{_digits(seconds * 1e3)} ms"


def _time_and_rate(result: Result, name: str) -> str:
    return f"{_time(result, name)} · {result.flops / result.seconds[name] / 1e9:.0f}"


def _digits(number: float) -> str:
    """Three significant digits."""
    rounded = float(f"{number:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


def as_ratio_row(timings: Mapping[str, Timing]) -> list[str]:
    """Of two contenders both times, how many times as fast the first is, and the larger spread of blocks;
    no ratio where blocks stalled."""
    ours, theirs = (timing.seconds for timing in timings.values())
    spread = max((timing.spread for timing in timings.values() if timing.spread is not None), default=None)
    rough = spread is not None and spread > UNSTEADY
    shown = [NOT_MEASURED if seconds is None else time_in_words(seconds) for seconds in (ours, theirs)]
    ratio = NOTHING if ours is None or theirs is None else "~" * rough + f"{theirs / ours:.2f} x"
    return [*shown, ratio, NOTHING if spread is None else f"{spread:.0%}"]
