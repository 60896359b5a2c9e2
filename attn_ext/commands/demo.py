"""``attn-ext demo``: the attention of a text, as a table and as a picture."""

import argparse
import re
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import attn_ext
from attn_ext import plot, reference
from attn_ext._text import columns, cut

from . import CommandError

TEXT = "the quick brown fox jumps over a lazy dog"
CONTEXT = "der flinke braune fuchs springt über den hund"
KINDS = ("self", "multihead", "cross")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
EMBED_DIM, HEAD_DIM = 64, 16
MAX_HEADS = 64
MAX_WORDS = 512  # weights and picture grow with the square
TABLE_ROWS, TABLE_COLUMNS = 24, 3
CELL_COLUMNS = 8  # the least that a table of several columns gives to a word
PICTURE = Path("attention.png")
SEED = 0

T = TypeVar("T")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "demo",
        help="show the attention of a text as a table and a picture",
        description="Run an attention module over a text, with random weights from a fixed seed; print to "
        "which words each word attends most, and draw a heat map with one panel a head.",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", help=f"the text (default: {TEXT!r})")
    text.add_argument("--file", type=Path, help="a file with the text, in UTF-8")
    parser.add_argument("--kind", choices=KINDS, default="multihead", help="the module (default: multihead)")
    parser.add_argument("--context", help=f"the text that 'cross' attends to (default: {CONTEXT!r})")
    parser.add_argument("--heads", type=int, help="heads of 'multihead' (default: 4)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PICTURE",
        help="where the heat map goes: png, pdf, svg, ... (default: attention.png)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    check_options(arguments)
    words = read_words(arguments.text, arguments.file)
    context = tokenise(given(arguments.context, CONTEXT), "--context") if arguments.kind == "cross" else words
    attention = attend(arguments.kind, given(arguments.heads, 4), words, context, DTYPES[arguments.dtype])

    print(f"{attention.description}, {arguments.dtype}: {counted(words)}", end="")
    print(f" attending to {counted(context)}" if arguments.kind == "cross" else "")
    print(
        f"(weights drawn at random from seed {SEED}: this shows how attention works, not what a text means)\n"
    )
    print_table(attention.weights, numbered(words), numbered(context))
    print(f"\naccuracy  {attention.accuracy}")
    print(f"path      {attention.path}")
    print(f"picture   {draw(arguments.out, attention, words, context)}")


def given(option: T | None, default: T) -> T:
    """The option, or its default where it was not given; an empty one was given."""
    return default if option is None else option


def check_options(arguments: argparse.Namespace) -> None:
    """Refuse what does not go together, and a picture that cannot be written, before any work."""
    if arguments.context is not None and arguments.kind != "cross":
        raise CommandError(f"--context goes with --kind cross, not with {arguments.kind}")
    if arguments.heads is not None and arguments.kind != "multihead":
        raise CommandError(
            f"--heads goes with --kind multihead, not with {arguments.kind}, which has one head"
        )
    if arguments.heads is not None and not 1 <= arguments.heads <= MAX_HEADS:
        raise CommandError(f"--heads must be between 1 and {MAX_HEADS}, got {arguments.heads}")
    try:
        plot.check_picture(given(arguments.out, PICTURE))
    except ImportError as error:
        if arguments.out is not None:  # the table needs no picture, but one was asked for
            raise CommandError(str(error)) from error
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error


def read_words(text: str | None, file: Path | None) -> list[str]:
    if file is None:
        return tokenise(given(text, TEXT), "--text")
    try:
        return tokenise(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError:
        raise CommandError(f"cannot read {file}: it is not text in UTF-8") from None
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from error


def tokenise(text: str, source: str) -> list[str]:
    """Words, with their inner hyphens and apostrophes, and punctuation marks; at most MAX_WORDS."""
    words = re.findall(r"\w+(?:['\u2019-]\w+)*|[^\w\s]", text)
    if not words:
        raise CommandError(f"{source} holds no words")
    if len(words) > MAX_WORDS:
        print(f"{source} holds {len(words)} words; the first {MAX_WORDS} are taken\n")
    return words[:MAX_WORDS]


@dataclass(frozen=True)
class Attention:
    """What the demo shows."""

    description: str
    weights: Tensor  # (heads, words, context), float32
    accuracy: str
    path: str


def attend(kind: str, heads: int, words: list[str], context: list[str], dtype: torch.dtype) -> Attention:
    """Run the module over the embedded words, and the float64 reference over what the op was given."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(SEED)
        x, y = embed(words, context)
        module, description = make_module(kind, heads)
        module = module.to(dtype).eval()
        x, y = x.to(dtype), y.to(dtype)
        inputs = {"self": (x,), "cross": (x, y), "multihead": (x, x, x)}[kind]
        output, weights = module(*inputs, need_weights=True)
        query, key, value = module.project(*inputs)
        expected_output, expected_weights = reference.sdpa_with_weights(query, key, value)
        if kind == "multihead":
            expected_output = expected_output.transpose(-3, -2).flatten(-2)
        path = attn_ext.explain(query, key, value)
    accuracy = (
        f"output within {distance(output, expected_output):.1e} of the float64 reference, "
        f"weights within {distance(weights, expected_weights):.1e}"
    )
    weights = weights.float().reshape(-1, len(words), len(context))
    return Attention(description, weights, accuracy, f"{path.path} ({path.capability}): {path.reason}")


def embed(words: list[str], context: list[str]) -> tuple[Tensor, Tensor]:
    """Random vectors, the same for the same word, plus the sinusoids of their places."""
    vocabulary = sorted({word.lower() for word in [*words, *context]})
    rank = {word: i for i, word in enumerate(vocabulary)}
    embedding = nn.Embedding(len(vocabulary), EMBED_DIM)

    def embed_one(text: list[str]) -> Tensor:
        words: Tensor = embedding(torch.tensor([rank[word.lower()] for word in text]))
        return words + positions(len(text))

    return embed_one(words), embed_one(context)


def positions(length: int) -> Tensor:
    """The positional encoding of Vaswani et al. 2017, section 3.5: (length, EMBED_DIM)."""
    frequency = 10000.0 ** (-torch.arange(0, EMBED_DIM, 2) / EMBED_DIM)
    angle = torch.arange(length).unsqueeze(-1) * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def make_module(kind: str, heads: int) -> tuple[Any, str]:
    """The module, whose weights are random, and what it is called."""
    module: nn.Module
    if kind == "self":
        module, description = attn_ext.SelfAttention(EMBED_DIM), "self-attention"
    elif kind == "cross":
        module, description = attn_ext.CrossAttention(EMBED_DIM), "cross-attention"
    else:
        module = attn_ext.MultiHeadAttention(EMBED_DIM, heads, head_dim=HEAD_DIM, bias=False, out_proj=False)
        description = f"multi-head self-attention, {heads} heads" if heads > 1 else "self-attention, 1 head"
    for weight in module.parameters():
        # Wide enough for scores that tell words apart.
        nn.init.normal_(weight, std=1.1 / EMBED_DIM**0.5)
    return module, description


def distance(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference."""
    return (actual.double() - expected).abs().max().item()


def print_table(weights: Tensor, words: Sequence[str], context: Sequence[str]) -> None:
    """Each word with the words that it attends to most, by the mean of the heads, in the terminal's width."""
    shares, places = weights.mean(0)[:TABLE_ROWS].topk(min(TABLE_COLUMNS, len(context)))
    width = shutil.get_terminal_size().columns
    left, right, across = table_widths(
        max(4, *(columns(word) for word in words[:TABLE_ROWS])),
        max(columns(context[place]) for place in places.flatten().tolist()),
        places.shape[1],
        width,
    )
    header = f"{padded('word', left)}   attends to most" + (
        " (mean of the heads)" if len(weights) > 1 else ""
    )
    print(cut(header, width))
    for i, word in enumerate(words[:TABLE_ROWS]):
        row = list(zip(places[i].tolist(), shares[i].tolist(), strict=True))[:across]
        cells = [f"{padded(context[place], right)} {share:4.0%}" for place, share in row]
        print(f"{padded(word, left)}   {'   '.join(cells)}")
    if len(words) > TABLE_ROWS:
        print(f"... and {len(words) - TABLE_ROWS} words more")


def table_widths(left: int, right: int, across: int, width: int) -> tuple[int, int, int]:
    """Columns for the word and for those that it attends to, and how many of these: what fits into ``width``.

    Words are cut before one of the attended is left out, but to no less than CELL_COLUMNS.
    """
    while True:
        numbers = 8 * across  # a space and the percentage, and what sets a cell apart
        least = min(left, CELL_COLUMNS) + across * min(right, CELL_COLUMNS)
        if across == 1 or least + numbers <= width:
            break
        across -= 1
    left = min(left, max(1, (width - numbers) // (across + 1)), max(CELL_COLUMNS, width // 3))
    return left, min(right, max(1, (width - numbers - left) // across)), across


def draw(path: Path | None, attention: Attention, words: list[str], context: list[str]) -> str:
    """Write the picture, and say where it is, or how to get it."""
    title = attention.description[0].upper() + attention.description[1:]
    path = given(path, PICTURE)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plot.save(plot.heads(attention.weights, context, row_tokens=words, title=title), path)
    except ImportError as error:
        return f"none: {error}"
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    return "\n          ".join(
        [str(path), *(str(w.message) for w in caught if "no installed font" in str(w.message))]
    )


def counted(words: Sequence[str]) -> str:
    return "1 word" if len(words) == 1 else f"{len(words)} words"


def numbered(words: Sequence[str]) -> list[str]:
    """The words, those that come again with the number of their occurrence."""
    seen: dict[str, int] = {}
    result = []
    for word in words:
        seen[word] = seen.get(word, 0) + 1
        result.append(word if seen[word] == 1 else f"{word}·{seen[word]}")
    return result


def padded(word: str, width: int) -> str:
    """The word in ``width`` columns of a terminal; cut if it takes more."""
    word = cut(word, width)
    return word + " " * (width - columns(word))
