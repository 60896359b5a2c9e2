"""How messages go from rank to rank: the only place that calls torch.distributed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

#: Waits for the messages that an exchange receives, by their senders.
Arrival = Callable[[], dict[int, Tensor]]


class Transport(Protocol):
    """What a layout needs to communicate.

    Messages are 1-D, of one dtype in one call; nobody changes one after it was handed over or received. Sizes
    are elements, and every rank knows those that it receives.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The message of each rank."""
        ...

    def all_to_all(self, sent: Tensor, parts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        """What each rank sent here; of ``sent`` the first ``parts[0]`` elements go to rank 0, and so on."""
        ...

    def exchange(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int], like: Tensor) -> Arrival:
        """Start to send to some ranks and to receive from some, with the dtype and device of ``like``.

        Only the two ranks of a message know of it. Empty ones are not sent.
        """
        ...


class GroupTransport:
    """Over a process group of :mod:`torch.distributed`, the default one if None."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def all_gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        largest = max(sizes)  # gloo gathers messages of one size only
        padded = message if message.numel() == largest else message.new_zeros(largest)
        if padded is not message:
            padded[: message.numel()] = message
        gathered = message.new_empty(self.world_size * largest)
        # torch 2.13 renamed it.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(gathered, padded, group=self.group)
        rows = gathered.view(self.world_size, largest)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def all_to_all(self, sent: Tensor, parts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        received = sent.new_empty(sum(sizes))
        dist.all_to_all_single(received, sent, list(sizes), list(parts), group=self.group)
        return list(received.split_with_sizes(list(sizes)))

    def exchange(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int], like: Tensor) -> Arrival:
        group: Any = dist.group.WORLD if self.group is None else self.group
        received = {rank: like.new_empty(size) for rank, size in sizes.items()}
        others = [
            *((dist.isend, rank, message) for rank, message in sent.items()),
            *((dist.irecv, rank, message) for rank, message in received.items()),
        ]
        transfers = [
            dist.P2POp(way, message, dist.get_global_rank(group, rank), self.group)
            for way, rank, message in others
            if message.numel() and rank != self.rank
        ]
        under_way = dist.batch_isend_irecv(transfers) if transfers else []

        if self.rank in received:
            received[self.rank] = sent[self.rank]

        def wait() -> dict[int, Tensor]:
            while under_way:
                under_way.pop().wait()  # and lets go of what was sent
            return received

        return wait


class Members:
    """Some ranks of a transport, numbered anew, that exchange among themselves."""

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        self._whole = whole
        self._members = list(members)
        self.rank = self._members.index(whole.rank)
        self.world_size = len(self._members)

    def all_gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return self._from_all([message] * self.world_size, sizes, message)

    def all_to_all(self, sent: Tensor, parts: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        return self._from_all(sent.split_with_sizes(list(parts)), sizes, sent)

    def _from_all(self, messages: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        received = self.exchange(dict(enumerate(messages)), dict(enumerate(sizes)), like)()
        return [received[rank] for rank in range(self.world_size)]

    def exchange(self, sent: Mapping[int, Tensor], sizes: Mapping[int, int], like: Tensor) -> Arrival:
        members = self._members
        arrival = self._whole.exchange(
            {members[rank]: message for rank, message in sent.items()},
            {members[rank]: size for rank, size in sizes.items()},
            like,
        )
        return lambda: {members.index(rank): message for rank, message in arrival().items()}


def as_transport(group: Any) -> Transport:
    """A transport as it is; a process group, a DeviceMesh of one dimension, or None for the default group."""
    if hasattr(group, "all_to_all") and hasattr(group, "exchange"):
        transport: Transport = group
        return transport
    if hasattr(group, "get_group"):
        group = group.get_group()
    return GroupTransport(group)
