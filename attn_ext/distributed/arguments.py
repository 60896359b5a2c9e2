"""The arguments of a call: whether they fit, whether all ranks pass the same, and which way is taken."""

from typing import NamedTuple

import torch
from torch import Tensor

from .agreement import Agreed, agree
from .calls import Call, attend, mask_part
from .cost import METHODS, Way, choose_way, heads_divide
from .layout import Run, SequenceLayout, transport_of


class Inputs(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    sinks: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


class Wish(NamedTuple):
    method: str
    ulysses_size: int | None
    memory_limit: int | None


def agreed(
    call: Call, inputs: Inputs, layout: SequenceLayout, wish: Wish, seed: int | None, check: bool
) -> tuple[Way, Agreed]:
    """How the call is made, and what the ranks told one another; nothing is sent if all of them know all."""
    error: Exception | None = None
    way = Way("allgather", 1)
    told = Agreed(0, _mask_rows(inputs.mask) not in (None, 1))
    try:
        _check(call, inputs, layout)
        way = _way(call, inputs, layout, wish)
        if call.dropout_p > 0.0:
            told = told._replace(seed=_seed(seed))
    except (ValueError, RuntimeError) as refused:
        if not check or layout.transport is None:
            raise
        error = refused
    asks_for_mask = way.ulysses_size > 1 and _mask_rows(inputs.mask) is not None
    draws = call.dropout_p > 0.0 and seed is None
    if not (check or asks_for_mask or draws):
        return way, told
    described = _description(call, inputs, layout, wish, seed) if check and error is None else {}
    return way, agree(transport_of(layout), described, error, told, inputs.query.device)


def _description(
    call: Call, inputs: Inputs, layout: SequenceLayout, wish: Wish, seed: int | None
) -> dict[str, object]:
    """What has to be the same on every rank, by the names that an error gives it."""
    described: dict[str, object] = {
        "layout": f"{layout.length} rows in {len(layout.sequences)} sequences, laid out as {layout.digest}",
        **call._replace(seed=None)._asdict(),
        **wish._asdict(),
        "dropout_seed": seed,
        "grad mode": torch.is_grad_enabled(),
    }
    for name, x in inputs._asdict().items():
        name = {"mask": "attn_mask"}.get(name, name)
        rows = -2 if name != "sinks" else None
        described[f"shape of {name}"] = None if x is None else _shape_without(x, rows)
        described[f"dtype of {name}"] = None if x is None else x.dtype
        described[f"requires_grad of {name}"] = x is not None and x.requires_grad
    return described


def _shape_without(x: Tensor, dim: int | None) -> str:
    """With the rows, which differ, left open."""
    shape = [str(size) for size in x.shape]
    if dim is not None and len(shape) >= -dim:
        shape[dim] = "rows"
    return f"({', '.join(shape)})"


def _mask_rows(mask: Tensor | None) -> int | None:
    return None if mask is None or mask.dim() < 2 else mask.shape[-2]


def _seed(given: int | None) -> int:
    largest = 2**63 - 1
    if given is None:
        return int(torch.randint(largest, ()))  # as the op draws it
    if not 0 <= given <= largest:
        raise ValueError(f"expected a dropout_seed from 0 to {largest}, but got {given}")
    return given


def _way(call: Call, inputs: Inputs, layout: SequenceLayout, wish: Wish) -> Way:
    """That of the wish, or for "auto" what costs least."""
    method, size = wish.method, wish.ulysses_size
    if method not in ("auto", *METHODS):
        raise ValueError(f"expected a method of 'auto', {', '.join(map(repr, METHODS))}, but got {method!r}")
    if size is not None and (method in ("auto", "ulysses") or size < 1 or layout.world_size % size):
        raise ValueError(
            f"expected a ulysses_size that divides the {layout.world_size} ranks, with method 'allgather' or "
            f"'ring', but got {size} with {method!r}"
        )
    query, key, value = inputs.tensors
    query_heads, key_heads = heads_of(query), heads_of(key)
    if method == "auto":
        return choose_way(
            layout,
            query_heads=query_heads,
            key_heads=key_heads,
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            itemsize=query.element_size(),
            batch=query.shape[:-3].numel(),
            is_causal=call.is_causal,
            window_left=call.window_left,
            window_right=call.window_right,
            has_mask=inputs.mask is not None,
            memory_limit=wish.memory_limit,
        )
    size = layout.world_size if method == "ulysses" else size or 1
    if size > 1:
        _check_heads(inputs, size)
    return Way("ring" if method == "ring" else "allgather", size)


def _check_heads(inputs: Inputs, ranks: int) -> None:
    for name, x in zip(("query", "key", "value"), inputs.tensors, strict=True):
        if x.dim() < 3:
            raise ValueError(f"expected {name} with a dimension of heads, but got shape {list(x.shape)}")
    query_heads, key_heads = heads_of(inputs.query), heads_of(inputs.key)
    if not heads_divide(query_heads, key_heads, ranks):
        raise ValueError(
            f"expected query heads that divide by the ranks, and key heads that divide by them or they by "
            f"these, but got {query_heads} query heads and {key_heads} key heads over {ranks} ranks"
        )


def heads_of(x: Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _check(call: Call, inputs: Inputs, layout: SequenceLayout) -> None:
    """Rows are those of the layout, and the op takes the rest: it is called with none of them."""
    local = layout.num_rows()
    for name, x in zip(("query", "key", "value"), inputs.tensors, strict=True):
        if x.dim() < 2 or x.shape[-2] != local:
            got = x.shape[-2] if x.dim() > 1 else f"shape {list(x.shape)}"
            raise ValueError(f"expected {name} of {local} rows, those of rank {layout.rank}, but got {got}")
    mask = inputs.mask
    if mask is not None:
        rows, columns = [1, 1, *mask.shape][-2:]
        if rows not in (1, local) or columns not in (1, layout.length):
            raise ValueError(
                f"expected attn_mask of {local} rows or 1, and {layout.length} columns or 1, "
                f"but got {list(mask.shape)}"
            )
    nothing = Run(0, 0)
    call = call._replace(seed=torch.zeros((), dtype=torch.int64, device=inputs.query.device))
    with torch.no_grad():
        empty = [x.narrow(-2, 0, 0) for x in inputs.tensors]
        attend(call, empty, mask_part(mask, nothing, nothing), inputs.sinks, 0, (0, 0, 0, 0))


def lowered(x: Tensor) -> Tensor:
    """In the dtype of autocast, as the op takes it there."""
    device = x.device.type
    lower = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if lower else x
