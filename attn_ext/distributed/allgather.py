"""Every rank gets the keys that its rows see, and makes a call for each run of them."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .calls import (
    DROPOUT_BLOCK,
    Call,
    Results,
    attend,
    attend_packed,
    can_pack,
    joined,
    mask_part,
    origin_of,
)
from .exchange import Route, gather_rows, scatter_rows, shared_rows
from .layout import Run, Runs, SequenceLayout, transport_of
from .plan import is_whole, needs, sends_all, wanted_keys

NOTHING = Run(0, 0)


def attend_gathered(
    call: Call, tensors: Sequence[Tensor], mask: Tensor | None, sinks: Tensor | None, layout: SequenceLayout
) -> Results:
    """Of this rank's rows. Whole sequences that lie here are one call and need nothing from elsewhere."""
    packed = len(layout.sequences) > 1 and can_pack(call, tensors, mask)
    runs = list(zip(layout.local_runs(), layout.runs[layout.rank], strict=True))
    here = [local for local, run in runs if packed and is_whole(layout, run)]
    rest = [local for local, _ in runs if local not in here]
    parts = []
    if here:
        parts.append(attend_packed(call, [_rows(x, here) for x in tensors], [r.size for r in here], sinks))
    if rest or not here or not _all_whole(layout.runs, layout.cu_seqlens):
        parts.append(_attend_runs(call, tensors, mask, sinks, layout, packed))
    return _in_order(joined(parts), [*here, *rest])


def _attend_runs(
    call: Call,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    layout: SequenceLayout,
    packed: bool,
) -> Results:
    """A call for each run that is not yet dealt with, with the keys that it sees."""
    query, key, value = tensors
    block = DROPOUT_BLOCK if call.dropout_p else 1
    where = (layout.runs, layout.cu_seqlens, call.reach, block, packed)
    # A rank without rows too has a part in the sums of the others.
    own = needs(*where)[layout.rank] or ((NOTHING, NOTHING),)
    wanted = wanted_keys(*where)
    spans = tuple(_place(keys, wanted[layout.rank]) for _, keys in own)
    to_all = sends_all(layout.cu_seqlens, call.reach)
    route = Route(transport_of(layout), layout.runs, wanted, spans, to_all=to_all)
    keys, values = _gathered(route, key, value)
    places = dict(zip(layout.runs[layout.rank], layout.local_runs(), strict=True))
    parts = []
    for (run, span), k, v in zip(own, keys, values, strict=True):
        local = places.get(run, NOTHING)
        number = layout.sequence_of(run)
        first = layout.cu_seqlens[number]
        origin = origin_of(call, query, number, run.begin - first, span.begin - first)
        rows = query.narrow(-2, local.begin, local.size)
        part = mask_part(mask, local, span)
        parts.append(attend(call, (rows, k, v), part, sinks, run.begin - span.begin, origin))
    result = joined(parts)
    if not call.return_key_mass:
        return result
    masses = [part.key_mass.unsqueeze(-1) for part in parts if part.key_mass is not None]
    return result._replace(key_mass=_mass_of_own(route, masses).squeeze(-1))


def _place(keys: Run, wanted: Runs) -> Run:
    """Where among those wanted."""
    return next((place for _, place in shared_rows((keys,), wanted)), NOTHING)


def _gathered(route: Route, *tensors: Tensor) -> list[Sequence[Tensor]]:
    if _is_alone(route):
        return [x.split_with_sizes([span.size for span in route.spans], -2) for x in tensors]
    return [*gather_rows(route, *tensors)]


def _mass_of_own(route: Route, masses: Sequence[Tensor]) -> Tensor:
    """Of this rank's keys, from what the rows of each rank gave the keys that it had."""
    if _is_alone(route):
        return torch.cat(list(masses), -2)
    (mass,) = scatter_rows(route, masses)
    return mass


def _is_alone(route: Route) -> bool:
    """Whether the only rank has the sequences one after the other, so that nothing is to be moved."""
    (_, *others), (held, *_) = route.ranks, route.held
    return not others and sum(span.size for span in route.spans) == sum(run.size for run in held)


@lru_cache(maxsize=64)
def _all_whole(runs: tuple[Runs, ...], cu_seqlens: tuple[int, ...]) -> bool:
    layout = SequenceLayout(runs, cu_seqlens, 0, None)
    return all(is_whole(layout, run) for own in runs for run in own)


def _rows(x: Tensor, runs: Sequence[Run]) -> Tensor:
    if sum(run.size for run in runs) == x.shape[-2]:
        return x
    return torch.cat([x.narrow(-2, run.begin, run.size) for run in runs], -2)


def _in_order(result: Results, runs: Sequence[Run]) -> Results:
    """The rows in their order, from those of the runs one after the other."""
    if list(runs) == sorted(runs):
        return result
    places = torch.cat([torch.arange(*run) for run in runs]).argsort().to(result.output.device)
    lse = None if result.lse is None else result.lse.index_select(-1, places)
    return Results(result.output.index_select(-2, places), lse, result.key_mass)
