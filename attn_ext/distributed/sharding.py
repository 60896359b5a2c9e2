"""Sharding rules of the ops: for each dim of a mesh, what placements of the inputs give what of the outputs.

Only :func:`register_dtensor` imports this, for it imports all of DTensor. The public ops need no rules where
they are made of the internal pair, which is what DTensor sees.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

#: Of each tensor in turn, the dim that is cut along one dim of the mesh; not there: replicated.
Cut = dict[str, int]

#: How many dims a tensor of the internal pair has behind that of its heads.
TAILS = {
    "query": 2,
    "key": 2,
    "value": 2,
    "attn_mask": 2,
    "sinks": 0,
    "output": 2,
    "lse": 1,
    "delta": 1,
    "weights": 2,
    "key_mass": 1,
}
GRAD = "grad_"


class Call:
    """An op's arguments by the names of its schema."""

    def __init__(self, schema: OpSchema) -> None:
        self.schema = schema
        names = [argument.name for argument in schema.op._schema.arguments]
        given = {**dict(zip(names, schema.args_schema, strict=False)), **schema.kwargs_schema}
        self.arguments: dict[str, Any] = {name: given[name] for name in names if name in given}
        self.tensors = {name: x for name, x in self.arguments.items() if isinstance(x, OpStrategy)}
        self.results = [result.name or "output" for result in schema.op._schema.returns]

    def placements(self, name: str) -> tuple[Placement, ...]:
        placements: tuple[Placement, ...] = self.tensors[name].strategies[0].output_spec.placements
        return placements

    def shards(self, name: str, placements: tuple[Placement, ...], dim: int | None = None) -> int:
        """Into how many pieces a tensor is cut, in one of its dims or in any."""
        mesh = self.tensors[name].mesh
        cuts = [(n, p) for n, p in zip(mesh.shape, placements, strict=True) if hasattr(p, "dim")]
        return math.prod(n for n, p in cuts if dim in (None, p.dim))

    def rule(self, cut: Cut) -> list[Placement | None]:
        """Results and inputs, along one dim of the mesh."""
        results = [self._result(name, cut) for name in self.results]
        inputs = [Shard(cut[name]) if name in cut else Replicate() for name in self.tensors]
        return [*results, *inputs]

    def _result(self, name: str, cut: Cut) -> Placement | None:
        of = name.removeprefix(GRAD)
        if name.startswith(GRAD) and of not in self.tensors:
            return None
        if of in cut:
            return Shard(cut[of])
        # The gradient of what each rank has whole is what its own part of the work adds to it.
        return Partial() if cut and name.startswith(GRAD) else Replicate()

    def strategy(self, cuts: list[Cut], fits: Callable[["Call", OpSpec], bool]) -> OpStrategy:
        """The cuts in every combination over the dims of the mesh, as far as they fit."""
        found = expand_to_full_mesh_op_strategy(
            self.schema.get_mesh_from_args(),
            self.schema,
            [self.rule(cut) for cut in ({}, *cuts)],
            input_index=len(self.results),
        )
        fitting = [spec for spec in found.strategies if self._keeps_keywords(spec) and fits(self, spec)]
        if not fitting:
            now = ", ".join(f"{name} {self.placements(name)}" for name in self.tensors)
            raise RuntimeError(
                f"attn_ext: expected placements that fit together in {self.schema.op}, where tensors passed "
                f"by keyword and pages that are written to stay as they are, but got {now}"
            )
        return OpStrategy(fitting)

    def _keeps_keywords(self, spec: OpSpec) -> bool:
        """DTensor moves no tensor that is passed by keyword."""
        return all(self.keeps(spec, name) for name in self.schema.kwargs_schema if name in self.tensors)

    def keeps(self, spec: OpSpec, name: str) -> bool:
        return self.placements_in(spec, name) == self.placements(name)

    def placements_in(self, spec: OpSpec, name: str) -> tuple[Placement, ...]:
        assert spec.input_specs is not None
        placements: tuple[Placement, ...] = spec.input_specs[[*self.tensors].index(name)].placements
        return placements


def replicated(schema: OpSchema) -> OpStrategy:
    return Call(schema).strategy([], lambda call, spec: True)


# The internal pair ---------------------------------------------------------------------------------


def attention(schema: OpSchema) -> OpStrategy:
    call = Call(schema)
    if call.arguments["dropout_p"] > 0:
        _refuse_shards(call)
        return call.strategy([], _heads_divide)
    return call.strategy(list(_cuts(call)), _heads_divide)


def _refuse_shards(call: Call) -> None:
    for name in call.tensors:
        if call.shards(name, call.placements(name)) > 1:
            raise RuntimeError(
                "attn_ext: expected tensors that no dim of the mesh cuts with dropout_p > 0, but got "
                f"{name} with placements {call.placements(name)}: what drops weights of a sequence that lies "
                "on several ranks is attn_ext.distributed.context_parallel_sdpa"
            )


def _cuts(call: Call) -> Iterator[Cut]:
    """Along the heads, then along each batch dim, from the right; they have numbers from the right."""
    operands = [call.tensors[name] for name in ("query", "key", "value")]
    dims = max(x.ndim for x in operands)
    for axis in range(dims - 2):
        sizes = [x.shape[-3 - axis] if x.ndim >= 3 + axis else 1 for x in operands]
        whole = {size for size in sizes if size != 1}
        if whole:
            yield {
                name: dim
                for name in (*call.tensors, *call.results)
                if (dim := _dim_of(call, name, axis, dims, whole)) is not None
            }


def _dim_of(call: Call, name: str, axis: int, dims: int, whole: set[int]) -> int | None:
    """Which dim of a tensor an axis of the heads (0) or the batch (1, 2, ...) is, if it is not broadcast."""
    kind = name.removeprefix(GRAD)
    if kind not in TAILS:
        return None
    tensor = call.tensors.get(name)
    if tensor is None:  # a result, which has every dim
        return dims - 3 - axis if not name.startswith(GRAD) else None
    dim = tensor.ndim - 1 - TAILS[kind] - axis
    # Heads of keys are fewer than those of queries where groups share them, and then both are cut.
    return dim if dim >= 0 and tensor.shape[dim] in whole else None


def _heads_divide(call: Call, spec: OpSpec) -> bool:
    for name in ("key", "value"):
        dim = call.tensors[name].ndim - 3
        if dim >= 0 and call.tensors[name].shape[dim] % call.shards(
            name, call.placements_in(spec, name), dim
        ):
            return False
    return True


# Pages of a cache ----------------------------------------------------------------------------------


def paged(schema: OpSchema) -> OpStrategy:
    """By heads; or by sequences, one row each, of which every rank has all pages."""
    call = Call(schema)
    cuts: list[Cut] = []
    if call.tensors["query"].shape[1] > 1:
        cuts.append({"query": 1, "sinks": 0, "output": 1, "lse": 0, **_page_cut(call)})
    if "cu_seqlens_q" not in call.tensors:
        cuts.append({"query": 0, "block_table": 0, "seqlens_k": 0, "output": 0, "lse": 1})
    return call.strategy(cuts, _page_heads_divide)


def cache_write(schema: OpSchema) -> OpStrategy:
    call = Call(schema)
    return call.strategy([{"key": 1, "value": 1, **_page_cut(call)}], _pages_stay)


def _page_cut(call: Call) -> Cut:
    """The heads of pages, and of their scales where each head has its own."""
    heads = call.tensors["key_pages"].shape[2]
    if heads == 1:
        return {}
    cut = {"key_pages": 2, "value_pages": 2}
    for name in ("key_scale", "value_scale"):
        scale = call.tensors.get(name)
        if scale is not None and scale.ndim == 4:
            cut[name] = 2
        elif scale is not None and scale.ndim == 1 and scale.shape[0] == heads:
            cut[name] = 0
    return cut


def _page_heads_divide(call: Call, spec: OpSpec) -> bool:
    heads = call.tensors["key_pages"].shape[2]
    return bool(heads % call.shards("key_pages", call.placements_in(spec, "key_pages"), 2) == 0)


def _pages_stay(call: Call, spec: OpSpec) -> bool:
    written = all(call.keeps(spec, name) for name in ("key_pages", "value_pages"))
    return written and _page_heads_divide(call, spec)


# Registration --------------------------------------------------------------------------------------

RULES = {
    "_sdpa_forward": attention,
    "_sdpa_backward": attention,
    "_packed_sequences": replicated,
    "sdpa_paged": paged,
    "sdpa_paged_with_lse": paged,
    "cache_write_": cache_write,
}


def register() -> None:
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for name, rule in RULES.items():
        op = getattr(torch.ops.attn_ext, name).default
        # A rule holds for these arguments alone: every one is part of the key under which DTensor keeps it,
        # also which tensors are None.
        keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
        info = RuntimeSchemaInfo(static_argnum=0, static_kwargkey=keywords)
        propagator.register_op_strategy(op, rule, info)
