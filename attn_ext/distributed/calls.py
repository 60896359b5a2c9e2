"""The calls of the op in which the rows of one rank meet the keys that it has."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._packed import sdpa_packed_with_lse
from ..functional import sdpa, sdpa_with_lse
from .layout import Run
from .plan import Reach

DROPOUT_BLOCK = 64  # columns whose draws are made together: a call's first column is a multiple of it


class Call(NamedTuple):
    """What is the same in all calls."""

    is_causal: bool
    window_left: int | None
    window_right: int | None
    scale: float | None
    enable_gqa: bool
    softcap: float
    dropout_p: float
    seed: Tensor | None  # of the dropout draw
    return_lse: bool
    return_key_mass: bool
    first_head: int = 0  # of the queries, among those of all ranks

    @property
    def reach(self) -> Reach:
        return Reach.of(self.is_causal, self.window_left, self.window_right)

    def scalars(self, query_offset: int) -> list[Any]:
        """As the internal pair takes them."""
        windows = (self.window_left, self.window_right, query_offset, self.softcap)
        return [self.dropout_p, self.is_causal, self.scale, self.enable_gqa, *windows]

    def options(self) -> dict[str, Any]:
        """As the public functions take them."""
        names = ("is_causal", "scale", "enable_gqa", "window_left", "window_right", "softcap")
        return {name: getattr(self, name) for name in names}


class Results(NamedTuple):
    """Of some rows: what the call returns of them, and the mass of the keys that they saw."""

    output: Tensor
    lse: Tensor | None
    key_mass: Tensor | None


def attend(
    call: Call,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    query_offset: int,
    origin: Sequence[int],
) -> Results:
    """One call; ``origin`` is its place in the draw of all: batch, head, row and column."""
    if call.dropout_p == 0.0 and not call.return_key_mass:
        query, key, value = tensors
        options = {**call.options(), "attn_mask": mask, "sinks": sinks, "query_offset": query_offset}
        if not call.return_lse:
            return Results(sdpa(query, key, value, **options), None, None)
        return Results(*sdpa_with_lse(query, key, value, **options), None)
    placed = {"dropout_origin": list(origin)} if call.dropout_p else {}
    output, lse, _, key_mass = torch.ops.attn_ext._sdpa_forward(
        *tensors,
        mask,
        sinks,
        call.seed,
        None,
        *call.scalars(query_offset),
        False,
        call.return_key_mass,
        **placed,
    )
    return Results(output, lse if call.return_lse else None, key_mass)


def origin_of(call: Call, query: Tensor, sequence: int, row: int, column: int) -> list[int]:
    """In the draw of a batch of all sequences, each with the leading dimensions of the query."""
    batches = query.shape[:-3].numel()
    return [sequence * batches, call.first_head, row, column]


def attend_packed(
    call: Call, tensors: Sequence[Tensor], sizes: Sequence[int], sinks: Tensor | None
) -> Results:
    """Whole sequences in one call."""
    shape = tensors[0].shape[:-1]
    query, key, value = (x.reshape(x.shape[-3:]).transpose(0, 1) for x in tensors)
    ends = torch.tensor(list(accumulate(sizes, initial=0)))
    output, lse = sdpa_packed_with_lse(query, key, value, ends, **call.options(), sinks=sinks)
    output = output.transpose(0, 1).reshape(*shape, output.shape[-1])
    return Results(output, lse.reshape(shape) if call.return_lse else None, None)


def can_pack(call: Call, tensors: Sequence[Tensor], mask: Tensor | None) -> bool:
    """Whether :func:`attend_packed` takes such calls: packed sequences know no batch, mask or key mass, and
    no origin of the draws."""
    plain = mask is None and not call.return_key_mass and call.dropout_p == 0.0
    return plain and all(x.dim() > 2 and x.shape[:-3].numel() == 1 for x in tensors)


def joined(parts: Sequence[Results]) -> Results:
    """Of runs whose rows follow one another; the mass of their keys is in the last part."""
    lses = [part.lse for part in parts if part.lse is not None]
    output = parts[0].output if len(parts) == 1 else torch.cat([part.output for part in parts], -2)
    return Results(output, torch.cat(lses, -1) if lses else None, parts[-1].key_mass)


def mask_part(mask: Tensor | None, rows: Run, columns: Run) -> Tensor | None:
    """Of a mask, what a call with these rows and columns sees."""
    if mask is None or mask.dim() == 0:
        return mask
    if mask.shape[-1] != 1:
        mask = mask.narrow(-1, columns.begin, columns.size)
    if mask.dim() > 1 and mask.shape[-2] != 1:
        mask = mask.narrow(-2, rows.begin, rows.size)
    return mask
