"""One call of attention as it is recorded: its arguments, the heads and rows chosen, and its side outputs.

All side outputs are those of the call without dropout. Only :func:`weights` holds (rows, Lk) a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..functional import sdpa_with_key_mass, sdpa_with_lse, sdpa_with_weights

Index = int | slice | Sequence[int] | None

#: Bytes of weights held at once where a side output is made from them a few rows at a time.
CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`attn_ext.sdpa`, without dropout; shapes as there."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window_left: int | None = None
    window_right: int | None = None
    query_offset: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    @property
    def num_heads(self) -> int:
        sizes = [tensor.shape[-3] for tensor in (self.query, self.key, self.value) if tensor.dim() > 2]
        return self.query.shape[-3] if self.enable_gqa else max(sizes, default=1)

    @property
    def num_rows(self) -> int:
        return self.query.shape[-2]

    @property
    def num_keys(self) -> int:
        return self.key.shape[-2]

    @property
    def lead_shape(self) -> tuple[int, ...]:
        """What comes before the rows in a side output: batch and heads."""
        if not self.enable_gqa:
            shapes = [tensor.shape[:-2] for tensor in (self.query, self.key, self.value)]
            return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
        shapes = [tensor.shape[:-3] for tensor in (self.query, self.key, self.value)]
        batch = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return (*batch, self.num_heads)

    @property
    def positional(self) -> bool:
        """Whether the place of a row decides what it sees."""
        return self.is_causal or self.window_left is not None or self.window_right is not None

    def run(self, function: Callable[..., Any]) -> Any:
        arguments = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return function(**arguments)

    def with_head_dim(self) -> "Call":
        """(…, L, D) of one head as (…, 1, L, D)."""
        mask = self.attn_mask
        return replace(
            self,
            query=self.query.unsqueeze(-3),
            key=self.key.unsqueeze(-3),
            value=self.value.unsqueeze(-3),
            attn_mask=mask.unsqueeze(-3) if mask is not None and mask.dim() > 2 else mask,
        )

    def of_heads(self, index: Index) -> "Call":
        """The call of some heads alone; key and value heads are repeated for groups."""
        if index is None:
            return self
        heads = chosen(index, self.num_heads, "heads")
        shared = self.num_heads // self.key.shape[-3] if self.enable_gqa else 1
        key_heads = [head // shared for head in heads]
        sinks = self.sinks
        return replace(
            self,
            query=_select(self.query, heads, -3),
            key=_select(self.key, key_heads, -3),
            value=_select(self.value, key_heads, -3),
            attn_mask=_select(self.attn_mask, heads, -3),
            sinks=sinks if sinks is None or sinks.numel() == 1 else sinks[heads],
            enable_gqa=False,
        )

    def of_rows(self, index: Index) -> "list[Call]":
        """The calls of some rows alone: one for each run of neighbours if a row's place counts."""
        if index is None:
            return [self]
        rows = chosen(index, self.num_rows, "rows")
        return [self._of_run(run) for run in (_runs(rows) if self.positional else [rows])]

    def in_chunks(self) -> "list[Call]":
        """Calls of as many neighbouring rows as have CHUNK_BYTES of weights in float32."""
        row_bytes = 4 * self.num_keys
        for size in self.lead_shape:
            row_bytes *= size
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        starts = range(0, self.num_rows, step)
        return [self._of_run(list(range(i, min(i + step, self.num_rows)))) for i in starts] or [self]

    def in_float(self) -> "Call":
        """With query and key of at least float32."""
        if self.query.dtype not in (torch.bfloat16, torch.float16):
            return self
        mask = self.attn_mask
        floating = mask is not None and mask.is_floating_point()
        return replace(
            self,
            query=self.query.float(),
            key=self.key.float(),
            value=self.value.float(),
            attn_mask=mask.float() if mask is not None and floating else mask,
            sinks=None if self.sinks is None else self.sinks.float(),
        )

    def _of_run(self, rows: list[int]) -> "Call":
        first = rows[0] if rows and self.positional else 0
        return replace(
            self,
            query=_take(self.query, rows),
            attn_mask=_select(self.attn_mask, rows, -2),
            query_offset=self.query_offset + first,
        )


def chosen(index: Index, size: int, name: str) -> list[int]:
    """The places that ``index`` names among ``size``; negative ones count from the end.

    Raises:
        IndexError: one of them is not there.
    """
    if isinstance(index, slice):
        return list(range(size)[index])
    places = [index] if isinstance(index, int) else list(index or [])
    for place in places:
        if not -size <= place < size:
            raise IndexError(f"{name}={index!r}: there is no {place} in an attention of {size} {name}")
    return [place % size for place in places]


def _runs(rows: list[int]) -> list[list[int]]:
    """Rows cut where a row is not followed by its neighbour."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and runs[-1][-1] + 1 == row:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs or [[]]


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """Rows of (…, L, D): a view where they are neighbours."""
    if rows and rows == list(range(rows[0], rows[-1] + 1)):
        return tensor[..., rows[0] : rows[-1] + 1, :]
    return tensor[..., rows, :]


def _select(tensor: Any, places: list[int], dim: int) -> Any:
    """Places along a dim, which may be missing or 1 for all."""
    if tensor is None or tensor.dim() < -dim or tensor.shape[dim] == 1:
        return tensor
    return tensor.index_select(dim, torch.tensor(places, dtype=torch.long, device=tensor.device))


def weights(calls: Sequence[Call]) -> Tensor:
    """(…, H, rows, Lk), in the dtype of the query."""
    return _joined([call.run(sdpa_with_weights)[1] for call in calls])


def key_mass(calls: Sequence[Call]) -> Tensor:
    """The sum of the weights over the rows, (…, H, Lk)."""
    masses = [call.run(sdpa_with_key_mass)[1] for call in calls]
    return masses[0] if len(masses) == 1 else torch.stack(masses).sum(0)


def lse(calls: Sequence[Call]) -> Tensor:
    """(…, H, rows), in float32 or float64."""
    return _joined([call.run(sdpa_with_lse)[1] for call in calls], -1)


def entropy(calls: Sequence[Call]) -> Tensor:
    r"""-\sum_j P_{ij} \ln P_{ij}, (…, H, rows), in float32 or float64; 0 for a row that sees no key."""
    return _joined([_entropy(call.in_float()) for call in calls], -1)


def _entropy(call: Call) -> Tensor:
    bias = call.attn_mask is not None and call.attn_mask.is_floating_point()
    if bias or call.softcap != 0.0 or call.sinks is not None:
        parts = [torch.special.entr(part.run(sdpa_with_weights)[1]).sum(-1) for part in call.in_chunks()]
        return _joined(parts, -1)
    # ln P_ij = s_ij - lse_i with s_ij = scale q_i . k_j, so the sum is lse_i - scale q_i . (P K)_i.
    scale = max(1, call.query.shape[-1]) ** -0.5 if call.scale is None else call.scale
    mean_key, row_lse = replace(call, value=call.key).run(sdpa_with_lse)
    mean_score = scale * (call.query * mean_key).sum(-1)
    return torch.where(row_lse.isneginf(), 0.0, (row_lse - mean_score).clamp_min(0))


def top(calls: Sequence[Call], k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights of each row and their keys, (…, H, rows, k), or all if there are fewer keys."""
    values, places = [], []
    for call in calls:
        for part in call.in_chunks():
            of_part = part.run(sdpa_with_weights)[1].topk(min(k, call.num_keys))
            values.append(of_part.values)
            places.append(of_part.indices)
    return _joined(values), _joined(places)


def _joined(parts: list[Tensor], dim: int = -2) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
