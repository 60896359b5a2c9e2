"""Ranks that are threads of one process: any number of them, without a network."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .transport import Shape

Result = TypeVar("Result")


class _Table:
    """Where the ranks lay down what they send."""

    def __init__(self, world_size: int) -> None:
        self.pieces: list[Sequence[Tensor]] = [()] * world_size
        self.barrier = threading.Barrier(world_size)


class MemoryTransport:
    """One rank of :func:`run_in_memory`."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.world_size = len(table.pieces)

    def all_gather(self, piece: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        return self.all_to_all([piece] * self.world_size, shapes)

    def all_to_all(self, pieces: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        self._table.pieces[self.rank] = pieces
        self._table.barrier.wait()
        received = [sent[self.rank].clone() for sent in self._table.pieces]
        self._table.barrier.wait()  # nobody lays down the next before everybody has taken this
        for sender, (piece, shape) in enumerate(zip(received, shapes, strict=True)):
            if tuple(piece.shape) != tuple(shape):
                got = list(piece.shape)
                raise ValueError(f"expected shape {list(shape)} from rank {sender}, but got {got}")
        return received


def run_in_memory(world_size: int, function: Callable[[MemoryTransport], Result]) -> list[Result]:
    """Call a function once a rank, each in a thread of its own, and return what they return.

    Args:
        world_size: how many ranks.
        function: gets the transport of its rank, which :class:`SequenceLayout` takes for a group.

    Raises:
        Whatever the function raises on the first rank that fails; the others end too.

    Example:
        >>> import torch
        >>> from attn_ext.distributed import SequenceLayout, run_in_memory
        >>> def whole(rank):
        ...     layout = SequenceLayout.zigzag(5, rank)
        ...     return layout.unshard(layout.positions(), 0).tolist()
        >>> run_in_memory(3, whole)
        [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    """
    table = _Table(world_size)
    results: list[Any] = [None] * world_size
    errors: list[Exception] = []

    def call(rank: int) -> None:
        try:
            results[rank] = function(MemoryTransport(table, rank))
        except threading.BrokenBarrierError:
            pass  # another rank failed, and says why
        except Exception as error:
            errors.append(error)
            table.barrier.abort()

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
