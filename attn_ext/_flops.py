"""What the operators cost, for :class:`torch.utils.flop_counter.FlopCounterMode`.

Counted as torch counts its own attention: two operations for each multiply-add of the matrix products, two
products forward, five backward (the scores are made again there; four where weights were saved), for
every pair of query and key. What a mask, causality or a window hides counts too, although the kernels skip
it. Of packed sequences every query meets the keys of its own sequence alone; where their lengths are not
known (fake and meta tensors), every key, which is the most that it can be. Only the internal operators have
formulas: the public ones decompose into them, so nothing is counted twice. Those over pages decompose into
nothing, and have their own.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_FLOP_COUNTER = "torch.utils.flop_counter"

_SEQUENCES = (
    6  # the place of the table among the tensors of both operators; output and lse follow in backward
)
_SAVED = 25  # the place of the weights, the last argument of backward


def _pairs(query: Tensor, key: Tensor, sequences: Tensor | None) -> int:
    """Of rows of a query head with keys."""
    if sequences is None or isinstance(sequences, FakeTensor) or sequences.is_meta:
        return int(query.shape[-2] * key.shape[-2])
    return sum(rows * keys for _, rows, _, keys, _ in sequences.tolist())


def _multiply_adds(lse: Tensor, query: Tensor, key: Tensor, sequences: Tensor | None) -> int:
    """Operations of a product of one column: every row of every head meets its keys."""
    heads: int = prod(lse.shape[:-1])
    return 2 * heads * _pairs(query, key, sequences)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Sequence[Tensor]) -> int:
    operations = _multiply_adds(out_val[1], query, key, rest[_SEQUENCES - 3])
    return operations * (query.shape[-1] + value.shape[-1])


def _backward(*args: Any, weights: Tensor | None = None, out_val: Any, **_: Any) -> int:
    query, key, value = args[4:7]
    if len(args) > _SAVED:
        weights = args[_SAVED]
    operations: int = _multiply_adds(args[4 + _SEQUENCES + 2], query, key, args[4 + _SEQUENCES])
    columns: int = (3 if weights is None else 2) * query.shape[-1] + 2 * value.shape[-1]
    return operations * columns


def _paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *_: Any,
    out_val: Any,
    **__: Any,
) -> int:
    """Every row of a sequence meets its every key; of tensors without numbers, all that a table can name."""
    rows, heads, dim = query.shape
    per_pair = 2 * heads * (dim + value_pages.shape[3])
    if seqlens_k.is_meta or isinstance(seqlens_k, FakeTensor):
        return rows * block_table.shape[1] * key_pages.shape[1] * per_pair
    counts = torch.ones_like(seqlens_k) if cu_seqlens_q is None else cu_seqlens_q.diff()
    return int((counts.long() * seqlens_k.long()).sum()) * per_pair


def _register_paged(flop_counter: ModuleType) -> None:
    ops = [torch.ops.attn_ext.sdpa_paged, torch.ops.attn_ext.sdpa_paged_with_lse]
    flop_counter.register_flop_formula(ops, get_raw=True)(_paged)


def _register_formulas(flop_counter: ModuleType) -> None:
    register = flop_counter.register_flop_formula
    register(torch.ops.attn_ext._sdpa_forward, get_raw=True)(_forward)
    register(torch.ops.attn_ext._sdpa_backward, get_raw=True)(_backward)
    _register_paged(flop_counter)


class _WhenImported(MetaPathFinder):
    """Registers the formulas when somebody imports the flop counter, which may bring a compiler with it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _FLOP_COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register_formulas(module)

        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Registers the formulas, now or when the flop counter is imported; once, when the package is."""
    if _FLOP_COUNTER in sys.modules:
        _register_formulas(sys.modules[_FLOP_COUNTER])
    else:
        sys.meta_path.insert(0, _WhenImported())
