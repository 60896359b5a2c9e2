"""Keys and values that go around the ranks: their way, and what of them a step takes.

No rank ever holds the keys of more than two at once.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .calls import DROPOUT_BLOCK, Call, mask_part
from .exchange import wide
from .layout import Run, SequenceLayout, transport_of
from .plan import Step, distances, plan
from .transport import Arrival

AddPart = Callable[[Step, Tensor, Tensor], None]


class Ring:
    """A call's constants, and the way of the keys: in hops, from a rank to the next one that needs them."""

    def __init__(self, call: Call, layout: SequenceLayout, batches: int) -> None:
        self.call, self.layout = call, layout
        self.transport = transport_of(layout)
        self.distances = distances(layout.runs, layout.cu_seqlens, call.reach)
        self.batches = batches  # of the leading dimensions

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """By owner of the keys."""
        bounds = {name: getattr(self.call, name) for name in ("is_causal", "window_left", "window_right")}
        by_owner: dict[int, list[Step]] = {}
        for step in plan(self.layout, self.layout.rank, **bounds):
            by_owner.setdefault(step.owner, []).append(step)
        return by_owner

    def owner(self, distance: int) -> int:
        """Whose keys are here after they went so far."""
        return (self.layout.rank - distance) % self.layout.world_size

    def pass_on(self, message: Tensor, distance: int, hop: int, row: int) -> Arrival:
        """Start to send what has come a distance, and to receive what will have come a hop more."""
        rank, ranks = self.layout.rank, self.layout.world_size
        before = (rank - hop) % ranks
        size = self.layout.num_rows(self.owner(distance + hop)) * row
        return self.transport.exchange({(rank + hop) % ranks: message}, {before: size}, message)

    def around(self, message: Tensor, row: int) -> Iterator[tuple[int, int, Tensor]]:
        """Distance, next hop (0: none) and message, of ``row`` elements a row; the next one is on its way."""
        for here, there in pairwise((*self.distances, self.distances[-1])):
            hop = there - here
            arrival = self.pass_on(message, here, hop, row) if hop else None
            yield here, hop, message
            if arrival is not None:
                (message,) = arrival().values()
                del arrival

    def sums_home(self, message: Tensor, row: int, sums_row: int, add_part: AddPart) -> Tensor:
        """Sums of ``sums_row`` elements a row that follow the keys around the ring, to their owner.

        A rank adds its part, by ``add_part(step, keys, part)``, and passes them on.
        """
        arrival: Arrival | None = None
        total = message.new_empty(0)
        for distance, hop, keys in self.around(message, row):
            owner = self.owner(distance)
            total = keys.new_zeros(self.layout.num_rows(owner) * sums_row, dtype=wide(keys.dtype))
            for step in self.steps.get(owner, ()):
                add_part(step, keys, total)
            if arrival is not None:
                (before,) = arrival().values()
                total = before.add_(total)
                del before
            if hop:
                arrival = self.pass_on(total, distance, hop, sums_row)
            del keys
        if last := self.distances[-1]:
            (total,) = self.pass_on(total, last, self.layout.world_size - last, sums_row)().values()
        return total


def split(message: Tensor, rows: int, *like: Tensor) -> list[Tensor]:
    """The tensors that a message of so many rows holds, each with the other sizes of one of ``like``."""
    shapes = [[*x.shape[:-2], rows, x.shape[-1]] for x in like]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [x.view(shape) for x, shape in zip(message.split_with_sizes(sizes), shapes, strict=True)]


def joined_rows(*tensors: Tensor) -> tuple[Tensor, int]:
    """Tensors as one message, and its elements a row."""
    return torch.cat([x.reshape(-1) for x in tensors]), row_size(*tensors)


def row_size(*tensors: Tensor) -> int:
    """Elements of a row of all of them."""
    return sum(x.shape[:-2].numel() * x.shape[-1] for x in tensors)


class Rows(NamedTuple):
    """What lies here all the time, or the sums of their gradients, of those that are wanted."""

    query: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None


def parts_of(ring: Ring, step: Step, own: Rows, key: Tensor, value: Tensor) -> list[Tensor | None]:
    """Of query, key, value, mask and sinks, what a step takes, or where its gradients are added.

    ``key`` and ``value`` are those of all rows of their owner.
    """
    rows = local_run(ring.layout, ring.layout.rank, step.rows)
    keys = local_run(ring.layout, step.owner, step.keys)
    # Every row sees its own key, if no mask hides it: the one step that every row is in.
    with_sinks = step.rows.overlap(step.keys).size > 0
    return [
        None if own.query is None else at(own.query, -2, rows),
        at(key, -2, keys),
        at(value, -2, keys),
        mask_part(own.mask, rows, step.keys),
        own.sinks if with_sinks else None,
    ]


def padded(ring: Ring, step: Step, parts: list[Tensor | None]) -> tuple[list[Tensor | None], int]:
    """With keys in front that the mask hides, so that the draws of dropout begin at a block of columns."""
    first = ring.layout.cu_seqlens[ring.layout.sequence_of(step.keys)]
    padding = (step.keys.begin - first) % DROPOUT_BLOCK if ring.call.dropout_p else 0
    if not padding:
        return parts, 0
    query, key, value, mask, sinks = parts
    assert key is not None and value is not None
    seen = key.new_ones(step.keys.size, dtype=torch.bool) if mask is None else mask
    if seen.dim() == 0 or seen.shape[-1] == 1:
        seen = seen.expand(*seen.shape[:-1], step.keys.size)
    hidden = False if seen.dtype == torch.bool else -torch.inf
    longer = [F.pad(x, (0, 0, padding, 0)) for x in (key, value)]
    return [query, *longer, F.pad(seen, (padding, 0), value=hidden), sinks], padding


def attend_step(ring: Ring, step: Step, parts: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a step, not rounded."""
    inputs, padding = padded(ring, step, parts)
    output, lse, _, _ = torch.ops.attn_ext._sdpa_forward(
        *inputs,
        ring.call.seed,
        None,
        *ring.call.scalars(step.query_offset + padding),
        False,
        False,
        dropout_origin=origin_of_step(ring, step, padding),
        unrounded=True,
    )
    return output, lse


def origin_of_step(ring: Ring, step: Step, padding: int) -> list[int] | None:
    """Where the first element of a step lies in the draw."""
    if not ring.call.dropout_p:
        return None
    number = ring.layout.sequence_of(step.keys)
    first = ring.layout.cu_seqlens[number]
    row, column = step.rows.begin - first, step.keys.begin - first - padding
    return [number * ring.batches, ring.call.first_head, row, column]


def local_run(layout: SequenceLayout, rank: int, rows: Run) -> Run:
    """Where among its own rows a rank has these, which lie in one of its runs."""
    for local, run in zip(layout.local_runs(rank), layout.runs[rank], strict=True):
        if run.begin <= rows.begin and rows.end <= run.end:
            begin = local.begin + rows.begin - run.begin
            return Run(begin, begin + rows.size)
    raise ValueError(f"expected rows of rank {rank}, but got {rows}")


def rows_shape(*tensors: Tensor) -> list[int]:
    """Of the output's rows: batch, heads, length. Grouped heads of keys are fewer than those of queries."""
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))  # type: ignore[no-untyped-call]
    heads = [max(x.shape[-3] for x in tensors)] if all(x.dim() > 2 for x in tensors) else []
    return [*batch, *heads, tensors[0].shape[-2]]


def at(x: Tensor, dim: int, rows: Run) -> Tensor:
    return x.narrow(dim, rows.begin, rows.size)
