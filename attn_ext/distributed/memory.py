"""Ranks that are threads of one process: any number of them, without a network."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from .transport import Arrival

Result = TypeVar("Result")


class _Broken(Exception):
    """Another rank has failed, and says why."""


class _Table:
    """Where the ranks lay down what they send to all, and the inbox of each."""

    def __init__(self, world_size: int) -> None:
        self.messages: list[Sequence[Tensor]] = [()] * world_size
        self.barrier = threading.Barrier(world_size)
        self.inboxes: list[SimpleQueue[tuple[int, Tensor] | None]] = [
            SimpleQueue() for _ in range(world_size)
        ]

        self.turn = threading.Lock()  # one rank at a time: a thousand that want Python's lock wake each other

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let others run while this rank waits for them."""
        self.turn.release()
        try:
            yield
        finally:
            self.turn.acquire()

    def meet(self) -> None:
        with self.pause():
            self.barrier.wait()

    def abort(self) -> None:
        self.barrier.abort()
        for inbox in self.inboxes:
            inbox.put(None)


class MemoryTransport:
    """One rank of :func:`run_in_memory`."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self._early: dict[int, list[Tensor]] = {}  # by sender: what came before it was asked for
        self.rank = rank
        self.world_size = len(table.messages)

    def all_gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return _checked(self._swap([message.clone()], lambda sent: sent[0]), sizes)

    def all_to_all(self, sent: Tensor, parts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        return _checked(self._swap(sent.split_with_sizes(list(parts)), lambda sent: sent[self.rank]), sizes)

    def exchange(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int], like: Tensor) -> Arrival:
        for rank, message in sent.items():
            if message.numel():
                self._table.inboxes[rank].put((self.rank, message))

        def wait() -> dict[int, Tensor]:
            received = {rank: self._next(rank) if size else like.new_empty(0) for rank, size in sizes.items()}
            _checked(list(received.values()), list(sizes.values()))
            return received

        return wait

    def _swap(self, messages: Sequence[Tensor], mine: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor]:
        self._table.messages[self.rank] = messages
        self._table.meet()
        received = [mine(sent) for sent in self._table.messages]
        self._table.meet()  # nobody lays down the next before everybody has taken this
        return received

    def _next(self, sender: int) -> Tensor:
        while not self._early.get(sender):
            with self._table.pause():
                arrived = self._table.inboxes[self.rank].get()
            if arrived is None:
                raise _Broken
            self._early.setdefault(arrived[0], []).append(arrived[1])
        return self._early[sender].pop(0)


def _checked(received: list[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    got = [message.numel() for message in received]
    if got != list(sizes):
        raise ValueError(f"expected messages of {list(sizes)} elements, but got {got}")
    return received


def run_in_memory(world_size: int, function: Callable[[MemoryTransport], Result]) -> list[Result]:
    """Call a function once a rank, each in a thread of its own, and return what they return.

    Args:
        world_size: how many ranks.
        function: gets the transport of its rank, which
            :class:`attn_ext.distributed.SequenceLayout` takes for a group.

    Raises:
        Exception: whatever the function raises on the first rank that fails; the others end too.

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
        torch.set_num_threads(1)  # or each of the ranks would start as many as there are cores
        try:
            with table.turn:
                results[rank] = function(MemoryTransport(table, rank))
        except (_Broken, threading.BrokenBarrierError):
            pass
        except Exception as error:
            errors.append(error)
            table.abort()

    before = torch.get_num_threads()
    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    if errors:
        raise errors[0]
    return results
