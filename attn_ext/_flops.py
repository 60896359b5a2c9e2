"""What the operators cost, for :class:`torch.utils.flop_counter.FlopCounterMode`.

Counted as torch counts its own attention: two operations for each multiply-add of the matrix products, two
products forward, five backward (the scores are made again there), for every pair of query and key. What a
mask, causality or a window hides counts too, although the kernels skip it. Only the internal operators have
formulas: the public ones decompose into them, so nothing is counted twice.
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

_FLOP_COUNTER = "torch.utils.flop_counter"

Shape = Sequence[int]


def _product(rows_of: Shape, keys_of: Shape, dim: int) -> int:
    """Of (..., Hq, Lq, any) by (..., Lk, any): every row meets every key, ``dim`` multiply-adds each."""
    return 2 * prod(rows_of[:-1]) * keys_of[-2] * dim


def _forward(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: Sequence[Shape]) -> int:
    output = out_shape[0]
    return _product(output, key, query[-1]) + _product(output, key, value[-1])


def _backward(*shapes: Any, out_shape: Any) -> int:
    query, key, value, output = *shapes[4:7], shapes[10]
    return 3 * _product(output, key, query[-1]) + 2 * _product(output, key, value[-1])


def _register_formulas(flop_counter: ModuleType) -> None:
    flop_counter.register_flop_formula(torch.ops.attn_ext._sdpa_forward)(_forward)
    flop_counter.register_flop_formula(torch.ops.attn_ext._sdpa_backward)(_backward)


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
