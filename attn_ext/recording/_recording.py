"""What was recorded: tensors by layer and call, and what can be made of them."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ._store import FileStore, MemoryStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

KINDS = ("weights", "key_mass", "lse", "entropy", "top")


class Top(NamedTuple):
    """The largest weights of each row, the largest first, and the keys that they are of: (…, H, rows, k)."""

    values: Tensor
    keys: Tensor


@dataclass(frozen=True)
class CallShape:
    """Query rows and keys of a call, and which rows and heads were kept; None for all."""

    num_rows: int
    num_keys: int
    rows: list[int] | None = None
    heads: list[int] | None = None


class Recording:
    """What :func:`attn_ext.record` saw.

    ``seen[path]`` is a list with one tensor for each call of the attention at ``path``, of the first kind
    that ``what`` names; ``seen[path, "lse"]`` is of that kind. ``seen[0]`` is the first layer. ``"top"``
    gives :class:`~attn_ext.recording.Top`, a pair of weights and keys.

    Attributes:
        layers: paths of the attentions, in the order of their first calls.
        what: the kinds that were recorded.
        calls: for each path the sizes of its calls.
        not_recorded: attentions that nothing could look into, each with the reason.
        closed: whether the ``with`` block has ended.

    Example:
        >>> import torch, attn_ext
        >>> model = attn_ext.MultiHeadAttention(16, 4)
        >>> with attn_ext.record(model, what=("key_mass", "top"), top=2) as seen:
        ...     _ = model(torch.randn(3, 7, 16))
        >>> seen[0][0].shape, seen[0, "top"][0].keys.shape
        (torch.Size([3, 4, 7]), torch.Size([3, 4, 7, 2]))
    """

    def __init__(self, store: MemoryStore | FileStore, what: Sequence[str]) -> None:
        self._store = store
        self.what = tuple(what)
        self.calls: dict[str, list[CallShape]] = {}
        self.not_recorded: dict[str, str] = {}
        self.closed = False

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self.calls)

    def __getitem__(self, layer: "str | int | tuple[str | int, str]") -> list[Any]:
        layer, what = layer if isinstance(layer, tuple) else (layer, self.what[0])
        path = self.path_of(layer)
        self._check_kind(what)
        tensors = self._store.read(what, path)
        if what == "top":
            return [Top(*pair) for pair in zip(tensors, self._store.read("top_keys", path), strict=True)]
        return list(tensors)

    def path_of(self, layer: str | int) -> str:
        """The path of a layer given by path or number.

        Raises:
            KeyError: it was not recorded; the message offers names that are close.
        """
        if isinstance(layer, int):
            if not -len(self.layers) <= layer < len(self.layers):
                raise KeyError(f"layer {layer}: {len(self.layers)} were recorded")
            return self.layers[layer]
        if layer not in self.calls:
            import difflib

            near = difflib.get_close_matches(layer, self.layers, cutoff=0.5) or list(self.layers)
            raise KeyError(f"{layer!r} was not recorded; close to it: {', '.join(map(repr, near[:3]))}")
        return layer

    def _check_kind(self, what: str) -> None:
        if what not in self.what:
            raise KeyError(f"{what!r} was not recorded, but {', '.join(self.what)}: name it in what=")

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        lines = [f"Recording of {', '.join(self.what)}: {len(self)} layers"]
        for path, calls in self.calls.items():
            first, last = calls[0], calls[-1]
            sizes = f"{first.num_rows} x {first.num_keys}"
            if len(calls) > 1:
                sizes = f"{len(calls)} calls, {sizes} to {last.num_rows} x {last.num_keys}"
            lines.append(f"  {path or '(the model)'}: {sizes}")
        lines += [
            f"  {path or '(the model)'}: not recorded, {why}" for path, why in self.not_recorded.items()
        ]
        return "\n".join(lines)

    def as_tuple(self, what: str | None = None) -> tuple[Any, ...]:
        """As transformers return attentions, and BertViz takes them.

        Returns:
            A tensor (B, H, Lq, Lk) for each layer where each was called once; else, as ``generate`` does, a
            tuple of these for each call.

        Raises:
            ValueError: some layers were called more often than others.
        """
        what = what or self.what[0]
        tails = {"weights": 2, "top": 2, "key_mass": 1, "lse": 1, "entropy": 1}
        counts = {path: len(calls) for path, calls in self.calls.items()}
        if len(set(counts.values())) > 1:
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            raise ValueError(
                f"{few} was called {counts[few]} times and {many} {counts[many]} times, which is no tuple of "
                "layers: record one part of the model by layers="
            )
        tensors = [[batched(tensor, tails[what]) for tensor in self[path, what]] for path in self.layers]
        steps = tuple(zip(*tensors, strict=True))
        return steps[0] if len(steps) == 1 else steps

    def to_dataframe(self, what: str | None = None, at_least: float | None = None) -> "DataFrame":
        """A pandas DataFrame, one row a number.

        Columns: layer, call, batch, head, then row and key (``row`` counts the query rows of the call), or
        for ``"top"`` also rank, and the number under its name. ``at_least`` leaves out smaller ones.

        Raises:
            ImportError: pandas is missing.
        """
        from ._frame import to_dataframe

        return to_dataframe(self, what or self.what[0], at_least)

    def plot(
        self, layer: str | int | None = None, tokens: Sequence[str] | None = None, **options: Any
    ) -> "Figure":
        """A picture: all heads of ``layer``, or without it an overview of all layers and heads.

        Recorded weights become heat maps, key mass words over bars, and entropies a line a layer. ``options``
        are those of the functions of ``attn_ext.plot``, and ``call`` and ``batch``, which say what is
        drawn.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: tokens that do not fit.
        """
        from ..plot import plot_recording

        return plot_recording(self, layer, tokens, **options)

    def save(
        self,
        path: str | os.PathLike[str],
        tokens: Sequence[str] | None = None,
        *,
        row_tokens: Sequence[str] | None = None,
        call: int | None = None,
        batch: int = 0,
        title: str = "",
    ) -> None:
        """Write the weights as a page that any browser opens without a network: ``seen.save("x.html")``.

        Args:
            path: the file, ``.html``.
            tokens: the words of the keys, and of the query rows where there are as many; numbers if None.
            row_tokens: the words of the query rows where they are others (cross-attention).
            call: which call of each layer; by default the only one, or the calls of ``generate`` as one.
            batch: which sequence of the batch.
            title: what the page is called.

        Raises:
            ValueError: weights were not recorded; tokens that do not fit; a path that is not ``.html``.
            OSError: the file cannot be written; nothing is left of it.
        """
        from ._page import save_page

        save_page(self, Path(path), tokens, row_tokens=row_tokens, call=call, batch=batch, title=title)

    def index(self) -> dict[str, Any]:
        """What a file needs to be read again."""
        calls = {path: [asdict(call) for call in calls] for path, calls in self.calls.items()}
        return {"format": 1, "what": self.what, "calls": calls, "not_recorded": self.not_recorded}


def load(path: str | os.PathLike[str]) -> Recording:
    """The recording that ``attn_ext.record(model, to=path)`` wrote; tensors are read when they are asked for.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or not a whole one.

    Example:
        >>> import tempfile, torch, attn_ext
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = attn_ext.MultiHeadAttention(16, 4)
        >>> with attn_ext.record(model, to=f"{folder.name}/seen.npz"):
        ...     _ = model(torch.randn(3, 7, 16))
        >>> attn_ext.recording.load(f"{folder.name}/seen.npz")[0][0].shape
        torch.Size([3, 4, 7, 7])
    """
    store, index = FileStore.open(Path(path))
    seen = Recording(store, index["what"])
    seen.calls = {layer: [CallShape(**call) for call in calls] for layer, calls in index["calls"].items()}
    seen.not_recorded = index["not_recorded"]
    seen.closed = True
    return seen


def batched(tensor: Any, tail: int) -> Any:
    """(B, H, …) with ``tail`` dims after the heads."""
    if isinstance(tensor, Top):
        return Top(*(batched(part, tail) for part in tensor))
    missing = tail + 2 - tensor.dim()
    if missing > 0:
        return tensor.reshape((1,) * missing + tensor.shape)
    return tensor.flatten(0, -missing) if missing < 0 else tensor
