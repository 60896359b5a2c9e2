"""Packed sequences and caches on the shapes that other projects hold theirs to."""

import math

import pytest
import torch

import attn_ext
from attn_ext import reference

# (query heads, key heads), head dim, value dim.
HEADS = [(9, 3), (8, 2), (6, 6), (4, 1)]
DIMS = [(33, 33), (55, 55), (96, 96), (192, 128), (256, 256), (512, 512), (576, 512)]
MIXES = {
    "decode": [(1, 523), (1, 37), (1, 777)],
    "mixed": [(1, 728), (5, 18), (129, 463), (1, 1), (239, 1)],
    "odd": [(127, 512), (113, 127), (3, 799), (108, 256), (256, 512)],
}
WINDOWS = [{}, {"window_left": 63, "window_right": 0}, {"window_left": 128, "window_right": 128}]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def close(actual, expected, dtype):
    largest = max([0.0, *expected[expected.isfinite()].abs().flatten()[:1].tolist()])
    torch.testing.assert_close(
        actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * (1 + largest)
    )


def sides_of(mix):
    return [starts(side) for side in zip(*MIXES[mix], strict=True)]


def tensors_of(mix, heads, dims, dtype):
    rows, keys = (int(side[-1]) for side in sides_of(mix))
    shapes = ((rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    return [torch.randn(shape).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_dims(mix, dims, dtype):
    tensors, sides = tensors_of(mix, (9, 3), dims, dtype), sides_of(mix)
    options = {"is_causal": True, "enable_gqa": True, "softcap": 50.0}
    actual = attn_ext.sdpa_packed_with_lse(*tensors, *sides, **options)
    for a, e in zip(actual, reference.sdpa_packed_with_lse(*tensors, *sides, **options), strict=True):
        close(a, e, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", WINDOWS, ids=["open", "left", "both"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gradients(heads, options, dtype):
    sides = sides_of("odd")
    leaves = [t.requires_grad_() for t in tensors_of("odd", heads, (40, 40), dtype)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    incoming = torch.randn(leaves[0].shape).to(dtype)
    results = [
        (output, *torch.autograd.grad(output, ts, incoming.to(output.dtype)))
        for ts, output in (
            (leaves, attn_ext.sdpa_packed(*leaves, *sides, enable_gqa=True, **options)),
            (wide, reference.sdpa_packed(*wide, *sides, enable_gqa=True, **options)),
        )
    ]
    for a, e in zip(*results, strict=True):
        close(a, e, dtype)


@pytest.mark.parametrize("page", [1, 8, 16, 64, 256])
@pytest.mark.parametrize("dims", [(33, 33), (96, 96), (576, 512)], ids=str)
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_pages(mix, dims, page):
    """Over a cache as it is served: rows of a pool in no order."""
    query, key, value = tensors_of(mix, (9, 3), dims, torch.bfloat16)
    sides, lengths = sides_of(mix), torch.tensor([keys for _, keys in MIXES[mix]])
    used = (lengths + page - 1) // page
    table = torch.full((len(used), int(used.max())), -1)
    for row, pages in zip(table, torch.randperm(int(used.sum())).split(used.tolist()), strict=True):
        row[: len(pages)] = pages
    caches = [torch.full((int(used.sum()), page, 3, dim), math.nan).bfloat16() for dim in dims]
    places = [torch.arange(int(n)) for n in lengths]
    slots = torch.cat([row[p // page] * page + p % page for row, p in zip(table, places, strict=True)])
    attn_ext.cache_write_(*caches, key, value, slots)
    options = {"enable_gqa": True, "window_left": 127}
    paged = attn_ext.sdpa_paged(query, *caches, table, lengths, sides[0], **options)
    assert torch.equal(paged, attn_ext.sdpa_packed(query, key, value, *sides, is_causal=True, **options))


@pytest.mark.slow
def test_a_prompt_of_4097():
    query, key, value = torch.randn(3, 4097, 2, 64).unbind(0)
    ends = starts([4097])
    output = attn_ext.sdpa_packed(query, key, value, ends, is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.double().transpose(0, 1) for t in (query, key, value)), is_causal=True
    )
    torch.testing.assert_close(output.double().transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
    caches = [t.reshape(241, 17, 2, 64) for t in (key, value)]
    table = torch.arange(241)[None]
    chunks = [
        attn_ext.sdpa_paged(query[a:b], *caches, table, torch.tensor([b]), starts([b - a]))
        for a, b in ((0, 1000), (1000, 4096), (4096, 4097))
    ]
    torch.testing.assert_close(torch.cat(chunks), output, rtol=1e-5, atol=1e-5)
