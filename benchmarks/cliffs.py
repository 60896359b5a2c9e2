"""Where a step to the next shape costs more than its work: walks the thresholds between the ways of a call.

    python benchmarks/cliffs.py
    python benchmarks/cliffs.py --walks key_length window --dtype float32 --mode bwd

Each walk changes one thing about a call, in small steps; its shapes are timed in turns, and the least time
counts; those that show a step are timed again, beside their neighbours alone. Two neighbours whose
times for a flop of visible work differ by more than --most times are printed, and the exit status is 1,
unless each is a step that is KNOWN, and no steeper (--strict: 1 anyway). It is no cliff where the one with
more work is as fast in all: a step up to a whole vector.
"""

import argparse
import ctypes
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import attn_ext
from attn_ext.benchmark.cells import DTYPES

SHORTEST = 2e-3  # seconds of calls that one sample takes, at least
#: Whole calls whose times differ by less are as fast as each other.
EQUAL = 1.1
AGAIN = 2  # times that a cliff has to show itself once more, each with tensors of its own


@dataclass
class Call:
    """One shape of a walk."""

    name: str
    batch: int = 1
    heads: int = 8
    key_heads: int | None = None
    query_length: int = 512
    key_length: int = 512
    head_dim: int = 64
    value_dim: int | None = None
    layout: str = "bhld"  # the order in memory; x: three tensors whose numbers lie between each other
    mask: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    special: tuple[str, float] | None = None  # a number in the middle of "query", "key", "value" or "grad"

    def pairs(self) -> int:
        """Of a query and a key that it sees, over all heads."""
        left, right = self.options.get("window_left"), self.options.get("window_right")
        offset = self.options.get("query_offset", 0)
        rows = torch.arange(self.query_length) + offset
        begin = torch.zeros_like(rows) if left is None else (rows - left).clamp(0, self.key_length)
        last = rows + (
            0 if self.options.get("is_causal") else right if right is not None else self.key_length
        )
        end = (last + 1).clamp(0, self.key_length)
        return self.batch * self.heads * int((end - begin).clamp(min=0).sum())

    def work(self) -> int:
        return self.pairs() * (self.head_dim + (self.value_dim or self.head_dim))

    def tensor(self, dtype: torch.dtype, heads: int, length: int, dim: int, layout: str) -> Tensor:
        sizes = {"b": self.batch, "h": heads, "l": length, "d": dim, "x": 3}
        stored = torch.randn([sizes[axis] for axis in layout], dtype=torch.float32).to(dtype)
        if layout.endswith("x"):
            stored = stored[..., 0]
        return stored.permute([layout.index(axis) for axis in "bhld"])

    def plant(self, **tensors: Tensor) -> None:
        """Puts the special number where it belongs, if it does so in one of the tensors."""
        name, number = self.special or ("", 0.0)
        if name in tensors:
            tensors[name][-1, -1, tensors[name].shape[2] // 2, 0] = number

    def make(self, dtype: torch.dtype, backward: bool) -> Callable[[], object]:
        key_heads, value_dim = self.key_heads or self.heads, self.value_dim or self.head_dim
        query = self.tensor(dtype, self.heads, self.query_length, self.head_dim, "bhld")
        key = self.tensor(dtype, key_heads, self.key_length, self.head_dim, self.layout)
        value = self.tensor(dtype, key_heads, self.key_length, value_dim, self.layout)
        mask = None
        if self.mask == "bool":
            mask = torch.ones(self.query_length, self.key_length, dtype=torch.bool)
        elif self.mask == "keys":
            mask = torch.ones(self.batch, 1, 1, self.key_length, dtype=torch.bool)
        elif self.mask == "float":
            mask = torch.zeros(1, self.heads, self.query_length, self.key_length, dtype=dtype)
        elif self.mask == "shared":
            mask = torch.zeros(self.query_length, self.key_length, dtype=dtype)
        self.plant(query=query, key=key, value=value)
        inputs = [x.requires_grad_(backward) for x in (query, key, value)]

        def forward() -> Tensor:
            return attn_ext.sdpa(query, key, value, mask, enable_gqa=key_heads != self.heads, **self.options)

        if not backward:
            return forward
        output = forward()
        along = torch.randn_like(output)
        self.plant(grad=along)
        return lambda: torch.autograd.grad(output, inputs, along, retain_graph=True)


def around(*places: int) -> list[int]:
    """Each place with its two neighbours, in order."""
    return sorted({n for place in places for n in (place - 1, place, place + 1) if n > 0})


def named(values: Iterable[Any], make: Callable[[Any], Call]) -> list[Call]:
    return [make(value) for value in values]


ROWS = [*around(1, 2, 4, 8, 16), 24, *around(32), 48, *around(64, 96, 128), 192, *around(256)]
KEYS = [16, 24, *around(32), 48, *around(64), 96, *around(128), 160, *around(256), 384, *around(512), 768]
KEYS += [*around(1024), 1536, *around(2048), 4096]
DIMS = [8, *around(16), 24, *around(32), 40, 48, *around(64), 80, 96, 112, *around(128), 160, 192]
DIMS += [*around(256), 320, 384, *around(512)]


def not_finite(rows: int, keys: int) -> list[Call]:
    """A call without, with one NaN or Inf, and without again."""
    special: list[tuple[str, float] | None] = [None]
    for where in ("query", "key", "value", "grad"):
        for number in (float("nan"), float("inf"), float("-inf")):
            special += [(where, number), None]
    return [
        Call(f"{rows} x {keys}, {what or 'finite'}", query_length=rows, key_length=keys, special=what)
        for what in special
    ]


def walks() -> dict[str, list[Call]]:
    """The thresholds of csrc/cpu/kernels: */plan.h and tiles/plan.h, and what else may have one."""
    return {
        "query_length": named(ROWS, lambda n: Call(f"Lq {n}", query_length=n, key_length=2048)),
        "query_length_few_keys": named(
            ROWS, lambda n: Call(f"Lq {n}, Lk 100", query_length=n, key_length=100, heads=64)
        ),
        "key_length": named(KEYS, lambda n: Call(f"Lk {n}", key_length=n, query_length=256)),
        "key_length_one_row": named(
            [*around(64, 128), 192, *around(256, 512, 1024, 2048), 3000, *around(4096), 8192, 16384, 32768],
            lambda n: Call(f"Lk {n}, one row", key_length=n, query_length=1, heads=32, head_dim=128),
        ),
        "head_dim": named(DIMS, lambda n: Call(f"D {n}", head_dim=n)),
        "head_dim_one_row": named(
            [16, 24, *around(32), 48, *around(64), 96, *around(128), 192, *around(256), 512, 576],
            lambda n: Call(f"D {n}, one row", head_dim=n, query_length=1, key_length=4096),
        ),
        "value_dim": named(
            [16, 32, 40, 48, *around(64), 80, 96, *around(128), 192, 256, 512],
            lambda n: Call(f"Dv {n}", value_dim=n),
        ),
        "heads": named([*range(1, 10), 12, *around(16, 32), 64, 128], lambda n: Call(f"{n} heads", heads=n)),
        "heads_one_row": named(
            [*range(1, 10), 12, *around(16, 32), 64, 128],
            lambda n: Call(f"{n} heads, one row", heads=n, query_length=1, key_length=16384),
        ),
        **{
            f"pooled_{rows}_rows": named(
                [8, 12, *around(16), 24, *around(32), 48, *around(64), 96, 100, *around(128), 160, 192],
                lambda n, rows=rows: Call(
                    f"Lk {n}, {rows} rows of many heads", heads=1024, query_length=rows, key_length=n
                ),
            )
            for rows in (1, 4, 8)
        },
        "tiny_heads": named(
            [1, 2, 8, 64, 512, 4096, 20000],
            lambda n: Call(f"{n} heads of 16", heads=n, query_length=16, key_length=16, head_dim=16),
        ),
        "group": named(
            [1, 2, 4, 8, 16, 32, 64],
            lambda n: Call(f"{n} query heads a key head", heads=64, key_heads=64 // n, query_length=64),
        ),
        "group_one_row": named(
            [1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128],
            lambda n: Call(
                f"{n} query heads a key head, one row",
                heads=2 * n,
                key_heads=2,
                query_length=1,
                key_length=8192,
            ),
        ),
        "layout": named(
            ["bhld", "blhd", "bhdl", "hdbl"], lambda order: Call(f"in memory {order}", layout=order)
        ),
        **{
            f"layout_{rows}_rows": named(
                ["bhld", "blhd", "bhdl", "blhdx"],
                lambda order, rows=rows: Call(
                    f"in memory {order}, {rows} rows", layout=order, query_length=rows, key_length=4096
                ),
            )
            for rows in (1, 4, 8, 16, 32, 128)
        },
        "mask": named(
            ["none", "keys", "bool", "shared", "float"],
            lambda kind: Call(f"mask {kind}", mask=kind, key_length=1024),
        ),
        "mask_one_row": named(
            ["none", "keys", "bool", "float"],
            lambda kind: Call(f"mask {kind}, one row", mask=kind, query_length=1, key_length=8192),
        ),
        "window": named(
            [64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096],
            lambda n: Call(
                f"window {n}",
                query_length=4096,
                key_length=4096,
                heads=4,
                options={"window_left": n, "is_causal": True},
            ),
        ),
        "window_length": named(
            [512, 1024, 2048, 4096, 8192, 16384],
            lambda n: Call(
                f"L {n}, window 256",
                query_length=n,
                key_length=n,
                heads=4,
                options={"window_left": 256, "is_causal": True},
            ),
        ),
        "window_one_row": named(
            [1024, 4096, 16384, 65536],
            lambda n: Call(
                f"Lk {n}, window 512, one row",
                query_length=1,
                key_length=n,
                options={"window_left": 511, "window_right": 0, "query_offset": n - 1},
            ),
        ),
        "not_finite": not_finite(512, 512),
        "not_finite_few_rows": not_finite(4, 4096),
        "not_finite_few_keys": not_finite(512, 48),
        "causal": named(
            [256, 512, 1024, 2048, 4096],
            lambda n: Call(f"L {n}, causal", query_length=n, key_length=n, options={"is_causal": True}),
        ),
    }


def least_times(calls: list[Callable[[], object]], turns: int) -> Iterator[list[float]]:
    """The least time of each so far, after each turn."""
    repeats, least = [], [float("inf")] * len(calls)
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, round(SHORTEST / (time.perf_counter() - start))))
    for _ in range(turns):
        for i, (call, count) in enumerate(zip(calls, repeats, strict=True)):
            call()  # what it reads is in the caches of the shape before
            start = time.perf_counter()
            for _ in range(count):
                call()
            least[i] = min(least[i], (time.perf_counter() - start) / count)
        yield least


@dataclass(frozen=True)
class Step:
    """From a shape to its neighbour."""

    text: str
    steep: float  # the time for a flop of one by that of the other


@dataclass(frozen=True)
class Known:
    """Steps whose reason is known: patterns of the walk's name, the mode and the slower shape's name."""

    walk: str
    mode: str
    shape: str
    most: float
    reason: str


#: docs/performance.md, "Cliffs". Of those that a step fits, the first one says how steep it may be.
KNOWN = (
    Known("layout_32_rows", ".*", ".* blhdx.*", 2.2, "numbers between others': three times the memory"),
    Known("layout_128_rows", ".*", ".* blhdx.*", 1.6, "numbers between others': three times the memory"),
    Known("layout_.*", ".*", ".* blhdx.*", 14, "numbers between others': three times the memory"),
    Known("layout_(1|4|8|16)_rows", ".*", ".* bhdl.*", 2, "values are turned around in registers"),
    Known(
        "layout_(1|4|8|16)_rows", "fwd", ".* blhd,.*", 1.45, "heads between each other: pages are read anew"
    ),
    Known("layout_32_rows", "fwd", ".* blhd,.*", 1.7, "heads between each other: pages are read anew"),
    Known(
        "head_dim_one_row", "bwd", r"D \d*[13579], .*", 1.9, "a vector more, most of it empty; lines in part"
    ),
    Known("(key_length|head_dim|heads|group)_one_row", ".*", ".*", 2.5, "memory: keys outgrow a cache"),
    Known("window_one_row", "bwd", ".*", 7, "all keys have gradients, which are written as zeros"),
    Known("pooled_.*", ".*", ".*", 1.7, "keys are met sixteen at a time; memory outgrows a cache"),
    Known("not_finite.*", ".*", ".*", 2, "kept apart from rows that do not see it"),
    Known("query_length.*", "bwd", r"Lq (17|33)\b.*", 1.6, "a vector of queries more, most of it empty"),
    Known("tiny_heads", ".*", ".*", 2, "gradients outgrow a cache"),
)


def reason_for(walk: str, mode: str, shape: str, step: Step) -> str | None:
    """Why there is such a step, if that is known."""
    for known in KNOWN:
        named = ((known.walk, walk), (known.mode, mode), (known.shape, shape))
        if all(re.fullmatch(pattern, name) for pattern, name in named):
            return known.reason if step.steep <= known.most else None
    return None


def cliffs_of(calls: Sequence[Call], seconds: list[float], most: float) -> dict[str, Step]:
    """Steps of a walk that are steeper than `most`, by the name of the slower shape.

    The last call has next to no work: what it takes every call does, and small ones would be all cliffs.
    """
    found = {}
    *own, overhead = seconds
    each = [(call, max(least - overhead, overhead / 10)) for call, least in zip(calls, own, strict=True)]
    for pair in itertools.pairwise(each):
        (one, fast), (other, slow) = sorted(pair, key=lambda timed: timed[1] / timed[0].work())
        steep = slow / other.work() / (fast / one.work())
        if other.name in found and found[other.name].steep > steep:  # than its neighbour on the other side
            continue
        if steep > most and (slow > fast * EQUAL or other.work() >= one.work()):
            times = f"{other.name} {slow * 1e6:.0f} us, {one.name} {fast * 1e6:.0f} us"
            found[other.name] = Step(f"{times}: {steep:.2f} x a flop", steep)
    return found


def walk(calls: list[Call], dtype: torch.dtype, backward: bool, turns: int, most: float) -> dict[str, Step]:
    """The cliffs among the calls that stay when timed beside their neighbours alone, `AGAIN` times.

    Others use the machine too, and somebody or other is always slow.

    Turns go on, up to three times as many, while cliffs come and go.
    """

    def in_turns(calls: Sequence[Call], turns: int) -> Iterator[dict[str, Step]]:
        smallest = Call("", heads=1, query_length=1, key_length=1, head_dim=1)
        timed = least_times([call.make(dtype, backward) for call in [*calls, smallest]], turns)
        return (cliffs_of(calls, seconds, most) for seconds in timed)

    found: dict[str, Step] = {}
    for turn, now in enumerate(in_turns(calls, 3 * turns)):
        before, found = found, now
        if turn + 1 >= turns and found.keys() == before.keys():
            break
    for i, call in enumerate(calls):
        for _ in range(AGAIN):
            if found.pop(call.name, None):
                *_, again = in_turns(calls[max(0, i - 1) : i + 2], 3 * turns)
                if call.name in again:
                    found[call.name] = again[call.name]
    return found


def with_progress(cases: list[tuple[str, str, str]]) -> Iterable[tuple[str, str, str]]:
    try:
        from tqdm import tqdm
    except ImportError:  # the extra `bench` brings it
        return cases
    return tqdm(cases, unit="walk", disable=None)


def keep_memory() -> None:
    """What is freed stays mapped (glibc).

    Whether results meet fresh pages, which can cost more than the call, is no matter of its shape.
    """
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, -1)  # never
        libc.mallopt(mmap_max, 0)


def main() -> int:
    everywhere = walks()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--walks", nargs="+", choices=everywhere, default=list(everywhere), metavar="NAME")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--mode", nargs="+", choices=["fwd", "bwd"], default=["fwd", "bwd"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=5, help="of which the least time counts, at least")
    parser.add_argument("--most", type=float, default=1.3)
    parser.add_argument("--strict", action="store_true", help="known steps count as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    cliffs = known = 0
    cases = [
        (name, dtype, mode) for name in options.walks for dtype in options.dtype for mode in options.mode
    ]
    for name, dtype, mode in with_progress(cases):
        found = walk(everywhere[name], DTYPES[dtype], mode == "bwd", options.turns, options.most)
        cliffs += len(found)
        for shape, step in found.items():
            reason = reason_for(name, mode, shape, step)
            known += reason is not None
            why = f" (known: {reason})" if reason else ""
            print(f"{name} {mode} {dtype}: {step.text}{why}", flush=True)
    print(f"{cliffs} cliffs of more than {options.most} x in {len(cases)} walks, {known} of them known")
    return cliffs > (0 if options.strict else known)


if __name__ == "__main__":
    sys.exit(main())
