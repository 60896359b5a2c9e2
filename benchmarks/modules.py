"""MultiHeadAttention beside nn.MultiheadAttention with the same weights, without gradients.

    python benchmarks/modules.py
    python benchmarks/modules.py --shape 8,128,768,12 --dtype bfloat16

The input is (batch, length, features), or (length, features) where the batch is 1; neither returns weights.
Calls alternate in blocks, in one process; what counts is the median. "stalled", "~" and "spread" mean what
they mean in `attn-ext bench`.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import attn_ext
from attn_ext.benchmark.report import as_ratio_row
from attn_ext.benchmark.timing import Method, alternate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = ["1,1,512,8", "1,10,512,8", "1,128,512,8", "8,128,768,12", "32,10,64,4"]


def make_calls(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """A call of each on the same input; they agree."""
    torch.manual_seed(0)
    batch, length, features, heads = shape
    theirs = nn.MultiheadAttention(features, heads, batch_first=True, dtype=dtype).eval()
    ours = attn_ext.MultiHeadAttention.from_torch(theirs)
    x = torch.randn(batch, length, features, dtype=dtype)
    if batch == 1:
        x = x[0]

    def call_ours() -> Tensor:
        return ours(x)[0]

    def call_theirs() -> Tensor:
        return theirs(x, x, x, need_weights=False)[0]

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    with torch.no_grad():
        assert_close(call_ours(), call_theirs(), rtol=tolerance, atol=tolerance)
    return {"attn_ext": call_ours, "nn.MultiheadAttention": call_theirs}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        *("--shape", "--shapes"),
        nargs="+",
        default=SHAPES,
        metavar="B,L,E,H",
        help="batch,length,features,heads",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    parser.add_argument("--block", type=float, default=0.1, help="seconds of a block (default: 0.1)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each (default: 7)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    print(f"{options.threads} threads, {attn_ext.cpu_capability()}\n")
    print("| B, L, E, H      | dtype    |   attn_ext | nn.MultiheadAttention |   ratio | spread |")
    print("| --------------- | -------- | ---------: | --------------------: | ------: | -----: |")
    for shape in options.shape:
        for dtype in options.dtype:
            calls = make_calls(tuple(int(size) for size in shape.split(",")), DTYPES[dtype])
            with torch.no_grad():
                timings = alternate(calls, Method(options.block, options.rounds))
            ours, theirs, ratio, spread = as_ratio_row(timings)
            sizes = shape.replace(",", ", ")
            print(
                f"| {sizes:<15} | {dtype:<8} | {ours:>10} | {theirs:>21} | {ratio:>7} | {spread:>6} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
