"""How pieces of tensors go from rank to rank: the only place that calls torch.distributed."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Shape = Sequence[int]


class Transport(Protocol):
    """What a layout needs to communicate. Pieces may differ in shape; each rank knows those it receives."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, piece: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """The piece of each rank, of which ``shapes`` are the shapes."""
        ...

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """What each rank sent here, in ``shapes``; ``pieces[w]`` goes to rank w."""
        ...


class GroupTransport:
    """Over a process group of :mod:`torch.distributed`, the default one if None."""

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def all_gather(self, piece: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        import torch.distributed as dist

        sizes = [math.prod(shape) for shape in shapes]
        largest = max(sizes)  # gloo gathers pieces of one size only
        padded = piece.new_zeros(largest)
        padded[: piece.numel()] = piece.reshape(-1)
        gathered = piece.new_empty(self.world_size * largest)
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        rows = gathered.view(self.world_size, largest)
        return [row[:size].view(tuple(shape)) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        import torch.distributed as dist

        sizes = [math.prod(shape) for shape in shapes]
        sent = torch.cat([piece.reshape(-1) for piece in pieces])
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, sizes, [piece.numel() for piece in pieces], group=self.group)
        return [r.view(tuple(shape)) for r, shape in zip(received.split(sizes), shapes, strict=True)]


def as_transport(group: Any) -> Transport:
    """A transport as it is; a process group, a DeviceMesh of one dimension, or None for the default group."""
    if hasattr(group, "rank") and hasattr(group, "world_size"):
        transport: Transport = group
        return transport
    if hasattr(group, "get_group"):
        group = group.get_group()
    return GroupTransport(group)
