"""Gradients of broadcast inputs: sums of the samples' own, in one order, rounded once."""

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext.testing import DTYPES, on_threads

pytestmark = pytest.mark.skipif(attn_ext.cpu_capability() == "aten", reason="it sums in matrix products")

# Leading dims of query, key and value
LEADS = {
    "query_over_batch": ((1, 2), (5, 2), (5, 2)),
    "query_without_batch": ((2,), (5, 2), (5, 2)),
    "keys_over_batch": ((5, 2), (1, 2), (1, 2)),
    "value_over_batch": ((5, 2), (5, 2), (1, 2)),
    "query_over_heads": ((5, 1), (5, 2), (5, 2)),
    "key_over_heads": ((5, 2), (5, 1), (5, 2)),
    "query_over_all": ((1, 1), (5, 2), (5, 2)),
    "outer_of_two": ((1, 3, 2), (2, 3, 2), (2, 3, 2)),
    "inner_of_two": ((2, 3, 2), (2, 1, 2), (2, 1, 2)),
    "crosswise": ((2, 1, 2), (1, 3, 2), (1, 3, 2)),
}
# (Lq, Lk, D): few keys, tiles, few query rows, and what goes through the kernels in several slices
LENGTHS = [(20, 30, 20), (40, 300, 16), (3, 400, 24), (16, 4100, 64), (4100, 16, 64)]
OPTIONS = {"plain": {}, "dropout": {"dropout_p": 0.3}, "softcap": {"softcap": 2.0, "is_causal": True}}
by_leads = pytest.mark.parametrize("leads", LEADS)
by_lengths = pytest.mark.parametrize(("query_len", "key_len", "dim"), LENGTHS)


def inputs(leads, query_len, key_len, dim, dtype) -> list[Tensor]:
    lengths = (query_len, key_len, key_len)
    return [torch.randn(*lead, n, dim).to(dtype) for lead, n in zip(LEADS[leads], lengths, strict=True)]


def gradients(tensors: list[Tensor], grad_output: Tensor, **options) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    torch.manual_seed(1)  # of the dropout
    return list(torch.autograd.grad(attn_ext.sdpa(*leaves, **options), leaves, grad_output))


def expanded(tensors: list[Tensor]) -> list[Tensor]:
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    return [t.expand(*lead, *t.shape[-2:]).contiguous() for t in tensors]


def output_like(tensors: list[Tensor]) -> Tensor:
    lead = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    return torch.randn(*lead, tensors[0].shape[-2], tensors[2].shape[-1]).to(tensors[0].dtype)


def sum_in_order(grad: Tensor, shape: torch.Size) -> Tensor:
    """Sample after sample, to the shape of the input."""
    total = torch.zeros(shape, dtype=grad.dtype)
    parts = total.expand_as(grad).flatten(0, -3)
    where = torch.arange(total[..., 0, 0].numel()).reshape(shape[:-2]).expand(grad.shape[:-2]).flatten()
    sums = total.reshape(-1, *shape[-2:])
    for place, part in zip(where.tolist(), grad.reshape(parts.shape), strict=True):
        sums[place] += part
    return sums.reshape(shape)


@pytest.mark.parametrize(
    ("options", "dtype"), [*((o, torch.float32) for o in OPTIONS), ("plain", torch.float64)], ids=str
)
@by_leads
@by_lengths
def test_the_gradient_is_the_sum_of_the_samples_in_order(leads, query_len, key_len, dim, dtype, options):
    tensors = inputs(leads, query_len, key_len, dim, dtype)
    grad_output = output_like(tensors)
    actual = gradients(tensors, grad_output, **OPTIONS[options])
    each = gradients(expanded(tensors), grad_output, **OPTIONS[options])
    for a, e, t in zip(actual, each, tensors, strict=True):
        assert torch.equal(a, sum_in_order(e, t.shape))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("leads", ["query_over_batch", "keys_over_batch", "query_over_heads"])
@by_lengths
def test_the_gradient_is_rounded_once(leads, query_len, key_len, dim, dtype):
    """Nearer to that of float64 than the sum of gradients that were rounded."""
    tensors = inputs(leads, query_len, key_len, dim, dtype)
    grad_output = output_like(tensors)
    exact = gradients([t.double() for t in tensors], grad_output.double())
    actual = gradients(tensors, grad_output)
    each = gradients(expanded(tensors), grad_output)

    def error(got: Tensor, want: Tensor) -> float:
        return ((got.double() - want).norm() / want.norm()).item()

    for a, e, x, t in zip(actual, each, exact, tensors, strict=True):
        if t.shape != e.shape:
            assert error(a, x) < error(e.double().sum_to_size(t.shape).to(dtype), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leads", ["query_over_all", "keys_over_batch", "crosswise"])
@by_lengths
def test_bits_do_not_depend_on_the_number_of_threads(leads, query_len, key_len, dim, dtype):
    tensors = inputs(leads, query_len, key_len, dim, dtype)
    grad_output = output_like(tensors)
    results = [on_threads(n, lambda: gradients(tensors, grad_output)) for n in (1, 2, 3, 8)]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("mask_lead", [(5, 2), (5, 1), (1, 2), (1, 1)])
@pytest.mark.parametrize("leads", ["query_over_batch", "keys_over_batch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@by_lengths
def test_gradients_of_mask_and_sinks_beside_it(leads, query_len, key_len, dim, mask_lead, dtype):
    tensors = inputs(leads, query_len, key_len, dim, dtype)
    mask = torch.randn(*mask_lead, query_len, key_len).to(dtype).requires_grad_()
    sinks = torch.randn(2).to(dtype).requires_grad_()
    grad_output = output_like(tensors)

    def mask_and_sinks(tensors: list[Tensor]) -> list[Tensor]:
        output = attn_ext.sdpa(*(t.requires_grad_() for t in tensors), mask, sinks=sinks)
        return list(torch.autograd.grad(output, (mask, sinks, *tensors), grad_output))[:2]

    for a, e in zip(mask_and_sinks(tensors), mask_and_sinks(expanded(tensors)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_gradient_of_a_mask_of_one_key_that_broadcasts_over_nothing(rows, dtype):
    query, key = torch.randn(2, 4, rows, 8, dtype=dtype), torch.randn(2, 4, 1, 8, dtype=dtype)
    mask = torch.randn(2, 4, rows, 1, dtype=dtype, requires_grad=True)
    lse = attn_ext.sdpa_with_lse(query, key, key, mask)[1]
    incoming = torch.randn_like(lse)
    # The one weight is 1 whatever the score: lse alone hangs on the mask.
    (grad,) = torch.autograd.grad(lse, mask, incoming)
    torch.testing.assert_close(grad, incoming.unsqueeze(-1).to(dtype))


def test_no_batch_at_all():
    tensors = [torch.randn(1, 2, 5, 4), torch.randn(0, 2, 7, 4), torch.randn(0, 2, 7, 4)]
    for gradient, t in zip(gradients(tensors, torch.randn(0, 2, 5, 4)), tensors, strict=True):
        assert torch.equal(gradient, torch.zeros_like(t))
