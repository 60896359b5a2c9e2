"""The ways to kernels of NVIDIA GPUs, tried without one: stand-ins for the kernels, on the CPU's tensors."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attn_ext.testing import CASES, OPS, assert_gradients_accurate, assert_outputs_accurate, cases

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from fused_kernels import CUDNN, EFFICIENT, FLASH, on_gpu

#: What ATen would choose, the first that can; and whether there are kernels of our own.
GPUS = {
    "hopper": ((CUDNN, FLASH, EFFICIENT), True),
    "ampere": ((FLASH, EFFICIENT), True),
    "older": ((EFFICIENT,), False),
    "flash_alone": ((FLASH,), False),
}
by_gpu = pytest.mark.parametrize("gpu", GPUS)
by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_op = pytest.mark.parametrize("op", OPS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def gpu_of(name: str):
    allowed, tiles = GPUS[name]
    return on_gpu(*allowed, tiles=tiles)


@by_gpu
@by_op
@by_dtype
@by_case
def test_outputs_are_accurate(case, dtype, op, gpu):
    with gpu_of(gpu):
        assert_outputs_accurate(op, case.build(dtype))


@by_gpu
@by_op
@by_dtype
@by_case
def test_gradients_are_accurate(case, dtype, op, gpu):
    with gpu_of(gpu):
        assert_gradients_accurate(op, case.build(dtype))


WITH_DROPOUT = [
    replace(case, options=case.options | {"dropout_p": p})
    for p in (0.3, 1.0)
    for case in cases(lambda case: case.name in ("plain", "five_dims", "grouped", "sinks", "bias", "causal"))
]


@by_op
@pytest.mark.parametrize("case", WITH_DROPOUT, ids=str)
def test_dropout_is_accurate(case, op):
    with gpu_of("hopper") as called:
        assert_outputs_accurate(op, case.build(torch.bfloat16), dropout_seed=5)
        assert_gradients_accurate(op, case.build(torch.bfloat16), dropout_seed=5)
    assert set(called) == {"_tile_lse", "_tile_weights"}
