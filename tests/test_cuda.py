"""The way to ATen's fused kernels on NVIDIA GPUs, tried without one: stand-ins for the kernels, on the CPU's tensors."""

import sys
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext.testing import CASES, OPS, assert_gradients_accurate, assert_outputs_accurate

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from fused_kernels import CUDNN, EFFICIENT, FLASH, on_gpu  # noqa: E402

GPUS = {
    "hopper": (CUDNN, FLASH, EFFICIENT),
    "ampere": (FLASH, EFFICIENT),
    "older": (EFFICIENT,),
    "flash_alone": (FLASH,),
}
by_gpu = pytest.mark.parametrize("gpu", GPUS)
by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
by_op = pytest.mark.parametrize("op", ["sdpa", "sdpa_with_lse"])


@by_gpu
@by_op
@by_dtype
@by_case
def test_outputs_are_accurate(case, dtype, op, gpu):
    with on_gpu(*GPUS[gpu]):
        assert_outputs_accurate(op, case.build(dtype))


@by_gpu
@by_op
@by_dtype
@by_case
def test_gradients_are_accurate(case, dtype, op, gpu):
    with on_gpu(*GPUS[gpu]):
        assert_gradients_accurate(op, case.build(dtype))
