"""A small language model, character by character, trained on this repository's own documentation.

    python examples/char_lm.py                       # trains, draws the loss, and lets the model write
    python examples/char_lm.py --resume --steps 800  # goes on from the last checkpoint
    python examples/char_lm.py --attention sdpa      # the same model on F.scaled_dot_product_attention
    python examples/char_lm.py --compare             # both, step by step, from the same weights
    python examples/char_lm.py --text my.txt --prompt "Once"

What comes out, in the folder `--out`: `loss.png`, `checkpoint.pt`, and `model.pt`, a scripted model that
takes a text and goes on with it, also in a C++ program without Python:

    torch.jit.load("char_lm/model.pt").complete("Attention is ", 200, 0.8)

It needs matplotlib, and tqdm for the progress bar: pip install attn_ext[bench]
"""

import argparse
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attn_ext

ROOT = Path(__file__).resolve().parents[1]
ATTENTIONS = ("ours", "sdpa")


@dataclass(frozen=True)
class Config:
    """What the model and its training are made of; the same in a checkpoint and in a resumed run."""

    attention: str = "ours"
    dim: int = 128
    heads: int = 4
    layers: int = 3
    context: int = 128  # characters that the model looks back
    batch: int = 16
    learning_rate: float = 2e-3
    seed: int = 0


# The model ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention and a perceptron, each after a norm and beside a shortcut."""

    ours: Final[bool]
    heads: Final[int]

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.ours, self.heads = config.attention == "ours", config.heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        # (B, L, 3 H D) -> three of (B, H, L, D)
        query, key, value = (
            self.qkv(self.norm1(x)).unflatten(-1, [3, self.heads, -1]).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if self.ours:
            output = attn_ext.sdpa(query, key, value, is_causal=True)
        else:
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(output.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    """Predicts the next character; scripted, it carries its alphabet along and completes texts."""

    def __init__(self, config: Config, alphabet: str) -> None:
        super().__init__()
        self.context = config.context
        self.alphabet = list(alphabet)  # TorchScript would cut a str into bytes
        self.places = {character: place for place, character in enumerate(alphabet)}
        self.embedding = nn.Embedding(len(alphabet), config.dim)
        self.position = nn.Parameter(0.02 * torch.randn(config.context, config.dim))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm, self.head = nn.LayerNorm(config.dim), nn.Linear(config.dim, len(alphabet))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        """(B, L) -> logits (B, L, alphabet)."""
        x = self.embedding(characters) + self.position[: characters.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.jit.export
    def complete(self, text: str, count: int, temperature: float) -> str:
        """The text and `count` characters more, drawn at random: the lower the temperature, the likelier.

        Of the text, what is in the alphabet and in ASCII counts.
        """
        places: list[int] = []
        for character in text:
            if character in self.places:
                places.append(self.places[character])
        if len(places) == 0:
            places.append(0)
        for _ in range(count):
            window = torch.tensor([places[-self.context :]])
            scores = self.forward(window)[0, -1]
            if temperature > 0:
                place = torch.multinomial(torch.softmax(scores / temperature, -1), 1)
            else:
                place = scores.argmax()
            places.append(int(place.item()))
        return "".join([self.alphabet[place] for place in places])


# Training -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """A model on its way, with all that a checkpoint holds."""

    config: Config
    model: CharLM
    optimizer: torch.optim.Optimizer
    losses: list[float]

    @classmethod
    def start(cls, config: Config, alphabet: str) -> "Run":
        torch.manual_seed(config.seed)
        model = CharLM(config, alphabet)
        return cls(config, model, torch.optim.AdamW(model.parameters(), lr=config.learning_rate), [])

    @classmethod
    def load(cls, path: Path) -> "Run":
        state = torch.load(path, weights_only=True)
        run = cls.start(Config(**state["config"]), state["alphabet"])
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.losses = state["losses"]
        return run

    def save(self, path: Path) -> None:
        """Whole or not at all: an interrupt leaves the checkpoint before."""
        state = {
            "config": asdict(self.config),
            "alphabet": "".join(self.model.alphabet),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def step(self, text: Tensor) -> float:
        """One step on passages that the seed and the step's number decide, so that a run can be resumed."""
        config, number = self.config, len(self.losses)
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + number)
        starts = torch.randint(len(text) - config.context, (config.batch, 1), generator=generator)
        passages = text[starts + torch.arange(config.context + 1)]
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (number + 1) / 50)
        loss = F.cross_entropy(self.model(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]


def train(runs: list[Run], text: Tensor, steps: int, checkpoint: Path | None) -> None:
    """Take the runs to so many steps, side by side; the first one's checkpoint is written every 100."""
    bar = progress(range(len(runs[0].losses), steps))
    for number in bar:
        losses = [run.step(text) for run in runs]
        if hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str("loss " + " ".join(f"{loss:.3f}" for loss in losses))
        if checkpoint is not None and (number + 1) % 100 == 0:
            runs[0].save(checkpoint)
    if checkpoint is not None:
        runs[0].save(checkpoint)


def progress(steps: range) -> Iterator[int]:
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(steps)
    return tqdm(steps, unit="step", disable=None)


def encode(text: str, alphabet: str) -> Tensor:
    places = {character: place for place, character in enumerate(alphabet)}
    return torch.tensor([places[character] for character in text if character in places])


# What comes out -----------------------------------------------------------------------------------


def draw(path: Path, runs: list[Run]) -> None:
    """The loss of each step, faint, and its running mean; of two runs their difference as well."""
    from matplotlib.figure import Figure

    colors = {"ours": "#de4d72", "sdpa": "#3d4a7a"}
    labels = {"ours": "attn_ext.sdpa", "sdpa": "F.scaled_dot_product_attention"}
    figure = Figure(figsize=(7.5, 6.0 if len(runs) > 1 else 4.0), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=[2, 1][: len(runs)])[
        :, 0
    ]
    for run, style in zip(runs, ("-", (0, (4, 3))), strict=False):
        color = colors[run.config.attention]
        panels[0].plot(run.losses, color=color, alpha=0.25, linewidth=0.8)
        mean = running_mean(run.losses)
        panels[0].plot(mean, color=color, linewidth=1.8, linestyle=style, label=labels[run.config.attention])
    panels[0].set_ylabel("loss, nats a character")
    panels[0].legend(frameon=False)
    if len(runs) > 1:
        panels[1].plot(differences(runs), ".", color="#22223b", markersize=3)
        panels[1].set_yscale("symlog", linthresh=1e-8)
        panels[1].set_ylabel("difference")
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e2e8", linewidth=0.7)
    figure.savefig(path, dpi=150)


def running_mean(losses: list[float], decay: float = 0.95) -> list[float]:
    """Of the steps so far, the latest weighing most."""
    means: list[float] = []
    total = weight = 0.0
    for loss in losses:
        total, weight = decay * total + loss, decay * weight + 1
        means.append(total / weight)
    return means


def differences(runs: list[Run]) -> list[float]:
    first, second = (run.losses for run in runs)
    return [abs(a - b) for a, b in zip(first, second, strict=True)]


def script(model: CharLM, path: Path) -> None:
    """Save the scripted model; it needs nothing of this file any more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(model.eval()).save(path)


def write(path: Path, prompt: str, count: int, temperature: float) -> str:
    """Let the scripted model go on with the prompt."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(0)
        return torch.jit.load(path).complete(prompt, count, temperature)


def compare(config: Config, text: str, steps: int, out: Path) -> None:
    """Train on both attentions from the same weights over the same passages."""
    alphabet = "".join(sorted(set(text)))
    runs = [Run.start(Config(**{**asdict(config), "attention": name}), alphabet) for name in ATTENTIONS]
    train(runs, encode(text, alphabet), steps, None)
    apart = differences(runs)
    print(f"{'step':>6}  {'ours':>9}  {'F.sdpa':>9}  difference")
    for number in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        ours, theirs = (run.losses[number] for run in runs)
        print(f"{number + 1:>6}  {ours:>9.6f}  {theirs:>9.6f}  {apart[number]:.1e}")
    print(f"largest difference {max(apart):.1e}, in step {apart.index(max(apart)) + 1}")
    draw(out / "compare.png", runs)
    print(f"picture  {out / 'compare.png'}")
    if not max(apart) < 1e-2:
        raise SystemExit("the losses do not agree")


def read(files: list[Path]) -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def main(arguments: list[str] | None = None) -> None:
    default = Config()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", nargs="+", type=Path, help="(default: the repository's own documentation)")
    parser.add_argument("--steps", type=int, default=400, help="(default: 400)")
    parser.add_argument("--attention", choices=ATTENTIONS, default=default.attention, help="(default: ours)")
    parser.add_argument(
        "--compare", action="store_true", help="train both attentions and compare their losses"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("char_lm"), help="a folder (default: char_lm)")
    parser.add_argument("--prompt", default="Attention ", help="what the model goes on with")
    parser.add_argument("--characters", type=int, default=300, help="that it writes (default: 300)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0: always the likeliest (default: 0.7)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: torch's)")
    for name in ("dim", "heads", "layers", "context", "batch", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    own = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = read(options.text or [*own, *sorted((ROOT / "attn_ext").rglob("*.py"))])
    names = ("attention", "dim", "heads", "layers", "context", "batch", "seed")
    config = Config(**{name: getattr(options, name) for name in names})
    if len(text) < 2 * config.context:
        parser.error(f"the text has {len(text)} characters; expected at least {2 * config.context}")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compare:
        compare(config, text, options.steps, options.out)
        return

    checkpoint = options.out / "checkpoint.pt"
    if options.resume and not checkpoint.exists():
        parser.error(f"there is no {checkpoint} to resume")
    run = Run.load(checkpoint) if options.resume else Run.start(config, "".join(sorted(set(text))))
    alphabet = "".join(run.model.alphabet)
    print(f"{len(text)} characters, {len(alphabet)} different ones; from step {len(run.losses)}")
    train([run], encode(text, alphabet), options.steps, checkpoint)
    bits = running_mean(run.losses)[-1] / math.log(2)
    print(f"loss     {run.losses[-1]:.3f} after {len(run.losses)} steps, about {bits:.2f} bits a character")
    draw(options.out / "loss.png", [run])
    script(run.model, options.out / "model.pt")
    print(f"written  {options.out}/loss.png, checkpoint.pt, model.pt\n")
    print(write(options.out / "model.pt", options.prompt, options.characters, options.temperature))


if __name__ == "__main__":
    main()
