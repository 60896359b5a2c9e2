"""Times and memory of whole models, as a table for a terminal and for a document."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .memory import Peak
from .models import OURS
from .profile import KINDS
from .report import NOT_MEASURED, NOTHING, aligned, in_markdown, time_in_words
from .timing import UNSTEADY, Timing

WARNING = (
    "warning: some figures are rough or missing; measure again on an idle machine, or with more --rounds."
)
NOTE_OF_SHARES = (
    "of one call under PyTorch's profiler; attention that is made of matrix products counts as these"
)

__all__ = ["Result", "as_json", "as_markdown", "as_table", "make_result", "warning"]


@dataclass(frozen=True)
class Result:
    """One task of one model."""

    model: str
    dtype: str
    task: str
    sizes: str
    """The first tensor of the inputs, in words."""
    seconds: dict[str, float | None]
    """Of a call, by contender; None where its blocks stalled."""
    spread: dict[str, float | None]
    memory: dict[str, Peak] = field(default_factory=dict)
    difference: float | None = None
    """Between the outputs of ours and of the default, as a part of the largest number there is in them."""
    shares: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of a call's time, by contender and kind of operator (:mod:`attn_ext.benchmark.profile`)."""

    @property
    def default(self) -> str:
        """What ours is held against: what the library itself takes."""
        return next(name for name in self.seconds if name != OURS)

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the default."""
        ours, theirs = self.seconds[OURS], self.seconds[self.default]
        return None if ours is None or theirs is None else theirs / ours

    @property
    def rough(self) -> bool:
        return any((self.spread[name] or 0.0) > UNSTEADY for name in (OURS, self.default))

    @property
    def memory_ratio(self) -> float | None:
        """The share of the default's memory that ours takes."""
        ours, theirs = self.memory.get(OURS), self.memory.get(self.default)
        return ours / theirs if isinstance(ours, int) and isinstance(theirs, int) and theirs else None


def make_result(
    model: str,
    dtype: str,
    task: str,
    sizes: str,
    timings: Mapping[str, Timing],
    memory: dict[str, Peak],
    difference: float | None,
    shares: dict[str, dict[str, float]],
) -> Result:
    seconds = {name: timing.seconds for name, timing in timings.items()}
    spread = {name: timing.spread if seconds[name] is not None else None for name, timing in timings.items()}
    return Result(model, dtype, task, sizes, seconds, spread, memory, difference, shares)


def as_table(results: Sequence[Result]) -> str:
    return "\n\n".join(f"{title}\n\n{aligned(rows)}\n{note}" for title, rows, note in _tables(results))


def as_markdown(results: Sequence[Result]) -> str:
    parts = [f"**{title}**\n\n{in_markdown(rows)}\n\n{note}" for title, rows, note in _tables(results)]
    return "\n\n".join(parts)


def as_json(results: Sequence[Result], **more: Any) -> dict[str, Any]:
    """Everything, in seconds and bytes."""
    return {**more, "results": [{**asdict(r), "ratio": r.ratio} for r in results]}


def warning(results: Sequence[Result]) -> str | None:
    """Which figures are no good, and why; None if all are."""
    lines = []
    for result in results:
        place = f"{result.model}, {result.dtype}, {result.task}"
        for name, part in result.spread.items():
            if part is not None and part > UNSTEADY:
                lines.append(f"  {place}: blocks of {name} differ by {part:.0%}")
        lines += [f"  {place}: {name} stalled" for name, time in result.seconds.items() if time is None]
        lines += [
            f"  {place}: memory of {n}: {why}" for n, why in result.memory.items() if isinstance(why, str)
        ]
    return "\n".join([WARNING, *lines]) if lines else None


def _tables(results: Sequence[Result]) -> Iterator[tuple[str, list[list[str]], str]]:
    """By model and dtype: title, rows with the header first, and a note."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(f"{result.model}, {result.dtype}, {result.sizes}", []).append(result)
    for title, group in groups.items():
        yield title, _rows(group), _note(group)
        if any(result.shares for result in group):
            yield f"{title}: where the time goes", _rows_of_shares(group), NOTE_OF_SHARES


def _rows_of_shares(results: Sequence[Result]) -> list[list[str]]:
    rows = [["task, attention by", *KINDS]]
    for result in results:
        for name, parts in result.shares.items():
            rows.append([f"{result.task}, {name}", *(f"{parts[kind]:.0%}" for kind in KINDS)])
    return rows


def _rows(results: Sequence[Result]) -> list[list[str]]:
    names = list(results[0].seconds)
    with_memory = any(result.memory for result in results)
    header = ["task", *names, "faster", "spread"]
    rows = [header + [f"{name}, MB" for name in names] * with_memory]
    for result in results:
        row = [result.task, *(_time(result, name) for name in names), _ratio(result), _spread(result)]
        rows.append(row + [_megabytes(result.memory.get(name)) for name in names] * with_memory)
    return rows


def _time(result: Result, name: str) -> str:
    seconds = result.seconds[name]
    return NOT_MEASURED if seconds is None else time_in_words(seconds)


def _ratio(result: Result) -> str:
    return NOTHING if result.ratio is None else f"{'~' * result.rough}{result.ratio:.2f} x"


def _spread(result: Result) -> str:
    known = [part for part in result.spread.values() if part is not None]
    return f"{max(known):.0%}" if known else NOTHING


def _megabytes(memory: Peak | None) -> str:
    return f"{memory / 1e6:.0f}" if isinstance(memory, int) else NOTHING


def _note(results: Sequence[Result]) -> str:
    known = [result.difference for result in results if result.difference is not None]
    parts = [f"faster: {OURS} than {results[0].default}"]
    if known:
        parts.append(f"outputs differ by {max(known):.1g} of their largest number at most")
    if any(result.memory for result in results):
        parts.append("MB: peak beyond what the process held before the call")
    return "; ".join(parts)
