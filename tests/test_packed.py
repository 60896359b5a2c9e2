"""Packed sequences: each sees its own keys alone, and gets the numbers and the bits of a call of its own."""

import math

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import reference
from attn_ext.testing import on_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Query and key lengths of the sequences. Of each path, none, one row, one key, and a mix of all.
LENGTHS = {
    "one": [(7, 7)],
    "mixed": [(1, 300), (20, 20), (0, 5), (5, 0), (40, 200), (3, 3), (0, 0), (130, 130)],
    "long_and_tiny": [(1, 1)] * 30 + [(700, 1100)] + [(2, 3)] * 30,
    "decode": [(1, 500), (1, 17), (1, 2000), (1, 1)],
    "powers": [(2**n, 2**n) for n in range(9)],
    "none": [],
}
by_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 5, "window_right": 2},
    "softcap": {"softcap": 3.0, "scale": 0.7, "is_causal": True},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def starts(lengths: list[int], dtype: torch.dtype = torch.int32, begin: int = 0) -> Tensor:
    return torch.tensor([begin, *lengths]).cumsum(0).to(dtype)


def packed(lengths, dtype=torch.float32, heads=(4, 2), dims=(8, 6), spare=0, device="cpu"):
    """Query, key, value and the starts of both sides; ``spare`` rows belong to nobody."""
    rows, keys = (sum(side) + spare for side in zip(*lengths, strict=True)) if lengths else (spare, spare)
    shapes = ((rows, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    sides = [starts([pair[side] for pair in lengths]).to(device) for side in (0, 1)]
    return tensors, sides


def tolerance(dtype):
    return {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]


@by_dtype
@by_options
@by_lengths
def test_outputs_and_gradients_are_those_of_the_reference(lengths, options, dtype, device):
    (query, key, value), sides = packed(lengths, dtype, spare=3, device=device)
    sinks = torch.randn(4, device=device).to(dtype)
    leaves = [t.requires_grad_() for t in (query, key, value, sinks)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    results = []
    for function, tensors in (
        (attn_ext.sdpa_packed_with_lse, leaves),
        (reference.sdpa_packed_with_lse, exact),
    ):
        output, lse = function(*tensors[:3], *sides, enable_gqa=True, sinks=tensors[3], **options)
        torch.manual_seed(1)
        along = [torch.randn(t.shape, device=device).to(dtype).to(t.dtype) for t in (output, lse)]
        along[1] = along[1].masked_fill(lse == -math.inf, 0)
        grads = torch.autograd.grad((output, lse), tensors, along) if lengths else []
        results.append([output.detach(), lse.detach(), *grads])
    names = ("output", "lse", "q", "k", "v", "sinks")[: len(results[0])]
    for name, actual, expected in zip(names, *results, strict=True):
        bound = tolerance(dtype) * (1 + max([0.0, *expected[expected.isfinite()].abs().flatten().tolist()]))
        torch.testing.assert_close(
            actual.double(),
            expected.double(),
            rtol=0,
            atol=bound,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )


@pytest.mark.same_bits
@by_dtype
@pytest.mark.parametrize("grad", [False, True])
@attn_ext.save_weights_for_backward(False)  # as packed sequences save none
def test_a_sequence_has_the_bits_that_it_has_alone(dtype, grad, device):
    lengths = LENGTHS["mixed"] + LENGTHS["long_and_tiny"] + LENGTHS["decode"]
    (query, key, value), sides = packed(lengths, dtype, device=device)
    leaves = [t.requires_grad_(grad) for t in (query, key, value)]
    output, lse = attn_ext.sdpa_packed_with_lse(*leaves, *sides, is_causal=True, enable_gqa=True)
    incoming = torch.randn_like(output)
    grads = torch.autograd.grad(output, leaves, incoming) if grad else ()
    for n, (rows, keys) in enumerate(lengths):
        of_query = slice(int(sides[0][n]), int(sides[0][n]) + rows)
        of_key = slice(int(sides[1][n]), int(sides[1][n]) + keys)
        places = (of_query, of_key, of_key)
        alone = [
            t.detach()[s].transpose(0, 1).requires_grad_(grad) for t, s in zip(leaves, places, strict=True)
        ]
        one, one_lse = attn_ext.sdpa_with_lse(
            *alone, is_causal=True, query_offset=keys - rows, enable_gqa=True
        )
        assert torch.equal(output[of_query].transpose(0, 1), one), (n, rows, keys)
        assert torch.equal(lse[:, of_query], one_lse)
        if grad:
            expected = torch.autograd.grad(one, alone, incoming[of_query].transpose(0, 1))
            for name, g, e, s in zip("qkv", grads, expected, places, strict=True):
                assert torch.equal(g[s].transpose(0, 1), e), (name, n, rows, keys)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    (query, key, value), sides = packed(LENGTHS["mixed"] + LENGTHS["long_and_tiny"])
    leaves = [t.requires_grad_() for t in (query, key, value)]

    def run():
        output = attn_ext.sdpa_packed(*leaves, *sides, enable_gqa=True)
        return output, *torch.autograd.grad(output.square().sum(), leaves)

    assert all(map(torch.equal, run(), on_threads(threads, run)))


@by_dtype
def test_dropout_is_that_of_a_padded_batch(dtype, device):
    lengths = [(5, 9), (17, 3), (40, 140)]
    (query, key, value), sides = packed(lengths, dtype, heads=(2, 2), device=device)
    longest = [max(pair[side] for pair in lengths) for side in (0, 1)]

    def pad(t, side, length):
        parts = [t[int(sides[side][n]) : int(sides[side][n + 1])] for n in range(len(lengths))]
        return torch.nn.utils.rnn.pad_sequence([*parts, t.new_zeros(length, *t.shape[1:])], batch_first=True)[
            :-1
        ].transpose(1, 2)

    mask = torch.arange(longest[1]) < torch.tensor([k for _, k in lengths])[:, None]
    torch.manual_seed(3)
    together = attn_ext.sdpa_packed(query, key, value, *sides, dropout_p=0.4)
    torch.manual_seed(3)
    apart = attn_ext.sdpa(
        pad(query, 0, longest[0]), pad(key, 1, longest[1]), pad(value, 1, longest[1]),
        mask[:, None, None].to(device), dropout_p=0.4,
    )  # fmt: skip
    for n, (rows, _) in enumerate(lengths):
        begin = int(sides[0][n])
        torch.testing.assert_close(
            together[begin : begin + rows].transpose(0, 1), apart[n, :, :rows], rtol=0, atol=tolerance(dtype)
        )


def test_dropout_gradients_agree_with_the_reference(device):
    lengths = [(5, 9), (0, 4), (40, 140), (3, 300)]
    tensors, sides = packed(lengths, torch.float64, heads=(2, 2), device=device)
    leaves = [t.requires_grad_() for t in tensors]
    seed = torch.tensor(11, device=device)
    heads_first = [t.transpose(0, 1) for t in leaves]
    table = torch.ops.attn_ext._packed_sequences(
        sides[0], sides[1], None, None, None, leaves[0].shape[0], leaves[1].shape[0]
    )
    output = torch.ops.attn_ext._sdpa_forward(
        *heads_first, None, None, seed, table, 0.3, False, None, False, None, None, 0, 0.0, False, False
    )[0].transpose(0, 1)
    expected = reference.sdpa_packed(*leaves, *sides, dropout_p=0.3, dropout_seed=seed)
    torch.testing.assert_close(output, expected)
    incoming = torch.randn_like(output)
    for a, e in zip(*(torch.autograd.grad(o, leaves, incoming) for o in (output, expected)), strict=True):
        torch.testing.assert_close(a, e)


def test_lengths_may_leave_holes_and_offsets_may_be_given(device):
    query, key, value = torch.randn(3, 30, 2, 4, device=device, dtype=torch.float64)
    options = {
        "cu_seqlens_q": torch.tensor([2, 10, 20, 26], device=device),
        "cu_seqlens_k": torch.tensor([0, 10, 11, 30], device=device),
        "seqlens_q": torch.tensor([5, 10, 0], device=device),
        "seqlens_k": torch.tensor([10, 0, 7], device=device, dtype=torch.int32),
        "query_offsets": torch.tensor([3, 0, -2], device=device),
        "is_causal": True,
    }
    value = value.clone()
    value[18:] = math.nan  # behind the last sequence's keys
    leaves = [t.requires_grad_() for t in (query, key, value)]
    output, lse = attn_ext.sdpa_packed_with_lse(*leaves, **options)
    expected, expected_lse = reference.sdpa_packed_with_lse(*leaves, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not output[:2].any()
    assert not output[7:10].any()
    assert not output[20:].any()
    grads = torch.autograd.grad(output.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
    assert not grads[1][10:11].any()


def test_results_lie_as_the_query_does(device):
    (query, key, value), sides = packed(LENGTHS["mixed"], device=device)
    output = attn_ext.sdpa_packed(query, key, value, *sides, enable_gqa=True)
    assert output.is_contiguous()
    grads = torch.autograd.grad(
        attn_ext.sdpa_packed(
            *[t.requires_grad_() for t in (query, key, value)], *sides, enable_gqa=True
        ).sum(),
        (query, key, value),
    )
    assert all(g.is_contiguous() for g in grads)


def small():
    tensors, sides = packed([(3, 4), (0, 2), (2, 2), (4, 0)], torch.float64, heads=(2, 1), spare=1)
    return (
        [t.requires_grad_() for t in tensors],
        torch.randn(2, dtype=torch.float64, requires_grad=True),
        sides,
    )


def test_every_derivative():
    leaves, sinks, sides = small()

    def function(query, key, value, sinks):
        output, lse = attn_ext.sdpa_packed_with_lse(
            query, key, value, *sides, is_causal=True, enable_gqa=True, sinks=sinks, softcap=2.0
        )
        return output, lse.masked_fill(lse == -math.inf, 0.0)

    inputs = (*leaves, sinks)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_vmap_over_any_of_the_tensors():
    (query, key, value), sides = packed([(3, 4), (2, 2)], torch.float64)
    queries = torch.randn(5, *query.shape, dtype=torch.float64)

    def function(query, key, value):
        return attn_ext.sdpa_packed(query, key, value, *sides, enable_gqa=True)

    together = torch.vmap(function, in_dims=(0, None, None))(queries, key, value)
    for each, q in zip(together, queries, strict=True):
        torch.testing.assert_close(each, function(q, key, value))
    jacobian = torch.func.jacrev(function)(query, key, value)
    expected = torch.autograd.functional.jacobian(lambda q: function(q, key, value), query)
    torch.testing.assert_close(jacobian, expected)


@pytest.mark.parametrize(
    "test", ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
)
@pytest.mark.parametrize("name", ["sdpa_packed", "sdpa_packed_with_lse"])
def test_opcheck(name, test):
    leaves, sinks, sides = small()
    op = getattr(torch.ops.attn_ext, name).default
    torch.library.opcheck(op, (*leaves, *sides), {"enable_gqa": True, "sinks": sinks}, test_utils=test)
    torch.library.opcheck(
        torch.ops.attn_ext._packed_sequences.default, (*sides, None, None, None, 10, 9), test_utils=test
    )


@pytest.mark.slow
def test_compile_and_export_with_lengths_that_change():
    def function(query, key, value, sides):
        return attn_ext.sdpa_packed(query, key, value, sides, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for lengths in ([(3, 3), (5, 5)], [(4, 4), (9, 9), (2, 2)], [(6, 6)]):
        tensors, sides = packed(lengths, heads=(2, 2), dims=(8, 8))
        leaves = [t.requires_grad_() for t in tensors]
        output, expected = compiled(*leaves, sides[0]), function(*leaves, sides[0])
        torch.testing.assert_close(output, expected)
        for a, e in zip(
            *(torch.autograd.grad(o.sin().sum(), leaves) for o in (output, expected)), strict=True
        ):
            torch.testing.assert_close(a, e)

    class Model(torch.nn.Module):
        forward = staticmethod(function)

    rows, count = torch.export.Dim("rows", min=2, max=9999), torch.export.Dim("count", min=2, max=999)
    shapes = ({0: rows}, {0: rows}, {0: rows}, {0: count})
    program = torch.export.export(
        Model(), (*(t.detach() for t in tensors), sides[0].repeat(2)[:3].sort()[0]), dynamic_shapes=shapes
    )
    (query, key, value), sides = packed([(3, 3), (5, 5), (7, 7)], heads=(2, 2), dims=(8, 8))
    torch.testing.assert_close(
        program.module()(query, key, value, sides[0]), function(query, key, value, sides[0])
    )


def test_torchscript_and_autocast():
    (query, key, value), sides = packed([(3, 3), (5, 5)], heads=(2, 2))
    scripted = torch.jit.script(attn_ext.sdpa_packed)
    assert torch.equal(
        scripted(query, key, value, sides[0]), attn_ext.sdpa_packed(query, key, value, sides[0])
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn_ext.sdpa_packed(query, key, value, sides[0]).dtype == torch.bfloat16


BAD = {
    "falls": ({"cu_seqlens_q": [0, 5, 3]}, r"cu_seqlens_q .*never to fall, but got 3 at place 2 after 5"),
    "begins_early": ({"cu_seqlens_q": [-1, 5, 8]}, r"cu_seqlens_q to begin at 0 or later .*got -1"),
    "ends_late": ({"cu_seqlens_q": [0, 5, 9]}, r"cu_seqlens_q to end within the 8 rows of query, but got 9"),
    "keys_end_late": (
        {"cu_seqlens_k": [0, 5, 9]},
        r"cu_seqlens_k to end within the 8 rows of key, but got 9",
    ),
    "empty": ({"cu_seqlens_q": []}, r"cu_seqlens_q to have at least 1 element"),
    "two_dims": (
        {"cu_seqlens_q": [[0, 5, 8]]},
        r"cu_seqlens_q to have one dimension, but got shape \[1, 3\]",
    ),
    "other_count": ({"cu_seqlens_k": [0, 8]}, r"cu_seqlens_k to have 3 elements .*but got 2"),
    "floating": ({"cu_seqlens_q": [0.0, 5.0, 8.0]}, r"cu_seqlens_q of dtype Int or Long, but got Float"),
    "long_lengths": (
        {"seqlens_k": [6, 3]},
        r"seqlens_k between 0 and the room .*got 6 where sequence 0 has 5",
    ),
    "negative_lengths": ({"seqlens_q": [5, -1]}, r"seqlens_q between 0 and the room .*got -1"),
    "few_offsets": ({"query_offsets": [1]}, r"query_offsets to have 2 elements .*but got 1"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_lengths_that_do_not_fit_are_refused(arguments, message):
    query, key, value = torch.randn(3, 8, 2, 4)
    options = {"cu_seqlens_q": torch.tensor([0, 5, 8])}
    options |= {name: torch.tensor(numbers) for name, numbers in arguments.items()}
    if arguments.get("cu_seqlens_q") == []:
        options["cu_seqlens_q"] = torch.empty(0, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=message):
        attn_ext.sdpa_packed(query, key, value, **options)


def test_shapes_that_do_not_fit_are_refused():
    ends = torch.tensor([0, 4])
    with pytest.raises(RuntimeError, match="query to have 3 dimensions"):
        attn_ext.sdpa_packed(*torch.randn(3, 1, 4, 2, 4), ends)
    with pytest.raises(RuntimeError, match="as many heads as query"):
        attn_ext.sdpa_packed(torch.randn(4, 4, 2), torch.randn(4, 2, 2), torch.randn(4, 2, 2), ends)
    with pytest.raises(RuntimeError, match="value to have the length of key"):
        attn_ext.sdpa_packed(torch.randn(4, 1, 2), torch.randn(4, 1, 2), torch.randn(5, 1, 2), ends)


@pytest.mark.parametrize("name", ["query", "key", "value", "cu_seqlens_q", "seqlens_k"])
def test_freed_memory_is_refused(name):
    (query, key, value), sides = packed([(3, 3), (5, 5)], heads=(2, 2))
    options = {
        "query": query,
        "key": key,
        "value": value,
        "cu_seqlens_q": sides[0],
        "seqlens_k": torch.tensor([3, 5]),
    }
    options[name] = options[name].clone()
    options[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"storage of {name} .* was its memory freed"):
        attn_ext.sdpa_packed(**options)
