"""Random calls over the whole argument space, held against float64 formulas, on every instruction set.

    python tests/fuzz/fuzz.py --seconds 60
    python tests/fuzz/fuzz.py --cases 5000 --seed 3 --capability avx2 --capability aten
    python tests/fuzz/fuzz.py --seconds 60 --without sinks --without plant:grad
    python tests/fuzz/fuzz.py --seconds 60 --calls paged
    python tests/fuzz/fuzz.py --show 3/1234 --capability avx2

Each instruction set runs in a process of its own (``--capability reference`` holds the package's reference
against the same formulas). A case is named SEED/NUMBER and is the same for ever. What differs is shrunk to
the simplest case that still fails and printed as a program, at once; a process that dies or hangs is such a
case too. An interrupt (Ctrl-C, SIGTERM) ends the run and says what was tried until then. The exit status is
1 if anything differed, 130 after an interrupt. What counts as different is written in ``check.py``,
``oracle.py``.
"""

import argparse
import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import torch
from cases import Case, Plant, draw_case
from check import Mismatch, check, minimise
from merged import MergedCase, check_merged, draw_merged_case
from packed import check_packed
from packed_cases import PackedCase, Part, draw_packed_case
from paged import check_paged
from paged_cases import PagedCase, draw_paged_case

HANG_SECONDS = 60.0
#: What names a case in a message between processes; read back with these names alone.
_CASE_NAMES = {c.__name__: c for c in (Case, MergedCase, PackedCase, PagedCase, Part, Plant)}
_CASE_NAMES |= {"inf": float("inf"), "nan": float("nan")}

AnyCase = Case | MergedCase | PackedCase | PagedCase
DRAW = {"plain": draw_case, "packed": draw_packed_case, "paged": draw_paged_case, "merged": draw_merged_case}
CHECK: dict[type, Any] = {Case: check, PackedCase: check_packed, PagedCase: check_paged}
CHECK |= {MergedCase: check_merged}


def read_case(text: str) -> AnyCase:
    """A case from its own text."""
    case: AnyCase = eval(text, {"__builtins__": {}}, _CASE_NAMES)
    return case


def drawn(options: argparse.Namespace, number: int) -> AnyCase:
    """Case ``number`` of the run."""
    return DRAW[options.calls](options.seed, number)


# The process of one instruction set ------------------------------------------------------------------


def subject_of(capability: str) -> str:
    """What is tested in a process of this capability."""
    return "reference" if capability == "reference" else "attn_ext"


def work(arguments: argparse.Namespace) -> None:
    """Run cases and print a line of JSON for each mismatch; the number of the case at work is in the file."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import attn_ext

    subject = subject_of(arguments.capability[0])
    if subject == "attn_ext" and attn_ext.cpu_capability() != arguments.capability[0]:
        raise RuntimeError(f"expected {arguments.capability[0]}, but got {attn_ext.cpu_capability()}")

    def checked(case: AnyCase) -> Mismatch | None:
        if arguments.plant in case.features():
            os.abort()  # the test of what is done about a process that dies
        found: Mismatch | None = CHECK[type(case)](case, subject)
        return found

    if arguments.case:
        checked(read_case(arguments.case))
        return
    without = set(arguments.without)
    with open(arguments.at, "r+b") as file, mmap.mmap(file.fileno(), 16) as at:
        print(json.dumps({"ready": True}), flush=True)
        number = arguments.first
        end = time.monotonic() + arguments.seconds
        while number < arguments.first + arguments.cases and time.monotonic() < end:
            at[:8] = number.to_bytes(8, "little")
            case = drawn(arguments, number)
            if not case.features() & without:
                found = checked(case)
                at[8:] = (int.from_bytes(at[8:], "little") + 1).to_bytes(8, "little")
                if found:
                    small = found
                    if arguments.shrink:
                        small = minimise(found, checked)
                    print(json.dumps({"number": number, **_as_json(small)}), flush=True)
            number += 1
    print(json.dumps({"done": number}), flush=True)


def _as_json(found: Mismatch) -> dict[str, str]:
    return {"case": str(found.case), "result": found.result, "kind": found.kind, "told": found.told}


# The process that starts and watches them ------------------------------------------------------------


@dataclass
class Run:
    """One instruction set: its process, and what it has found."""

    capability: str
    options: argparse.Namespace
    place: Path
    found: list[tuple[int, Mismatch]] = field(default_factory=list)
    done: bool = False
    tried: int = 0

    def start(self, first: int, seconds: float) -> None:
        """Start at case number ``first``."""
        self.first, self.until = first, time.monotonic() + seconds
        self.place.write_bytes(first.to_bytes(8, "little") + bytes(8))
        options = self.options
        command = [
            *("--worker", "--at", str(self.place), "--seed", str(options.seed), "--first", str(first)),
            *("--cases", str(options.first + options.cases - first), "--seconds", str(seconds)),
            *(["--no-shrink"] if not options.shrink else []),
            *("--calls", options.calls),
            *(["--plant", options.plant] if options.plant else []),
            *(f"--without={name}" for name in options.without),
        ]
        self.process = start_worker(self.capability, command)
        self.lines: Queue[str] = Queue()
        self.errors: list[str] = []
        for stream, sink in (
            (self.process.stdout, self.lines.put),
            (self.process.stderr, self.errors.append),
        ):
            threading.Thread(target=_read, args=(stream, sink), daemon=True).start()
        self.seen, self.changed, self.ready = first, time.monotonic(), False

    def position(self) -> tuple[int, int]:
        """The number of the case at work, and how many this process has checked."""
        data = self.place.read_bytes()
        return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little")

    def look(self) -> None:
        """Take what the process printed; where it died or hangs, note the case and start after it."""
        ended = self.process.poll() is not None
        self._take()
        if self.done:
            return
        number, _ = self.position()
        if number != self.seen or not self.ready:  # a busy machine may take long to start a process
            self.seen, self.changed = number, time.monotonic()
        hangs = time.monotonic() - self.changed > HANG_SECONDS * (4 if self.options.shrink else 1)
        if not ended and not hangs:
            return
        if hangs:
            self.process.kill()
        self.process.wait()
        time.sleep(0.2)  # the readers' last lines
        self._take()
        if self.done:
            return
        self._count()
        told = f"hangs for {HANG_SECONDS} s" if hangs else f"process ended with {self.process.returncode}"
        told += ": " + " | ".join(line.strip() for line in self.errors[:12])
        crash = Mismatch(drawn(self.options, number), "", "crash", told)
        self._note(number, self._shrink_crash(crash) if self.options.shrink else crash)
        self.start(number + 1, max(self.until - time.monotonic(), 1.0))

    def _take(self) -> None:
        while True:
            try:
                line = self.lines.get_nowait()
            except Empty:
                return
            message = json.loads(line)
            if "ready" in message:
                self.ready = True
                continue
            if "done" in message:
                self.done = True
                self._count()
                return
            case = read_case(message["case"])
            found = Mismatch(case, message["result"], message["kind"], message["told"])
            self._note(message["number"], found)

    def _count(self) -> None:
        self.tried += self.position()[1]

    def _note(self, number: int, found: Mismatch) -> None:
        self.found.append((number, found))
        print(f"\n==== {self.capability}, case {self.options.seed}/{number}: {found.kind} {found.result}")
        print(f"# {found.case}")
        told = f"{found.kind}: {found.told}".replace("\n", "\n# ")
        print(found.case.snippet(found.result or "call", self.capability, told), flush=True)

    def stop(self, why: str) -> None:
        """End the process where it is."""
        self.process.kill()
        self._count()
        self.done = True
        self.summarise(f", {why}")

    def summarise(self, why: str = "") -> None:
        """Print what was tried."""
        print(f"{self.capability}: {self.tried} cases, {len(self.found)} mismatches{why}", flush=True)

    def _shrink_crash(self, crash: Mismatch) -> Mismatch:
        hangs = crash.told.startswith("hangs")

        def again(case: AnyCase) -> Mismatch | None:
            status = run_case(self.capability, case, ["--plant", self.options.plant or ""], hangs)
            return Mismatch(case, "", "crash", crash.told) if status < 0 else None

        return minimise(crash, again, self.options.crash_tries)


def _read(stream: Any, sink: Any) -> None:
    for line in stream:
        sink(line)


def start_worker(capability: str, command: Sequence[str]) -> "subprocess.Popen[str]":
    """A process of one instruction set."""
    forced = {} if capability == "reference" else {"ATTN_EXT_CPU_CAPABILITY": capability}
    return subprocess.Popen(
        [sys.executable, __file__, "--capability", capability, *command],
        env=os.environ | forced,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_case(capability: str, case: AnyCase, more: Sequence[str], hangs: bool) -> int:
    """The exit status of a process that runs one case; negative if it died or hung."""
    process = start_worker(capability, ["--worker", "--case", str(case), *more])
    try:
        process.communicate(timeout=HANG_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return -1 if hangs else 0  # on a busy machine slow is not dead
    return process.returncode


def progress(total: int, unit: str) -> Any:
    """A progress bar where tqdm is installed and standard error is a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext()
    return tqdm(total=total, unit=unit, disable=None, dynamic_ncols=True)


def fuzz(options: argparse.Namespace) -> dict[str, list[tuple[int, Mismatch]]]:
    """Run all instruction sets, ``--jobs`` at a time; what each found, in order."""
    waiting: list[str] = list(options.capability)
    running: list[Run] = []
    results: dict[str, Run] = {}
    rounds = -(-len(waiting) // options.jobs)
    with tempfile.TemporaryDirectory() as folder, progress(0, " cases") as bar:
        try:
            while waiting or running:
                while waiting and len(running) < options.jobs:
                    run = Run(waiting.pop(0), options, Path(folder) / str(len(waiting)))
                    run.start(options.first, options.seconds / rounds)
                    running.append(run)
                    results[run.capability] = run
                for run in running:
                    run.look()
                    if run.done:
                        run.summarise()
                    elif len(run.found) >= options.max_found:
                        run.stop("and no more were looked for")
                running = [run for run in running if not run.done]
                if bar is not None:
                    bar.n = sum(r.tried or r.position()[1] for r in results.values())
                    bar.set_postfix(mismatches=sum(len(r.found) for r in results.values()), refresh=True)
                time.sleep(0.1)
        except KeyboardInterrupt:
            for run in running:
                run.stop("interrupted")
            raise
    return {name: run.found for name, run in results.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10**9, help="cases for each instruction set")
    parser.add_argument(
        "--seconds", type=float, default=None, help="for all together (default: 60 without --cases)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--capability", action="append", help="instruction set, aten, or reference; default: all"
    )
    parser.add_argument("--without", action="append", default=[], help="leave out a feature (Case.features)")
    parser.add_argument(
        "--max-found", type=int, default=20, help="end an instruction set after so many mismatches"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="print cases as they were drawn"
    )
    parser.add_argument("--crash-tries", type=int, default=30, help="processes that may shrink a crash")
    parser.add_argument("--calls", choices=DRAW, default="plain", help="of what kind (default: %(default)s)")
    parser.add_argument("--show", metavar="SEED/NUMBER", help="print a case's program and check it")
    for name in ("--worker", "--at", "--case", "--plant"):
        action = "store_true" if name == "--worker" else "store"
        parser.add_argument(name, action=action, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 1e9 if options.cases < 10**9 else 60.0
    if options.capability is None:
        import attn_ext

        options.capability = [*attn_ext.available_cpu_capabilities()[::-1], "reference"]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = parse(arguments)
    if options.worker:
        work(options)
        return 0
    if options.show:
        seed, number = map(int, options.show.split("/"))
        options.seed, options.first, options.cases = seed, number, 1
        case = drawn(options, number)
        print(f"# {case}\n{case.snippet()}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(any(fuzz(options).values()))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
