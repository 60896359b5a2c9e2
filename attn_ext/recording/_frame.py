"""A recording as a table of pandas."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._recording import CallShape, Recording, Top, batched

if TYPE_CHECKING:
    from pandas import DataFrame

_AXES = {
    "weights": ("row", "key"),
    "key_mass": ("key",),
    "lse": ("row",),
    "entropy": ("row",),
    "top": ("row", "rank"),
}
_NUMBER = {"weights": "weight", "top": "weight"}


def to_dataframe(seen: Recording, what: str, at_least: float | None) -> "DataFrame":
    """See :meth:`Recording.to_dataframe`."""
    try:
        import pandas
    except ImportError:
        raise ImportError("a DataFrame takes pandas; to have it: pip install 'attn_ext[record]'") from None
    tables = []
    for path in seen.layers:
        for number, tensor in enumerate(seen[path, what]):
            columns = _columns(tensor, what, seen.calls[path][number], at_least)
            table = pandas.DataFrame({name: column.numpy() for name, column in columns.items()})
            table.insert(0, "layer", path)
            table.insert(1, "call", number)
            tables.append(table)
    whole = pandas.concat(tables, ignore_index=True) if tables else pandas.DataFrame()
    return whole.astype({"layer": "category"}) if tables else whole


def _columns(tensor: Any, what: str, shape: CallShape, at_least: float | None) -> dict[str, Tensor]:
    axes = _AXES[what]
    keys = batched(tensor.keys, len(axes)) if isinstance(tensor, Top) else None
    numbers = batched(tensor.values if isinstance(tensor, Top) else tensor, len(axes))
    kept = torch.ones_like(numbers, dtype=torch.bool) if at_least is None else numbers >= at_least
    columns = dict(zip(("batch", "head", *axes), kept.nonzero(as_tuple=True), strict=True))
    for axis, places in (("row", shape.rows), ("head", shape.heads)):
        if places is not None and axis in columns:
            columns[axis] = torch.tensor(places, dtype=torch.long)[columns[axis]]
    if keys is not None:
        columns["key"] = keys[kept]
    number = numbers[kept]
    columns[_NUMBER.get(what, what)] = number.float() if number.dtype == torch.bfloat16 else number
    return columns
