"""Every memory allocation of a call fails once: that is one exception, and the next call is unharmed.

    python tests/fuzz/faults.py
    python tests/fuzz/faults.py --capability avx2 --only 'tiles*'
    python tests/fuzz/faults.py --capability aten --every 10   # the composition has hundreds in every call

For each path and n = 1, 2, 3 ... the n-th allocation under the library's code fails (``faults.cpp``,
preloaded), until a call meets no failure any more. Each call must then raise MemoryError or RuntimeError and
have changed nothing that it was given, or, where it can do without that memory, give the bits it always
gives; and the call after it must give them too. A process that dies is told with its n, and the next one goes
on after it. The exit status is 1 if anything was wrong.
"""

import argparse
import ctypes
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from cases import OPS, SIDE, Case, Plant
from fuzz import progress
from merged import MergedCase, run_merged
from packed import run_packed
from packed_cases import PackedCase, Part
from paged import memory_of, run_paged, write
from paged_cases import PagedCase
from subjects import run as run_one

HERE = Path(__file__).parent

# Shapes for each way through forward and backward, as in tests/tools/digest_cases.py
_WAYS = {
    "few_rows": {"lq": 4, "lk": 300, "d": 16, "dv": 16},
    "few_keys": {"lq": 40, "lk": 70, "d": 16, "dv": 20},
    "tiles": {"lq": 70, "lk": 230, "d": 16, "dv": 24},
    "split": {"lq": 19, "lk": 1100, "d": 8, "dv": 16},
    "online": {"lq": 40, "lk": 1090, "d": 16, "dv": 8},
    "phases": {"lq": 513, "lk": 520, "d": 8, "dv": 8},
}


@dataclass(frozen=True)
class Write:
    """``cache_write_`` alone, whose results are the pages."""

    case: PagedCase

    @property
    def threads(self) -> int:
        return self.case.threads

    def build(self) -> dict[str, torch.Tensor]:
        """Every tensor by name."""
        return self.case.build()


AnyCall = Case | MergedCase | PackedCase | PagedCase | Write


def paths() -> Iterator[tuple[str, AnyCall]]:
    """Every path, and on it every kind of extra memory that a call may want; all paths in one packed call."""
    yield from packed_paths()
    yield from paged_paths()
    yield from merged_paths()
    nan_hidden = (
        Plant("value", 0.3, "nan"),
        Plant("key", 0.6, "nan"),
    )  # by holes, so that they are computed with
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "threads": {"threads": 2},
        "bfloat16": {"dtype": "bfloat16", "threads": 2},
        "careful": {"plants": nan_hidden, "mask": "bool", "mask_ones": (3,)},
        "careful_bfloat16": {"plants": nan_hidden, "dtype": "bfloat16", "options": (("is_causal", True),)},
        "careful_threads": {"plants": nan_hidden, "mask": "bool", "threads": 2},
        "bias": {"mask": "bias", "mask_ones": (4, 3), "sinks": "normal", "threads": 2},
        "dropout": {"options": (("dropout_p", 0.3), ("softcap", 2.0))},
        "transposed": {"layouts": tuple((n, "transposed") for n in ("query", "key", "value", "grad_output"))},
        "broadcast": {"ones": ("key.0", "value.0", "key.h", "value.h"), "threads": 2},
    }
    for way, shape in _WAYS.items():
        for kind, more in kinds.items():
            if way == "phases" and kind not in ("plain", "threads", "bias"):
                continue
            for op in OPS if kind in ("plain", "bias", "careful") else ("sdpa",):
                incoming = ("output", SIDE[op]) if op in SIDE else ("output",)
                case = Case(op=op, batch=(2,), heads=2, incoming=incoming, seed=5, **{**shape, **more})
                yield f"{way}/{kind}/{op}", case
                yield f"{way}/{kind}/{op}/forward", replace(case, incoming=())


def packed_paths() -> Iterator[tuple[str, PackedCase]]:
    """Packed calls of one sequence, and of one for each way, one of none and one of a row."""
    yield "packed/short/forward", PackedCase(parts=(Part(3, 5),), incoming=(), seed=5)
    shapes = [*_WAYS.values(), {"lq": 0, "lk": 0}, {"lq": 1, "lk": 1}]
    parts = tuple(Part(s["lq"], s["lk"], hole_q=1, hole_k=2) for s in shapes)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "threads": {"threads": 2},
        "holes": {"holes": True, "offsets": True, "dtype": "bfloat16", "threads": 2},
        "careful": {"plants": (Plant("value", 0.3, "nan"), Plant("key", 0.6, "nan"))},
        "sinks": {"sinks": "normal", "options": (("dropout_p", 0.3), ("window_left", 9))},
    }
    for kind, more in kinds.items():
        incoming = ("output", "lse") if kind == "sinks" else ("output",)
        case = PackedCase(parts=parts, heads=2, d=8, dv=16, incoming=incoming, seed=5, **more)
        yield f"packed/{kind}", case
        yield f"packed/{kind}/forward", replace(case, incoming=())


def paged_paths() -> Iterator[tuple[str, PagedCase | Write]]:
    """Reading from pages, and writing to them."""
    prefill = tuple((s["lq"], s["lk"]) for s in _WAYS.values())
    narrow = {"stored": "int8", "key_scale": "row", "value_scale": "row"}
    float8 = {"stored": "float8_e4m3fn", "key_scale": "head", "value_scale": "one"}
    kinds: dict[str, dict[str, Any]] = {
        "short": {"lengths": ((1, 30),), **narrow},
        "decode": {"lengths": ((1, 300), (1, 1100), (1, 0))},
        "prefill": {"lengths": prefill},
        "int8": {"lengths": ((1, 1100), *prefill[:3]), "dtype": "bfloat16", **narrow},
        "float8": {"lengths": ((1, 1100), *prefill[:3]), **float8},
        "half": {"lengths": ((1, 1100), *prefill[:3]), "stored": "bfloat16", "page": 5},
        "threads": {"lengths": ((1, 1100), *prefill), "dtype": "bfloat16", "threads": 2},
        "careful": {"lengths": prefill[:4], "plants": (Plant("value", 0.3, "nan"), Plant("key", 0.6, "nan"))},
    }
    for kind, more in kinds.items():
        case = PagedCase(
            **{"page": 16, "heads": 2, "group": 2, "gqa": True, "d": 16, "dv": 24, "seed": 5, **more}
        )
        yield f"paged/{kind}", case
    writes: dict[str, dict[str, Any]] = {
        "plain": {},
        "skipped": {"skipped": 3, "integers": "strided"},
        "half": {"stored": "bfloat16"},
        "int8": narrow,
        "float8": {**float8, "skipped": 3},
        "transposed": {"layouts": (("key", "transposed"), ("value", "transposed"))},
    }
    for kind, more in writes.items():
        yield (
            f"cache_write/{kind}",
            Write(PagedCase(lengths=((1, 30), (1, 7)), heads=2, written=True, **more)),
        )


def merged_paths() -> Iterator[tuple[str, MergedCase]]:
    """Parts of the keys put together."""
    whole = Case(op="sdpa_with_lse", batch=(2,), heads=2, lq=4, lk=30, incoming=("output", "lse"), seed=5)
    for kind, changed in (("plain", whole), ("bfloat16", replace(whole, dtype="bfloat16", threads=2))):
        yield f"merge/{kind}", MergedCase(changed, (10, 0))
        yield f"merge/{kind}/forward", MergedCase(replace(changed, incoming=()), (10, 0))


def run(case: AnyCall, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs and gradients by name."""
    if isinstance(case, Write):
        write(case.case, tensors)
        return {n: tensors[n].clone() for n in ("key_pages", "value_pages")}
    if isinstance(case, PagedCase):
        return run_paged(case, tensors, "attn_ext")
    if isinstance(case, MergedCase):
        return run_merged(case, tensors, "attn_ext")
    if isinstance(case, PackedCase):
        return run_packed(case, tensors, "attn_ext")
    return run_one(case, tensors, "attn_ext")


# The process in which allocations fail ---------------------------------------------------------------


def code_of_the_library() -> tuple[int, int]:
    """The addresses of the library's code."""
    lines = [
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "libattn_ext.so" in line
    ]
    ranges = [tuple(int(a, 16) for a in words[0].split("-")) for words in lines if "x" in words[1]]
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


def bits(results: dict[str, torch.Tensor]) -> list[bytes]:
    """The bytes of every result, one pattern for every NaN."""
    return [t.double().masked_fill(t.isnan(), 1e300).numpy().tobytes() for t in results.values()]


class Given:
    """The bytes of a call's tensors as they were before it."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.memory = {name: memory_of(t) for name, t in tensors.items()}
        self.before = {name: t.clone() for name, t in self.memory.items()}

    def changed(self) -> list[str]:
        """Which of them have changed."""
        return [name for name, t in self.memory.items() if not torch.equal(t, self.before[name])]

    def restore(self) -> None:
        """As they were."""
        for name in self.changed():
            self.memory[name].copy_(self.before[name])


def work(names: Sequence[str], first: int, every: int, at: Path) -> None:
    """Try paths one after the other; print a line of JSON for each."""
    import attn_ext  # noqa: F401  (loads the library)

    faulthandler.enable()
    faults = ctypes.CDLL(None)
    faults.attn_ext_faults_end.restype = ctypes.c_int64
    cases = dict(paths())
    for name in names:
        numbers = itertools.count(first or 1 + list(cases).index(name) % every, every)
        message = fail_each(cases[name], name, faults, numbers, at)
        print(json.dumps({"name": name, **message}), flush=True)
        first = 0


def fail_each(case: AnyCall, name: str, faults: Any, numbers: Iterable[int], at: Path) -> dict[str, Any]:
    """Let one allocation of a call fail after the other, by their numbers; what came of it."""
    begin, end = (ctypes.c_size_t(a) for a in code_of_the_library())
    tensors = case.build()
    given = Given(tensors)
    torch.set_num_threads(case.threads)
    expected = bits(run(case, tensors))
    wrong: list[str] = []
    kinds: Counter[str] = Counter()
    tried = 0
    for n in numbers:
        at.write_text(f"{name} {n}")
        given.restore()
        results, told = None, "no exception"
        faults.attn_ext_faults_begin(ctypes.c_int64(n), begin, end)
        try:
            results = run(case, tensors)
        except (MemoryError, RuntimeError) as error:
            told = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:60]}"
        except BaseException as error:
            wrong.append(f"allocation {n}: {type(error).__name__}: {error}")
        met = faults.attn_ext_faults_end() < 0
        if results is not None and bits(results) != expected:
            wrong.append(f"allocation {n}: another result and no exception")
        if not met:
            break
        if results is None and given.changed():
            wrong.append(f"allocation {n}: an exception, and {', '.join(given.changed())} changed")
        given.restore()
        tried += 1
        kinds[told] += 1
        if bits(run(case, tensors)) != expected:
            wrong.append(f"allocation {n}: the call after it gives another result")
    return {"tried": tried, "wrong": wrong, "kinds": kinds}


# The process that starts them ------------------------------------------------------------------------


def build_library(folder: Path) -> Path:
    """Compile what is preloaded."""
    library = folder / "faults.so"
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        str(HERE / "faults.cpp"),
    ]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


def try_paths(
    names: Sequence[str], capability: str, library: Path, at: Path, every: int = 1
) -> Iterator[dict[str, Any]]:
    """For each path how many allocations failed, what was wrong, and how the calls ended."""
    environment = os.environ | {"LD_PRELOAD": str(library), "ATTN_EXT_CPU_CAPABILITY": capability}
    environment |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}  # what else runs here, runs on
    left, first = list(names), 0
    while left:
        command = [
            sys.executable,
            __file__,
            "--worker",
            ",".join(left),
            "--first",
            str(first),
            "--every",
            str(every),
            "--at",
            str(at),
        ]
        with (at.parent / "errors").open("w+") as errors:
            process = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                left.remove(message["name"])
                yield message
            if process.wait() == 0:
                return
            errors.seek(0)
            told = [
                line for line in errors.read().splitlines() if "libattn_ext" in line or "terminate" in line
            ]
        name, n = at.read_text().split()
        died = f"allocation {n}: the process ended with {process.returncode}: {' | '.join(told[-6:])}"
        yield {"name": name, "tried": 0, "wrong": [died], "kinds": {}}
        first = int(n) + every


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--capability", action="append", help="instruction set or aten; default: the best")
    parser.add_argument("--only", action="append", help="a pattern of paths' names")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="one allocation in N, others on each path; default: 1",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error(f"argument --every: expected a number of 1 or more, got {options.every}")
    if options.worker:
        work(options.worker.split(","), options.first, options.every, options.at)
        return 0
    import attn_ext

    names = [n for n, _ in paths() if any(fnmatchcase(n, p) for p in options.only or ["*"])]
    total, wrongs, kinds = 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        library = build_library(Path(folder))
        for capability in options.capability or [attn_ext.cpu_capability()]:
            with progress(len(names), " paths") or nullcontext() as bar:
                for message in try_paths(names, capability, library, Path(folder) / "at", options.every):
                    total, wrongs = total + message["tried"], wrongs + len(message["wrong"])
                    kinds.update(message["kinds"])
                    for line in message["wrong"]:
                        print(f"{capability} {message['name']}: {line}", flush=True)
                    if bar is not None:
                        bar.update()
    for told, count in kinds.most_common():
        print(f"{count:7} {told}")
    print(f"{total} failed allocations on {len(names)} paths, {wrongs} wrong")
    return int(wrongs > 0)


if __name__ == "__main__":
    sys.exit(main())
