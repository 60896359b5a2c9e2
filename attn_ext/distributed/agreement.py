"""Before anything is sent: whether all ranks make the same call.

Each rank sends four numbers. If these agree, that is all. If not, or if the arguments of a rank are refused,
each also sends its description, so that all of them stop with the same sentence and none waits for another.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from .transport import Transport


class Agreed(NamedTuple):
    """What the ranks tell one another beside their description."""

    seed: int  # of the first rank
    has_mask_rows: bool  # whether the mask of any rank has other than one row


def agree(
    transport: Transport,
    description: Mapping[str, object],
    error: Exception | None,
    told: Agreed,
    device: torch.device,
) -> Agreed:
    """What the ranks agree on; raises on every rank if they do not, or if one has an error of its own."""
    text = "\n".join(f"{name}\t{value}" for name, value in description.items())
    if error is not None:
        text = str(error)
    digest = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
    numbers = [int(error is not None), digest, told.seed, int(told.has_mask_rows)]
    all_numbers = _all_of(transport, torch.tensor(numbers, device=device))
    failed, digests, seeds, has_rows = (column.tolist() for column in all_numbers.unbind(1))
    if any(failed) or len(set(digests)) > 1:
        texts = _texts(transport, text, device)
        raise error or _disagreement(texts, failed)
    return Agreed(seeds[0], any(has_rows))


def _all_of(transport: Transport, numbers: Tensor) -> Tensor:
    return torch.stack(transport.all_gather(numbers, [numbers.numel()] * transport.world_size))


def _texts(transport: Transport, text: str, device: torch.device) -> list[str]:
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = _all_of(transport, torch.tensor([data.numel()], device=device)).flatten().tolist()
    return [bytes(of_rank.tolist()).decode() for of_rank in transport.all_gather(data, sizes)]


def _disagreement(texts: list[str], failed: list[int]) -> Exception:
    if any(failed):
        rank = failed.index(1)
        return RuntimeError(f"rank {rank} takes no part in the call: {texts[rank]}")
    described = [dict(line.split("\t", 1) for line in text.split("\n")) for text in texts]
    first = described[0]
    for rank, other in enumerate(described):
        for name in first:
            if first[name] != other[name]:
                return ValueError(
                    f"expected the same {name} on every rank, but got {first[name]} on rank 0 and "
                    f"{other[name]} on rank {rank}"
                )
    return ValueError(f"expected the same call on every rank, but got {sorted(set(texts))}")
