"""Times of packed and paged batches, what ours is held against, and what is aimed at."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from .machine import Machine
from .report import NOT_MEASURED, NOTHING, aligned, grouped, in_markdown, time_in_words
from .timing import UNSTEADY, Timing

__all__ = [
    "CANNOT",
    "DOES_NOT_FIT",
    "AtLeast",
    "AtMost",
    "Comparison",
    "Report",
    "Result",
    "make_result",
]

#: Instead of a time: it cannot express the problem, or would ask for too much memory.
CANNOT = NOTHING
DOES_NOT_FIT = "does not fit"
WRONG = "wrong"
SHORTEST_BOUND = 10e-6  # what bounds shorter calls is not the silicon

#: Of cell and dtype.
Where = Callable[[str, str], bool]


@dataclass(frozen=True)
class Result:
    """One batch, timed."""

    cell: str
    dtype: str
    mode: str
    names: tuple[str, ...]
    """Of the contenders, in the order of the table."""
    flops: float
    bytes_read: int
    seconds: dict[str, float]
    """Of a call, by contender."""
    spread: dict[str, float | None]
    errors: dict[str, float]
    absent: dict[str, str]
    """Why the others have no time."""
    fraction: float | None = None
    """Of the limit: of the multiply-add peak, or of the read rate where reading takes longer. None where ours
    was not measured."""
    memory_bound: bool = False

    @property
    def stalled(self) -> tuple[str, ...]:
        return tuple(name for name, why in self.absent.items() if why == NOT_MEASURED)

    @property
    def unsteady(self) -> dict[str, float]:
        """Those whose blocks differ too much, and by how much."""
        return {name: part for name, part in self.spread.items() if part is not None and part > UNSTEADY}


class Problem(Protocol):
    """What a result needs to know of what was timed."""

    @property
    def mode(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def flops(self) -> float: ...
    @property
    def bytes_read(self) -> int: ...


def make_result(
    cell: str,
    problem: Problem,
    ours: str,
    entries: Mapping[str, Timing | str],
    errors: dict[str, float],
    machine: Machine,
) -> Result:
    """Of what was timed; a word stands for who was not."""
    timings = {name: entry for name, entry in entries.items() if isinstance(entry, Timing)}
    every = {name: timing.seconds for name, timing in timings.items()}
    seconds = {name: time for name, time in every.items() if time is not None}
    absent = {name: entry if isinstance(entry, str) else NOT_MEASURED for name, entry in entries.items()}
    work = (problem.flops, problem.bytes_read, problem.dtype)
    return Result(
        cell,
        str(problem.dtype).removeprefix("torch."),
        problem.mode,
        tuple(entries),
        problem.flops,
        problem.bytes_read,
        seconds,
        {name: timings[name].spread for name in seconds},
        errors,
        {name: why for name, why in absent.items() if name not in seconds},
        machine.shortest(*work) / seconds[ours] if ours in seconds else None,
        machine.memory_bound(*work),
    )


# What is held against what ------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Ours against another, and what is aimed at."""

    name: str
    other: str
    ours: str
    aim: float | None = None
    where: Where = lambda cell, dtype: True
    """The aim is one, by cell and dtype."""

    def value(self, result: Result) -> float | None:
        """None where one of the two has no time."""
        ours, theirs = result.seconds.get(self.ours), result.seconds.get(self.other)
        return None if ours is None or theirs is None else self.of(ours, theirs)

    def of(self, ours: float, theirs: float) -> float:
        raise NotImplementedError

    def in_words(self, value: float) -> str:
        raise NotImplementedError

    def aim_in_words(self) -> str:
        raise NotImplementedError

    def reached(self, value: float) -> bool:
        """The aim."""
        raise NotImplementedError

    def shown(self, result: Result) -> str:
        value = self.value(result)
        rough = self.ours in result.unsteady or self.other in result.unsteady
        return NOTHING if value is None else "~" * rough + self.in_words(value)


class AtLeast(Comparison):
    """How many times as fast as the other."""

    def of(self, ours: float, theirs: float) -> float:
        return theirs / ours

    def in_words(self, value: float) -> str:
        return f"{value:.2f} x"

    def aim_in_words(self) -> str:
        return f"at least {self.aim:.2f} x"

    def reached(self, value: float) -> bool:
        return self.aim is None or value >= self.aim


class AtMost(Comparison):
    """How much longer it takes than the other, in µs, where there is an aim for that."""

    def value(self, result: Result) -> float | None:
        return super().value(result) if self.where(result.cell, result.dtype) else None

    def of(self, ours: float, theirs: float) -> float:
        return ours - theirs

    def in_words(self, value: float) -> str:
        return f"{value * 1e6:.2f} µs"

    def aim_in_words(self) -> str:
        return f"at most {self.in_words(self.aim or 0.0)}"

    def reached(self, value: float) -> bool:
        return self.aim is None or value <= self.aim


# Tables -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Results with what they are held against."""

    comparisons: Sequence[Comparison]
    results: Sequence[Result] = field(default_factory=list)

    def as_table(self) -> str:
        """Aligned columns, a block for each dtype and mode."""
        blocks = [
            [title, "", aligned(self._rows(group)), *self._aims(group)] for title, group in self._groups()
        ]
        return "\n\n".join("\n".join(block) for block in blocks)

    def as_markdown(self) -> str:
        blocks = []
        for title, group in self._groups():
            aims = "\n".join(f"{line}  " for line in self._aims(group)).rstrip()
            blocks.append("\n".join([f"**{title}**", "", in_markdown(self._rows(group)), "", aims]).rstrip())
        return "\n\n".join(blocks)

    def as_json(self, machine: Machine, **more: Any) -> dict[str, Any]:
        """Everything, in seconds, flops and bytes."""
        return {**more, "machine": asdict(machine), "results": [self._numbers(r) for r in self.results]}

    def _numbers(self, result: Result) -> dict[str, Any]:
        compared = {comparison.name: comparison.value(result) for comparison in self.comparisons}
        aims = {c.name: c.aim for c in self.comparisons if c.where(result.cell, result.dtype)}
        return {**asdict(result), "compared": compared, "aims": aims}

    def _groups(self) -> list[tuple[str, list[Result]]]:
        return grouped(self.results)

    def _rows(self, results: Sequence[Result]) -> list[list[str]]:
        names = results[0].names
        shown = [c for c in self.comparisons if any(c.value(result) is not None for result in results)]
        rows = [["cell", *names, *(c.name for c in shown), "of the limit", "spread"]]
        for result in results:
            row = [result.cell, *(_time(result, name) for name in names)]
            row += [comparison.shown(result) for comparison in shown]
            rows.append([*row, _fraction(result), _spread(result)])
        return rows

    def _aims(self, results: Sequence[Result]) -> list[str]:
        """A line for each aim that the cells have."""
        lines = []
        for comparison in self.comparisons:
            if comparison.aim is None:
                continue
            cells = {r.cell: comparison.value(r) for r in results if comparison.where(r.cell, r.dtype)}
            known = {cell: value for cell, value in cells.items() if value is not None}
            if known:
                missed = [cell for cell, value in known.items() if not comparison.reached(value)]
                outcome = f"missed in {', '.join(missed)}" if missed else f"reached in {', '.join(known)}"
                lines.append(f"{comparison.name}: aim {comparison.aim_in_words()}, {outcome}")
        return lines


def _time(result: Result, name: str) -> str:
    if name in result.seconds:
        return time_in_words(result.seconds[name])
    return result.absent.get(name, NOTHING)


def _fraction(result: Result) -> str:
    ours = None if result.fraction is None else result.seconds[result.names[0]]
    if result.fraction is None or ours is None or result.fraction * ours < SHORTEST_BOUND:
        return NOTHING
    return f"{result.fraction:.2f}" + " mem" * result.memory_bound


def _spread(result: Result) -> str:
    """The largest of the row."""
    spreads = [spread for spread in result.spread.values() if spread is not None]
    return f"{max(spreads):.0%}" if spreads else NOTHING
