"""FlopCounterMode counts the operators as it counts torch's own attention."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import attn_ext
from attn_ext.testing import OPS, operator, tensors

# query, key, value; key heads that query heads share; another value dim
SHAPES = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "grouped": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "value_dim": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3)),
}

by_shapes = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


def count(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def count_of_torch(*shapes) -> int:
    """That of forward, where this torch counts such shapes: before 2.12 it knows no grouped heads."""
    try:
        return sdpa_flop_count(*shapes)
    except AssertionError:
        pytest.skip("this torch counts no such shapes")


def make(shapes, device, requires_grad=False):
    return [torch.randn(shape, device=device, requires_grad=requires_grad) for shape in shapes]


@by_shapes
@pytest.mark.parametrize("op", OPS)
def test_forward(op, shapes, device):
    inputs = make(shapes, device)
    assert count(lambda: operator(op)(*inputs, enable_gqa=True)) == count_of_torch(*shapes)


@by_shapes
def test_forward_as_torch_counts_its_plain_path(shapes, device):
    inputs = make(shapes, device)

    def plain():
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(*inputs, enable_gqa=True)

    assert count(lambda: attn_ext.sdpa(*inputs, enable_gqa=True)) == count(plain) > 0


@by_shapes
@pytest.mark.parametrize("op", OPS)
def test_forward_and_backward(op, shapes, device):
    inputs = make(shapes, device, requires_grad=True)

    def train():
        sum(t.sum() for t in tensors(operator(op)(*inputs, enable_gqa=True))).backward()

    grad_output = (*shapes[0][:-1], shapes[2][-1])
    expected = count_of_torch(*shapes) + sdpa_backward_flop_count(grad_output, *shapes)
    assert count(train) == expected


@pytest.mark.parametrize("op", ["sdpa_paged", "sdpa_paged_with_lse"])
def test_over_pages_every_row_meets_the_keys_of_its_sequence(op, device):
    key_pages, value_pages = torch.randn(6, 4, 2, 8, device=device), torch.randn(6, 4, 2, 3, device=device)
    table, lengths = (
        torch.tensor([[0, 1], [2, 3], [4, 5]], device=device),
        torch.tensor([7, 4, 0], device=device),
    )
    query, starts = torch.randn(7, 4, 8, device=device), torch.tensor([0, 2, 6, 7], device=device)
    function = operator(op)

    def call(query, *more, **options):
        return lambda: function(
            query, key_pages, value_pages, table, lengths, *more, enable_gqa=True, **options
        )

    assert count(call(query, starts)) == 2 * 4 * (8 + 3) * (2 * 7 + 4 * 4)
    assert count(call(query, cu_seqlens_q=starts, window_left=1)) == 2 * 4 * (8 + 3) * (2 * 7 + 4 * 4)
    assert count(call(query[:3])) == 2 * 4 * (8 + 3) * (7 + 4)


def test_over_pages_without_numbers_all_that_the_table_can_name():
    pages, table = torch.randn(6, 4, 2, 8, device="meta"), torch.zeros(3, 2, dtype=torch.long, device="meta")
    query, lengths = torch.randn(3, 2, 8, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")
    assert count(lambda: attn_ext.sdpa_paged(query, pages, pages, table, lengths)) == 2 * 3 * 8 * 2 * 16
    mode = FakeTensorMode()
    fake = [
        mode.from_tensor(torch.zeros_like(t, device="cpu")) for t in (query, pages, pages, table, lengths)
    ]
    assert count(lambda: attn_ext.sdpa_paged(*fake)) == 2 * 3 * 8 * 2 * 16


def test_what_is_masked_counts_as_torch_counts_it(device):
    inputs = make(SHAPES["plain"], device)
    everything = count(lambda: attn_ext.sdpa(*inputs))
    assert count(lambda: attn_ext.sdpa(*inputs, is_causal=True, window_left=1)) == everything


def test_broadcast_and_matrices(device):
    query, key = torch.randn(3, 1, 5, 8, device=device), torch.randn(4, 7, 8, device=device)
    assert count(lambda: attn_ext.sdpa(query, key, key)) == sdpa_flop_count(
        (3, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)
    )
    assert count(lambda: attn_ext.sdpa(query[0, 0], key[0], key[0])) == 2 * 5 * 7 * (8 + 8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode, device):
    inputs = make(SHAPES["plain"], device)
    with mode():
        assert count(lambda: attn_ext.sdpa(*inputs, dropout_p=0.5)) == sdpa_flop_count(*SHAPES["plain"])


def test_meta_tensors():
    inputs = make(SHAPES["plain"], "meta")
    assert count(lambda: attn_ext.sdpa(*inputs)) == sdpa_flop_count(*SHAPES["plain"])


PACKED = {
    "all": ({}, 3 * 4 + 0 * 2 + 5 * 5),
    "holes": ({"seqlens_q": torch.tensor([2, 0, 5]), "seqlens_k": torch.tensor([4, 2, 1])}, 2 * 4 + 5 * 1),
    "offsets": ({"query_offsets": torch.tensor([9, 9, 9]), "is_causal": True}, 3 * 4 + 5 * 5),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("options", "pairs"), PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("op", ["sdpa_packed", "sdpa_packed_with_lse"])
def test_packed_sequences_count_their_own_pairs(op, options, pairs, mode):
    starts = torch.tensor([0, 3, 3, 8]), torch.tensor([0, 4, 6, 11])
    inputs = make(((8, 4, 16), (11, 2, 16), (11, 2, 6)), "cpu", requires_grad=True)

    def call():
        return tensors(operator(op)(*inputs, *starts, enable_gqa=True, **options))

    with mode():
        assert count(call) == 2 * 4 * pairs * (16 + 6)
    expected = 2 * 4 * pairs * (16 + 6 + 3 * 16 + 2 * 6)
    assert count(lambda: call()[0].sum().backward()) == expected


def test_packed_sequences_of_unknown_lengths_count_every_pair():
    inputs = make(((8, 4, 16), (11, 4, 16), (11, 4, 6)), "meta")
    starts = torch.tensor([0, 3, 8], device="meta")
    assert count(lambda: attn_ext.sdpa_packed(*inputs, starts, starts)) == 2 * 4 * 8 * 11 * (16 + 6)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = make(((8, 4, 16), (11, 4, 16), (11, 4, 6)), "cpu")
        starts = torch.empty(3, dtype=torch.int64)
        assert count(lambda: attn_ext.sdpa_packed(*fakes, starts, starts)) == 2 * 4 * 8 * 11 * (16 + 6)


def test_jagged_tensors_count_their_own_pairs():
    rows = [torch.randn(n, 4, 8) for n in (3, 0, 5)]
    query = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    assert count(lambda: attn_ext.sdpa(query, query, query)) == 2 * 4 * (9 + 25) * 16


@pytest.mark.parametrize("first", ["attn_ext", "torch.utils.flop_counter"])
def test_either_may_be_imported_first(first):
    program = f"""
import importlib, sys, torch
importlib.import_module("{first}")
assert ("torch.utils.flop_counter" in sys.modules) == ("{first}" != "attn_ext")
import attn_ext
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    attn_ext.sdpa(*torch.randn(3, 1, 2, 4, 8))
print(counter.get_total_flops())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 2 * 2 * 4 * 4 * 16
