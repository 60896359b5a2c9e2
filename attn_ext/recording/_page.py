"""Recorded weights as one HTML file: canvas, no network, any number of heads.

A head is a comment of the page, ``<!--layer.head data-->``, which a browser reads past at memory speed, and
unpacks when the head is looked at: raw deflate in base64 of the largest weight of each row, float32, and of
a byte a weight, 255 * sqrt(weight / largest of its row). The overview comes first, in small.
"""

import base64
import html
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..plot._style import DARK_COLORS, LIGHT_COLORS
from ._files import whole_file
from ._recording import Recording
from ._views import View, view_of, words_of

#: Cells in a page; of more, neighbours are joined to their largest.
MAX_CELLS = 1 << 28
THUMB_SIDE = 48
SCRIPTS = ("draw.js", "head.js", "page.js")


def save_page(
    seen: Recording,
    path: Path,
    tokens: Sequence[str] | None,
    *,
    row_tokens: Sequence[str] | None,
    call: int | None,
    batch: int,
    title: str,
) -> None:
    """See :meth:`Recording.save`."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"cannot write {path} as a page: expected the extension .html")
    if "weights" not in seen.what:
        raise ValueError(f"a page shows weights, and recorded were {', '.join(seen.what)}: what='weights'")
    words, sizes = [], []
    for name in seen.layers:  # all are looked at before anything is written
        view = view_of(seen, name, "weights", call, batch)
        words.append(words_of(view, tokens, row_tokens))
        sizes.append(view.tensor.shape)
    step = _step(sizes)
    layers = [_Layer(seen, name, call, batch, step) for name in seen.layers]
    with whole_file(path) as file:
        file.write(_top(layers, words, step, title or "Attention", sizes).encode())
        for number, layer in enumerate(_shown_progress(layers)):
            for head, data in enumerate(layer.packed()):
                file.write(b"<!--%d.%d %s-->\n" % (number, head, data))
        file.write(b"</div>\n</body>\n</html>\n")


class _Layer:
    """One layer of the page, read again when it is written: only one is held at a time."""

    def __init__(self, seen: Recording, path: str, call: int | None, batch: int, step: int) -> None:
        self.arguments = (seen, path, "weights", call, batch)
        self.path = path
        self.step = step

    def view(self) -> View:
        return view_of(*self.arguments)

    def cells(self) -> Tensor:
        """(H, rows, columns), each cell the largest of step by step weights."""
        weights = self.view().tensor
        if not weights.amax(-1).isfinite().all():  # a row with NaN is NaN everywhere
            weights = weights.nan_to_num(0.0)
        return pooled(weights, self.step, self.step)

    def packed(self) -> Iterable[bytes]:
        for head in self.cells():
            largest = head.amax(-1, keepdim=True) if head.numel() else head.new_zeros(head.shape[0], 1)
            yield _base64(largest.numpy().astype("<f4").tobytes() + _bytes(head, largest))


def pooled(weights: Tensor, rows: int, columns: int) -> Tensor:
    """The largest of each block of (…, rows, columns)."""
    if rows == columns == 1 or weights.numel() == 0:
        return weights
    return F.max_pool2d(weights, (rows, columns), ceil_mode=True)


def _bytes(weights: Tensor, largest: Tensor) -> bytes:
    """255 * sqrt(weight / largest), rounded."""
    factor = torch.where(largest > 0, 255.0**2 / largest, 0.0)
    return (weights * factor).sqrt_().add_(0.5).to(torch.uint8).numpy().tobytes()


def _base64(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(data) + packer.flush())


def _step(sizes: list[torch.Size]) -> int:
    """The least side of a block that keeps the page below MAX_CELLS."""
    step = 1
    while sum(h * math.ceil(r / step) * math.ceil(k / step) for h, r, k in sizes) > MAX_CELLS:
        step += 1
    return step


def _top(
    layers: list[_Layer],
    words: list[tuple[list[str], list[str]]],
    step: int,
    title: str,
    sizes: list[torch.Size],
) -> str:
    """The page up to its heads."""
    texts: list[list[str]] = []
    thumbs, described = bytearray(), []
    for layer, names in zip(layers, words, strict=True):
        view = layer.view()
        cells = layer.cells()
        described.append(
            {
                "name": layer.path or "the model",
                "heads": view.heads,
                "rows": cells.shape[1],
                "columns": cells.shape[2],
                "step": step,
                "same": view.rows == list(range(view.num_keys)) and names[0] == names[1],
                "words": [_number_of(texts, text) for text in names],
                "thumbs": [_add_thumb(thumbs, head) for head in cells],
            }
        )
    data = {
        "layers": described,
        "texts": texts,
        "light": LIGHT_COLORS,
        "dark": DARK_COLORS,
        "summary": _summary(sizes),
        "precision": _precision(step),
    }
    page = files("attn_ext.recording") / "page"
    parts = {
        "title": html.escape(title),
        "css": (page / "page.css").read_text(encoding="utf-8"),
        "js": "\n".join((page / name).read_text(encoding="utf-8") for name in SCRIPTS),
        "data": json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
        "thumbs": _base64(bytes(thumbs)).decode(),
    }
    template = (page / "page.html").read_text(encoding="utf-8")
    return re.sub("@(\\w+)@", lambda name: parts[name[1]], template)


def _number_of(texts: list[list[str]], text: list[str]) -> int:
    if text not in texts:
        texts.append(text)
    return texts.index(text)


def _add_thumb(thumbs: bytearray, head: Tensor) -> dict[str, int]:
    """Append a head in small, and say where it is."""
    block = [math.ceil(max(size, 1) / THUMB_SIDE) for size in head.shape]
    small = pooled(head.unsqueeze(0), *block)[0]
    at = len(thumbs)
    thumbs += _bytes(small, small.amax(-1, keepdim=True)) if small.numel() else b""
    return {"at": at, "rows": small.shape[0], "columns": small.shape[1]}


def _summary(sizes: list[torch.Size]) -> str:
    heads = sorted({size[0] for size in sizes})
    rows, keys = max(size[1] for size in sizes), max(size[2] for size in sizes)
    across = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
    layers = "1 layer" if len(sizes) == 1 else f"{len(sizes)} layers"
    return f"{layers}, {across} heads each, {rows:,} \N{MULTIPLICATION SIGN} {keys:,} words."


def _precision(step: int) -> str:
    text = (
        "Weights are kept in 8 bits, with finer steps for smaller ones: none is further from its true value "
        "than 0.4 % of the largest of its row."
    )
    if step > 1:
        text += f" Each cell is the largest of {step} \N{MULTIPLICATION SIGN} {step} weights."
    return text


def _shown_progress(layers: list[_Layer]) -> Iterable[_Layer]:
    """With a bar, where there is a terminal and a program for it."""
    if len(layers) > 3 and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            return layers
        bar: Any = tqdm(layers, desc="writing the page", unit="layer")
        return bar  # type: ignore[no-any-return]
    return layers
