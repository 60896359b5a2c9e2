"""The composition over ATen ops takes batches and heads apart where many of them meet many keys.

Forward mode and second derivatives always go through it; values and gradients do so where
ATTN_EXT_CPU_CAPABILITY=aten. In every case here the scores of sixteen rows are more than one chunk holds.
"""

import pytest
import torch
from torch import Tensor

from attn_ext import reference
from attn_ext.testing import Arguments, Case, operator

KEYS = 1000
CASES = (
    Case("heads", (1, 90, 16, 2), (1, 90, KEYS, 2), (1, 90, KEYS, 3)),
    Case("batches", (3, 30, 16, 2), (3, 30, KEYS, 2), (3, 30, KEYS, 2), sinks=True),
    Case("lead_dims", (2, 1, 3, 16, 16, 2), (2, 1, 3, 16, KEYS, 2), (2, 1, 3, 16, KEYS, 2)),
    Case(
        "groups", (2, 48, 16, 2), (2, 3, KEYS, 2), (2, 3, KEYS, 2), sinks=True, options={"enable_gqa": True}
    ),
    Case("group_of_all", (80, 16, 2), (1, KEYS, 2), (1, KEYS, 2), options={"enable_gqa": True}),
    Case("one_key_batch", (5, 20, 16, 2), (1, 20, KEYS, 2), (1, 20, KEYS, 2), options={"is_causal": True}),
    Case("one_query_batch", (1, 20, 16, 2), (5, 20, KEYS, 2), (5, 20, KEYS, 2), options={"window_left": 5}),
    Case("one_value_head", (5, 20, 16, 2), (5, 20, KEYS, 2), (5, 1, KEYS, 2), options={"softcap": 2.0}),
    Case("bias", (5, 20, 16, 2), (5, 20, KEYS, 2), (5, 20, KEYS, 2), "bias", (20, 16, KEYS), seed=1),
    Case("bias_of_batches", (5, 20, 16, 2), (5, 20, KEYS, 2), (5, 20, KEYS, 2), "bias", (5, 1, 1, KEYS)),
    Case("padding", (5, 20, 16, 2), (5, 20, KEYS, 2), (5, 20, KEYS, 2), "padding", (5, 1, 1, KEYS)),
)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def value_and_gradients(op, arguments: Arguments) -> tuple[Tensor, ...]:
    leaves = arguments.leaves()
    output, lse = leaves(op)
    loss = output.sin().sum() + lse.cos().sum()
    return (output, lse, *torch.autograd.grad(loss, list(leaves.differentiable().values())))


def second_gradients(op, arguments: Arguments) -> tuple[Tensor, ...]:
    leaves = arguments.leaves()
    inputs = list(leaves.differentiable().values())
    first = torch.autograd.grad(leaves(op)[0].sin().sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(grad.sin().sum() for grad in first), inputs)


def tangents(op, arguments: Arguments) -> tuple[Tensor, ...]:
    primals = arguments.differentiable()

    def function(*tensors: Tensor):
        return arguments.with_tensors(dict(zip(primals, tensors, strict=True)))(op)

    along = tuple(tensor.cos() for tensor in primals.values())
    return torch.func.jvp(function, tuple(primals.values()), along)[1]


@pytest.mark.parametrize("way", [value_and_gradients, second_gradients, tangents])
@by_case
def test_parts_together_are_the_whole(case, way, device):
    arguments = case.build(torch.float64, device)
    expected = way(reference.sdpa_with_lse, arguments)
    torch.testing.assert_close(way(operator("sdpa_with_lse"), arguments), expected)


@pytest.mark.parametrize("op", ["sdpa_with_weights", "sdpa_with_key_mass"])
def test_side_outputs_along_a_direction(op, device):
    arguments = CASES[3].build(torch.float64, device)
    expected = tangents(getattr(reference, op), arguments)
    torch.testing.assert_close(tangents(operator(op), arguments), expected)


@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: case.name)
def test_every_part_draws_the_dropout_of_its_place(case, device):
    """The output is linear in value: its tangent along another value is the output of that, drawn alike."""
    arguments = case.build(torch.float64, device)
    query, key, value = arguments.query, arguments.key, arguments.value
    other = value.cos()

    def drawn(value: Tensor) -> Tensor:
        torch.manual_seed(2)
        options = {"enable_gqa": True} if case.options else {}
        return torch.ops.attn_ext.sdpa(query, key, value, dropout_p=0.3, **options)

    torch.testing.assert_close(torch.func.jvp(drawn, (value,), (other,))[1], drawn(other))


def test_parts_under_vmap_and_in_third_derivatives(device):
    query, key = torch.randn(2, 70, 16, 1, device=device), torch.randn(2, 70, KEYS, 1, device=device)
    query, key = query.double(), key.double()

    def loss(query: Tensor) -> Tensor:
        return torch.ops.attn_ext.sdpa(query, key[0], key[0]).sin().sum()

    def along(query: Tensor) -> Tensor:
        return torch.func.jvp(torch.func.grad(loss), (query,), (query.cos(),))[1]

    expected = torch.stack([along(q) for q in query])
    torch.testing.assert_close(torch.func.vmap(along)(query), expected)
    third = torch.func.grad(lambda q: along(q).sum())(query[0])
    assert third.isfinite().all()
