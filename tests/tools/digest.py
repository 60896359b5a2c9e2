"""Shows that a change of the kernels changes no bit of any result.

Write one file with each build, then compare them; which build it is says ``PYTHONPATH`` or the environment:

    python tests/tools/digest.py --out before.txt
    python tests/tools/digest.py --out after.txt
    python tests/tools/digest.py --compare before.txt after.txt

A line is one case (``digest_cases.py``) in one dtype on one instruction set. It holds the way that forward
took and a hash over dtype, shape and bytes of each result: ``sdpa`` is the public function, ``plain`` the
internal op with its log-sum-exp, ``weights``, ``mass`` and ``both`` the op with side outputs, and
``back[ol:qkv]`` the gradients of query, key and value where those of output (o) and lse (l) come in (w:
weights, k: key mass; m: mask, s: sinks). All NaNs count as one: their signs and payloads mean nothing. The
signs of zeros count.

The number of threads must change nothing, so a line says none: a case with work enough for threads is run on
the first two numbers of ``--threads``, a case that may tell more on all of them, and where one of them gives
other bits than the first, it gets a line of its own and the exit status is 1.
"""

import argparse
import faulthandler
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from digest_cases import INPUTS, OUTPUTS, Call, Case, all_cases, stable_number
from torch import Tensor

# Multiply-adds from which the kernels start threads at all, as in csrc/cpu/call.cpp.
LITTLE_WORK = 4e5
SIDE_OUTPUTS = {
    "plain": (False, False),
    "weights": (True, False),
    "mass": (False, True),
    "both": (True, True),
}
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


# One case ----------------------------------------------------------------------------------------


def digest_of(t: Tensor | None) -> str:
    """Twelve digits for dtype, shape and bits, with one pattern for every NaN."""
    if t is None:
        return "-"
    t = t.detach().contiguous()
    if t.dtype.is_floating_point:
        t = t.view(INTEGERS[t.element_size()]).masked_fill(t.isnan(), -1)
    state = hashlib.blake2b(f"{t.dtype}{tuple(t.shape)}".encode(), digest_size=6)
    state.update(t.numpy().tobytes())
    return state.hexdigest()


def run_case(case: Case, call: Call) -> dict[str, str]:
    """All results of a case, by name, as their hashes."""
    import attn_ext

    options: dict[str, Any] = {
        **{"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": case.grouped},
        **{"window_left": None, "window_right": None, "query_offset": 0, "softcap": 0.0},
        **case.options,
    }
    operands = call.query, call.key, call.value
    tensors = *operands, call.mask, call.sinks, call.seed, None
    scalars = tuple(options.values())
    results: dict[str, str] = {}
    torch.manual_seed(stable_number(case.name))  # the public function draws its seed
    results["sdpa"] = digest_of(attn_ext.sdpa(*operands, attn_mask=call.mask, sinks=call.sinks, **options))
    saved: dict[bool, tuple[Tensor, Tensor]] = {}
    for name, wanted in SIDE_OUTPUTS.items():
        outputs = torch.ops.attn_ext._sdpa_forward(*tensors, *scalars, *wanted)
        for part, t in zip(("output", "lse", "weights", "mass"), outputs, strict=True):
            if t is not None:
                results[f"{name}.{part}"] = digest_of(t)
        saved[wanted[0] and wanted[1]] = outputs[:2]
        if name == "plain":
            saved[False] = outputs[:2]
    has_grad = {
        "m": call.mask is not None and call.mask.is_floating_point(),
        "s": call.sinks is not None,
    }
    possible = [has_grad.get(letter, True) for letter in INPUTS]
    for incoming, wanted_letters in case.passes:
        asked = [letter in wanted_letters for letter in INPUTS]
        mask = [a and p for a, p in zip(asked, possible, strict=True)]
        mask = mask if any(mask) else possible
        output, lse = saved["w" in incoming or "k" in incoming]
        grads = [call.incoming[letter] if letter in incoming else None for letter in OUTPUTS]
        back = torch.ops.attn_ext._sdpa_backward(*grads, *tensors, output, lse, *scalars, mask)
        letters = "".join(letter for letter, is_wanted in zip(INPUTS, mask, strict=True) if is_wanted)
        for letter, t, is_wanted in zip(INPUTS, back, mask, strict=True):
            if is_wanted:
                results[f"back[{incoming}:{letters}].{letter}"] = digest_of(t)
    return results


def forward_path(case: Case, call: Call) -> str:
    """Which way the package says that the call without side outputs takes."""
    import attn_ext

    return attn_ext.explain(
        call.query,
        call.key,
        call.value,
        call.mask,
        sinks=call.sinks,
        **{"enable_gqa": case.grouped, **case.options},
    ).path


def threads_for(case: Case, threads: Sequence[int]) -> Sequence[int]:
    """Of the numbers of threads, those that can matter to a case."""
    if case.work < LITTLE_WORK:
        return threads[:1]
    return threads if case.tries_threads else threads[:2]


def run_child(capability: str, cases: list[Case], threads: Sequence[int]) -> None:
    """Print the lines of one instruction set, the one that this process was started with."""
    import attn_ext

    faulthandler.enable()
    if attn_ext.cpu_capability() != capability:
        raise RuntimeError(f"expected instruction set {capability}, but got {attn_ext.cpu_capability()}")
    for case in cases:
        for dtype in case.dtypes:
            call = case.build(dtype)
            first: dict[str, str] = {}
            for count in threads_for(case, threads):
                torch.set_num_threads(count)
                results = run_case(case, call)
                if not first:
                    first = {"forward": forward_path(case, call), **results}
                    print(case.name, dtype, capability, *(f"{k}={v}" for k, v in first.items()), flush=True)
                    continue
                other = {name: v for name, v in results.items() if v != first[name]}
                if other:
                    print(
                        *(case.name, dtype, capability, f"threads={count}"),
                        *(f"{k}={v}" for k, v in other.items()),
                        flush=True,
                    )


# All instruction sets ----------------------------------------------------------------------------


def chosen_cases(pattern: str) -> list[Case]:
    """The cases whose names match."""
    cases = [case for case in all_cases() if fnmatchcase(case.name, pattern)]
    if not cases:
        raise SystemExit(f"expected --only to match the name of a case, but got {pattern!r}")
    return cases


class Progress:
    """A bar where tqdm is installed, else a line now and then; to stderr."""

    def __init__(self, total: int):
        self._total, self._done, self._lock = total, 0, threading.Lock()
        self._bar = None
        if importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="call", file=sys.stderr)

    def step(self) -> None:
        """One call more."""
        with self._lock:
            self._done += 1
            if self._bar is not None:
                self._bar.update()
            elif self._done % max(self._total // 20, 1) == 0:
                print(f"{self._done:,} of {self._total:,} calls", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._bar is not None:
            self._bar.close()


def run_capability(
    capability: str, pattern: str, threads: Sequence[int], step: Callable[[], None]
) -> list[str]:
    """The lines of one instruction set, from a process of its own: the set is chosen at import."""
    # Threads of two processes share the cores: those that wait must not spin.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "ATTN_EXT_CPU_CAPABILITY": capability}
    command = [sys.executable, __file__, "--child", capability, "--only", pattern]
    command += ["--threads", *map(str, threads)]
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            if not is_deviation(lines[-1]):
                step()
        status = child.wait()
        if status != 0:
            errors.seek(0)
            last = " ".join(lines[-1].split()[:2]) if lines else "no call at all"
            raise SystemExit(
                f"{capability} ended with status {status} after {last}:\n{errors.read()[-3000:]}"
            )
    return lines


def is_deviation(line: str) -> bool:
    """Whether a line tells what another number of threads gave."""
    return line.split(maxsplit=4)[3].startswith("threads=")


def write(out: Path, capabilities: Sequence[str], pattern: str, threads: Sequence[int]) -> int:
    """Run all, write the file, print what was covered; 1 where the number of threads made a difference."""
    cases = chosen_cases(pattern)
    progress = Progress(len(capabilities) * sum(len(case.dtypes) for case in cases))
    with ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(run_capability, c, pattern, threads, progress.step) for c in capabilities]
        pieces = [future.result() for future in futures]
    progress.close()
    lines = [line for piece in pieces for line in piece]
    out.write_text("".join(f"{line}\n" for line in lines))
    deviations = [line for line in lines if is_deviation(line)]
    print_paths([line for line in lines if not is_deviation(line)])
    for line in deviations:
        print(f"other bits: {line}")
    print(
        f"{len(lines) - len(deviations):,} calls in {out}; {len(deviations)} differ by the number of threads"
    )
    return 1 if deviations else 0


def print_paths(lines: Sequence[str]) -> None:
    """A table of how many calls took which way."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in lines:
        _, _, capability, *fields = line.split()
        counts.update((capability, field) for field in fields if field.startswith("forward="))
    capabilities = list(dict.fromkeys(capability for capability, _ in counts))
    print(" " * 20 + "".join(f"{c:>14}" for c in capabilities))
    for way in sorted({way for _, way in counts}, reverse=True):
        print(f"{way:20}" + "".join(f"{counts[c, way]:14,}" for c in capabilities))


# Comparison --------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, dict[str, str]]:
    """Of each line the first three words, which name it, and its fields."""

    def entries() -> Iterator[tuple[str, dict[str, str]]]:
        for line in path.read_text().splitlines():
            words = line.split()
            named = 4 if is_deviation(line) else 3
            yield " ".join(words[:named]), dict(word.rsplit("=", 1) for word in words[named:])

    return dict(entries())


def compare(before: Path, after: Path) -> int:
    """Print what differs between two files; 1 if anything does."""
    a, b = read(before), read(after)
    changed = sum(a[name] != b[name] for name in a.keys() & b.keys())
    by_field: Counter[str] = Counter()
    for name in [*a, *(n for n in b if n not in a)]:
        if name not in a or name not in b:
            print(f"only in {before if name in a else after}: {name}")
            continue
        fields = [f for f in {**a[name], **b[name]} if a[name].get(f) != b[name].get(f)]
        if fields:
            print(f"differs: {name}: {' '.join(fields)}")
            by_field.update(re.sub(r"\[.*\]", "", field) for field in fields)
    alone = len(a.keys() ^ b.keys())
    equal = len(a.keys() & b.keys()) - changed
    print(f"{equal:,} lines are equal, {changed:,} differ, {alone:,} have no partner")
    if by_field:
        print("by result: " + ", ".join(f"{field} {count:,}" for field, count in by_field.most_common()))
    return 1 if changed or alone else 0


def main() -> int:
    """Write a file, or compare two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--out", type=Path, help="run all cases and write this file")
    mode.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="tell where two files differ")
    mode.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="names of cases, such as 'far/*tiles*'"
    )
    parser.add_argument("--capabilities", nargs="+", help="instruction sets; default: all but aten")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 3, 4])
    arguments = parser.parse_args()
    if arguments.compare:
        return compare(*arguments.compare)
    if arguments.child:
        run_child(arguments.child, chosen_cases(arguments.only), arguments.threads)
        return 0
    import attn_ext

    capabilities = arguments.capabilities or [c for c in attn_ext.available_cpu_capabilities() if c != "aten"]
    return write(arguments.out, capabilities, arguments.only, arguments.threads)


if __name__ == "__main__":
    sys.exit(main())
