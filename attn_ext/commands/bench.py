"""``attn-ext bench``: attention timed against its peers and against the limits of the machine."""

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attn_ext
from attn_ext import plot
from attn_ext.benchmark import cells, chart, checks, machine, peers, report, timing

from . import CommandError

#: What ATen calls the instruction sets, for F.sdpa to run on the same one.
ATEN_CAPABILITIES = {
    "baseline": "default",
    "avx2": "avx2",
    "avx512": "avx512",
    "avx512_bf16": "avx512",
    "amx": "avx512",
    "neon": "default",
    "neon_bf16": "default",
}
CAPABILITY_VARIABLE = "ATTN_EXT_CPU_CAPABILITY"
PEERS = [c.name for c in peers.CONTENDERS if c.name not in (peers.OURS, peers.BASELINE)]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time attention against its peers",
        description="Time attention against F.scaled_dot_product_attention, plain matmul and softmax, and, "
        "if installed, onnxruntime and OpenVINO: in one process, in alternating blocks of calls, by medians. "
        "The machine's multiply-add peak and memory read rate are measured in the same run. Blocks that "
        "stalled because something else used the machine are measured again, and left out if they go on; "
        "'spread' is by how much blocks differ, of the contender that is the least steady.",
        epilog="masks: " + "; ".join(f"{name}: {meaning}" for name, meaning in cells.MASKS.items()) + ".",
    )
    what = parser.add_argument_group("what is timed")
    what.add_argument(
        "--cells", nargs="+", metavar="NAME", help="cells of the grid, wildcards allowed (default: all)"
    )
    what.add_argument(
        "--outside",
        action="store_true",
        help="shapes outside of the grid instead, where peers come near or plans change",
    )
    what.add_argument(
        "--shape", action="append", type=shape, metavar="B,Hq,Hkv,Lq,Lk,D,Dv", help="a shape of your own"
    )
    what.add_argument("--mask", choices=cells.MASKS, help="(default: the cell's own; of a shape, none)")
    what.add_argument(
        "--dtype", nargs="+", choices=cells.DTYPES, default=["float32"], help="(default: float32)"
    )
    what.add_argument(
        "--mode",
        nargs="+",
        choices=cells.MODES,
        default=["fwd"],
        help="forward, backward alone, both, forward returning the weights, forward with dropout 0.1 "
        "(default: fwd)",
    )
    what.add_argument("--peers", nargs="*", choices=PEERS, help="(default: those that are installed)")
    what.add_argument("--without", action="store_true", help="time ours without its mask or dropout, too")
    what.add_argument("--list", action="store_true", help="list the grid and stop")

    how = parser.add_argument_group("how")
    how.add_argument("--threads", type=positive, help="(default: torch's)")
    how.add_argument("--capability", metavar="NAME", help="the instruction set, for ours and for torch")
    how.add_argument("--block", type=positive_float, default=0.3, help="seconds of a block (default: 0.3)")
    how.add_argument("--rounds", type=positive, default=5, help="blocks of each contender (default: 5)")
    how.add_argument(
        "--limit", type=positive_float, default=10.0, help="most seconds for a slow one (default: 10)"
    )

    from . import bench_batches, bench_models

    bench_batches.add_options(parser)
    bench_models.add_options(parser)

    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    out.add_argument("--plot", type=Path, metavar="PICTURE", help="draw bars: png, pdf, svg, ...")
    out.add_argument("--markdown", action="store_true", help="print the table for a document")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from . import bench_batches, bench_models

    batches = bench_batches.chosen(arguments)
    if arguments.list:
        print_grid(named_cells(arguments)) if batches is None else bench_batches.print_grid(batches)
        return
    bench_models.check_options(arguments)
    if batches is not None:
        bench_batches.check_options(batches, arguments)
    check_files(arguments)
    on_capability(arguments.capability)
    if batches is not None:
        bench_batches.run(batches, arguments)
        return
    if arguments.model:
        bench_models.run(arguments)
        return
    absent = peers.missing(arguments.peers)
    if absent:
        print(peers.missing_in_words(absent), file=sys.stderr)
    with threads(arguments.threads):
        limits, results = measure(arguments, choose_problems(arguments))
    if not results:
        return
    print("\n".join([report.describe(limits), *[peers.missing_in_words(absent)] * bool(absent)]) + "\n")
    print(report.as_markdown(results) if arguments.markdown else report.as_table(results))
    warning = report.warning(results)
    if warning is not None:
        sys.stdout.flush()
        print(f"\n{warning}", file=sys.stderr)
    if arguments.json:
        versions = {"attn_ext": attn_ext.__version__, "torch": torch.__version__}
        numbers = report.as_json(results, limits, **versions, not_installed=[c.name for c in absent])
        write(arguments.json, lambda: arguments.json.write_text(json.dumps(numbers, indent=1) + "\n"))
        print(f"\nnumbers  {arguments.json}")
    if arguments.plot:
        write(arguments.plot, lambda: chart.save_bars(arguments.plot, results, limits))
        print(f"picture  {arguments.plot}")


# Options ------------------------------------------------------------------------------------------


def shape(text: str) -> cells.Shape:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != 7 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"expected seven sizes of 1 or more, B,Hq,Hkv,Lq,Lk,D,Dv, got {text!r}"
        )
    result = cells.Shape(*sizes)
    if result.query_heads % result.kv_heads:
        raise argparse.ArgumentTypeError(
            f"expected Hq to be a multiple of Hkv, got {result.query_heads} and {result.kv_heads}"
        )
    return result


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return number


def check_files(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be written before minutes of measuring."""
    if arguments.json and not arguments.json.parent.is_dir():
        raise CommandError(f"cannot write {arguments.json}: there is no folder {arguments.json.parent}")
    if arguments.json and arguments.json.is_dir():
        raise CommandError(f"cannot write {arguments.json}: it is a folder")
    if arguments.plot:
        try:
            plot.check_picture(arguments.plot)
        except (ImportError, OSError, ValueError) as error:
            raise CommandError(str(error)) from error


def write(path: Path, action: Callable[[], Any]) -> None:
    try:
        action()
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def named_cells(arguments: argparse.Namespace) -> dict[cells.Cell, str]:
    """The list that names are of."""
    return cells.OUTSIDE if arguments.outside else cells.GRID


def choose_cells(arguments: argparse.Namespace) -> list[cells.Cell]:
    """By name, and the shapes given; all of the list where neither is."""
    named = named_cells(arguments)
    chosen: list[cells.Cell] = []
    for pattern in arguments.cells or ([] if arguments.shape else ["*"]):
        found = [cell for cell in named if fnmatch.fnmatch(cell.name, pattern)]
        if not found:
            known = ", ".join(cell.name for cell in named)
            where = "outside of the grid" if arguments.outside else "of the grid"
            raise CommandError(f"--cells {pattern!r} names no cell {where}; there are {known}")
        chosen += [cell for cell in found if cell not in chosen]
    for own in arguments.shape or []:
        chosen.append(cells.Cell(",".join(map(str, own)), own))
    return [replace(cell, mask=arguments.mask or cell.mask) for cell in chosen]


class Plan(NamedTuple):
    """What makes a problem, whose tensors are made when their turn comes."""

    cell: cells.Cell
    mode: str
    dtype: torch.dtype


def choose_problems(arguments: argparse.Namespace) -> list[Plan]:
    chosen = choose_cells(arguments)
    dtypes = [cells.DTYPES[name] for name in dict.fromkeys(arguments.dtype)]
    modes = list(dict.fromkeys(arguments.mode))
    return [Plan(cell, mode, dtype) for dtype in dtypes for mode in modes for cell in chosen]


def print_grid(named: dict[cells.Cell, str]) -> None:
    print(f"{'cell':<15}{'B,Hq,Hkv,Lq,Lk,D,Dv':<26}{'mask':<9}stands for")
    for cell, meaning in named.items():
        print(f"{cell.name:<15}{','.join(map(str, cell.shape)):<26}{cell.mask:<9}{meaning}")


# The run ------------------------------------------------------------------------------------------


def on_capability(name: str | None) -> None:
    """An instruction set is chosen when the library is loaded: start again if it is to be another one."""
    if name is None or (name == attn_ext.cpu_capability() and os.environ.get(CAPABILITY_VARIABLE) == name):
        return
    known = attn_ext.available_cpu_capabilities()
    if name not in known:
        raise CommandError(f"--capability must be one of {', '.join(known)} on this machine, got {name!r}")
    environment = {**os.environ, CAPABILITY_VARIABLE: name}
    if name in ATEN_CAPABILITIES:
        environment["ATEN_CPU_CAPABILITY"] = ATEN_CAPABILITIES[name]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "attn_ext", *sys.argv[1:]], environment)


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    arguments: argparse.Namespace, plans: Sequence[Plan]
) -> tuple[machine.Machine, list[report.Result]]:
    """Every problem in turn. An interrupt ends the run and keeps what there is."""
    method = timing.Method(arguments.block, arguments.rounds, arguments.limit)
    number = torch.get_num_threads()
    contenders = [
        contender
        for contender in peers.available(arguments.peers)
        if contender.name != peers.BASELINE or arguments.without or "dropout" in arguments.mode
    ]
    limits = machine.measure(number, arguments.block)
    timed = []
    with progress(len(plans) * arguments.rounds) as bar:
        try:
            for plan in plans:
                problem = cells.make_problem(plan.cell, plan.mode, plan.dtype)
                timed.append((problem, *time_problem(problem, contenders, method, number, bar)))
                limits.look_again(arguments.block / 3)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    # The limits are known best at the end.
    return limits, [report.make_result(*result, limits) for result in timed]


def time_problem(
    problem: cells.Problem,
    contenders: list[peers.Contender],
    method: timing.Method,
    number: int,
    bar: "Bar",
) -> tuple[dict[str, timing.Timing], dict[str, float]]:
    """Times and errors of those who can express the problem."""
    bar.show(f"{problem.cell.name} {problem.mode}: checking")
    errors = checks.errors(problem, contenders, number)
    tolerance = checks.TOLERANCE[problem.dtype]
    wrong = [name for name, error in errors.items() if not error <= tolerance]
    if peers.OURS in wrong:
        raise CommandError(
            f"attn_ext is wrong in {problem.cell.name}, {problem.mode}, {problem.dtype}: expected an error "
            f"of at most {tolerance:g} of the largest number, got {errors[peers.OURS]:.2g}"
        )
    with torch.set_grad_enabled(problem.mode == "fwdbwd"):
        right = [contender for contender in contenders if contender.name not in wrong]
        calls = {contender.name: contender.prepare(problem, number) for contender in right}
        possible = {name: call for name, call in calls.items() if call is not None}

        def on_block(name: str, turn: int) -> None:
            again = turn >= method.rounds
            bar.show(f"{problem.cell.name} {problem.mode}: {name}" + ", again" * again)
            if name == peers.OURS and not again:
                bar.advance()

        return timing.alternate(possible, method, on_block), errors


class Bar:
    """A progress bar where tqdm is installed and a person watches."""

    def __init__(self, total: int) -> None:
        self.bar: Any = None
        if find_spec("tqdm"):
            form = "{desc:<34.34} {bar} {n_fmt}/{total_fmt} blocks, {remaining} left"
            self.bar = import_module("tqdm").tqdm(total=total, bar_format=form, disable=None, leave=False)

    def show(self, text: str) -> None:
        if self.bar is not None:
            self.bar.set_description_str(text)

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def progress(total: int) -> Iterator[Bar]:
    bar = Bar(total)
    try:
        yield bar
    finally:
        bar.close()
