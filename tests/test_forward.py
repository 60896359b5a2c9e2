"""The forward of every operator: against the float64 reference, and the contract's edges by name."""

import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

import attn_ext  # noqa: F401  (loads the operators)
from attn_ext import reference
from attn_ext.testing import (
    CASES,
    DTYPES,
    OPS,
    Case,
    all_outputs,
    assert_outputs_accurate,
    cases,
    operator,
    random_cases,
    tensors,
)

NAN = math.nan
INF = math.inf

by_case = pytest.mark.parametrize("case", CASES, ids=str)
CI = bool(os.environ.get("CI"))  # there the random cases are the same in every run

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_op = pytest.mark.parametrize("op", OPS)


@by_op
@by_dtype
@by_case
def test_outputs_are_accurate(case, dtype, op, device):
    assert_outputs_accurate(op, case.build(dtype, device))


@settings(
    max_examples=40,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=list(HealthCheck),
)
@given(case=random_cases())
@by_dtype
def test_outputs_of_random_cases_are_accurate(dtype, device, case):
    assert_outputs_accurate("sdpa_with_weights", case.build(dtype, device))
    assert_outputs_accurate("sdpa_with_lse", case.build(dtype, device))


@by_case
def test_all_operators_give_the_same_output(case, device):
    arguments = case.build(torch.float32, device)
    output, lse, weights, key_mass = all_outputs(arguments)
    torch.testing.assert_close(arguments(operator("sdpa")), output, rtol=0, atol=1e-6)
    for op, side in zip(OPS[1:], (weights, lse, key_mass), strict=True):
        torch.testing.assert_close(arguments(operator(op)), (output, side), rtol=1e-6, atol=1e-6)


@by_dtype
def test_side_outputs_have_their_shapes_and_dtypes(dtype, device):
    arguments = Case("", (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), options={"enable_gqa": True})
    output, lse, weights, key_mass = all_outputs(arguments.build(dtype, device))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (output.shape, output.dtype) == ((2, 4, 5, 6), dtype)
    assert (weights.shape, weights.dtype) == ((2, 4, 5, 7), dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), wide)
    assert key_mass.shape == (2, 4, 7)


def test_side_outputs_that_are_not_asked_for_are_none(device):
    arguments = Case("").build(torch.float32, device)
    *_, weights, key_mass = all_outputs(arguments, need_weights=False, need_key_mass=False)
    assert weights is None and key_mass is None
    *_, weights, key_mass = all_outputs(arguments, need_weights=False)
    assert weights is None and key_mass is not None


# F.sdpa takes no window, offset, softcap or sinks, broadcasts no heads, and has its own word on
# rows that see nothing.
FSDPA_CASES = cases(
    lambda case: (
        not case.sinks
        and case.mask not in ("dead_row", "all_false", "bias_with_minus_inf")
        and set(case.options) <= {"is_causal", "scale", "enable_gqa"}
        and case.key[-2] > 0
        and len(case.query) == len(case.key) == len(case.value) == 4
        and case.query[1] * case.key[1] != 3
        and not (case.mask and (case.options.get("is_causal") or len(case.mask_shape) < 2))
    )
)


@pytest.mark.parametrize("case", FSDPA_CASES, ids=str)
def test_agrees_with_torch(case, device):
    arguments = case.build(torch.float64, device)
    expected = arguments(F.scaled_dot_product_attention)
    torch.testing.assert_close(arguments(operator("sdpa")), expected, rtol=1e-9, atol=1e-12)


def test_positional_arguments_are_those_of_torch(device):
    query, key, value = (torch.randn(2, 3, 5, 8, device=device) for _ in range(3))
    mask = torch.rand(5, 5, device=device) < 0.8
    mask.fill_diagonal_(True)
    expected = F.scaled_dot_product_attention(query, key, value, mask, 0.0, False, scale=0.3)
    actual = torch.ops.attn_ext.sdpa(query, key, value, mask, 0.0, False, scale=0.3)
    torch.testing.assert_close(actual, expected)


# Rows that see no key


@by_op
def test_dead_row_gives_zero_and_minus_infinity(op, device):
    query, key, value = (torch.randn(2, 3, 4, 8, device=device) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)
    mask[1] = False
    output, *side = tensors(operator(op)(query, key, value, mask))
    assert (output[:, :, 1] == 0).all()
    assert output.isfinite().all()
    if op == "sdpa_with_weights":
        assert (side[0][:, :, 1] == 0).all()
    if op == "sdpa_with_lse":
        assert (side[0][:, :, 1] == -INF).all()
        assert side[0][:, :, [0, 2, 3]].isfinite().all()


def test_no_keys_give_zeros(device):
    query = torch.randn(2, 3, 4, 8, device=device)
    empty = torch.randn(2, 3, 0, 8, device=device)
    output, lse = torch.ops.attn_ext.sdpa_with_lse(query, empty, empty)
    assert (output == 0).all() and output.shape == (2, 3, 4, 8)
    assert (lse == -INF).all()


def test_lse_of_a_dead_row_with_a_sink_is_the_sink(device):
    query, key, value = (torch.randn(1, 2, 3, 8, device=device) for _ in range(3))
    sinks = torch.tensor([0.5, -2.0], device=device)
    mask = torch.zeros(3, 3, dtype=torch.bool, device=device)
    output, lse = torch.ops.attn_ext.sdpa_with_lse(query, key, value, mask, sinks=sinks)
    torch.testing.assert_close(lse, sinks[:, None].expand(1, 2, 3))
    assert (output == 0).all()


# NaN and Inf


def _everything_hidden_but(visible, device):
    """Ways of hiding all keys but the first `visible`, for 4 rows and 6 keys."""
    columns = torch.arange(6, device=device)
    seen = (columns < visible).expand(4, 6)
    return {
        "bool_mask": {"attn_mask": seen},
        "minus_inf": {"attn_mask": torch.zeros(4, 6, device=device).masked_fill(~seen, -INF)},
        "causal": {"is_causal": True, "query_offset": visible - 4},
        "window": {"window_right": 0, "query_offset": visible - 4},
    }


HIDINGS = ("bool_mask", "minus_inf", "causal", "window")


@pytest.mark.careful
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("hiding", HIDINGS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("where", ["key", "value"])
def test_hidden_key_and_value_never_reach_an_output(where, op, hiding, poison, device):
    query = torch.randn(2, 2, 4, 8, device=device)
    key, value = torch.randn(2, 2, 2, 6, 8, device=device)
    options = _everything_hidden_but(4, device)[hiding]
    clean = operator(op)(query, key, value, **options)
    (key if where == "key" else value)[..., 4:, :] = poison
    actual = operator(op)(query, key, value, **options)
    torch.testing.assert_close(actual, clean)


@pytest.mark.careful
@by_dtype
def test_visible_nan_in_a_value_shows_in_its_column_and_in_the_rows_that_see_it(dtype, device):
    query, key, value = (torch.randn(1, 1, 4, 8, device=device, dtype=dtype) for _ in range(3))
    value[0, 0, 2, 5] = NAN
    output = torch.ops.attn_ext.sdpa(query, key, value, is_causal=True)
    expected = torch.zeros(1, 1, 4, 8, dtype=torch.bool, device=device)
    expected[0, 0, 2:, 5] = True
    assert torch.equal(output.isnan(), expected)


@by_dtype
def test_visible_nan_in_a_key_shows_in_the_rows_that_see_it(dtype, device):
    query, key, value = (torch.randn(1, 1, 4, 8, device=device, dtype=dtype) for _ in range(3))
    key[0, 0, 2, 5] = NAN
    output, lse = torch.ops.attn_ext.sdpa_with_lse(query, key, value, is_causal=True)
    assert not output[0, 0, :2].isnan().any() and output[0, 0, 2:].isnan().all()
    assert lse.isnan().tolist() == [[[False, False, True, True]]]


def test_nan_in_a_query_shows_in_its_row_alone(device):
    query, key, value = (torch.randn(1, 2, 4, 8, device=device) for _ in range(3))
    query[0, 1, 2, 3] = NAN
    output = torch.ops.attn_ext.sdpa(query, key, value)
    expected = torch.zeros(1, 2, 4, 8, dtype=torch.bool, device=device)
    expected[0, 1, 2] = True
    assert torch.equal(output.isnan(), expected)


@pytest.mark.careful
def test_nan_in_a_query_row_that_sees_nothing_does_not_show(device):
    query, key, value = (torch.randn(1, 2, 4, 8, device=device) for _ in range(3))
    query[0, 1, 2] = NAN
    mask = torch.ones(4, 4, dtype=torch.bool, device=device)
    mask[2] = False
    output = torch.ops.attn_ext.sdpa(query, key, value, mask)
    assert (output[:, :, 2] == 0).all() and output.isfinite().all()


@pytest.mark.careful
def test_visible_nan_in_a_bias_shows_and_a_hidden_one_does_not(device):
    query, key, value = (torch.randn(1, 1, 4, 8, device=device) for _ in range(3))
    bias = torch.zeros(4, 4, device=device)
    bias[1, 0] = NAN  # visible
    bias[1, 3] = bias[2, 3] = NAN  # after the diagonal
    output = torch.ops.attn_ext.sdpa(query, key, value, bias, is_causal=True)
    assert output.isnan().any(-1).tolist() == [[[False, True, False, False]]]


@pytest.mark.careful
def test_visible_infinite_value_shows(device):
    query, key, value = (torch.randn(1, 1, 4, 8, device=device) for _ in range(3))
    value[0, 0, 1, 3] = INF
    output = torch.ops.attn_ext.sdpa(query, key, value, is_causal=True)
    assert (output[0, 0, 1:, 3] == INF).all()
    assert output[0, 0, 0].isfinite().all()
    assert output[..., :3].isfinite().all() and output[..., 4:].isfinite().all()


@pytest.mark.careful
@by_dtype
def test_nonfinite_input_matches_the_reference(dtype, device):
    case = Case("", mask="dead_row", options={"is_causal": True, "query_offset": 1})
    arguments = case.build(dtype, device)
    arguments.key[0, 1, 3, 2] = NAN
    arguments.value[1, 2, 2, 1] = NAN
    arguments.value[0, 0, 1, 4] = INF
    arguments.query[1, 0, 4, 0] = NAN
    for op in OPS:
        assert_outputs_accurate(op, arguments)


# Numbers that need care


def test_huge_scores_do_not_overflow(device):
    query = torch.full((1, 1, 2, 4), 1e18, device=device)
    key = torch.tensor([1e18, -1e18, 2e18], device=device)[:, None].expand(1, 1, 3, 4)
    value = torch.eye(3, device=device)[None, None]
    output, weights = torch.ops.attn_ext.sdpa_with_weights(query, key, value)
    assert torch.equal(output, value[:, :, [2, 2]])
    assert torch.equal(weights, value[:, :, [2, 2]])


def test_small_weights_are_not_flushed_to_zero(device):
    query = torch.ones(1, 1, 1, device=device)
    key = torch.tensor([0.0, -60.0, -80.0], device=device)[None, :, None]
    _, weights = torch.ops.attn_ext.sdpa_with_weights(query, key, key, scale=1.0)
    expected = torch.tensor([1.0, math.exp(-60), math.exp(-80)], device=device)
    torch.testing.assert_close(weights[0, 0], expected, rtol=1e-4, atol=0)


@pytest.mark.careful
def test_row_of_the_lowest_finite_bias_is_not_dead(device):
    query, key, value = (torch.randn(1, 1, 4, 8, device=device) for _ in range(3))
    bias = torch.full((4, 4), torch.finfo(torch.float32).min, device=device)
    output = torch.ops.attn_ext.sdpa(query, key, value, bias, scale=1e-3)
    torch.testing.assert_close(output, value.mean(-2, keepdim=True).expand_as(output))


def test_scale_zero_gives_the_mean_of_the_values(device):
    query, key, value = (torch.randn(1, 2, 4, 8, device=device) for _ in range(3))
    output = torch.ops.attn_ext.sdpa(query, key, value, scale=0.0)
    torch.testing.assert_close(output, value.mean(-2, keepdim=True).expand_as(output))


def test_default_scale_is_one_over_the_root_of_the_head_dim(device):
    query, key, value = (torch.randn(1, 2, 4, 7, device=device) for _ in range(3))
    explicit = torch.ops.attn_ext.sdpa(query, key, value, scale=1 / math.sqrt(7))
    torch.testing.assert_close(torch.ops.attn_ext.sdpa(query, key, value), explicit)


def test_alibi_is_a_bias_of_one_row(device):
    query, key, value = (torch.randn(1, 2, 6, 8, device=device) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25], device=device)[:, None, None]
    columns = torch.arange(6, device=device)
    distance = columns - columns[:, None]
    full = torch.ops.attn_ext.sdpa(query, key, value, slopes * distance, is_causal=True)
    row = torch.ops.attn_ext.sdpa(query, key, value, slopes * columns, is_causal=True)
    torch.testing.assert_close(row, full)


def test_inputs_are_left_as_they_are(device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float32, device)
    before = {n: t.clone() for n, t in arguments.differentiable().items()}
    arguments(operator("sdpa"))
    for name, t in arguments.differentiable().items():
        assert torch.equal(t, before[name]), name


# The reference itself


def test_reference_agrees_with_torch():
    arguments = Case("", mask="bias").build(torch.float64)
    expected = arguments(F.scaled_dot_product_attention)
    torch.testing.assert_close(arguments(reference.sdpa), expected)


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({}, ["111", "111"]),
        ({"is_causal": True}, ["100", "110"]),
        ({"is_causal": True, "query_offset": 1}, ["110", "111"]),
        ({"is_causal": True, "query_offset": -1}, ["000", "100"]),
        ({"window_left": 0}, ["111", "011"]),
        ({"window_right": 0}, ["100", "110"]),
        ({"window_left": 0, "window_right": 0, "query_offset": 1}, ["010", "001"]),
        ({"window_left": 1, "query_offset": 2}, ["011", "001"]),
    ],
    ids=str,
)
def test_visible_keys_are_those_of_the_contract(options, visible, device):
    expected = torch.tensor([[c == "1" for c in row] for row in visible], device=device)
    assert torch.equal(reference.visible_keys(2, 3, device=device, **options), expected)
    uniform = torch.zeros(2, 4, device=device), torch.zeros(3, 4, device=device)
    _, weights = torch.ops.attn_ext.sdpa_with_weights(*uniform, uniform[1], **options)
    assert torch.equal(weights > 0, expected)
