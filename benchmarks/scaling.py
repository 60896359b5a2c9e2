"""How attention scales over ranks: what is measured here, and what follows from it for more of them.

    python benchmarks/scaling.py                     # measures, simulates, writes docs/scaling.md
    python benchmarks/scaling.py --quick             # the same of a small problem, in seconds
    python benchmarks/scaling.py --pair-only         # two processes against one, and nothing else

Measured: the rate of the kernels, forward and backward; latency and bandwidth of gloo between two processes;
and the speed of two processes of one thread each against one. Simulated from that: the efficiency of each
method, and of what `method="auto"` takes, from 1 to 1,024 ranks and from 8 k to 1 M tokens, on this network
and on those whose rates are published. The page says which is which.

It needs matplotlib for the picture, and tqdm for the progress bar: pip install attn_ext[bench]
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import attn_ext
from attn_ext.benchmark.cells import DTYPES, GRID, Cell, Shape, make_problem
from attn_ext.distributed import SequenceLayout, context_parallel_sdpa, cost
from attn_ext.distributed.cost import Way, choose_way, heads_divide

ROOT = Path(__file__).resolve().parents[1]
CELL = next(cell for cell in GRID if cell.name == "llama-2048")
SMALL = Cell("small", Shape(1, 4, 2, 128, 128, 32, 32), "causal")
THREADS = "one process of two threads"  # what the machine gives, without any exchange
ROWS = [4, 16, 64, 256]  # of a call, beside all of the cell
MESSAGES = [2**n for n in range(10, 26, 3)]  # bytes: 1 KiB to 32 MiB


# Measuring ----------------------------------------------------------------------------------------


class Rate(NamedTuple):
    """Flops of the forward pass that a thread does a second, in either pass."""

    forward: float
    backward: float

    def text(self) -> str:
        return f"{self.forward / 1e9:.0f} and {self.backward / 1e9:.0f} GFLOP/s"


@dataclass
class Measured:
    """Of one thread, and of two processes of one thread each."""

    dtype: torch.dtype
    cell: Cell
    rates: dict[int, Rate]  # by query rows of a call
    latency: float  # seconds of a small message
    bandwidth: float  # bytes a second of a large one
    pair: dict[str, float]  # by method: seconds of one process over those of two


def steps(what: str, count: int) -> Iterator[int]:
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(range(count))
    return iter(tqdm(range(count), desc=what, disable=None, leave=False))


def seconds_of(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def kernel_rates(cell: Cell, dtype: torch.dtype, rounds: int) -> dict[int, Rate]:
    """By query rows of a call over all keys of the cell: the more ranks, the fewer rows each has.

    The best of some rounds: others only ever make a call slower.
    """
    problem, keys = make_problem(cell, "fwdbwd", dtype), cell.shape.key_length
    counts = [rows for rows in ROWS if rows < keys] + [keys]
    rates = {}
    for _, rows in zip(steps("kernels", len(counts)), counts, strict=True):
        query = problem.query.detach()[..., keys - rows :, :].requires_grad_()
        inputs, options = (query, problem.key, problem.value), {"is_causal": True, "enable_gqa": True}
        forward, backward = [], []
        for _ in range(rounds):
            begin = perf_counter()
            output = attn_ext.sdpa(*inputs, **options, query_offset=keys - rows)
            between = perf_counter()
            torch.autograd.grad(output, inputs, torch.ones_like(output))
            forward.append(between - begin)
            backward.append(perf_counter() - between)
        pairs = rows * keys - rows * (rows - 1) // 2
        flops = 2 * (cell.shape.head_dim + cell.shape.value_dim) * cell.shape.query_heads * pairs
        rates[rows] = Rate(flops / min(forward), flops / min(backward))
    return rates


def network(rounds: int) -> tuple[float, float]:
    """Of an exchange between two processes: latency, and bytes a second received."""
    times = {}
    for size in MESSAGES:
        sent = torch.zeros(2 * size, dtype=torch.uint8)
        received = torch.empty_like(sent)
        each = []
        for _ in range(rounds):
            dist.barrier()
            each.append(seconds_of(lambda r=received, s=sent: dist.all_to_all_single(r, s)))
        times[size] = statistics.median(each)
    return times[MESSAGES[0]], MESSAGES[-1] / times[MESSAGES[-1]]


def pair_speed(
    cell: Cell, dtype: torch.dtype, methods: list[str], rounds: int, bar: bool
) -> dict[str, float]:
    """Forward and backward, in turns: one process alone while the other waits, then both."""
    rank, shape = dist.get_rank(), cell.shape
    torch.manual_seed(0)
    sizes = (
        (shape.query_heads, shape.head_dim),
        (shape.kv_heads, shape.head_dim),
        (shape.kv_heads, shape.value_dim),
    )
    whole = [torch.randn(shape.batch, heads, shape.query_length, dim).to(dtype) for heads, dim in sizes]
    layout = SequenceLayout.zigzag(shape.query_length)
    options = {"is_causal": True, "enable_gqa": True}

    def step(attend: Callable[..., Any], tensors: list[Tensor]) -> float:
        leaves = [x.detach().requires_grad_() for x in tensors]
        output_grad = torch.ones(*tensors[0].shape[:-1], shape.value_dim, dtype=dtype)
        return seconds_of(lambda: attend(*leaves, **options).backward(output_grad))

    own = [layout.shard(x, -2) for x in whole]
    found: dict[str, list[float]] = {name: [] for name in ("one", THREADS, *methods)}
    for number in steps("two processes", rounds + 1) if bar else range(rounds + 1):
        for name in found:
            dist.barrier()
            taken = torch.zeros(1)
            if name in methods:
                taken[0] = step(
                    lambda *x, n=name, **o: context_parallel_sdpa(*x, layout=layout, method=n, **o), own
                )
            elif rank == 0 and name == THREADS:
                torch.set_num_threads(2)
                taken[0] = step(attn_ext.sdpa, whole)
                torch.set_num_threads(1)
            elif rank == 0:
                taken[0] = step(attn_ext.sdpa, whole)
            dist.all_reduce(taken, dist.ReduceOp.MAX)  # both have to be done
            if number:  # the first round warms up
                found[name].append(float(taken))
    best = {name: min(times) for name, times in found.items()}
    return {name: best["one"] / best[name] for name in (THREADS, *methods)}


def of_process(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    latency, bandwidth = network(options.rounds * 2)
    pair = pair_speed(
        options.cell, DTYPES[options.dtype], ["ulysses", "allgather", "ring"], options.rounds, rank == 0
    )
    if rank == 0:
        torch.save((latency, bandwidth, pair), f"{folder}/found.pt")
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> Measured:
    dtype = DTYPES[options.dtype]
    torch.set_num_threads(1)
    rates = kernel_rates(options.cell, dtype, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_process, (folder, options), nprocs=2)
        latency, bandwidth, pair = torch.load(f"{folder}/found.pt")
    return Measured(dtype, options.cell, rates, latency, bandwidth, pair)


# Simulating ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    name: str
    bandwidth: float  # bytes a second that a rank receives
    latency: float  # seconds of a message


#: Line rates as the standards and their makers publish them; the latencies are assumed.
PUBLISHED = [
    Network("10 Gbit Ethernet", 10e9 / 8, 30e-6),
    Network("25 Gbit Ethernet", 25e9 / 8, 20e-6),
    Network("100 Gbit Ethernet", 100e9 / 8, 5e-6),
    Network("InfiniBand HDR, 200 Gbit", 200e9 / 8, 2e-6),
    Network("InfiniBand NDR, 400 Gbit", 400e9 / 8, 2e-6),
]
FEATURES = {"query_heads": 32, "key_heads": 8, "head_dim": 128, "itemsize": 2}  # Llama 3 8B, bfloat16
LENGTHS = [2**n for n in range(13, 21)]
RANKS = [2**n for n in range(11)]
METHODS = ("ulysses", "allgather", "ring")


@dataclass(frozen=True)
class Machine:
    """What a rank is."""

    rates: dict[int, Rate]  # of a core
    cores: int
    network: Network

    def computing(self, flops: int, rows: int) -> float:
        """Seconds, forward and backward, of calls with so many query rows."""
        rate = self.rates[max((n for n in self.rates if n <= rows), default=min(self.rates))]
        return flops * (1 / rate.forward + 1 / rate.backward) / self.cores


@lru_cache(None)
def way_of(method: str, length: int, ranks: int) -> Way | None:
    """None where the heads do not allow it."""
    layout = SequenceLayout.zigzag(length, world_size=ranks)
    if method == "auto":
        return choose_way(layout, **FEATURES, is_causal=True)
    if method == "ulysses":
        divide = heads_divide(FEATURES["query_heads"], FEATURES["key_heads"], ranks)
        return Way("allgather", ranks) if divide else None
    return Way(method, 1)


@lru_cache(None)
def cost_of(way: Way, length: int, ranks: int) -> Any:
    layout = SequenceLayout.zigzag(length, world_size=ranks)
    return cost(way.method, layout, ulysses_size=way.ulysses_size, is_causal=True, **FEATURES)


def messages(way: Way, ranks: int) -> int:
    """That a rank waits for, forward and backward: keys there, gradients back; and heads to and fro."""
    between = ranks // way.ulysses_size - 1
    return 3 * between + 8 * (way.ulysses_size - 1)


def seconds(way: Way, length: int, ranks: int, machine: Machine) -> float:
    """Of a layer, forward and backward, as if nothing were sent while something is computed."""
    found = cost_of(way, length, ranks)
    runs = 2 if ranks > way.ulysses_size else 1  # an early and a late piece
    computing = machine.computing(found.flops_forward, length * way.ulysses_size // ranks // runs)
    received = found.received_forward + found.received_backward
    return computing + received / machine.network.bandwidth + messages(way, ranks) * machine.network.latency


def efficiency(method: str, length: int, ranks: int, machine: Machine) -> float | None:
    """Of a perfect division of the work of one rank."""
    way = way_of(method, length, ranks)
    if way is None:
        return None
    alone = seconds(Way("allgather", 1), length, 1, machine)
    return alone / ranks / seconds(way, length, ranks, machine)


def break_even(machine: Machine, ranks: int, least: float = 0.5) -> int | None:
    """The shortest sequence on which `ranks` ranks are at least half as fast as so many perfect ones."""
    fitting = [n for n in LENGTHS if (efficiency("auto", n, ranks, machine) or 0) >= least]
    return min(fitting, default=None)


# Writing ------------------------------------------------------------------------------------------


def tokens(length: int) -> str:
    return f"{length // 2**20} M" if length >= 2**20 else f"{length // 1024} k"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def by_length(cell: Callable[[int, int], str], ranks: list[int]) -> str:
    head = ["tokens", *(f"{n} rank{'s' * (n > 1)}" for n in ranks)]
    return table(head, [[tokens(length), *(cell(length, n) for n in ranks)] for length in LENGTHS])


def described(way: Way | None, ranks: int) -> str:
    if way is None or ranks == 1:
        return "-"
    rest = ranks // way.ulysses_size
    if rest == 1:
        return "ulysses"
    return way.method if way.ulysses_size == 1 else f"ulysses {way.ulysses_size} x {way.method} {rest}"


def page(found: Measured, machines: list[Machine], picture: str) -> str:
    here, typical = machines[0], machines[3]
    shown = [n for n in RANKS if n in (1, 2, 8, 32, 128, 512, 1024)]
    rates = {
        **{
            f"kernels, one thread, {rows:,} query rows, forward and backward": rate.text()
            for rows, rate in found.rates.items()
        },
        "gloo between two processes, latency of an exchange of 1 KiB": f"{found.latency * 1e6:.0f} µs",
        "gloo, bandwidth received, an exchange of 32 MiB": f"{found.bandwidth / 1e9:.2f} GB/s",
        **{
            f"against one thread: {name if name == THREADS else f'two processes, {name}'}": f"{ratio:.2f} x"
            for name, ratio in found.pair.items()
        },
    }
    even = [
        [
            m.network.name,
            *(tokens(n) if n else "more than 1 M" for n in (break_even(m, w) for w in (8, 64, 1024))),
        ]
        for m in machines
    ]
    compare = [
        [
            tokens(length),
            str(n),
            *(percent(efficiency(method, length, n, typical)) for method in (*METHODS, "auto")),
        ]
        for length in (2**15, 2**17, 2**20)
        for n in (8, 64, 1024)
    ]
    weak = [
        [tokens(8192 * n), str(n), described(way_of("auto", 8192 * n, n), n)]
        + [percent(efficiency("auto", 8192 * n, n, m)) for m in machines]
        for n in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    template = Path(__file__).with_name("scaling_page.md").read_text(encoding="utf-8")
    return template.format(
        measured=table(["measured", "here"], [[*row] for row in rates.items()]),
        cell=found.cell.name,
        dtype=str(found.dtype).removeprefix("torch."),
        cores=typical.cores,
        networks=table(
            ["network", "a rank receives", "latency"],
            [[n.name, f"{n.bandwidth / 1e9:.2f} GB/s", f"{n.latency * 1e6:.0f} µs"] for n in PUBLISHED],
        ),
        picture=picture,
        typical=typical.network.name,
        efficiency=by_length(lambda length, n: percent(efficiency("auto", length, n, typical)), shown),
        chosen=by_length(lambda length, n: described(way_of("auto", length, n), n), shown[1:]),
        compare=table(["tokens", "ranks", *METHODS, "auto"], compare),
        weak=table(["tokens", "ranks", "auto takes", *(m.network.name for m in machines)], weak),
        even=table(["network", "8 ranks", "64 ranks", "1,024 ranks"], even),
        here=here.network.name,
    )


def draw(machines: list[Machine], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
    colors = ["#de4d72", "#e8963c", "#2f9e77", "#3d4a7a"]
    typical = machines[3]
    for panel, length in zip(panels, (2**15, 2**20), strict=False):
        for method, color in zip((*METHODS, "auto"), colors, strict=True):
            values = {n: efficiency(method, length, n, typical) for n in RANKS}
            kept = {n: v for n, v in values.items() if v is not None}
            style = "--" if method == "auto" else "-"
            panel.plot([*kept], [*kept.values()], style, color=color, label=method)
        panel.set_title(f"{tokens(length)} tokens, {typical.network.name}", fontsize=10)
    for panel, machine in zip([*figure.axes][2:], (machines[1], machines[4]), strict=True):
        for length, color in zip((2**13, 2**15, 2**17, 2**20), colors, strict=True):
            panel.plot(
                RANKS,
                [efficiency("auto", length, n, machine) for n in RANKS],
                color=color,
                label=f"{tokens(length)} tokens",
            )
        panel.set_title(f"auto, {machine.network.name}", fontsize=10)
        panel.set_xlabel("ranks")
    for panel in figure.axes:
        panel.set_xscale("log", base=2)
        panel.set_ylim(0, 1.05)
        panel.set_ylabel("efficiency")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#e4e2e8", linewidth=0.7)
        panel.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def machines_of(found: Measured, cores: int) -> list[Machine]:
    """That of the two processes, and those of the published networks."""
    here = Network("gloo, as measured", found.bandwidth, found.latency)
    others = [Machine(found.rates, cores, network) for network in PUBLISHED]
    return [Machine(found.rates, 1, here), *others]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/scaling.md", help="(default: docs/scaling.md)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--cores", type=int, default=32, help="of a rank of the simulation (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument("--quick", action="store_true", help="measure a small problem")
    parser.add_argument("--pair-only", action="store_true", help="measure, print, and write nothing")
    options = parser.parse_args(arguments)
    for name in ("cores", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"expected --{name} of at least 1, but got {getattr(options, name)}")
    options.cell = SMALL if options.quick else CELL
    found = measure(options)
    for rows, rate in found.rates.items():
        print(f"{rows} rows: {rate.text()} of one thread")
    print(f"gloo: {found.latency * 1e6:.0f} µs, {found.bandwidth / 1e9:.2f} GB/s")
    print("two processes: " + ", ".join(f"{name} {ratio:.2f} x" for name, ratio in found.pair.items()))
    if options.pair_only:
        return
    machines = machines_of(found, options.cores)
    for _, length in zip(steps("simulating", len(LENGTHS)), LENGTHS, strict=True):
        for ranks in RANKS:
            for method in (*METHODS, "auto"):
                efficiency(method, length, ranks, machines[0])
    picture = options.out.parent / "pictures/scaling.png"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(found, machines, f"pictures/{picture.name}"), encoding="utf-8")
    try:
        draw(machines, picture)
    except ImportError:
        print("no picture: matplotlib is not installed; to have it: pip install 'attn_ext[plot]'")
    print(f"written: {os.path.relpath(options.out)}")


if __name__ == "__main__":
    main()
