"""Peak memory and time of a call and its derivatives over growing lengths, beside the plain composition.

    python benchmarks/memory.py
    python benchmarks/memory.py --lengths 4096 16384 --heads 4 --dtype bfloat16
    python benchmarks/memory.py --lengths 128 256 512 --heads 96 --dtype bfloat16 --calls backward

Where weights are saved for backward, a row of its own shows the call that makes them again.
Every figure comes from a process of its own (Linux): by how much its peak resident memory grew over what it
held before the call, outputs and gradients included, and how long the call took.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

import attn_ext

MIB = 2**20
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Case = tuple[str, str, int]  # call, attention, length


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, its weights in memory."""
    return torch.softmax(query @ key.mT * query.size(-1) ** -0.5, -1) @ value


def unsaved(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with attn_ext.save_weights_for_backward(False):
        return attn_ext.sdpa(query, key, value)


def forward(attend: Attend, inputs: list[Tensor]) -> None:
    attend(*inputs)


def backward(attend: Attend, inputs: list[Tensor]) -> None:
    inputs = [x.requires_grad_() for x in inputs]
    attend(*inputs).sum().backward()


def forward_mode(attend: Attend, inputs: list[Tensor]) -> None:
    with forward_ad.dual_level():
        attend(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in inputs))


def double_backward(attend: Attend, inputs: list[Tensor]) -> None:
    inputs = [x.requires_grad_() for x in inputs]
    grads = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
    torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)


UNSAVED = "attn_ext, no weights saved"
ATTENTIONS: dict[str, Attend] = {"attn_ext": attn_ext.sdpa, UNSAVED: unsaved, "plain": plain}
CALLS = {
    "forward": forward,
    "backward": backward,
    "forward mode": forward_mode,
    "double backward": double_backward,
}


def peak_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def measure(attention: str, call: str, length: int, heads: int, dtype: str) -> tuple[float, float]:
    """MiB and seconds of the call, the libraries being warm."""

    def inputs(rows: int) -> list[Tensor]:
        return [torch.randn(1, heads, rows, 64, dtype=getattr(torch, dtype)) for _ in range(3)]

    CALLS[call](ATTENTIONS[attention], inputs(128))
    own = inputs(length)
    before, start = peak_bytes(), time.perf_counter()
    CALLS[call](ATTENTIONS[attention], own)
    return (peak_bytes() - before) / MIB, time.perf_counter() - start


def saves_weights(call: str, length: int, heads: int, dtype: str) -> bool:
    x = torch.empty(1, heads, length, 64, dtype=getattr(torch, dtype), requires_grad=True)
    return call == "backward" and attn_ext.explain(x, x, x).saved_bytes > 0


def with_progress(cases: list[Case]) -> Iterable[Case]:
    try:
        from tqdm import tqdm
    except ImportError:  # the extra `bench` brings it
        return cases
    return tqdm(cases, unit="call", disable=None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS))
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", help="as torch names it")
    parser.add_argument("--plain-up-to", type=int, default=4096, help="longest length of `plain`")
    args = parser.parse_args()

    def is_measured(call: str, attention: str, length: int) -> bool:
        if attention == UNSAVED:
            return saves_weights(call, length, args.heads, args.dtype)
        return attention == "attn_ext" or length <= args.plain_up_to

    cases = [
        (call, attention, length)
        for call in args.calls
        for attention in ATTENTIONS
        for length in args.lengths
        if is_measured(call, attention, length)
    ]
    context = multiprocessing.get_context("spawn")
    found = {}
    for call, attention, length in with_progress(cases):
        with context.Pool(1) as pool:
            found[call, attention, length] = pool.apply(
                measure, (attention, call, length, args.heads, args.dtype)
            )
    print(f"{args.heads} heads of {args.dtype}, D = 64: MiB at the peak, and time\n")
    print("| call | attention | " + " | ".join(f"L = {length}" for length in args.lengths) + " |")
    print("|---|---|" + "--:|" * len(args.lengths))
    for call in args.calls:
        for attention in ATTENTIONS:
            if all((call, attention, length) not in found for length in args.lengths):
                continue
            row = [found.get((call, attention, length)) for length in args.lengths]
            cells = ["-" if f is None else f"{f[0]:.0f} MiB · {f[1]:.2f} s" for f in row]
            print(f"| {call} | {attention} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
