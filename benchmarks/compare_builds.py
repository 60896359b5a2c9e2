"""Two builds of attn_ext against each other: has a change cost a cell of the grid anything?

    python benchmarks/compare_builds.py OLD NEW
    python benchmarks/compare_builds.py OLD NEW --cells 'bert*' decode-batch --modes bwd --dtype bfloat16

OLD and NEW are folders that hold a built `attn_ext` each, as an editable install leaves it in a clone. Two
builds cannot be loaded into one process, so each gets one of its own, and the two take turns, a block of
calls at a time, while the other waits. Where its memory lies makes a process some percent slower or faster
for all of its life: so pairs of processes follow each other (`--pairs`), and what counts is the median of the
pairs' ratios. Of a process it is the time that one call in ten stays below, since those who share a machine
only ever make a call slower. Exits with 1 if a cell is slower than `--most` allows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

Name = tuple[str, str, str]  # cell, mode, dtype


def work() -> None:
    """A build's process: reads {"cell", "mode", "dtype", "seconds"} a line, answers with a block's times."""
    import torch

    from attn_ext.benchmark.cells import DTYPES, GRID, OUTSIDE, make_problem
    from attn_ext.benchmark.peers import available
    from attn_ext.benchmark.timing import Timing

    ours = next(contender for contender in available([]) if contender.name == "attn_ext")
    cells = {cell.name: cell for cell in (*GRID, *OUTSIDE)}
    call, current = None, None
    for line in sys.stdin:
        wanted = json.loads(line)
        name = (wanted["cell"], wanted["mode"], wanted["dtype"])
        if name != current:
            problem = make_problem(cells[wanted["cell"]], wanted["mode"], DTYPES[wanted["dtype"]])
            call = ours.prepare(problem, torch.get_num_threads())
            current = name
        assert call is not None
        timing = Timing(call)  # of that build: what both have is used here
        timing.run_block(wanted["seconds"])
        print(json.dumps(timing.samples), flush=True)


def tenth(times: list[float]) -> float:
    """The time that one call in ten stays below."""
    return sorted(times)[len(times) // 10]


class Build:
    """The process of a build."""

    def __init__(self, folder: Path, threads: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve(), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder,
            text=True,
        )

    def block(self, **wanted: Any) -> list[float]:
        """The times of a block of calls."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(wanted), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("a build's process ended: see above")
        times: list[float] = json.loads(answer)
        return times

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(
    options: argparse.Namespace, names: list[tuple[str, str, str]]
) -> dict[tuple[str, str, str], Any]:
    """For every cell the times of each pair of processes, old and new."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    steps = [(pair, name) for pair in range(options.pairs) for name in names]
    times_of: dict[Name, list[tuple[float, float]]] = {name: [] for name in names}
    builds: list[Build] = []
    for pair, name in steps if tqdm is None else tqdm(steps, unit="cell"):
        if name == names[0]:
            for build in builds:
                build.close()
            builds = [Build(folder, options.threads) for folder in (options.old, options.new)]
        cell, mode, dtype = name
        samples: list[list[float]] = [[], []]
        for turn in range(options.rounds):
            for which in (0, 1) if (turn + pair) % 2 == 0 else (1, 0):
                wanted = {"cell": cell, "mode": mode, "dtype": dtype, "seconds": options.block}
                samples[which] += builds[which].block(**wanted)
        times_of[name].append((tenth(samples[0]), tenth(samples[1])))
    for build in builds:
        build.close()
    return times_of


def main() -> None:
    if sys.argv[1:] == ["--worker"]:
        return work()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW")
    parser.add_argument("--cells", nargs="+", default=["*"], help="patterns of names; default: all")
    parser.add_argument("--outside", action="store_true", help="cells outside of the grid instead")
    parser.add_argument("--modes", nargs="+", default=["fwd", "bwd"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", type=int, default=3, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=4, help="blocks of each build and pair")
    parser.add_argument("--block", type=float, default=0.1, help="seconds of a block")
    parser.add_argument("--most", type=float, default=0.02, help="how much slower a cell may be")
    options = parser.parse_args()
    options.old, options.new = options.old.resolve(), options.new.resolve()
    sys.path.insert(0, str(options.new))
    from attn_ext.benchmark.cells import GRID, OUTSIDE

    chosen = OUTSIDE if options.outside else GRID
    cells = [c.name for c in chosen if any(fnmatch(c.name, pattern) for pattern in options.cells)]
    if not cells:
        parser.error(
            f"no cell is named {' or '.join(options.cells)}: there are {', '.join(c.name for c in chosen)}"
        )
    names = [(cell, mode, dtype) for mode in options.modes for dtype in options.dtype for cell in cells]
    slower = []
    print("| cell | mode | dtype | old | new | new / old | of the pairs |")
    print("| --- | --- | --- | --: | --: | --: | --: |")
    for name, pairs in compare(options, names).items():
        ratios = [new / old for old, new in pairs]
        ratio = statistics.median(ratios)
        old, new = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
        row = [*name, f"{old:.1f} µs", f"{new:.1f} µs", f"{ratio:.3f}"]
        print("|", " | ".join([*row, f"{min(ratios):.3f} to {max(ratios):.3f}"]), "|")
        if ratio > 1 + options.most:
            slower.append(" ".join(name))
    print(f"\n{len(names)} cells; slower by more than {options.most:.0%}: {', '.join(slower) or 'none'}")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
