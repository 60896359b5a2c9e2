"""One training step of a layer: forward, loss, backward, Adam; ours against the same layer on F.sdpa.

    python benchmarks/training_step.py
    python benchmarks/training_step.py --layers swin --dtype bfloat16 --dropout 0.1

Transformer layers (norm first) of the sizes of BERT base with padding, GPT-2 with causality, and Swin with
its learned relative position bias, as in the grid of `attn-ext bench`. Both copies of a layer start from the
same weights and take their steps in alternating blocks, in one process; what counts is the median. bfloat16
is autocast over float32 weights. "stalled", "~" and "spread" mean what they mean in `attn-ext bench`.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attn_ext
from attn_ext.benchmark.report import as_ratio_row
from attn_ext.benchmark.timing import Method, alternate

Attend = Callable[..., Tensor]
ATTENTIONS: dict[str, Attend] = {"attn_ext": attn_ext.sdpa, "F.sdpa": F.scaled_dot_product_attention}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layer(nn.Module):
    """A transformer layer, norm first; `bias` (1, heads, L, L) is learned where there is one."""

    def __init__(self, attend: Attend, dim: int, heads: int, *, is_causal: bool, dropout: float) -> None:
        super().__init__()
        self.attend, self.heads, self.is_causal, self.dropout = attend, heads, is_causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def mask(self, given: Tensor | None) -> Tensor | None:
        return given

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        # (B, L, 3 H D) -> three of (B, H, L, D)
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        output = self.attend(query, key, value, self.mask(mask), self.dropout, self.is_causal)
        x = x + self.out(output.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class SwinLayer(Layer):
    """Windows of window x window patches; the bias of a pair of patches is that of their offset."""

    def __init__(self, attend: Attend, dim: int, heads: int, *, window: int, dropout: float) -> None:
        super().__init__(attend, dim, heads, is_causal=False, dropout=dropout)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(2 * [torch.arange(window)], indexing="ij")).flatten(1)
        offset = place[:, :, None] - place[:, None, :] + window - 1  # (2, L, L)
        self.register_buffer("index", offset[0] * (2 * window - 1) + offset[1])

    def mask(self, given: Tensor | None) -> Tensor | None:
        bias = self.table[self.index].permute(2, 0, 1).unsqueeze(0)  # (1, H, L, L)
        return bias.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else bias


@dataclass(frozen=True)
class Setting:
    """A layer and what it is fed."""

    make: Callable[[Attend, float], Layer]
    input: tuple[int, int, int]  # B, L, dim
    padded: bool = False


SETTINGS = {
    "bert-128": Setting(
        lambda a, p: Layer(a, 768, 12, is_causal=False, dropout=p), (8, 128, 768), padded=True
    ),
    "bert-512": Setting(
        lambda a, p: Layer(a, 768, 12, is_causal=False, dropout=p), (4, 512, 768), padded=True
    ),
    "gpt2-1024": Setting(lambda a, p: Layer(a, 768, 12, is_causal=True, dropout=p), (1, 1024, 768)),
    "swin": Setting(lambda a, p: SwinLayer(a, 128, 4, window=7, dropout=p), (64, 49, 128)),
}


def make_steps(setting: Setting, dtype: torch.dtype, dropout: float) -> dict[str, Callable[[], float]]:
    """For each attention, a function that takes one training step and returns the loss before it."""
    torch.manual_seed(0)
    layer = setting.make(ATTENTIONS["attn_ext"], dropout)
    x, target = torch.randn(2, *setting.input)
    b, length, _ = setting.input
    lengths = torch.linspace(length, 2 * length // 3, b).round()
    mask = (torch.arange(length) < lengths[:, None])[:, None, None] if setting.padded else None

    def make_step(attend: Attend) -> Callable[[], float]:
        model = copy.deepcopy(layer)
        model.attend = attend
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

        def step() -> float:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                output = model(x, mask)
            loss = F.mse_loss(output.float(), target)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    return {name: make_step(attend) for name, attend in ATTENTIONS.items()}


def check(steps: dict[str, Callable[[], float]], dtype: torch.dtype, dropout: float) -> None:
    """The losses of the first steps agree, to the rounding of the dtype; with dropout only roughly."""
    tolerance = 0.1 if dropout else {torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]
    for number in range(3):
        ours, theirs = (step() for step in steps.values())
        if not abs(ours - theirs) <= tolerance * abs(theirs):
            raise SystemExit(f"the losses of step {number} differ: ours {ours}, F.sdpa's {theirs}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights (default: 0)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    parser.add_argument("--block", type=float, default=0.3, help="seconds of a block (default: 0.3)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each (default: 7)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    print(f"{options.threads} threads, {attn_ext.cpu_capability()}, dropout {options.dropout}\n")
    print("| layer     | dtype    |   attn_ext |     F.sdpa |   ratio | spread |")
    print("| --------- | -------- | ---------: | ---------: | ------: | -----: |", flush=True)
    for name in options.layers:
        for dtype in options.dtype:
            steps = make_steps(SETTINGS[name], DTYPES[dtype], options.dropout)
            check(steps, DTYPES[dtype], options.dropout)
            timings = alternate(steps, Method(options.block, options.rounds))
            ours, theirs, ratio, spread = as_ratio_row(timings)
            row = f"| {name:<9} | {dtype:<8} | {ours:>10} | {theirs:>10} | {ratio:>7} | {spread:>6} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
