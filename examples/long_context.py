"""A character model whose sequence lies on several processes, which none of them could hold alone.

    python examples/long_context.py                                   # one process
    torchrun --nproc-per-node 2 examples/long_context.py              # the same losses, each half of the rows
    torchrun --nproc-per-node 4 examples/long_context.py --resume --steps 200
    torchrun --nproc-per-node 2 examples/long_context.py --context 16384 --method ring --text my.txt

What is special is four lines:

- a `SequenceLayout` says which rows each process has;
- the attention takes it, `MultiHeadAttention(..., context_parallel=layout)`, and is all that communicates;
- what depends on the place of a row asks the layout, `layout.positions()`;
- each process divides the losses of its rows by the rows of all, and gradients are summed over the processes.

A checkpoint has nothing of the processes in it, so a run goes on with another number of them. In `--out`:
`checkpoint.pt`, and `losses.txt` with the loss of each step. The progress bar needs tqdm:
pip install attn_ext[bench]
"""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import attn_ext
from attn_ext.distributed import SequenceLayout

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Config:
    """What the model and its training are made of; the same in a checkpoint and in a resumed run."""

    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    context: int = 2048  # characters of a sequence, on all processes together
    learning_rate: float = 3e-3
    seed: int = 0


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, config: Config, layout: SequenceLayout, method: str) -> None:
        super().__init__()
        dim = config.dim
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = attn_ext.MultiHeadAttention(
            dim,
            config.heads,
            num_kv_heads=config.kv_heads,
            bias=False,
            context_parallel=layout,
            context_parallel_method=method,
        )
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), is_causal=True)[0]
        return x + self.mlp(self.norm2(x))


class LongContextLM(nn.Module):
    """Predicts the next character of each row of this process: (1, rows) -> (1, rows, alphabet)."""

    def __init__(self, config: Config, alphabet: int, layout: SequenceLayout, method: str) -> None:
        super().__init__()
        self.layout = layout
        self.embedding = nn.Embedding(alphabet, config.dim)
        self.position = nn.Parameter(0.02 * torch.randn(config.context, config.dim))
        self.blocks = nn.ModuleList([Block(config, layout, method) for _ in range(config.layers)])
        self.norm, self.head = nn.LayerNorm(config.dim), nn.Linear(config.dim, alphabet)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position[self.layout.positions()]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# Training -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """A model on its way, with all that a checkpoint holds; alike on every process."""

    config: Config
    alphabet: str
    model: LongContextLM
    optimizer: torch.optim.Optimizer
    losses: list[float]

    @classmethod
    def start(cls, config: Config, alphabet: str, method: str) -> "Run":
        torch.manual_seed(config.seed)
        layout = SequenceLayout.zigzag(config.context)
        model = LongContextLM(config, len(alphabet), layout, method)
        return cls(
            config, alphabet, model, torch.optim.AdamW(model.parameters(), lr=config.learning_rate), []
        )

    @classmethod
    def load(cls, path: Path, method: str) -> "Run":
        state = torch.load(path, weights_only=True)
        run = cls.start(Config(**state["config"]), state["alphabet"], method)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.losses = state["losses"]
        return run

    def save(self, out: Path) -> None:
        """Whole or not at all, by one process; the others wait, so that all can read it afterwards."""
        if dist.get_rank() == 0:
            state = {
                "config": asdict(self.config),
                "alphabet": self.alphabet,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "losses": self.losses,
            }
            torch.save(state, out / "checkpoint.new")
            (out / "checkpoint.new").replace(out / "checkpoint.pt")
            (out / "losses.txt").write_text("".join(f"{loss:.6f}\n" for loss in self.losses))
        dist.barrier()

    def step(self, text: Tensor) -> float:
        """One step on a passage that the seed and the step's number decide, so that a run can be resumed."""
        config, number, layout = self.config, len(self.losses), self.model.layout
        draw = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        begin = int(torch.randint(len(text) - config.context, (), generator=draw))
        passage = text[begin : begin + config.context + 1].unsqueeze(0)
        characters, following = layout.shard(passage[:, :-1], 1), layout.shard(passage[:, 1:], 1)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (number + 1) / 20)
        scores = self.model(characters)
        loss = F.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum") / config.context
        self.optimizer.zero_grad()
        loss.backward()
        total = sum_over_processes(loss.detach(), self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(total)
        return total


def sum_over_processes(loss: Tensor, model: nn.Module) -> float:
    """Of the loss, and of the gradients in place: one exchange for all of them."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([loss.view(1), *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat)
    for grad, summed in zip(grads, flat[1:].split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
    return float(flat[0])


def train(run: Run, text: Tensor, steps: int, out: Path) -> None:
    """Take the run to so many steps; the checkpoint is written every 50 and at the end."""
    bar = progress(range(len(run.losses), steps))
    for number in bar:
        loss = run.step(text)
        if hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str(f"loss {loss:.3f}")
        if (number + 1) % 50 == 0 and number + 1 < steps:
            run.save(out)
    run.save(out)


def progress(steps: range) -> Iterator[int]:
    """A bar on the first process only."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(steps)
    return tqdm(steps, unit="step", disable=None if dist.get_rank() == 0 else True)


# The program --------------------------------------------------------------------------------------


def connect() -> None:
    """The processes that torchrun started; without it, one."""
    # The default group is a default argument in there. First imported while there is a group, as an optimizer
    # does, the module would keep it and its threads after they were destroyed.
    import torch.distributed.nn  # noqa: F401

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def encode(text: str, alphabet: str) -> Tensor:
    places = {character: place for place, character in enumerate(alphabet)}
    return torch.tensor([places[character] for character in text if character in places])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    default = Config()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", type=Path, help="(default: the repository's own documentation)")
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("long_context"), help="(default: long_context)")
    parser.add_argument("--method", default="auto", help="auto, allgather, ulysses or ring (default: auto)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    for name, value in asdict(default).items():
        if name != "learning_rate":
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args(arguments)
    if options.resume and not (options.out / "checkpoint.pt").exists():
        parser.error(f"there is no {options.out / 'checkpoint.pt'} to resume")
    own = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    options.characters = "\n".join(file.read_text(encoding="utf-8") for file in options.text or own)
    if len(options.characters) < options.context + 2:
        parser.error(
            f"the text has {len(options.characters)} characters; expected at least {options.context + 2}"
        )
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    connect()
    try:
        names = [name for name in asdict(Config()) if name != "learning_rate"]
        if options.resume:
            run = Run.load(options.out / "checkpoint.pt", options.method)
        else:
            options.out.mkdir(parents=True, exist_ok=True)
            config = Config(**{name: getattr(options, name) for name in names})
            run = Run.start(config, "".join(sorted(set(options.characters))), options.method)
        layout, first = run.model.layout, len(run.losses)
        train(run, encode(options.characters, run.alphabet), options.steps, options.out)
        if layout.rank == 0:
            rows = ", ".join(str(layout.num_rows(rank)) for rank in range(layout.world_size))
            bits = run.losses[-1] / math.log(2)
            print(f"{layout.world_size} processes of {rows} rows; steps {first + 1} to {len(run.losses)}")
            print(f"loss {run.losses[-1]:.6f}, {bits:.2f} bits a character; {options.out}/checkpoint.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
