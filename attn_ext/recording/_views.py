"""Recorded weights as matrices with words along both sides, for pictures and pages."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._recording import CallShape, Recording, batched


@dataclass(frozen=True)
class View:
    """What one layer shows."""

    path: str
    tensor: Tensor
    """(H, rows, keys) of weights; (H, keys) of key mass; (H, rows) of lse and entropy."""
    rows: list[int]
    """Places of the rows in their sequence."""
    num_keys: int
    heads: list[int]


def view_of(seen: Recording, layer: str | int, what: str, call: int | None = None, batch: int = 0) -> View:
    """One call of a layer, or the calls of ``generate`` one below the other.

    Raises:
        IndexError: a call or a sequence of the batch that is not there.
        ValueError: several calls that are no generation, and none was chosen.
    """
    path = seen.path_of(layer)
    shapes, tensors = seen.calls[path], seen[path, what]
    tail = 2 if what == "weights" else 1
    if call is None and len(shapes) > 1 and what in ("weights", "entropy", "lse"):
        places = _generated(shapes)
        if places is None:
            raise ValueError(
                f"{path or 'the model'} was called {len(shapes)} times, and not by a generation that adds "
                f"keys: choose one by call=0 to call={len(shapes) - 1}"
            )
    else:
        call = _checked(call if call is not None else len(shapes) - 1, len(shapes), "call", path)
        shapes, tensors, places = [shapes[call]], [tensors[call]], [0]
    parts = [_of_batch(batched(tensor, tail), batch, path) for tensor in tensors]
    rows = [
        start + row
        for start, shape in zip(places, shapes, strict=True)
        for row in (range(shape.num_rows) if shape.rows is None else shape.rows)
    ]
    num_keys = max(shape.num_keys for shape in shapes)
    if len(parts) > 1:
        parts = [torch.cat([_widened(part, num_keys) if tail == 2 else part for part in parts], 1)]
    whole = parts[0]
    return View(path, whole, rows, num_keys, shapes[0].heads or list(range(whole.shape[0])))


def _generated(shapes: list[CallShape]) -> list[int] | None:
    """Where the rows of each call begin, if the calls continue each other."""
    pairs = list(itertools.pairwise(shapes))
    if all(after.num_keys == before.num_keys + after.num_rows for before, after in pairs):
        return [shape.num_keys - shape.num_rows for shape in shapes]
    if all(after.num_keys == before.num_keys and after.num_rows == 1 for before, after in pairs):
        starts = [0]
        for shape in shapes[:-1]:
            starts.append(starts[-1] + shape.num_rows)
        return starts
    return None


def _checked(number: int, size: int, name: str, path: str) -> int:
    if not -size <= number < size:
        raise IndexError(f"{name}={number}: {path or 'the model'} has {size}")
    return number % size


def _of_batch(tensor: Any, batch: int, path: str) -> Tensor:
    chosen: Tensor = tensor[_checked(batch, tensor.shape[0], "batch", path)]
    return chosen.float()


def _widened(part: Tensor, num_keys: int) -> Tensor:
    return torch.nn.functional.pad(part, (0, num_keys - part.shape[-1]))


def words_of(
    view: View, tokens: Sequence[str] | None, row_tokens: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The words of rows and keys; places where no words are given.

    Raises:
        ValueError: they do not fit.
    """
    name = view.path or "the model"
    if tokens is not None and len(tokens) != view.num_keys:
        raise ValueError(
            f"tokens has {len(tokens)} words, but {name} looks at {view.num_keys} keys: pass one word a key"
        )
    keys = list(map(str, tokens)) if tokens is not None else [str(i) for i in range(view.num_keys)]
    needed = max(view.rows, default=-1) + 1
    if row_tokens is not None and len(row_tokens) < needed:
        raise ValueError(
            f"row_tokens has {len(row_tokens)} words, but {name} has {needed} query rows: pass one word a row"
        )
    words = list(map(str, row_tokens)) if row_tokens is not None else keys
    if len(words) < needed:
        words = [str(i) for i in range(needed)]
    return [words[row] for row in view.rows], keys
