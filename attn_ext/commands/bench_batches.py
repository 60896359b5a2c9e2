"""``attn-ext bench --packed`` and ``--paged``: batches of sequences of different lengths."""

import argparse
import fnmatch
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import attn_ext
from attn_ext.benchmark import batch_report, cells, checks, machine, packed, paged, report, timing

from . import CommandError, bench

#: Options of `attn-ext bench` that are about the grid of cells alone, and their values when not given.
OF_CELLS: dict[str, Any] = {"outside": False, "shape": None, "peers": None, "without": False, "plot": None}


class Kind(NamedTuple):
    """What is timed in one of the two ways."""

    grid: Mapping[Any, str]
    make_problem: Callable[[Any, str, torch.dtype, str], Any]
    """Of cell, mode, dtype and mask."""
    module: Any
    modes: tuple[str, ...]
    masks: tuple[str, ...]
    """The first where none is given."""


KINDS = {
    "packed": Kind(
        packed.GRID,
        lambda batch, mode, dtype, mask: packed.make_problem(batch, mode, dtype, mask == "causal"),
        packed,
        ("fwd", "bwd", "fwdbwd"),
        ("causal", "none"),
    ),
    "paged": Kind(
        paged.GRID,
        lambda cache, mode, dtype, mask: paged.make_problem(cache, dtype),
        paged,
        ("fwd",),
        ("none",),
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sequences of different lengths",
        "With --packed or --paged, --cells and --list are about batches of sequences; 'alone' is the sum of "
        "the times of each sequence by itself.",
    )
    group.add_argument(
        "--packed",
        action="store_true",
        help="sdpa_packed against sdpa on each sequence, a loop of it, and padded batches; "
        "causal unless --mask none",
    )
    group.add_argument(
        "--paged",
        action="store_true",
        help="decoding by sdpa_paged, with pages of 16, 1 and 256 and in int8, against contiguous caches",
    )


def chosen(arguments: argparse.Namespace) -> str | None:
    """The name of the kind that is asked for, if one is."""
    asked = [name for name in KINDS if getattr(arguments, name)]
    if len(asked) + bool(arguments.model) > 1:
        raise CommandError("--packed, --paged and --model are different things to time: give one of them")
    return asked[0] if asked else None


def check_options(name: str, arguments: argparse.Namespace) -> None:
    """Refuse what the kind has no meaning for, and a build without its op."""
    kind = KINDS[name]
    for option, default in OF_CELLS.items():
        if getattr(arguments, option) != default:
            raise CommandError(f"--{option} goes with the grid of cells, not with --{name}")
    for mode in arguments.mode:
        if mode not in kind.modes:
            raise CommandError(f"--{name} has the modes {', '.join(kind.modes)}, got {mode}")
    if arguments.mask not in (None, *kind.masks):
        raise CommandError(f"--{name} has the masks {', '.join(kind.masks)}, got {arguments.mask}")
    if not hasattr(attn_ext, f"sdpa_{name}"):
        raise CommandError(f"--{name} needs attn_ext.sdpa_{name}, which this build does not have")


def print_grid(name: str) -> None:
    print(f"{'cell':<14}stands for")
    for cell, meaning in KINDS[name].grid.items():
        print(f"{cell.name:<14}{meaning}")


def run(name: str, arguments: argparse.Namespace) -> None:
    kind = KINDS[name]
    chosen_cells = choose_cells(kind, arguments.cells or ["*"])
    with bench.threads(arguments.threads):
        limits, results = measure(kind, chosen_cells, arguments)
    if results:
        show(batch_report.Report(kind.module.COMPARISONS, results), limits, arguments)


def choose_cells(kind: Kind, patterns: list[str]) -> list[Any]:
    found: list[Any] = []
    for pattern in patterns:
        named = [cell for cell in kind.grid if fnmatch.fnmatch(cell.name, pattern)]
        if not named:
            known = ", ".join(cell.name for cell in kind.grid)
            raise CommandError(f"--cells {pattern!r} names no batch; there are {known}")
        found += [cell for cell in named if cell not in found]
    return found


def measure(
    kind: Kind, chosen_cells: list[Any], arguments: argparse.Namespace
) -> tuple[machine.Machine, list[batch_report.Result]]:
    """Every problem in turn. An interrupt ends the run and keeps what there is."""
    method = timing.Method(arguments.block, arguments.rounds, arguments.limit)
    dtypes = [cells.DTYPES[name] for name in dict.fromkeys(arguments.dtype)]
    plans = [(d, m, c) for d in dtypes for m in dict.fromkeys(arguments.mode) for c in chosen_cells]
    limits = machine.measure(torch.get_num_threads(), arguments.block)
    results = []
    with bench.progress(len(plans) * arguments.rounds) as bar:
        try:
            for dtype, mode, cell in plans:
                bar.show(f"{cell.name} {mode}: checking")
                problem = kind.make_problem(cell, mode, dtype, arguments.mask or kind.masks[0])
                results.append(time_problem(kind, cell.name, problem, method, limits, bar))
                del problem  # before the next one is made
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    return limits, results


def time_problem(
    kind: Kind,
    cell: str,
    problem: Any,
    method: timing.Method,
    limits: machine.Machine,
    bar: bench.Bar,
) -> batch_report.Result:
    """Check everyone, and time those who are right; what they hold is let go."""
    ours = kind.module.OURS
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        entries = kind.module.entries(problem)
        errors = kind.module.errors(problem, entries)
    tolerance = checks.TOLERANCE[problem.dtype]
    for name, error in errors.items():
        if not error <= tolerance and name == ours:
            raise CommandError(
                f"attn_ext is wrong in {cell}, {problem.mode}, {problem.dtype}: expected an error of at most "
                f"{tolerance:g} of the largest number, got {error:.2g}"
            )
        if not error <= tolerance:
            entries[name] = batch_report.WRONG

    def on_block(name: str, turn: int) -> None:
        again = turn >= method.rounds
        bar.show(f"{cell} {problem.mode}: {name}" + ", again" * again)
        if name == ours and not again:
            bar.advance()

    timed = {name: entry for name, entry in entries.items() if isinstance(entry, timing.Timing)}
    with torch.set_grad_enabled(problem.mode == "fwdbwd"):
        timing.alternate(timed, method, on_block)
    limits.look_again(method.block / 3)
    return batch_report.make_result(cell, problem, ours, entries, errors, limits)


def show(results: batch_report.Report, limits: machine.Machine, arguments: argparse.Namespace) -> None:
    print(report.describe(limits) + "\n")
    print(results.as_markdown() if arguments.markdown else results.as_table())
    warning = report.warning(results.results)
    if warning is not None:
        sys.stdout.flush()
        print(f"\n{warning}", file=sys.stderr)
    if arguments.json:
        versions = {"attn_ext": attn_ext.__version__, "torch": torch.__version__}
        numbers = results.as_json(limits, **versions)
        bench.write(arguments.json, lambda: arguments.json.write_text(json.dumps(numbers, indent=1) + "\n"))
        print(f"\nnumbers  {arguments.json}")
