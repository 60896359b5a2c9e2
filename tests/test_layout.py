"""Results lie in memory in the order of the inputs that they follow: the output in the query's, a gradient in
its input's, with the features innermost. So what was transposed transposes back without a copy."""

import itertools

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import reference
from attn_ext.testing import operator

SIZES = (2, 3, 5, 4)  # (B, H, L, D)


def stored_as(order: tuple[int, ...], sizes: tuple[int, ...] = SIZES, **options) -> Tensor:
    """Of these sizes, with the dims in this order in memory."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.randn([sizes[d] for d in order], **options).permute(back)


def order_of(t: Tensor) -> list[int]:
    return sorted(range(t.dim()), key=lambda d: -t.stride(d))


def is_dense(t: Tensor) -> bool:
    return t.permute(order_of(t)).is_contiguous()


ORDERS = [(*order, 3) for order in itertools.permutations(range(3))]
by_order = pytest.mark.parametrize("order", ORDERS, ids=str)


@by_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_output_follows_the_query(order, dtype, device):
    query = stored_as(order, device=device, dtype=dtype)
    key, value = torch.randn(2, *SIZES, device=device, dtype=dtype)
    output = attn_ext.sdpa(query, key, value)
    assert order_of(output) == list(order)
    assert is_dense(output)
    assert torch.equal(output, attn_ext.sdpa(query.contiguous(), key, value))


@by_order
def test_gradients_follow_their_inputs(order, device):
    orders = [order, *[o for o in ORDERS if o != order][:2]]
    inputs = [stored_as(o, device=device).requires_grad_() for o in orders]
    copies = [t.detach().contiguous().requires_grad_() for t in inputs]
    grad = torch.randn(SIZES, device=device)
    grads = torch.autograd.grad(attn_ext.sdpa(*inputs), inputs, grad)
    expected = torch.autograd.grad(attn_ext.sdpa(*copies), copies, grad)
    for g, e, o in zip(grads, expected, orders, strict=True):
        assert order_of(g) == list(o)
        assert is_dense(g)
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_gradients_of_broadcast_inputs_too(order, name, device):
    inputs = {n: torch.randn(SIZES, device=device) for n in ("query", "key", "value")}
    inputs[name] = stored_as(order, SIZES[1:], device=device)
    leaves = [t.requires_grad_() for t in inputs.values()]
    copies = [t.detach().contiguous().requires_grad_() for t in leaves]
    place = list(inputs).index(name)
    grads = [torch.autograd.grad(attn_ext.sdpa(*t).sin().sum(), t)[place] for t in (leaves, copies)]
    assert order_of(grads[0]) == list(order)
    torch.testing.assert_close(*grads)


def test_heads_join_without_a_copy(device):
    batch, length, heads, dim = 2, 7, 3, 4
    packed = torch.randn(batch, length, 3, heads, dim, device=device)  # of one projection, with gaps
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    output = attn_ext.sdpa(query, key, value)
    joined = output.transpose(1, 2).flatten(-2)
    assert joined.shape == (batch, length, heads * dim)
    assert joined.data_ptr() == output.data_ptr()
    assert output.transpose(1, 2).view(batch, length, -1).is_contiguous()


@pytest.mark.parametrize("length", [1, 6])
def test_values_may_have_other_features_than_queries(length, device):
    query = torch.randn(2, length, 3, 4, device=device).transpose(1, 2)
    key, value = torch.randn(2, 3, 6, 4, device=device), torch.randn(2, 3, 6, 9, device=device)
    output = attn_ext.sdpa(query, key, value)
    assert output.shape == (2, 3, length, 9)
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("heads", [2, 6])
def test_grouped_heads_too(heads, device):
    query = torch.randn(2, 5, 6, 8, device=device).transpose(1, 2)
    key, value = torch.randn(2, 2, heads, 5, 8, device=device)
    output = attn_ext.sdpa(query, key, value, enable_gqa=True)
    assert output.transpose(1, 2).is_contiguous()
    expected = reference.sdpa(query, key, value, enable_gqa=True, dtype=torch.float32)
    torch.testing.assert_close(output, expected)


def test_the_other_outputs_are_contiguous(device):
    query, key, value = (stored_as((0, 2, 1, 3), device=device) for _ in range(3))
    for name in ("sdpa_with_weights", "sdpa_with_lse", "sdpa_with_key_mass"):
        output, other = operator(name)(query, key, value)
        assert order_of(output) == [0, 2, 1, 3]
        assert other.is_contiguous(), name


def test_features_are_innermost_whatever_the_query_says(device):
    query = stored_as((0, 1, 3, 2), device=device)
    output = attn_ext.sdpa(query, *torch.randn(2, *SIZES, device=device))
    assert output.is_contiguous()


def test_dims_that_say_nothing_keep_their_place(device):
    key, value = torch.randn(2, *SIZES, device=device)
    for query in (
        torch.randn(1, 1, 1, 4, device=device).expand(SIZES),
        torch.randn(5, 4, device=device),
        torch.randn(1, 3, 5, 4, device=device),
        torch.randn(2, 3, 0, 4, device=device),
    ):
        assert attn_ext.sdpa(query, key, value).is_contiguous()
    query = torch.randn(5, 3, 4, device=device).transpose(0, 1)  # broadcasts over the batch
    assert order_of(attn_ext.sdpa(query, key, value)) == [0, 2, 1, 3]
    five = stored_as((1, 3, 0, 2, 4), (2, 2, 3, 5, 4), device=device)
    assert order_of(attn_ext.sdpa(five, key, value)) == [1, 3, 0, 2, 4]


def every_layout() -> list[tuple[Tensor, ...]]:
    plain = [tuple(stored_as(o) for o in (order, (1, 0, 2, 3), (0, 2, 1, 3))) for order in ORDERS]
    packed = torch.randn(2, 7, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
    matrices = (stored_as((0, 1, 3, 2)), torch.randn(3, 5, 4), torch.randn(5, 3, 4).transpose(0, 1))
    return [*plain, packed, matrices]


@pytest.mark.parametrize("inputs", every_layout(), ids=lambda inputs: str(order_of(inputs[0])))
def test_meta_and_fake_tensors_know_it(inputs):
    with torch.no_grad():
        output = attn_ext.sdpa(*inputs)
    assert attn_ext.sdpa(*(t.to("meta") for t in inputs)).stride() == output.stride()
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.library.opcheck(torch.ops.attn_ext.sdpa.default, leaves, test_utils="test_aot_dispatch_static")


def test_compiled_code_sees_the_same_strides():
    def model(x: Tensor) -> Tensor:
        query, key, value = x.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return attn_ext.sdpa(query, key, value).transpose(1, 2).flatten(-2)

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for length in (5, 9):
        x = torch.randn(2, length, 96, requires_grad=True)
        output, expected = compiled(x), model(x)
        torch.testing.assert_close(output, expected)
        assert output.stride() == expected.stride()
        grads = [torch.autograd.grad(o.square().sum(), x)[0] for o in (output, expected)]
        torch.testing.assert_close(*grads)


def test_exported_code_too():
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
            return attn_ext.sdpa(heads, heads, heads).transpose(1, 2).view(x.shape)

    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=1, max=4096)}
    program = torch.export.export(Model(), (torch.randn(2, 6, 32),), dynamic_shapes=(sizes,))
    for shape in ((1, 1, 32), (3, 50, 32), (64, 1, 32)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), Model()(x))


def test_vmap_and_second_derivatives_take_any_layout():
    inputs = [stored_as((0, 2, 1, 3)).double() for _ in range(3)]
    each = torch.vmap(attn_ext.sdpa)(*inputs)
    torch.testing.assert_close(each, attn_ext.sdpa(*inputs))
    assert order_of(each) == [0, 2, 1, 3]
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.autograd.gradgradcheck(attn_ext.sdpa, leaves, fast_mode=True)
    torch.autograd.gradcheck(attn_ext.sdpa, leaves, check_forward_ad=True, fast_mode=True)


MASK_SIZES = (2, 3, 70, 300)  # (B, H, Lq, Lk): more than a line of rows, more than a stretch of columns


def numbers(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes) > 0 if dtype == torch.bool else torch.randn(sizes).to(dtype)


def mask_in(dtype: torch.dtype, *order: int) -> Tensor:
    return numbers(dtype, *(MASK_SIZES[d] for d in order)).permute([order.index(d) for d in range(4)])


def overlapping(dtype: torch.dtype) -> Tensor:
    """Rows of a table that share their numbers, two apart, as those of relative positions may."""
    batch, heads, rows, columns = MASK_SIZES
    table = numbers(dtype, heads * 2 * (rows + columns))
    return table.as_strided((heads, rows, columns), (2 * (rows + columns), 2, 2)).expand(batch, -1, -1, -1)


MASKS = {
    "heads innermost": lambda dtype: mask_in(dtype, 0, 2, 3, 1),
    "samples innermost": lambda dtype: mask_in(dtype, 1, 2, 3, 0),
    "transposed": lambda dtype: mask_in(dtype, 0, 1, 3, 2),
    "of two dims, transposed": lambda dtype: numbers(dtype, 300, 70).mT,
    "transposed, one column more than those of a task": lambda dtype: numbers(dtype, 1025, 20).mT,
    "each second column": lambda dtype: numbers(dtype, 2, 3, 70, 600)[..., ::2],
    "of all samples": lambda dtype: numbers(dtype, 70, 300, 3).permute(2, 0, 1).expand(MASK_SIZES),
    "of all heads": lambda dtype: numbers(dtype, 2, 1, 300, 70).mT.expand(MASK_SIZES),
    "of all rows": lambda dtype: numbers(dtype, 2, 3, 1, 600)[..., ::2].expand(MASK_SIZES),
    "of all keys": lambda dtype: numbers(dtype, 2, 3, 140, 1)[..., ::2, :].expand(MASK_SIZES),
    "rows that overlap": overlapping,
    "of no rows": lambda dtype: numbers(dtype, 2, 3, 300, 0).mT,
}


@pytest.mark.same_bits
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_the_same_meaning_wherever_its_numbers_lie(name, mask_dtype, device):
    mask = MASKS[name](mask_dtype).to(device)
    dtype = torch.float32 if mask_dtype == torch.bool else mask_dtype
    lengths = mask.shape[-2], mask.shape[-1], mask.shape[-1]
    inputs = [torch.randn(2, 3, n, 16, device=device, dtype=dtype).requires_grad_() for n in lengths]
    results = []
    for each in (mask, mask.contiguous()):
        wanted = [*inputs, each.detach().requires_grad_(each.is_floating_point())]
        output, lse = attn_ext.sdpa_with_lse(*inputs, wanted[-1])
        grads = torch.autograd.grad(output.sum() + lse.sum(), [t for t in wanted if t.requires_grad])
        results.append([output, lse, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.same_bits
@pytest.mark.parametrize(("rows", "keys"), [(1600, 1500), (4200, 4096)])  # 10 MB, and 69
@pytest.mark.parametrize("batch", [1, 2])
def test_so_has_a_large_one_whether_it_is_read_once_or_twice(rows, keys, batch, device):
    query, key, value = (torch.randn(batch, 1, n, 8, device=device) for n in (rows, keys, keys))
    mask = torch.randn(keys, rows, device=device).mT
    output = attn_ext.sdpa(query, key, value, mask)
    assert torch.equal(output, attn_ext.sdpa(query, key, value, mask.contiguous()))


# 17 MB: from 8 MB on, a few keys of several heads are read at a time on some processors, where these lie so.
@pytest.mark.same_bits
@pytest.mark.parametrize(("heads", "rows"), [(8, 1), (8, 6), (16, 2)])
@pytest.mark.parametrize("special", [0.0, float("nan")], ids=str)
@pytest.mark.parametrize("is_seen", [False, True])
def test_few_rows_read_many_keys_of_heads_beside_each_other(heads, rows, special, is_seen, device):
    query = torch.randn(1, heads, rows, 64, device=device)
    key, value = torch.randn(2, 1, 4201, 8, 64, device=device).transpose(2, 3)
    value[0, 2, 4000, 5] = special
    mask = torch.rand(rows, 4201, device=device) > 0.3
    mask[:, 4000] = is_seen
    results = []
    for layout in (lambda t: t, torch.Tensor.contiguous):
        results.append(attn_ext.sdpa_with_lse(query, layout(key), layout(value), mask, enable_gqa=heads > 8))
    for beside, apart in zip(*results, strict=True):
        torch.testing.assert_close(beside, apart, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("mask", "options", "copied"),
    [
        (torch.zeros(64, 96, 3).permute(2, 0, 1), {}, 3 * 64 * 96 * 4),
        (torch.zeros(64, 96, 3).permute(2, 0, 1).expand(2, -1, -1, -1), {}, 3 * 64 * 96 * 4),
        (torch.zeros(3, 64, 96), {}, 0),
        (torch.zeros(64, 96), {"window_left": 8, "window_right": 0}, 0),
        (torch.zeros(96, 64).mT, {"window_left": 20, "window_right": 0}, 64 * 96 * 4),  # all heads together
        (torch.zeros(2, 3, 96, 64).mT, {"window_left": 8, "window_right": 0}, 0),  # most of it is hidden
        (torch.zeros(2, 1, 96, 64, dtype=torch.bool).mT, {}, 2 * 64 * 96),
        (torch.zeros(1).as_strided((64, 96), (0, 0)), {}, 0),
    ],
)
def test_explain_counts_the_copy_of_a_mask_on_the_cpu(mask, options, copied):
    query, key = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 96, 8)
    given = attn_ext.explain(query, key, key, mask, **options)
    dense = attn_ext.explain(query, key, key, mask.contiguous(), **options)
    if given.capability != "aten":
        assert given.scratch_bytes - dense.scratch_bytes == copied


@pytest.mark.parametrize(
    ("mask", "batch", "copied"),
    [
        (torch.empty(4096, 4096).mT, 1, 64 << 20),
        (torch.empty(4096, 4097).mT, 1, 0),
        (torch.empty(1024, 1024, 4).permute(2, 0, 1), 1, 16 << 20),  # 16 bytes of neighbours
        (torch.empty(1024, 1024, 3).permute(2, 0, 1), 1, 0),
        (torch.empty(1024, 1024, 3).permute(2, 0, 1), 2, 12 << 20),  # read twice
        (torch.empty(512, 512, 3).permute(2, 0, 1), 1, 3 << 20),
    ],
)
def test_of_large_masks_those_that_pay_are_copied_on_the_cpu(mask, batch, copied):
    rows, keys = mask.shape[-2:]
    heads = mask.shape[0] if mask.dim() == 3 else 1
    query, key = torch.empty(batch, heads, rows, 8), torch.empty(batch, heads, keys, 8)
    given = attn_ext.explain(query, key, key, mask)
    dense = attn_ext.explain(query, key, key, torch.empty(rows, keys))
    if given.capability != "aten":
        assert given.scratch_bytes - dense.scratch_bytes == copied
