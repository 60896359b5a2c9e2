"""Decoding where no cache of the processor holds keys and values, as after all of a model was read.

    python benchmarks/decode_from_memory.py
    python benchmarks/decode_from_memory.py --cells decode-batch --dtype bfloat16 --threads 1

`attn-ext bench` calls with the same keys and values again and again, which a large cache holds. Here each
call has the next of some copies, `--gigabytes` of them together. Calls of attn_ext and F.sdpa alternate in
blocks, in one process; what counts is the median. "stalled", "~" and "spread" mean what they mean in
`attn-ext bench`, GB/s are keys and values read once, and "read" is how fast threads read memory from
one end to the other that do nothing else.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

import attn_ext
from attn_ext.benchmark.cells import DTYPES, GRID, Cell, Shape, make_problem
from attn_ext.benchmark.machine import read_rate
from attn_ext.benchmark.peers import available
from attn_ext.benchmark.report import as_ratio_row
from attn_ext.benchmark.timing import Method, alternate

CELLS = {
    cell.name: cell
    for cell in (
        *(cell for cell in GRID if cell.name.startswith("decode")),
        Cell("decode-heads", Shape(1, 32, 32, 1, 2048, 128, 128)),  # a key head for each query head
        Cell("decode-narrow", Shape(16, 12, 12, 1, 500, 64, 64)),
    )
}


def _call_next(calls: Iterator[Callable[[], object]]) -> object:
    return next(calls)()


def make_calls(
    cell: Cell, dtype: torch.dtype, threads: int, memory: float
) -> dict[str, Callable[[], object]]:
    """A call of each contender, every time with the next copy of keys and values."""
    first = make_problem(cell, "fwd", dtype)
    copies = max(2, round(memory / cell.kv_bytes(dtype)))
    problems = [replace(first, key=first.key.clone(), value=first.value.clone()) for _ in range(copies)]
    calls: dict[str, Callable[[], object]] = {}
    for contender in available(["F.sdpa"]):
        prepared = [contender.prepare(problem, threads) for problem in problems]
        if known := [call for call in prepared if call is not None]:
            calls[contender.name] = partial(_call_next, itertools.cycle(known))
    return calls


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of keys and values (default: 1)")
    parser.add_argument("--block", type=float, default=0.15, help="seconds of a block (default: 0.15)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each (default: 5)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    read = read_rate(options.threads, 0.5)
    print(f"{options.threads} threads, {attn_ext.cpu_capability()}; read: {read / 1e9:.0f} GB/s\n")
    print("| cell | dtype | attn_ext | F.sdpa | ratio | GB/s | spread |")
    print("| --- | --- | --: | --: | --: | --: | --: |")
    for name in options.cells:
        for dtype in options.dtype:
            calls = make_calls(CELLS[name], DTYPES[dtype], options.threads, options.gigabytes * 1e9)
            timings = alternate(calls, Method(options.block, options.rounds))
            ours, theirs, ratio, spread = as_ratio_row(timings)
            seconds = timings["attn_ext"].seconds
            rate = "-" if seconds is None else f"{CELLS[name].kv_bytes(DTYPES[dtype]) / seconds / 1e9:.1f}"
            print(f"| {name} | {dtype} | {ours} | {theirs} | {ratio} | {rate} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
