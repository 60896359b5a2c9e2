"""Sequences that lie one after the other in a row of tokens, as models of transformers are told of them.

By ``cu_seq_lens_q`` and ``cu_seq_lens_k``, which come to the attention function as they are; or by
``position_ids`` that start again, of which transformers makes a mask: here one that knows where the
sequences begin, and holds no number for every pair of tokens unless somebody looks at it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from attn_ext.functional import sdpa_packed

__all__ = ["PackedMask", "Sequences", "attend", "block_mask", "plain", "sequences_of"]

#: Names of the functions that masking_utils of transformers puts a packed mask together of.
_AND = "and_masks.<locals>.and_mask"
_SAME_SEQUENCE = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_CAUSAL = "causal_mask_function"


class Sequences(NamedTuple):
    """Where sequences begin among the rows of a batch, (N + 1,) each, and which of their keys a row sees."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    is_causal: bool
    window_left: int | None = None
    window_right: int | None = None


class PackedMask(Tensor):
    """The mask of causal sequences in rows of tokens, (B, 1, L, L) on the CPU, made when it is looked at.

    Its shape and dtype are known without that; every other operation works on the mask itself, which is a
    plain tensor. Underneath there is a tensor without data, so that code which does not ask is refused.
    """

    sequences: Sequences
    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def of(sequences: Sequences, shape: tuple[int, ...], make: Callable[[], Tensor]) -> "PackedMask":
        mask = torch.empty(shape, dtype=torch.bool, device="meta").as_subclass(PackedMask)
        mask.sequences, mask._make, mask._made = sequences, make, None
        return mask

    def made(self) -> Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _KNOWN_UNSEEN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(PackedMask, PackedMask.made, (args, kwargs or {}))
        return function(*args, **kwargs)


_KNOWN_UNSEEN = frozenset(
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.dim,
        Tensor.size,
    }
)


def plain(mask: Tensor | None) -> Tensor | None:
    """The mask as a plain tensor."""
    return mask.made() if isinstance(mask, PackedMask) else mask


def sequences_of(mask_function: Any, shape: tuple[int, int]) -> Sequences | None:
    """What a mask function of transformers says about packed sequences in rows of tokens of this shape.

    None where it says anything that is not causality and a sliding window in each of them.
    """
    both = _held(mask_function, _AND, "mask_functions")
    if both is None or len(both) != 2:
        return None
    same, remapped = both if _is_named(both[0], _SAME_SEQUENCE) else both[::-1]  # from 5.24 on the other way
    number = _held(same, _SAME_SEQUENCE, "packed_sequence_mask")  # (B, L), 0 and up
    inner = _held(remapped, _REMAPPED, "mask_function")
    if type(number) is not Tensor or number.device.type != "cpu" or number.shape != shape:
        return None
    window = None
    overlaid = _held(inner, _AND, "mask_functions")
    if overlaid is not None and len(overlaid) == 2:
        window = _held(overlaid[0], _WINDOW, "sliding_window")
        inner = overlaid[1] if type(window) is int else None
    if not _is_named(inner, _CAUSAL):
        return None
    starts = _starts(number)
    return Sequences(starts, starts, is_causal=True, window_left=None if window is None else window - 1)


def _held(function: Any, name: str, variable: str) -> Any:
    """What a function of masking_utils, of this name, holds in this variable; None of any other function."""
    if not _is_named(function, name) or variable not in function.__code__.co_freevars:
        return None
    return function.__closure__[function.__code__.co_freevars.index(variable)].cell_contents


def _is_named(function: Any, name: str) -> bool:
    module, qualified = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return (module, qualified) == ("transformers.masking_utils", name)


def _starts(number: Tensor) -> Tensor:
    """Where sequences begin among the rows of all batches, and the end, of the sequence number of each."""
    begins = torch.ones_like(number, dtype=torch.bool)
    begins[:, 1:] = number[:, 1:] != number[:, :-1]
    ends = torch.tensor([number.numel()])
    return torch.cat([begins.flatten().nonzero().flatten(), ends])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    dropout: float,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of (B, H, L, D), whose sequences lie one after the other: (B, Lq, Hq, Dv)."""
    output = sdpa_packed(
        _rows(query),
        _rows(key),
        _rows(value),
        sequences.cu_seqlens_q,
        sequences.cu_seqlens_k,
        dropout,
        sequences.is_causal,
        scale=scaling,
        enable_gqa=True,
        window_left=sequences.window_left,
        window_right=sequences.window_right,
        softcap=softcap,
        sinks=sinks,
    )
    return output.reshape(query.shape[0], query.shape[2], *output.shape[1:])


def _rows(tensor: Tensor) -> Tensor:
    """(B L, H, D) of (B, H, L, D)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def block_mask(sequences: Sequences, rows: int, keys: int) -> Tensor:
    """The mask (rows, keys) that sequences stand for, True where a row sees a key: a block for each."""
    of_row, place = _places(sequences.cu_seqlens_q, rows)
    of_key, at = _places(sequences.cu_seqlens_k, keys)
    # Causality and windows are aligned with the end of a sequence's keys.
    lengths = [starts.diff(append=starts[-1:]) for starts in sequences[:2]]
    place = place + (lengths[1] - lengths[0])[of_row]
    distance = place[:, None] - at
    mask = (of_row[:, None] == of_key) & (of_row < len(lengths[0]) - 1)[:, None]
    if sequences.is_causal:
        mask &= distance >= 0
    if sequences.window_left is not None:
        mask &= distance <= sequences.window_left
    if sequences.window_right is not None:
        mask &= distance >= -sequences.window_right
    return mask


def _places(starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Of each row, the number of its sequence, one too many behind the last, and its place in that."""
    row = torch.arange(length, device=starts.device)
    number = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    return number, row - starts[number]
