"""FlopCounterMode counts the operators as it counts torch's own attention."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
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


def make(shapes, device, requires_grad=False):
    return [torch.randn(shape, device=device, requires_grad=requires_grad) for shape in shapes]


@by_shapes
@pytest.mark.parametrize("op", OPS)
def test_forward(op, shapes, device):
    inputs = make(shapes, device)
    assert count(lambda: operator(op)(*inputs, enable_gqa=True)) == sdpa_flop_count(*shapes)


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
    expected = sdpa_flop_count(*shapes) + sdpa_backward_flop_count(grad_output, *shapes)
    assert count(train) == expected


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
