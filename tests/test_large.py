"""Tensors of more than 2^31 elements, or that lie more than 2^31 elements apart in memory."""

import math
import mmap

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext.testing import DTYPES

pytestmark = pytest.mark.skipif(attn_ext.cpu_capability() == "aten", reason="it packs what lies apart")

FAR = 2**31 + 24
MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on


def lay_out(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides, in memory of which only the pages that it touches are there."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, extent * t.element_size(), flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


def everything(query, key, value, attn_mask, sinks, grad_output, grad_lse) -> list[Tensor]:
    """Output, lse, and every gradient."""
    leaves = [t.detach() for t in (query, key, value, attn_mask, sinks)]
    wanted = [t.requires_grad_() for t in leaves if t.is_floating_point()]
    results = torch.ops.attn_ext.sdpa_with_lse(
        *leaves[:4], sinks=leaves[4], enable_gqa=True, is_causal=True, query_offset=key.shape[-2] // 2
    )
    return [*results, *torch.autograd.grad(results, wanted, (grad_output, grad_lse))]


# Strides where heads lie `distance` apart, which a head fills up to its end. A column of a row far from the
# next, or a row from the next: either may be what is read as whole vectors.
def rows_apart(t: Tensor, distance: int) -> tuple[int, ...]:
    return (t.shape[1] * distance, distance, distance // t.shape[2] // 2 * 2, 1)


def columns_apart(t: Tensor, distance: int) -> tuple[int, ...]:
    return (t.shape[1] * distance, distance, 1, distance // t.shape[3] // 2 * 2)


LAYOUTS = {"rows_apart": rows_apart, "columns_apart": columns_apart}


# (Lq, Lk): few keys, whole rows, online over key blocks, split over keys, decoding
@pytest.mark.parametrize(("query_len", "key_len"), [(9, 11), (40, 150), (40, 1100), (8, 1100), (2, 300)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask_kind", ["bool", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_offsets_beyond_31_bits(dtype, mask_kind, layout, query_len, key_len):
    shapes = (2, 4, query_len, 16), (2, 2, key_len, 16), (2, 2, key_len, 24), (2, 4, query_len, key_len)
    query, key, value, mask = (torch.randn(shape).to(dtype) for shape in shapes)
    if mask_kind == "bool":
        mask = mask > -1
    grad_output = torch.randn(2, 4, query_len, 24).to(dtype)
    sinks, grad_lse = torch.randn(4).to(dtype), torch.randn(2, 4, query_len)
    grad_lse = grad_lse.to(torch.float64 if dtype == torch.float64 else torch.float32)

    def laid_out(distance: int) -> list[Tensor]:
        matrices = (query, key, value, mask, grad_output)
        query_, key_, value_, mask_, grad_ = (
            lay_out(t, LAYOUTS[layout](t, distance or 2 * t[0, 0].numel())) for t in matrices
        )
        distance = distance or 2 * query_len
        lse_grad = lay_out(grad_lse, (4 * distance, distance, distance // query_len))
        return [query_, key_, value_, mask_, lay_out(sinks, (distance,)), grad_, lse_grad]

    for far, near in zip(everything(*laid_out(FAR)), everything(*laid_out(0)), strict=True):
        assert torch.equal(far, near)


BATCH, LENGTH = 1024, 1021
WIDTH = math.ceil(FAR / (BATCH * LENGTH))  # of a matrix that has more than 2^31 elements in a batch
SAMPLES = (0, BATCH // 2, BATCH - 1)


def need_memory(gib: float) -> None:
    """Skip the test where no such tensor can be."""
    with open("/proc/meminfo") as lines:
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    if free < gib:
        pytest.skip(f"needs {gib} GiB of memory, of which {free:.1f} GiB are free")


@pytest.mark.slow
@pytest.mark.parametrize("query_len", [1, LENGTH])
def test_an_output_of_more_than_31_bits(query_len):
    need_memory(6)
    batch = BATCH * LENGTH // query_len
    query = torch.randn(batch, 1, query_len, 2).bfloat16()
    key, value = torch.randn(1, 1, 3, 2).bfloat16(), torch.randn(1, 1, 3, WIDTH).bfloat16()
    output = attn_ext.sdpa(query, key, value)
    assert output.numel() > 2**31
    for b in (0, batch // 2, batch - 1):
        assert torch.equal(output[b], attn_ext.sdpa(query[b : b + 1], key, value)[0])


@pytest.mark.slow
def test_weights_of_more_than_31_bits():
    need_memory(6)
    query, key = torch.randn(WIDTH, 1, LENGTH, 2).bfloat16(), torch.randn(1, 1, BATCH, 2).bfloat16()
    _, weights = attn_ext.sdpa_with_weights(query, key, key)
    assert weights.numel() > 2**31
    for b in (*SAMPLES, WIDTH - 1):
        assert torch.equal(weights[b], attn_ext.sdpa_with_weights(query[b : b + 1], key, key)[1][0])


def gradient_of(wanted: str, inputs: dict[str, Tensor], grad_output: Tensor) -> Tensor:
    leaves = {name: t.detach() for name, t in inputs.items()}
    leaves[wanted].requires_grad_()
    output = attn_ext.sdpa(**leaves)
    return torch.autograd.grad(output, leaves[wanted], grad_output.expand_as(output))[0]


# In each test all samples are one, expanded, so that nothing but the gradient is large.
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["query", "key", "value"])
def test_a_gradient_of_more_than_31_bits(wanted):
    need_memory(6)
    query_len, key_len = (LENGTH, 3) if wanted == "query" else (3, LENGTH)
    dim, value_dim = (2, WIDTH) if wanted == "value" else (WIDTH, 2)
    shapes = {"query": (query_len, dim), "key": (key_len, dim), "value": (key_len, value_dim)}
    sample = {name: torch.randn(1, 1, *shape).bfloat16() for name, shape in shapes.items()}
    grad_output = torch.randn(1, 1, query_len, value_dim).bfloat16()
    inputs = {name: t.expand(BATCH, -1, -1, -1) for name, t in sample.items()}
    gradient = gradient_of(wanted, inputs, grad_output)
    assert gradient.numel() > 2**31
    expected = gradient_of(wanted, sample, grad_output)
    for b in SAMPLES:
        assert torch.equal(gradient[b : b + 1], expected)


@pytest.mark.slow
def test_a_mask_gradient_of_more_than_31_bits():
    need_memory(11)
    query, key = torch.randn(1, 1, LENGTH, 2), torch.randn(1, 1, BATCH, 2)
    sample = {"query": query, "key": key, "value": key, "attn_mask": torch.randn(1, 1, LENGTH, BATCH)}
    grad_output = torch.randn(1, 1, LENGTH, 2)
    inputs = {name: t.expand(WIDTH, -1, -1, -1) for name, t in sample.items()}
    gradient = gradient_of("attn_mask", inputs, grad_output)
    assert gradient.numel() > 2**31
    expected = gradient_of("attn_mask", sample, grad_output)
    for b in (*SAMPLES, WIDTH - 1):
        assert torch.equal(gradient[b : b + 1], expected)
