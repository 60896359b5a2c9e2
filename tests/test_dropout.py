"""Dropout: the draw is the documented one, for any seed; backward draws the same."""

import math

import pytest
import torch

import attn_ext  # noqa: F401  (loads the operators)
from attn_ext import reference
from attn_ext.testing import (
    DTYPES,
    OPS,
    Case,
    all_outputs,
    assert_gradients_accurate,
    assert_outputs_accurate,
    gradients,
    on_threads,
    operator,
    tensors,
    with_seed,
)

SEEDS = (0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63))

DROPOUT = {"dropout_p": 0.3}
CASES = (
    Case("plain", options=DROPOUT),
    Case("two_dims", (5, 8), (7, 8), (7, 6), options=DROPOUT),
    Case("five_dims", (2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 6), options=DROPOUT),
    Case("one_key_batch", (2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 6), options=DROPOUT),
    Case("many_columns", (1, 2, 9, 8), (1, 2, 200, 8), (1, 2, 200, 8), options=DROPOUT),
    Case("many_rows", (1, 2, 300, 8), options={**DROPOUT}, key=(1, 2, 7, 8), value=(1, 2, 7, 6)),
    Case("dead_row", mask="dead_row", options=DROPOUT),
    Case("bias", mask="bias", mask_shape=(3, 5, 7), options=DROPOUT),
    Case("causal_offset", options={**DROPOUT, "is_causal": True, "query_offset": 1}),
    Case("sinks_and_softcap", sinks=True, options={**DROPOUT, "softcap": 1.0}),
    Case(
        "grouped",
        (2, 6, 5, 8),
        (2, 2, 7, 8),
        (2, 2, 7, 6),
        options={**DROPOUT, "enable_gqa": True},
    ),
    Case("all_dropped", options={"dropout_p": 1.0}),
)

by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def kept(case: Case, seed, device) -> torch.Tensor:
    """Which weights one call keeps; every key must be visible."""
    return all_outputs(case.build(torch.float64, device), seed)[2] != 0


# The draw


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_reference_philox_gives_the_published_words(counter, key, words):
    def as_tensors(numbers):
        return tuple(torch.tensor(n) for n in numbers)

    assert tuple(reference.philox4x32(as_tensors(counter), as_tensors(key)).tolist()) == words


@pytest.mark.parametrize("seed", SEEDS)
def test_draw_is_the_reference_s(seed, device):
    case = Case("", (2, 3, 17, 4), (2, 3, 150, 4), (2, 3, 150, 4), options={"dropout_p": 0.25})
    expected = reference.dropout_keep(seed, 0.25, (2, 3, 17, 150), device)
    assert torch.equal(kept(case, seed, device), expected)


@pytest.mark.parametrize("dropout_p", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-9])
def test_draw_is_the_reference_s_at_any_rate(dropout_p, device):
    options = {"dropout_p": dropout_p}
    case = Case("", (1, 2, 40, 4), (1, 2, 70, 4), (1, 2, 70, 4), options=options)
    expected = reference.dropout_keep(7, dropout_p, (1, 2, 40, 70), device)
    assert torch.equal(kept(case, 7, device), expected)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.8])
def test_rate(dropout_p, device):
    case = Case("", *[(2, 4, 128, 4)] * 3, options={"dropout_p": dropout_p})
    keep = kept(case, 3, device).double()
    deviation = math.sqrt(dropout_p * (1 - dropout_p) / keep.numel())
    assert abs(keep.mean().item() - (1 - dropout_p)) < 5 * deviation


def test_rows_heads_and_batches_draw_apart(device):
    keep = kept(Case("", *[(2, 2, 2, 4)] * 2, (2, 2, 2, 4), options={"dropout_p": 0.5}), 3, device)
    assert keep.shape == (2, 2, 2, 2)
    wide = kept(
        Case("", *[(2, 2, 2, 4), (2, 2, 128, 4), (2, 2, 128, 4)], options={"dropout_p": 0.5}), 3, device
    )
    rows = wide.flatten(0, 2)
    agreement = (rows[:, None] == rows[None]).double().mean(-1)
    agreement.fill_diagonal_(0.5)
    assert ((agreement - 0.5).abs() < 0.25).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_draw_does_not_depend_on_the_number_of_threads(threads, device):
    case = Case("", *[(2, 2, 64, 8)] * 3, options={"dropout_p": 0.5})
    keep = on_threads(threads, lambda: kept(case, 11, device))
    assert torch.equal(keep, reference.dropout_keep(11, 0.5, (2, 2, 64, 64), device))


@pytest.mark.parametrize("shape", [(2,), (1,), (2, 3), (1, 3), (2, 1)], ids=str)
def test_seed_with_dims_covers_the_leading_batch_dims(shape, device):
    seed = torch.arange(10, 10 + math.prod(shape), device=device).reshape(shape)
    case = Case("", *[(2, 3, 2, 5, 8)] * 3, options={"dropout_p": 0.5})
    keep = kept(case, seed, device)
    assert torch.equal(keep, reference.dropout_keep(seed, 0.5, (2, 3, 2, 5, 5), device))
    if shape == (2,):
        one = kept(Case("", *[(3, 2, 5, 8)] * 3, options={"dropout_p": 0.5}), int(seed[1]), device)
        assert torch.equal(keep[1], one)


# What is computed with it


@by_dtype
@by_case
@pytest.mark.parametrize("op", OPS)
def test_outputs_are_accurate(op, case, dtype, device):
    assert_outputs_accurate(op, case.build(dtype, device), dropout_seed=5)


@by_dtype
@by_case
@pytest.mark.parametrize("op", OPS)
def test_gradients_are_accurate(op, case, dtype, device):
    assert_gradients_accurate(op, case.build(dtype, device), dropout_seed=5)


def test_kept_weights_are_scaled_up(device):
    arguments = Case("").build(torch.float64, device)
    _, weights = arguments(torch.ops.attn_ext.sdpa_with_weights)
    _, _, dropped, key_mass = all_outputs(
        Case("", options={"dropout_p": 0.25}).build(torch.float64, device), 9
    )
    keep = dropped != 0
    torch.testing.assert_close(dropped[keep], weights[keep] / 0.75)
    torch.testing.assert_close(key_mass, dropped.sum(-2))


def test_lse_is_that_without_dropout(device):
    arguments = Case("").build(torch.float64, device)
    _, lse = arguments(torch.ops.attn_ext.sdpa_with_lse)
    _, with_dropout = arguments(torch.ops.attn_ext.sdpa_with_lse, dropout_p=0.5)
    torch.testing.assert_close(with_dropout, lse)


@pytest.mark.parametrize("op", OPS)
def test_dropping_everything_gives_zeros_and_zero_gradients(op, device):
    arguments = Case("", options={"dropout_p": 1.0}).build(torch.float32, device)
    output, *side = tensors(arguments(operator(op)))
    assert (output == 0).all()
    if op in ("sdpa_with_weights", "sdpa_with_key_mass"):
        assert (side[0] == 0).all()
    if op != "sdpa_with_lse":
        assert all((g == 0).all() for g in gradients(operator(op), arguments).values())


# The generator


@pytest.mark.parametrize("op", OPS)
def test_manual_seed_brings_the_same_draw_again(op, device):
    arguments = Case("", *[(2, 2, 16, 8)] * 3, options=DROPOUT).build(torch.float32, device)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(tensors(arguments(operator(op)))[0])
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_each_call_draws_anew(device):
    arguments = Case("", *[(2, 2, 16, 8)] * 3, options=DROPOUT).build(torch.float32, device)
    first, second = (arguments(operator("sdpa")) for _ in range(2))
    assert not torch.equal(first, second)


def test_no_dropout_leaves_the_generator_alone(device):
    state = torch.get_rng_state()
    Case("").build(torch.float32, device)(operator("sdpa"), dropout_p=0.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_draws_nothing_from_the_generator(device):
    arguments = Case("", options=DROPOUT).build(torch.float32, device).leaves()
    output = arguments(operator("sdpa"))
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_of_the_public_operator_uses_the_forward_s_draw(device):
    """The output is linear in value: its gradient holds the very weights that were applied."""
    arguments = Case("", *[(1, 2, 16, 8)] * 3, options={"dropout_p": 0.5}).build(torch.float64, device)
    value = arguments.value.clone().requires_grad_()
    output, weights = arguments.with_tensors({"value": value})(torch.ops.attn_ext.sdpa_with_weights)
    cotangent = torch.randn_like(output)
    (grad,) = torch.autograd.grad(output, value, cotangent)
    torch.testing.assert_close(grad, weights.detach().mT @ cotangent)
    torch.testing.assert_close(output, weights @ value)


def test_internal_operator_is_a_function_of_its_seed(device):
    arguments = Case("", options=DROPOUT).build(torch.float32, device)
    first, second = (arguments(with_seed("sdpa", 4)) for _ in range(2))
    assert torch.equal(first, second)
