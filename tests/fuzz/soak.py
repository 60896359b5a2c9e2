"""Many calls of many shapes, forward and backward: does the process's memory grow?

    python tests/fuzz/soak.py                       # 200,000 calls of short tensors
    python tests/fuzz/soak.py --large --calls 3000  # results of 2 to 40 MB

Memory is what the process holds in RAM (VmRSS), and of that what lies in huge pages, sampled at even steps.
The first fifth of the calls is for caches to fill. Then the verdict is "grows" if the median of the last
fifth, less the tensors that live, exceeds that of the second by more than ``--allow`` (16 MB, and 200 MB with
``--large``), and the exit status is 1.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from cases import Case, draw_case
from fuzz import progress
from subjects import run

import attn_ext

SAMPLES = 25


def memory() -> tuple[float, float]:
    """Resident memory and what of it lies in huge pages, in MB."""
    resident = huge = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        words = line.split()
        if words[0] == "Rss:":
            resident = int(words[1])
        elif words[0] == "AnonHugePages:":
            huge = int(words[1])
    return resident / 1024, huge / 1024


def short_call(case: Case, threads: int) -> None:
    """One of the fuzzer's cases; its tensors are made and freed."""
    torch.set_num_threads(threads)
    run(case, case.build(), "attn_ext")


def large_call(draw: random.Random, kept: list[torch.Tensor]) -> None:
    """A result of 2 to 40 MB, of which one in four stays for a while, so that the heap has holes."""
    length = int(2 ** draw.uniform(13, 17.3))  # rows of 64 float32: 2 MB at 8192
    heads = draw.choice((1, 2))
    query = torch.full((1, heads, length // heads, 64), 0.1, requires_grad=draw.random() < 0.5)
    key, value = torch.full((2, 1, heads, draw.choice((1, 2, 4)), 64), 0.1)
    output = attn_ext.sdpa(query, key, value)
    if query.requires_grad:
        (grad,) = torch.autograd.grad(output.sum(), query)
        kept.append(grad[:, :, ::1000].clone())
    kept.append(output.detach() if draw.random() < 0.25 else output.detach()[:, :, :3].clone())
    while len(kept) > 12:
        kept.pop(draw.randrange(len(kept)))


def soak(calls: int, large: bool, seed: int) -> list[tuple[int, float, float, float]]:
    """Make the calls; (calls made, resident, huge, live) at each sample."""
    draw, kept, samples = random.Random(seed), [], []
    cases = [] if large else [draw_case(seed, number) for number in range(min(calls, 3000))]
    every = max(1, calls // SAMPLES)
    with progress(calls, " calls") or nullcontext() as bar:
        for number in range(calls):
            if large:
                large_call(draw, kept)
            else:
                short_call(cases[number % len(cases)], 1 + number // 1000 % 2)
            if (number + 1) % every == 0:
                gc.collect()
                live = sum(t.nbytes for t in kept) / 2**20
                samples.append((number + 1, *memory(), live))
                if bar is not None:
                    bar.update(every)
    return samples


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if memory grows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=None, help="default: 200,000, and 3,000 with --large")
    parser.add_argument("--large", action="store_true", help="results around 8 MB and above")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow", type=float, default=None, help="growth allowed, in MB")
    options = parser.parse_args(arguments)
    calls = options.calls or (3_000 if options.large else 200_000)
    allowed = options.allow if options.allow is not None else (200.0 if options.large else 16.0)
    start = time.monotonic()
    samples = soak(calls, options.large, options.seed)
    print(f"{'calls':>9} {'RSS MB':>9} {'huge MB':>9} {'live MB':>9}")
    for number, resident, huge, live in samples:
        print(f"{number:9} {resident:9.1f} {huge:9.1f} {live:9.1f}")
    fifth = max(1, len(samples) // 5)
    before = statistics.median(s[1] - s[3] for s in samples[fifth : 2 * fifth] or samples)
    after = statistics.median(s[1] - s[3] for s in samples[-fifth:])
    grows = after - before > allowed
    print(
        f"{attn_ext.cpu_capability()}: {calls} calls in {time.monotonic() - start:.0f} s, "
        f"{'grows' if grows else 'flat'}: {before:.1f} MB, then {after:.1f} MB ({after - before:+.1f})"
    )
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
