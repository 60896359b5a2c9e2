"""Calls that are a part of a whole one: what several of them give adds up to what one gives."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import reference
from attn_ext.testing import DIFFERENTIABLE, DTYPES, OPTIONS, Arguments, Case, assert_accurate, cotangents

OPS = torch.ops.attn_ext
INPUTS = DIFFERENTIABLE
SEED = 7


def call(lengths: tuple[int, int], heads: tuple[int, int] = (2, 2), **more: Any) -> Case:
    """Of Lq and Lk, and of query and key heads."""
    (rows, keys), (query_heads, key_heads) = lengths, heads
    options = {**({"enable_gqa": True} if query_heads != key_heads else {}), **more.pop("options", {})}
    mask_shape = more.pop("mask_shape", (1, query_heads, rows, keys))
    shapes = (1, query_heads, rows, 24), (1, key_heads, keys, 24), (1, key_heads, keys, 20)
    return Case("", *shapes, mask_shape=mask_shape, options=options, **more)


@dataclass(frozen=True)
class Split:
    """A call, and where its keys are cut."""

    case: Case
    cuts: tuple[int, ...]


# Pieces of one key, of none, of few and of many, against rows for which every path is taken.
FEW_KEYS, FEW_ROWS, TILES = (40, 70), (3, 700), (50, 500)
FEW_KEY_CUTS, FEW_ROW_CUTS, TILE_CUTS = (0, 33, 33, 34, 70), (0, 400, 401, 550, 700), (0, 1, 200, 200, 500)
SPLITS = {
    "few_keys": Split(call(FEW_KEYS), FEW_KEY_CUTS),
    "few_rows": Split(call(FEW_ROWS), FEW_ROW_CUTS),
    "tiles": Split(call(TILES), TILE_CUTS),
    "phases": Split(call((530, 1200), (1, 1)), (0, 600, 1200)),
    "one_piece": Split(call(TILES, sinks=True), (0, 500)),
    "one_row": Split(call((1, 600)), (0, 130, 600)),
    "no_keys": Split(call((5, 0), sinks=True), (0, 0, 0)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"heads": (4, 2), "sinks": True},
    "causal": {"options": {"is_causal": True, "query_offset": 30}},
    "window": {"options": {"window_left": 60, "window_right": 9, "query_offset": 100}, "sinks": True},
    "unseen": {"options": {"window_left": 5, "window_right": 5, "query_offset": 20}},
    "softcap": {"options": {"softcap": 0.7}, "mask": "bias"},
    "bool": {"mask": "dead_row", "sinks": True, "heads": (4, 2)},
    "bias": {"mask": "bias_with_minus_inf", "sinks": True},
    "wide_bias": {"mask": "bias", "mask_dtype": torch.float32, "options": {"is_causal": True}},
    "scale": {"options": {"scale": -0.3}, "layout": "heads_last"},
}
LENGTHS = {
    "few_keys": (FEW_KEYS, FEW_KEY_CUTS),
    "few_rows": (FEW_ROWS, FEW_ROW_CUTS),
    "tiles": (TILES, TILE_CUTS),
}
for _name, (_lengths, _cuts) in LENGTHS.items():
    _rows, _keys = _lengths
    SPLITS |= {f"{_name}-{name}": Split(call(_lengths, **more), _cuts) for name, more in VARIANTS.items()}
    for _kind, _shape in {
        "keys": (_keys,),
        "rows": (_rows, 1),
        "number": (1, 1),
        "row_bool": (_rows, 1),
    }.items():
        _mask = "dead_row" if _kind == "row_bool" else "bias"
        _case = call(_lengths, mask=_mask, mask_shape=_shape, sinks=True)
        SPLITS[f"{_name}-of_{_kind}"] = Split(_case, _cuts)
    _dropout = {"dropout_p": 0.4}
    SPLITS[f"{_name}-dropout"] = Split(call(_lengths, (4, 2), options=_dropout, sinks=True), (0, 64, _keys))
SPLITS["tiles-dropout_bias"] = Split(call(TILES, mask="bias", options={"dropout_p": 0.2}), (0, 64, 320, 500))

by_split = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# A whole call as pieces of its keys


def pieces(arguments: Arguments, cuts: tuple[int, ...]) -> Iterator[tuple[int, Arguments]]:
    """Each piece with the key that it begins with; the sinks are in one of them alone."""
    with_sinks = (len(cuts) - 1) // 2
    for place, (begin, end) in enumerate(pairwise(cuts)):
        options = dict(arguments.options)
        options["query_offset"] = options.get("query_offset", 0) - begin
        mask = options.get("attn_mask")
        if mask is not None and mask.shape[-1] != 1:
            options["attn_mask"] = mask[..., begin:end]
        if place != with_sinks:
            options.pop("sinks", None)
        yield (
            begin,
            Arguments(
                arguments.query, arguments.key[..., begin:end, :], arguments.value[..., begin:end, :], options
            ),
        )


def forward(arguments: Arguments, origin: tuple[int, ...] | None = None, **more: Any) -> tuple[Tensor, ...]:
    options = {name: arguments.options.get(name, default) for name, default in OPTIONS.items()}
    options |= {"dropout_seed": torch.tensor(SEED) if options["dropout_p"] else None, "sequences": None}
    options |= {"need_weights": False, "need_key_mass": False, "dropout_origin": origin, **more}
    return OPS._sdpa_forward(arguments.query, arguments.key, arguments.value, **options)


def backward(
    arguments: Arguments,
    grads: tuple[Tensor | None, ...],
    output: Tensor | None,
    lse: Tensor,
    origin: tuple[int, ...] | None = None,
    **more: Any,
) -> tuple[Tensor, ...]:
    options = {name: arguments.options.get(name, default) for name, default in OPTIONS.items()}
    options |= {"dropout_seed": torch.tensor(SEED) if options["dropout_p"] else None, "sequences": None}
    mask = [name in arguments.differentiable() for name in INPUTS]
    tensors = arguments.query, arguments.key, arguments.value
    options |= {"output": output, "lse": lse, "output_mask": mask, "dropout_origin": origin, **more}
    return OPS._sdpa_backward(*grads, *tensors, **options)


def merged(arguments: Arguments, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    parts = [
        forward(part, (0, 0, 0, begin) if part.options.get("dropout_p") else None, unrounded=True)[:2]
        for begin, part in pieces(arguments, cuts)
    ]
    return attn_ext.merge_partials(*map(list, zip(*parts, strict=True)))


def summed(
    arguments: Arguments, cuts: tuple[int, ...], grad_output: Tensor, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """The whole call's gradients."""
    output, lse = merged(arguments, cuts)
    delta = (grad_output.to(output.dtype) * output).sum(-1)
    gathered: dict[str, list[Tensor]] = {}
    for begin, part in pieces(arguments, cuts):
        origin = (0, 0, 0, begin) if part.options.get("dropout_p") else None
        grads = (grad_output, grad_lse, None, None)
        results = backward(part, grads, None, lse, origin, unrounded=True, delta=delta)
        for name, result in zip(INPUTS, results, strict=True):
            if name in part.differentiable():
                assert result.dtype == output.dtype
                gathered.setdefault(name, []).append(result)
    totals = {
        name: sum(parts[1:], parts[0]) for name, parts in gathered.items() if name in ("query", "sinks")
    }
    for name in ("key", "value"):
        totals[name] = torch.cat(gathered[name], -2)
    if "attn_mask" in gathered:
        by_key = arguments.options["attn_mask"].shape[-1] != 1
        parts = gathered["attn_mask"]
        totals["attn_mask"] = torch.cat(parts, -1) if by_key else sum(parts[1:], parts[0])
    return totals


def exact_gradients(arguments: Arguments, grads: list[Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = arguments.leaves() if dtype != torch.float64 else arguments.map(torch.Tensor.double).leaves()
    function = partial(reference.sdpa_with_lse, dtype=dtype, dropout_seed=SEED)
    outputs = leaves(function)
    inputs = leaves.differentiable()
    grads = [g.to(o) for g, o in zip(grads, outputs, strict=True)]
    results = torch.autograd.grad(outputs, list(inputs.values()), grads, materialize_grads=True)
    return dict(zip(inputs, results, strict=True))


def assert_adds_up(arguments: Arguments, cuts: tuple[int, ...]) -> None:
    dtype = arguments.query.dtype
    output, lse = merged(arguments, cuts)
    oracle = partial(reference.sdpa_with_lse, dropout_seed=SEED)
    exact = arguments(oracle)
    accumulated = torch.promote_types(dtype, torch.float32)
    assert output.dtype == accumulated
    assert lse.dtype == torch.float64
    assert_accurate(output, exact[0], arguments(oracle, dtype=dtype)[0], "output")
    assert_accurate(lse.to(accumulated), exact[1], arguments(oracle, dtype=accumulated)[1], "lse")
    grad_output, grad_lse = cotangents(exact, dtype)
    grad_lse = grad_lse.masked_fill(lse == -math.inf, 0)
    totals = summed(arguments, cuts, grad_output.to(dtype), grad_lse.to(accumulated))
    exact_grads = exact_gradients(arguments, [grad_output, grad_lse], torch.float64)
    plain_grads = exact_gradients(arguments, [grad_output, grad_lse], dtype)
    largest = max(float(g.abs().max()) for g in exact_grads.values() if g.numel())
    for name, total in totals.items():
        scores = arguments.query[..., 0].numel() * max(1, arguments.key.shape[-2])
        walk = math.sqrt(scores / total.numel()) if name in ("attn_mask", "sinks") else 1.0
        magnitude = max(1.0, walk) * largest
        assert_accurate(total, exact_grads[name], plain_grads[name], f"gradient of {name}", magnitude)
    assert totals.keys() == exact_grads.keys()


@by_dtype
@by_split
def test_pieces_of_the_keys_add_up_to_the_whole_call(split, dtype):
    assert_adds_up(split.case.build(dtype), split.cuts)


def test_what_a_piece_hides_stays_hidden_though_not_finite():
    arguments = call((50, 500), mask="padding", mask_shape=(1, 1, 1, 500)).build(torch.float32)
    hidden = ~arguments.options["attn_mask"][0, 0, 0]
    arguments.key[..., hidden, :] = math.nan
    arguments.value[..., hidden, :] = math.inf
    for cuts in (TILE_CUTS, (0, 470, 500)):
        output, _ = merged(arguments, cuts)
        totals = summed(arguments, cuts, torch.randn(output.shape), None)
        assert output.isfinite().all()
        assert all(t.isfinite().all() for t in totals.values())


@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_is_not_finite_shows_where_the_whole_call_shows_it(lengths):
    (rows, keys), cuts = LENGTHS[lengths]
    options = {"is_causal": True, "query_offset": 40}
    arguments = call((rows, keys), options=options, sinks=True).build(torch.float32)
    arguments.key[..., 41, 3] = math.nan  # seen from the second row on
    grad_output = torch.randn(1, 2, rows, 20)
    output, lse, _, _ = forward(arguments)
    actual = merged(arguments, cuts)
    assert torch.equal(actual[0].isnan(), output.isnan())
    assert torch.equal(actual[1].isnan(), lse.isnan())
    expected = backward(arguments, (grad_output, None, None, None), output, lse)
    totals = summed(arguments, cuts, grad_output, None)
    for name, e in zip(INPUTS, expected, strict=True):
        if name in totals:
            assert torch.equal(totals[name].isnan(), e.isnan()), name


# Rows far from 0


@pytest.mark.parametrize("far", [300.0, -1e9, -5e10, -1e12])
def test_a_sink_beside_biases_as_far_has_the_weight_of_a_key(far):
    """Each piece's output and lse say so alike, or merged they would not."""
    query, key = torch.zeros(1, 2, 5, 16), torch.randn(1, 2, 60, 16)
    options = {"attn_mask": torch.full((5, 60), far), "sinks": torch.full((2,), far)}
    output, _ = merged(Arguments(query, key, torch.ones_like(key), options), (0, 20, 40, 60))
    torch.testing.assert_close(output, torch.full_like(query, 60 / 61), rtol=2e-3, atol=0)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("far", [-300.0, 5e3, -6e4, -1e9, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_far_from_0_come_out_as_in_the_whole_call(dtype, far, lengths):
    (rows, keys), cuts = LENGTHS[lengths]
    arguments = call((rows, keys)).build(dtype)
    bias = torch.zeros(rows, keys)
    bias[::2] = far  # for all keys of every second row
    arguments.options["attn_mask"] = bias
    output, lse, _, _ = forward(arguments, unrounded=True)
    actual, actual_lse = merged(arguments, cuts)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(actual, output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual_lse, lse, rtol=1e-7, atol=1e-5)
    grad_output = torch.randn(output.shape).to(dtype)
    expected = backward(
        arguments, (grad_output, None, None, None), output.to(dtype), lse.float(), unrounded=True
    )
    totals = summed(arguments, cuts, grad_output, None)
    for name, e in zip(INPUTS, expected, strict=True):
        if name in totals:
            torch.testing.assert_close(totals[name], e, rtol=tolerance, atol=tolerance * float(e.abs().max()))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("cut", [False, True])
def test_weights_of_a_row_of_lowest_biases_never_sum_up_to_more_than_its_pieces(cut, lengths):
    """A double holds no lse of -3.4e38 beside the logarithm of a number of keys."""
    (rows, keys), cuts = LENGTHS[lengths]
    arguments = call((rows, keys)).build(torch.float32)
    arguments.options["attn_mask"] = torch.full((keys,), torch.finfo(torch.float32).min)
    cuts = cuts if cut else (0, keys)
    grad_output = torch.ones(1, 2, rows, 20)
    value_grad = summed(arguments, cuts, grad_output, None)["value"]  # the sums of the weights, by key
    assert value_grad.isfinite().all()
    seen = sum(end > begin for begin, end in pairwise(cuts))
    torch.testing.assert_close(value_grad.sum(-2), torch.full((1, 2, 20), float(rows * seen)))


# Dropout


def kept(arguments: Arguments, origin: tuple[int, ...] | None) -> Tensor:
    return forward(arguments, origin, need_weights=True)[2] != 0


@pytest.mark.parametrize("lengths", [(9, 300), (60, 300), (3, 5000)])
@by_dtype
def test_a_part_of_the_draw_is_that_of_the_whole(dtype, lengths):
    rows, keys = lengths
    shapes = (3, 4, rows, 8), (3, 4, keys, 8), (3, 4, keys, 8)
    arguments = Case("", *shapes, options={"dropout_p": 0.5, "scale": 0.01}).build(dtype)
    whole = kept(arguments, None)
    assert 0.45 < whole.double().mean() < 0.55
    assert torch.equal(whole, kept(arguments, (0, 0, 0, 0)))
    for batch, head, row, column in ((1, 2, 2, 128), (2, 0, 0, 64), (0, 3, 1, 0), (0, 0, rows - 1, 256)):
        part = Arguments(
            arguments.query[batch:, head:, row:],
            arguments.key[batch:, head:, column:],
            arguments.value[batch:, head:, column:],
            arguments.options,
        )
        expected = whole[batch:, head:, row:, column:]
        assert torch.equal(kept(part, (batch, head, row, column)), expected)


def test_far_origins_draw_what_the_counters_say():
    arguments = Case("", (1, 1, 3, 8), (1, 1, 70, 8), (1, 1, 70, 8), options={"dropout_p": 0.5}).build(
        torch.float64
    )
    origin = batch, head, row, column = 2**31, 2**31 - 5, 2**31 - 1, 2**31
    columns = column + torch.arange(70)
    rows = (row + torch.arange(3)).unsqueeze(-1)
    counter = ((columns >> 6) * 16 + (columns & 15), rows, torch.tensor(head), torch.tensor(batch))
    words = reference.philox4x32(counter, (torch.tensor(SEED), torch.tensor(0)))
    which = ((columns >> 4) & 3).expand(words.shape[1:])
    expected = words.gather(0, which.unsqueeze(0))[0] >= 2**31
    assert torch.equal(kept(arguments, origin)[0, 0], expected)


def test_origins_of_seeded_batches_count_within_a_seed():
    arguments = Case("", (2, 3, 4, 5, 8), (2, 3, 4, 70, 8), (2, 3, 4, 70, 8)).build(torch.float32)
    arguments.options["dropout_p"] = 0.5
    seeds = torch.tensor([3, 4])
    whole = forward(arguments, need_weights=True, dropout_seed=seeds)[2]
    part = Arguments(
        *(t[:, 1:] for t in (arguments.query, arguments.key, arguments.value)), arguments.options
    )
    actual = forward(part, (1, 0, 0, 0), need_weights=True, dropout_seed=seeds)[2]
    assert torch.equal(actual != 0, whole[:, 1:] != 0)


# Derivatives of a part


@by_dtype
def test_an_unrounded_output_has_gradients(dtype):
    case = replace(SPLITS["tiles-dropout_bias"].case, sinks=True)
    leaves = case.build(dtype).leaves()
    origin = (1, 2, 3, 64)
    inputs = list(leaves.differentiable().values())
    results = []
    for unrounded in (False, True):
        output, lse, _, _ = forward(leaves, origin, unrounded=unrounded)
        along = cotangents((output, lse), dtype)
        results.append([output, lse, *torch.autograd.grad((output, lse), inputs, along)])
    rounded, unrounded = results
    assert unrounded[0].dtype == torch.promote_types(dtype, torch.float32)
    largest = max(float(t.detach().abs().max()) for t in rounded[2:])
    for actual, expected in zip(unrounded, rounded, strict=True):
        atol = 4 * torch.finfo(dtype).eps * max(largest, float(expected.detach().abs().max()))
        torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=atol)
    for actual, tensor in zip(unrounded[2:], inputs, strict=True):
        assert actual.dtype == tensor.dtype


def small_leaves() -> tuple[Arguments, list[Tensor]]:
    shapes = {"query": (2, 2, 3), "key": (2, 4, 3), "value": (2, 4, 2), "mask_shape": (2, 4)}
    case = Case("", **shapes, sinks=True, mask="bias", options={"dropout_p": 0.3})
    leaves = case.build(torch.float64).leaves()
    return leaves, list(leaves.differentiable().values())


def test_an_unrounded_call_has_every_derivative():
    arguments, inputs = small_leaves()

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        part = arguments.with_tensors(dict(zip(arguments.differentiable(), tensors, strict=True)))
        return forward(part, (1, 1, 1, 64), unrounded=True)[:2]

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_derivatives_of_unrounded_results_are_unrounded(dtype):
    case = Case("", sinks=True)
    leaves = case.build(dtype).leaves()
    tangents = leaves.map(torch.randn_like)
    with torch.autograd.forward_ad.dual_level():
        duals = leaves.map(lambda t: t.detach())
        pairs = zip(duals.differentiable().items(), tangents.differentiable().values(), strict=True)
        duals = duals.with_tensors(
            {name: torch.autograd.forward_ad.make_dual(t, tangent) for (name, t), tangent in pairs}
        )
        output = forward(duals, unrounded=True)[0]
        assert torch.autograd.forward_ad.unpack_dual(output).tangent.dtype == torch.float32
    output, lse, _, _ = forward(leaves)
    grad_output = torch.randn_like(output).detach().requires_grad_()
    results = backward(leaves, (grad_output, None, None, None), output, lse, unrounded=True)
    results = [r for r, name in zip(results, INPUTS, strict=True) if name in leaves.differentiable()]
    assert {r.dtype for r in results} == {torch.float32}
    inputs = [grad_output, *leaves.differentiable().values()]
    seconds = torch.autograd.grad(results, inputs, [torch.randn_like(r) for r in results])
    assert [s.dtype for s in seconds] == [i.dtype for i in inputs]


def given(arguments: Arguments) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor]:
    """What a backward call is given: gradients, lse and delta."""
    output, lse, _, _ = forward(arguments, unrounded=True)
    output, lse = output.detach(), lse.detach()
    grad_output = torch.randn_like(output).to(arguments.query.dtype)
    return (grad_output, None, None, None), lse, (grad_output * output).sum(-1)


NO_DERIVATIVE = "no derivative of _sdpa_backward with a given delta"


def test_a_given_delta_has_no_derivative():
    leaves, inputs = small_leaves()
    grads, lse, delta = given(leaves)
    result = backward(leaves, grads, None, lse, delta=delta)[0]
    assert result.requires_grad
    with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
        torch.autograd.grad(result.sum(), inputs[0])
    with torch.no_grad():
        assert not backward(leaves, grads, None, lse, delta=delta)[0].requires_grad
    plain = leaves.map(torch.Tensor.detach)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(delta, torch.ones_like(delta))
        with pytest.raises(RuntimeError, match=NO_DERIVATIVE):
            backward(plain, grads, None, lse, delta=dual)


# Ways of calling


def whole_backward(arguments: Arguments) -> tuple[Tensor, ...]:
    grads, lse, delta = given(arguments)
    return backward(arguments, grads, None, lse, (0, 0, 0, 64), unrounded=True, delta=delta)


@by_dtype
def test_meta_tensors_tell_shapes_and_dtypes(dtype):
    arguments = Case("", sinks=True, mask="bias", layout="heads_last").build(dtype)
    grads, lse, delta = given(arguments)
    actual = [*forward(arguments, unrounded=True)[:2]]
    actual += backward(arguments, grads, None, lse, unrounded=True, delta=delta)
    on_meta = arguments.map(lambda t: t.to("meta"))
    meta_grads = (grads[0].to("meta"), None, None, None)
    meta = [*forward(on_meta, unrounded=True)[:2]]
    meta += backward(on_meta, meta_grads, None, lse.to("meta"), unrounded=True, delta=delta.to("meta"))
    for a, m in zip(actual, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (m.shape, m.dtype, m.stride())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck(requires_grad):
    arguments = Case("", sinks=True, mask="bias").build(torch.float32)
    grads, lse, delta = given(arguments)
    if requires_grad:
        arguments = arguments.leaves()
    options = {**OPTIONS, **arguments.options, "dropout_seed": torch.tensor(3), "sequences": None}
    options |= {"dropout_p": 0.5, "dropout_origin": [1, 2, 3, 64], "unrounded": True}
    tensors = (arguments.query, arguments.key, arguments.value)
    needs = {"need_weights": True, "need_key_mass": True}
    torch.library.opcheck(OPS._sdpa_forward.default, tensors, {**options, **needs})
    given_rows = {"output": None, "lse": lse, "delta": delta, "output_mask": [True] * 5}
    plain = tuple(t.detach() for t in tensors)  # there is no derivative to check
    options |= {n: options[n].detach() for n in ("attn_mask", "sinks")}
    torch.library.opcheck(OPS._sdpa_backward.default, (*grads, *plain), {**options, **given_rows})


@pytest.mark.parametrize("in_dims", [0, 1, None])
def test_vmap_is_a_loop(in_dims):
    batch = [
        Case("", (2, 3, 5, 8), seed=seed, options={"dropout_p": 0.4}).build(torch.float32) for seed in (1, 2)
    ]
    grads, lse, delta = zip(*(given(one) for one in batch), strict=True)

    def function(query: Tensor, key: Tensor, value: Tensor, grad: Tensor, lse: Tensor, delta: Tensor) -> Any:
        part = Arguments(query, key, value, batch[0].options)
        outputs = forward(part, (1, 0, 2, 64), unrounded=True)[:2]
        more = {"unrounded": True, "delta": delta}
        return *outputs, *backward(part, (grad, None, None, None), None, lse, (1, 0, 2, 64), **more)[:3]

    columns = [
        *zip(*((one.query, one.key, one.value) for one in batch), strict=True),
        tuple(g[0] for g in grads),
        lse,
        delta,
    ]
    if in_dims is None:  # the key is shared
        columns[1] = (columns[1][0],) * 2
        dims = [0, None, 0, 0, 0, 0]
    else:
        dims = [in_dims] * 6
    stacked = [c[0] if d is None else torch.stack(c, d) for c, d in zip(columns, dims, strict=True)]
    together = torch.vmap(function, tuple(dims))(*stacked)
    for i, alone in enumerate(function(*one) for one in zip(*columns, strict=True)):
        for actual, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(actual[i], expected)


def test_compiled_calls_agree():
    arguments = Case("", (2, 3, 40, 8), (2, 3, 300, 8), (2, 3, 300, 6), options={"dropout_p": 0.3}).build(
        torch.bfloat16
    )

    def function(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        part = Arguments(query, key, value, arguments.options)
        grads = (torch.ones_like(query[..., :6]), None, None, None)
        output, lse, _, _ = forward(part, (0, 0, 0, 128), unrounded=True)
        delta = output.sum(-1)
        return output, *backward(part, grads, None, lse, (0, 0, 0, 128), unrounded=True, delta=delta)[:3]

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    inputs = (arguments.query, arguments.key, arguments.value)
    for actual, expected in zip(compiled(*inputs), function(*inputs), strict=True):
        assert torch.equal(actual, expected)


# Packed sequences


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_pieces_of_packed_sequences_add_up(dtype, dropout_p):
    queries, keys = torch.tensor([40, 3, 0, 60]), torch.tensor([70, 300, 5, 400])
    firsts = (
        torch.tensor([64, 128, 0, 320]) if dropout_p == 0 else torch.tensor([64, 64, 64, 64]).minimum(keys)
    )
    starts = [
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]) for lengths in (queries, keys)
    ]
    tensors = [torch.randn(4, int(queries.sum()), 16), torch.randn(2, int(keys.sum()), 16)]
    tensors += [torch.randn(2, int(keys.sum()), 12), None, torch.randn(4)]
    query, key, value, mask, sinks = (t if t is None else t.to(dtype) for t in tensors)
    seed = torch.tensor(SEED) if dropout_p else None

    def table(begin: Tensor, end: Tensor) -> Tensor:
        key_starts = torch.cat([starts[1][:-1] + begin, starts[1][-1:]])
        offsets = 5 - begin  # causal
        return OPS._packed_sequences(
            starts[0], key_starts, queries, end - begin, offsets, query.shape[1], key.shape[1]
        )

    def run(sequences: Tensor, sinks: Tensor | None, origin: Any, grads: Any, **more: Any) -> Any:
        inputs = (query, key, value, mask, sinks, seed, sequences)
        scalars = (dropout_p, True, None, True, None, None, 0, 0.0)
        if grads is None:
            return OPS._sdpa_forward(*inputs, *scalars, False, False, origin, **more)[:2]
        output, lse, grad_output = grads
        wanted = [True, True, True, False, sinks is not None]
        incoming = (grad_output, None, None, None)
        return OPS._sdpa_backward(*incoming, *inputs, output, lse, *scalars, wanted, origin, **more)

    none = torch.zeros_like(keys)
    whole = table(none, keys)
    output, lse = run(whole, sinks, None, None, unrounded=True)
    grad_output = torch.randn(output.shape).to(dtype)
    saved = (output.to(dtype), lse.to(output.dtype), grad_output)
    expected = run(whole, sinks, None, saved, unrounded=True)
    parts = [(table(none, firsts), sinks, None), (table(firsts, keys), None, [0, 0, 0, 64])]
    if dropout_p == 0:
        parts[1] = (*parts[1][:2], None)
    pairs = [run(*part, None, unrounded=True) for part in parts]
    actual, actual_lse = attn_ext.merge_partials(*map(list, zip(*pairs, strict=True)))
    tolerance = {torch.float64: 1e-9, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(actual, output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual_lse, lse, rtol=1e-6, atol=1e-6)
    delta = (grad_output.to(actual.dtype) * actual).sum(-1)
    summed_up: list[Any] = [None] * 5
    for part in parts:
        grads = run(*part, (None, actual_lse, grad_output), unrounded=True, delta=delta)
        summed_up = [
            a if g is None else g if a is None else a + g for a, g in zip(summed_up, grads, strict=True)
        ]
    for a, e in zip(summed_up, expected, strict=True):
        if e is not None and e.numel():
            assert a.dtype == e.dtype
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * float(e.abs().max()))


# What is refused

GOOD = Case("", sinks=True)
FORWARD_REFUSALS = {
    "numbers": ([0, 0, 0], r"to be \(batch, head, row, column\), but got 3 numbers"),
    "negative": ([0, -1, 0, 0], r"dropout_origin between 0 and 2\^31, but got -1"),
    "large": ([0, 0, 2**31 + 1, 0], r"dropout_origin between 0 and 2\^31, but got 2147483649"),
    "column": ([0, 0, 0, 65], "column of dropout_origin to be a multiple of 64, but got 65"),
}


@pytest.mark.parametrize(("origin", "message"), FORWARD_REFUSALS.values(), ids=FORWARD_REFUSALS)
@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_origins_outside_of_a_draw_are_refused(where, origin, message):
    arguments = GOOD.build(torch.float32, where)
    with pytest.raises(RuntimeError, match=message):
        forward(arguments, origin)
    grads, lse = torch.zeros(2, 3, 5, 6, device=where), torch.zeros(2, 3, 5, device=where)
    with pytest.raises(RuntimeError, match=message):
        backward(arguments, (grads, None, None, None), grads, lse, origin)


ROWS = torch.zeros(2, 3, 5)
ROW_REFUSALS = {
    "delta_shape": (
        {"delta": ROWS[..., :1]},
        r"expected delta to have shape \[2, 3, 5\], but got \[2, 3, 1\]",
    ),
    "delta_dtype": ({"delta": ROWS.double()}, "expected delta of dtype Float where query is of Float"),
    "delta_device": ({"delta": ROWS.to("meta")}, "expected delta on the same device as query"),
    "no_output": ({}, "expected output without a delta, but got None"),
    "lse_dtype": ({"delta": ROWS, "lse": ROWS.half()}, "expected lse of dtype Float where query is of Float"),
}


@pytest.mark.parametrize(("more", "message"), ROW_REFUSALS.values(), ids=ROW_REFUSALS)
def test_rows_that_do_not_fit_are_refused(more, message):
    arguments = GOOD.build(torch.float32)
    grads = (torch.zeros(2, 3, 5, 6), None, None, None)
    rows = {"lse": ROWS, **more}
    with pytest.raises(RuntimeError, match=message):
        backward(arguments, grads, None, **rows)


def test_a_freed_delta_is_refused():
    arguments = GOOD.build(torch.float32)
    delta = torch.zeros(2, 3, 5)
    delta.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="expected the storage of delta to hold all of its elements"):
        backward(arguments, (torch.zeros(2, 3, 5, 6), None, None, None), None, ROWS, delta=delta)


def test_an_output_beside_a_delta_is_not_read():
    arguments = Case("").build(torch.float32)
    grads, lse, delta = given(arguments)
    expected = backward(arguments, grads, None, lse, delta=delta)
    for output in (torch.full((2, 3, 5, 6), math.nan), torch.empty(0), torch.zeros(2, dtype=torch.int64)):
        for a, e in zip(backward(arguments, grads, output, lse, delta=delta), expected, strict=True):
            assert a is None or torch.equal(a, e) or not a.numel()
