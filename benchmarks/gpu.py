"""attn_ext beside F.scaled_dot_product_attention and FlexAttention on an NVIDIA GPU.

    python benchmarks/gpu.py                                       the grid, forward and backward
    python benchmarks/gpu.py --dtype bfloat16 --mode fwd --cells llama-2048
    python benchmarks/gpu.py --graph                               the same without the processor's share
    python benchmarks/gpu.py --sides                               what no fused kernel of PyTorch's has
    python benchmarks/gpu.py --host --cells bert-128               where the processor's time goes

Calls alternate in blocks, in one process, each round of them in another order, and the composition's, whose
memory slows what follows, after all others; a block is timed by events around as many calls as take
`--block` milliseconds, so that it holds what a loop of calls takes: the GPU's time, or where that is
shorter the processor's. With `--graph` the calls are replays of CUDA graphs, which leaves the GPU's time
alone, of forward or of forward and backward. What counts is the median of the blocks. "best" is the
fastest of F.sdpa as it chooses by itself and of each of its backends that takes the call.
"""

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_ext
from attn_ext.benchmark.cells import DTYPES, GRID, OUTSIDE, Cell, Problem, Shape, make_problem
from attn_ext.benchmark.peers import CONTENDERS, OURS, explain

Call = Callable[[], Any]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
#: What is timed with `--sides`.
SIDES = Cell("sides", Shape(1, 16, 16, 4096, 4096, 128, 128))
WINDOW = 512


def on_gpu(problem: Problem) -> Problem:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().cuda().requires_grad_(tensor.requires_grad)

    names = ("query", "key", "value", "attn_mask", "grad_output")
    return replace(problem, **{name: move(getattr(problem, name)) for name in names})


def timed(problem: Problem, attend: Call) -> Call:
    if problem.mode == "fwd":
        return attend
    output = attend()
    inputs = problem.differentiable()
    incoming = problem.grad_output[..., -output.shape[-2] :, :]
    return lambda: torch.autograd.grad(output, inputs, incoming, retain_graph=True)


class Timed:
    """Blocks of one call."""

    def __init__(self, call: Call, milliseconds: float) -> None:
        self.call = call
        self.blocks: list[float] = []
        for _ in range(3):
            call()
        self.repeats = 3
        self.repeats = max(3, min(1000, round(milliseconds / max(self.run(), 1e-3))))

    def run(self) -> float:
        """Milliseconds a call."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.repeats // 4):  # what ran before has left its own in caches
            self.call()
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self.repeats):
            self.call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.repeats

    @property
    def microseconds(self) -> float:
        return 1e3 * statistics.median(self.blocks)


def alternate(calls: dict[str, Call], rounds: int, milliseconds: float) -> dict[str, Timed]:
    """Those that run; what a backend refuses is left out."""
    timings = {}
    for name, call in calls.items():
        try:
            timings[name] = Timed(call, milliseconds)
        except RuntimeError:
            torch.cuda.synchronize()
    # What the composition allocates slows what follows: it has rounds of its own, after all others.
    shuffle = random.Random(0).shuffle
    for together in (set(timings) - {"composition"}, set(timings) & {"composition"}):
        order = [timings[name] for name in sorted(together)]
        for _ in range(rounds):
            shuffle(order)
            for timing in order:
                timing.blocks.append(timing.run())
    return timings


def run_under(context: Callable[[], Any], call: Call) -> Call:
    def run() -> Any:
        with context():
            return call()

    return run


def graphed(step: Call) -> Call:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def contenders(problem: Problem, graph: bool) -> dict[str, Call]:
    """Backward goes by what forward has chosen."""
    calls: dict[str, Call] = {}
    ours, f_sdpa = (next(c for c in CONTENDERS if c.name == name) for name in (OURS, "F.sdpa"))
    if graph:
        step = replace(problem, mode="fwdbwd" if problem.mode == "bwd" else "fwd")
        return {"ours": graphed(ours.prepare(step, 1)), "F.sdpa": graphed(f_sdpa.prepare(step, 1))}
    for name, contender, context in (
        ("ours", ours, nullcontext),
        ("F.sdpa", f_sdpa, nullcontext),
        *((name, f_sdpa, partial(sdpa_kernel, [backend])) for name, backend in BACKENDS.items()),
        ("composition", ours, partial(sdpa_kernel, [SDPBackend.MATH])),
    ):
        try:
            with context():
                call = contender.prepare(problem, 1)
        except RuntimeError:
            continue
        # Entering a context takes as long as a short call.
        inside = problem.mode == "bwd" and name != "composition"
        calls[name] = call if context is nullcontext or inside else run_under(context, call)
    return calls


def print_row(problem: Problem, timings: dict[str, Timed]) -> float:
    best = min((t.microseconds, name) for name, t in timings.items() if name not in ("ours", "composition"))
    us = timings["ours"].microseconds
    with torch.no_grad():
        path = explain(problem).path
    ratio = timings["F.sdpa"].microseconds / us
    print(
        f"{problem.cell.name:13} {str(problem.dtype)[6:]:9} {problem.mode:3} {path:10}"
        f"{us:10.1f} {timings['F.sdpa'].microseconds:10.1f} {ratio:6.2f} {best[0]:10.1f} {best[0] / us:6.2f} "
        f"{best[1]:10}"
        + (f"{timings['composition'].microseconds / us:8.1f}" if "composition" in timings else ""),
        flush=True,
    )
    return ratio


def grid(cells: list[Cell], options: argparse.Namespace) -> None:
    head = f"{'cell':13} {'dtype':9} {'':3} {'path':10}{'us':>10} {'F.sdpa us':>10} {'ratio':>6}"
    print(f"{head} {'best us':>10} {'ratio':>6} {'':10}{'comp.':>8}")
    ratios = []
    for dtype in options.dtype:
        for mode in options.mode:
            for cell in cells:
                problem = on_gpu(make_problem(cell, mode, DTYPES[dtype]))
                timings = alternate(contenders(problem, options.graph), options.rounds, options.block)
                ratios.append(print_row(problem, timings))
    below, mean = sum(ratio < 0.98 for ratio in ratios), statistics.geometric_mean(ratios)
    print(f"{len(ratios)} cells, {below} below 0.98 of F.sdpa, geometric mean {mean:.3f}")


def host(cells: list[Cell], options: argparse.Namespace) -> None:
    """The processor's share: what it takes to hand out a call, and what of it each operator takes."""
    from torch.profiler import ProfilerActivity, profile

    for dtype, mode, cell in product(options.dtype, options.mode, cells):
        problem = on_gpu(make_problem(cell, mode, DTYPES[dtype]))
        for name in (OURS, "F.sdpa"):
            call = next(c for c in CONTENDERS if c.name == name).prepare(problem, 1)
            microseconds = statistics.median(handing_out(call) for _ in range(50 * options.rounds))
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                handing_out(call)
            print(f"{cell.name} {dtype} {mode}, {name}: {microseconds:.1f} us of the processor")
            averages = profiled.key_averages()
            print(averages.table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))


def handing_out(call: Call, calls: int = 20) -> float:
    """Microseconds a call, of fewer calls than the GPU's queue takes."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return 1e6 * (end - begin) / calls


def side_calls(problem: Problem, flex: Any) -> dict[str, dict[str, Call]]:
    """By what is asked: our call, and FlexAttention's where it has a word for it."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = problem.query, problem.key, problem.value
    heads, length = q.shape[1], q.shape[2]
    sinks = torch.randn(heads, device="cuda")
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length)
    window = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= WINDOW), None, None, length, length)

    def capped(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    def with_sink() -> Tensor:
        output, lse = flex(q, k, v, block_mask=causal, return_lse=True)
        return (output * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)).to(q.dtype)

    attend = partial(attn_ext.sdpa, q, k, v)
    calls: dict[str, dict[str, Call]] = {
        "causal": {
            "ours": partial(attend, is_causal=True),
            "flex": partial(flex, q, k, v, block_mask=causal),
        },
        "window": {
            "ours": partial(attend, is_causal=True, window_left=WINDOW),
            "flex": partial(flex, q, k, v, block_mask=window),
        },
        "softcap": {
            "ours": partial(attend, is_causal=True, softcap=30.0),
            "flex": partial(flex, q, k, v, capped, block_mask=causal),
        },
        "softcap, one row": {
            "ours": partial(attn_ext.sdpa, q[:, :, -1:], k, v, softcap=30.0),
            "flex": partial(flex, q[:, :, -1:], k, v, capped),
        },
        "sinks": {"ours": partial(attend, is_causal=True, sinks=sinks), "flex": with_sink},
        "dropout": {
            "ours": partial(attend, dropout_p=0.1),
            "F.sdpa": partial(F.scaled_dot_product_attention, q, k, v, dropout_p=0.1),
        },
        "weights": {"ours": partial(attn_ext.sdpa_with_weights, q, k, v)},
        "key mass": {"ours": partial(attn_ext.sdpa_with_key_mass, q, k, v)},
    }
    if problem.mode == "fwd":
        buffer = torch.empty(*q.shape[:3], length, dtype=q.dtype, device="cuda")
        calls["weights"]["writing them"] = partial(buffer.fill_, 1.0)
    return calls


def sides(options: argparse.Namespace) -> None:
    """What F.sdpa has no word for, or draws otherwise."""
    from torch.nn.attention.flex_attention import flex_attention

    for dtype in options.dtype:
        for mode in options.mode:
            problem = on_gpu(make_problem(SIDES, mode, DTYPES[dtype]))
            for name, calls in side_calls(problem, torch.compile(flex_attention, dynamic=False)).items():
                if options.only and name not in options.only:
                    continue
                timings = alternate(
                    {
                        who: call if who == "writing them" else timed(problem, partial(first, call))
                        for who, call in calls.items()
                    },
                    options.rounds,
                    options.block,
                )
                us = timings["ours"].microseconds
                others = "".join(
                    f"  {who} {timing.microseconds:.1f} us, ratio {timing.microseconds / us:.2f}"
                    for who, timing in timings.items()
                    if who != "ours"
                )
                print(f"{name:10} {dtype:9} {mode}  {us:10.1f} us{others}", flush=True)


def first(call: Call) -> Tensor:
    outputs = call()
    output: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return output


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = {cell.name: cell for cell in (*GRID, *OUTSIDE)}
    parser.add_argument("--cells", nargs="+", choices=names, default=[cell.name for cell in GRID])
    parser.add_argument("--outside", action="store_true", help="the shapes outside of the grid as well")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float16", "float32"])
    parser.add_argument("--mode", nargs="+", choices=["fwd", "bwd"], default=["fwd", "bwd"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=float, default=3.0, help="milliseconds (default: 3)")
    parser.add_argument("--graph", action="store_true", help="replays of CUDA graphs")
    parser.add_argument("--sides", action="store_true", help="sinks, softcap, weights and the like instead")
    parser.add_argument("--only", nargs="+", default=[], help="of the sides, these")
    parser.add_argument("--host", action="store_true", help="the processor's share, operator by operator")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU: torch.cuda.is_available() is False")
    warnings.simplefilter("ignore")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"
    )
    chosen = [names[name] for name in options.cells] + (list(OUTSIDE) if options.outside else [])
    if options.sides:
        sides(options)
    elif options.host:
        if options.graph:
            parser.error("--host is of eager calls: leave --graph out")
        host(chosen, options)
    else:
        grid(chosen, options)


if __name__ == "__main__":
    main()
