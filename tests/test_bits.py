"""The kernels' promise: the same bits on any number of threads, and beside any other batch and heads."""

import pytest
import torch

import attn_ext
from attn_ext.testing import DTYPES, on_threads

pytestmark = pytest.mark.skipif(
    attn_ext.cpu_capability() == "aten", reason="matmul libraries do not promise it"
)

# (Lq, Lk): whole rows, online over key blocks, split over keys, decoding
LENGTHS = [(40, 70), (300, 1500), (20, 3000), (1, 2000), (13, 700)]
CALLS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 5},
    "softcap_and_window": {"softcap": 3.0, "window_left": 30},
}
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_lengths = pytest.mark.parametrize(("query_len", "key_len"), LENGTHS)
by_call = pytest.mark.parametrize("call", CALLS)


def inputs(query_len, key_len, dtype):
    """(3, 4, Lq, 24), and two key heads."""
    shapes = (3, 4, query_len, 24), (3, 2, key_len, 24), (3, 2, key_len, 20)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def everything(tensors, options):
    """Output, lse and key mass, and the gradients of all of them together."""
    output, lse = torch.ops.attn_ext.sdpa_with_lse(*tensors, enable_gqa=True, **options)
    _, key_mass = torch.ops.attn_ext.sdpa_with_key_mass(*tensors, enable_gqa=True, **options)
    loss = output.square().sum() + lse[lse.isfinite()].sum() + key_mass.square().sum()
    return [output, lse, key_mass, *torch.autograd.grad(loss, tensors)]


@by_dtype
@by_lengths
@by_call
def test_bits_do_not_depend_on_the_number_of_threads(call, query_len, key_len, dtype):
    tensors = inputs(query_len, key_len, dtype)
    alone = on_threads(1, lambda: everything(tensors, CALLS[call]))
    for threads in (2, 3, 8):
        for a, b in zip(alone, on_threads(threads, lambda: everything(tensors, CALLS[call])), strict=True):
            assert torch.equal(a, b)


@by_dtype
@by_call
@pytest.mark.parametrize(("query_len", "key_len"), [(30, 150), (64, 512), (300, 300), (511, 700), (1000, 77)])
def test_bits_of_gradients_do_not_depend_on_threads_that_take_turns_on_one_key_head(
    call, query_len, key_len, dtype
):
    query = torch.randn(1, 3, query_len, 24, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, 1, key_len, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    leaves, options = (query, key, value), {"enable_gqa": True, **CALLS[call]}
    output = attn_ext.sdpa(*leaves, **options)
    grad = torch.randn_like(output)

    def gradients():
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    alone = on_threads(1, gradients)
    for threads in (2, 5, 64):
        for a, b in zip(alone, on_threads(threads, gradients), strict=True):
            assert torch.equal(a, b)


@by_dtype
@pytest.mark.parametrize("key_heads", [1, 3])
@pytest.mark.parametrize(
    "more", ["bias", "bias_of_keys", "bias_over_batch", "sinks", "dropout", "not_finite"]
)
def test_bits_of_gradients_of_few_keys_do_not_depend_on_the_number_of_threads(more, key_heads, dtype):
    batch = 20 if more == "bias_over_batch" else 2  # more than there are copies of its gradient
    query = torch.randn(batch, 3, 250, 24, dtype=dtype)
    key, value = (torch.randn(batch, key_heads, 77, dim, dtype=dtype) for dim in (24, 20))
    options, leaves = {"enable_gqa": True}, [query, key, value]
    if more == "dropout":
        options.update(dropout_p=0.3)
    elif more == "not_finite":
        query[0, 1, 100, 3] = key[0, 0, 5, 0] = value[1, 0, 70, 1] = float("nan")
        options.update(attn_mask=torch.rand(2, 1, 250, 77) > 0.4)
    elif more == "sinks":
        options.update(sinks=torch.randn(3, dtype=dtype))
    else:
        shape = {"bias": (2, 3, 250, 77), "bias_of_keys": (2, 1, 1, 77), "bias_over_batch": (1, 3, 250, 77)}
        options.update(attn_mask=torch.randn(shape[more], dtype=dtype))
    if more not in ("dropout", "not_finite"):
        leaves.append(options["sinks" if more == "sinks" else "attn_mask"])
    for leaf in leaves:
        leaf.requires_grad_()
    output = attn_ext.sdpa(query, key, value, **options)
    grad = torch.randn_like(output)
    grad[0, 2, 200, 7] = torch.inf if more == "not_finite" else 1

    def gradients():
        return torch.autograd.grad(output, leaves, grad, retain_graph=True)

    alone = on_threads(1, gradients)
    for threads in (2, 5, 64):
        for a, b in zip(alone, on_threads(threads, gradients), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@by_dtype
@by_lengths
@by_call
def test_a_row_has_the_same_bits_beside_any_batch_and_heads(call, query_len, key_len, dtype):
    query, key, value = (t.detach() for t in inputs(query_len, key_len, dtype))
    whole, lse = attn_ext.sdpa_with_lse(query, key, value, enable_gqa=True, **CALLS[call])
    part, part_lse = attn_ext.sdpa_with_lse(
        query[1:2, 2:3], key[1:2, 1:2], value[1:2, 1:2], enable_gqa=True, **CALLS[call]
    )
    assert torch.equal(part, whole[1:2, 2:3])
    assert torch.equal(part_lse, lse[1:2, 2:3])


@by_dtype
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (24, 20), (67, 40), (128, 100), (160, 8)])
@pytest.mark.parametrize("key_len", [471, 4096])  # columns a large power of two apart share sets of a cache
@pytest.mark.parametrize("query_len", [1, 2, 3, 5, 8, 16])
def test_bits_of_a_few_rows_do_not_depend_on_how_keys_and_values_lie(
    query_len, key_len, dim, value_dim, dtype
):
    query, key, value = (
        torch.randn(2, 3, length, columns, dtype=dtype, requires_grad=True)
        for length, columns in ((query_len, dim), (key_len, dim), (key_len, value_dim))
    )
    expected = everything((query, key, value), {})
    for key_across, value_across in ((True, True), (True, False), (False, True)):
        laid = (
            x.detach().mT.contiguous().mT.requires_grad_() if across else x
            for x, across in ((key, key_across), (value, value_across))
        )
        for a, b in zip(everything((query, *laid), {}), expected, strict=True):
            assert torch.equal(a, b)


@by_dtype
@pytest.mark.parametrize(("query_len", "key_len"), [(20, 1100), (40, 500), (300, 100)])
@pytest.mark.parametrize("value_dim", [128, 256, 320, 512])
def test_bits_do_not_depend_on_whether_rows_of_wide_values_follow_each_other(
    value_dim, query_len, key_len, dtype
):
    query, key, apart = (
        torch.randn(2, heads, length, dim, dtype=dtype)
        for heads, length, dim in ((4, query_len, 16), (2, key_len, 16), (2, key_len, value_dim + 8))
    )
    apart = apart[..., :value_dim]  # always packed, where others are if that is faster

    def results(value):
        return everything([x.detach().requires_grad_() for x in (query, key, value)], {})

    for a, b in zip(results(apart), results(apart.contiguous()), strict=True):
        assert torch.equal(a, b)


@by_dtype
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (33, 16), (80, 31), (7, 128), (32, 1)])
@pytest.mark.parametrize("apart", [2, 3, 4, 5, 12])
@pytest.mark.parametrize("query_len", [1, 7, 24, 150])
def test_bits_do_not_depend_on_how_far_apart_columns_lie(query_len, apart, dim, value_dim, dtype):
    def laid(x):  # NaN lies between, and the last number ends the storage
        stored = torch.full((*x.shape, apart), torch.nan, dtype=x.dtype)
        stored[..., -1] = x.detach()
        return stored[..., -1].requires_grad_()

    operands = tuple(
        torch.randn(2, 3, length, columns, dtype=dtype, requires_grad=True)
        for length, columns in ((query_len, dim), (171, dim), (171, value_dim))
    )
    expected = everything(operands, {})
    for a, b in zip(everything(tuple(map(laid, operands)), {}), expected, strict=True):
        assert torch.equal(a, b)


SHARED_KEYS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 440},
    "window": {"is_causal": True, "query_offset": 440, "window_left": 301},
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.3},
    "padding": {"attn_mask": torch.arange(471) < 300},
    "holes": {"attn_mask": torch.arange(4 * 471).view(4, 471) % 7 != 0},
    "bias": {"attn_mask": torch.linspace(-3, 3, 4 * 471).view(4, 471)},
}


@by_dtype
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 100, 37, 288])
@pytest.mark.parametrize("call", SHARED_KEYS)
def test_a_few_rows_have_the_same_bits_in_a_large_group(call, dim, bad, dtype):
    query = torch.randn(2, 73, 4, dim).to(dtype)  # so many that keys of any of these dims are packed
    key, value = torch.randn(2, 1, 471, dim).to(dtype), torch.randn(2, 1, 471, 72).to(dtype)
    if bad is not None:
        key[0, 0, 300, 3] = value[1, 0, 33, 5] = value[1, 0, 400] = bad

    def results(heads):
        torch.manual_seed(7)
        options = {"enable_gqa": True, **SHARED_KEYS[call]}
        output, lse = attn_ext.sdpa_with_lse(query[:, heads], key, value, **options)
        if call == "dropout" and heads.start:
            return output[:, :0], lse[:, :0]  # draws are counted from the first head on
        return output, lse, attn_ext.sdpa_with_weights(query[:, heads], key, value, **options)[1]

    whole = results(slice(0, 73))
    for heads in (slice(0, 3), slice(72, 73)):
        for alone, together in zip(results(heads), whole, strict=False):
            expected = together[:, heads] if alone.shape[1] else together[:, :0]
            torch.testing.assert_close(alone, expected, rtol=0, atol=0, equal_nan=True)


LAYOUTS = {
    "rows": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "across": lambda x: x.mT.contiguous().mT,
}
BOTH_LAYOUTS = [("rows", "rows"), ("transposed", "transposed"), ("across", "across"), ("rows", "across")]

SEEN_KEYS = {
    "all": lambda keys: {},
    "from the 17th on": lambda keys: {"attn_mask": keys >= 16},
    "two runs": lambda keys: {"attn_mask": (keys < 65) | (keys >= 192)},
    "few of many": lambda keys: {"attn_mask": keys % 97 == 5},
    "a window": lambda keys: {"is_causal": True, "query_offset": len(keys) // 2, "window_left": 40},
}


@by_dtype
@pytest.mark.parametrize("value_dim", [64, 40])
@pytest.mark.parametrize("query_len", [17, 47, 48, 256])
def test_bits_of_many_rows_do_not_depend_on_how_heads_lie(query_len, value_dim, dtype):
    query, key = (torch.randn(2, 3, n, 24).to(dtype) for n in (query_len, 333))
    value = torch.randn(2, 3, 333, value_dim).to(dtype)
    value[0, 1, 77] = float("inf")
    results = [
        attn_ext.sdpa_with_lse(
            *(LAYOUTS[how](x) for x in (query, key, value)), attn_mask=torch.arange(333) != 77
        )
        for how in ("rows", "transposed")
    ]
    assert all(map(torch.equal, *results))
    assert results[0][0].isfinite().all()


@by_dtype
@pytest.mark.parametrize("seen", SEEN_KEYS)
@pytest.mark.parametrize("query_len", [1, 4, 7])
@pytest.mark.parametrize("key_len", [1, 7, 16, 31, 32, 33, 48, 256, 257, 331, 555])
def test_bits_of_rows_that_see_some_keys_do_not_depend_on_how_keys_and_values_lie(
    key_len, query_len, seen, dtype
):
    query, key, value = (torch.randn(2, 3, n, 40).to(dtype) for n in (query_len, key_len, key_len))
    options = SEEN_KEYS[seen](torch.arange(key_len))
    across = LAYOUTS["across"]
    expected = attn_ext.sdpa_with_lse(query, key, value, **options)
    for laid in ((across(key), across(value)), (across(key), value), (key, across(value))):
        for a, b in zip(attn_ext.sdpa_with_lse(query, *laid, **options), expected, strict=True):
            assert torch.equal(a, b)


@by_dtype
@pytest.mark.parametrize(
    ("query_len", "dim", "value_dim"),
    [(1, 128, 128), (1, 160, 8), (2, 64, 100), (3, 96, 40), (5, 33, 9), (7, 32, 72)],
)
@pytest.mark.parametrize("size", [1.0, 1e-38])  # of the values: products that are subnormal, too
@pytest.mark.parametrize("layouts", BOTH_LAYOUTS)
def test_a_row_has_the_same_bits_in_groups_of_any_size(layouts, size, query_len, dim, value_dim, dtype):
    query = torch.randn(2, 160, query_len, dim).to(dtype)
    key, value = (
        LAYOUTS[layout](torch.randn(2, 1, 555, columns).to(dtype) * scale)
        for layout, columns, scale in zip(layouts, (dim, value_dim), (1.0, size), strict=True)
    )
    whole = attn_ext.sdpa_with_lse(query, key, value, enable_gqa=True)
    for heads in (slice(0, 1), slice(2, 4), slice(32, 72)):
        part = attn_ext.sdpa_with_lse(query[:, heads], key, value, enable_gqa=True)
        assert all(torch.equal(a, b[:, heads]) for a, b in zip(part, whole, strict=True))


@by_dtype
@pytest.mark.parametrize("query_len", [1, 2, 7, 8])
@pytest.mark.parametrize("heads", [2, 140])  # 140: whose keys are packed
def test_a_zero_has_the_same_sign_beside_heads_that_see_other_keys(heads, query_len, dtype):
    """Head 0 goes through two stretches of keys, whose sum underflows, and beside others through a third."""
    query, key, value = (torch.zeros(1, 1, length, 128, dtype=dtype) for length in (query_len, 256, 256))
    value[..., 0, :], value[..., 32, :] = 1.2e-38, -1.3e-38
    mask = torch.zeros(heads, 1, 256, dtype=torch.bool)
    mask[:, :, [0, 32]] = mask[1:, :, 100] = True
    together = attn_ext.sdpa(query.expand(-1, heads, -1, -1), key, value, mask, enable_gqa=True)
    alone = attn_ext.sdpa(query, key, value, mask[:1])
    assert torch.equal(together[:, :1].signbit(), alone.signbit())


@by_dtype
def test_subnormal_numbers_are_numbers_after_a_call(dtype):
    query, key, value = (torch.randn(1, 2, length, 128).to(dtype) for length in (1, 555, 555))
    attn_ext.sdpa(query, key, value)
    assert torch.tensor(1e-40) * 0.5 != 0


@by_dtype
@pytest.mark.parametrize("page_size", [32, 16, 5])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(("query_len", "dim"), [(4, 64), (1, 128)])
def test_a_few_rows_have_the_same_bits_in_a_large_group_over_pages(
    query_len, dim, cache_dtype, page_size, dtype
):
    query = torch.randn(2, 130, query_len, dim).to(dtype)
    cache = attn_ext.KeyValueCache(
        2, 480, num_heads=1, head_dim=dim, page_size=page_size, dtype=cache_dtype or dtype
    )
    rows = torch.randn(2, 1, 471, dim).to(dtype)
    cache.append(rows, rows.flip(2))
    whole = cache.attend(query, enable_gqa=True)
    for heads in (slice(0, 2), slice(129, 130)):
        assert torch.equal(cache.attend(query[:, heads], enable_gqa=True), whole[:, heads])
    if cache_dtype is None:
        last_rows = {"is_causal": True, "query_offset": 471 - query_len, "enable_gqa": True}
        assert torch.equal(attn_ext.sdpa(query, rows, rows.flip(2), **last_rows), whole)


# In which order many samples' gradients add up is no matter of the dtype.
@pytest.mark.parametrize(
    ("batch", "key_heads", "dtype"),
    [*((1, heads, dtype) for heads in (1, 2) for dtype in DTYPES), (20, 2, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("mask_shape", [(800, 1), (800,), (6, 800, 1), (800, 800)])
def test_bits_of_a_mask_s_gradient_that_a_group_s_heads_share_do_not_depend_on_threads(
    mask_shape, batch, key_heads, dtype
):
    query = torch.randn(batch, 6, 800, 16, dtype=dtype)
    key, value = (torch.randn(batch, key_heads, 800, 16, dtype=dtype) for _ in range(2))
    mask = torch.randn(mask_shape, dtype=dtype, requires_grad=True)
    output = attn_ext.sdpa(query, key, value, mask, enable_gqa=True)
    incoming = torch.randn_like(output)

    def gradient():
        return torch.autograd.grad(output, mask, incoming, retain_graph=True)[0]

    expected = on_threads(1, gradient)
    for threads in (2, 3, 8):
        assert torch.equal(on_threads(threads, gradient), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("key_len", [1024, 1030, 1056])
def test_a_large_gradient_of_a_mask_has_the_bits_of_small_ones(key_len, threads, dtype):
    """Past the caches where it takes megabytes and its rows are whole lines, some of which nobody sees."""
    query, key, value, grad = (
        torch.randn(1, 4, length, 64, dtype=dtype) for length in (512, key_len, key_len, 512)
    )
    mask = torch.randn(1, 4, 512, key_len, dtype=dtype)
    mask[..., 5:9] = mask[..., 200:270, 100:700] = -torch.inf

    def gradient(heads):
        leaf = mask[:, heads].clone().requires_grad_()
        output = attn_ext.sdpa(query[:, heads], key[:, heads], value[:, heads], leaf)
        return torch.autograd.grad(output, leaf, grad[:, heads])[0]

    together = on_threads(threads, lambda: gradient(slice(0, 4)))
    alone = [gradient(slice(head, head + 1)) for head in range(4)]
    assert torch.equal(together, torch.cat(alone, 1))
    assert together[..., 200:270, 100:700].eq(0).all()


# (Hq, Hkv, Lq): heads of a group whose rows the backward pass takes side by side
JOINED_HEADS = [(8, 1, 5), (6, 2, 40), (32, 2, 1), (4, 2, 200)]
by_joined_heads = pytest.mark.parametrize(("heads", "key_heads", "query_len"), JOINED_HEADS)


def gradients_of_joined_heads(query, key, value, grad, mask=None):
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    output, lse = attn_ext.sdpa_with_lse(*leaves, attn_mask=mask, enable_gqa=True)
    return torch.autograd.grad([output, lse], leaves, [grad, grad[..., 0].float().to(lse.dtype)])


@by_dtype
@by_joined_heads
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_joined_heads_have_the_same_bits(masked, heads, key_heads, query_len, dtype):
    query, grad = (torch.randn(2, heads, query_len, dim).to(dtype) for dim in (24, 20))
    key, value = (torch.randn(2, key_heads, 2700, dim).to(dtype) for dim in (24, 20))
    mask = torch.rand(2, 1, 1, 2700) > 0.3 if masked else None
    tensors = query, key, value, grad
    expected = on_threads(1, lambda: gradients_of_joined_heads(*tensors, mask))
    one_batch = gradients_of_joined_heads(*(x[1:] for x in tensors), mask[1:] if masked else None)
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for name, got in {
        "3 threads": on_threads(3, lambda: gradients_of_joined_heads(*tensors, mask)),
        "64 threads": on_threads(64, lambda: gradients_of_joined_heads(*tensors, mask)),
        "rows before heads": gradients_of_joined_heads(*rows_first, mask),
    }.items():
        assert all(map(torch.equal, got, expected)), name
    assert all(torch.equal(a, b[1:]) for a, b in zip(one_batch, expected, strict=True))


@by_dtype
@by_joined_heads
def test_gradients_of_joined_heads_have_the_same_bits_packed(heads, key_heads, query_len, dtype):
    lengths = query_len, query_len + 1, 300
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    key_offsets = 2700 * torch.arange(4)
    query, grad = (torch.randn(int(offsets[-1]), heads, dim).to(dtype) for dim in (24, 20))
    key, value = (torch.randn(8100, key_heads, dim).to(dtype) for dim in (24, 20))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = attn_ext.sdpa_packed(*leaves, offsets, key_offsets, enable_gqa=True)
    got = torch.autograd.grad(output, leaves, grad)
    for i in range(3):
        rows, keys = slice(*offsets[i : i + 2]), slice(*key_offsets[i : i + 2])
        parts = [
            x.detach()[at].transpose(0, 1).requires_grad_()
            for x, at in zip(leaves, (rows, keys, keys), strict=True)
        ]
        with attn_ext.save_weights_for_backward(False):
            alone = attn_ext.sdpa(*parts, enable_gqa=True)
        expected = torch.autograd.grad(alone, parts, grad[rows].transpose(0, 1))
        for whole, part, at in zip(got, expected, (rows, keys, keys), strict=True):
            assert torch.equal(whole[at].transpose(0, 1), part)
