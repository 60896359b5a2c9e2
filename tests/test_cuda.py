"""The ways to kernels of NVIDIA GPUs, tried without one: stand-ins for the kernels, on the CPU's tensors."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import test_packed
import torch
import torch.utils.checkpoint

import attn_ext
from attn_ext import reference
from attn_ext._library import _C
from attn_ext.testing import (
    CASES,
    OPS,
    OPTIONS,
    Case,
    assert_gradients_accurate,
    assert_outputs_accurate,
    cases,
    gradients,
    operator,
)

sys.path.insert(0, str(Path(__file__).parent / "tools"))
import fused_kernels
from fused_kernels import CUDNN, EFFICIENT, FLASH, on_gpu

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

#: What ATen would choose, the first that can; and whether there are kernels of our own.
GPUS = {
    "hopper": ((CUDNN, FLASH, EFFICIENT), True),
    "ampere": ((FLASH, EFFICIENT), True),
    "older": ((EFFICIENT,), False),
    "flash_alone": ((FLASH,), False),
    "none": ((), False),
}


by_gpu = pytest.mark.parametrize("gpu", [name for name in GPUS if name != "none"])
by_case = pytest.mark.parametrize("case", CASES, ids=str)
by_op = pytest.mark.parametrize("op", OPS)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def gpu_of(name: str):
    allowed, tiles = GPUS[name]
    return on_gpu(*allowed, tiles=tiles, math=name != "flash_alone")


@by_gpu
@by_op
@by_dtype
@by_case
def test_outputs_are_accurate(case, dtype, op, gpu):
    with gpu_of(gpu):
        assert_outputs_accurate(op, case.build(dtype))


@by_gpu
@by_op
@by_dtype
@by_case
def test_gradients_are_accurate(case, dtype, op, gpu):
    with gpu_of(gpu):
        assert_gradients_accurate(op, case.build(dtype))


WITH_DROPOUT = [
    replace(case, options=case.options | {"dropout_p": p})
    for p in (0.3, 1.0)
    for case in cases(lambda case: case.name in ("plain", "five_dims", "grouped", "sinks", "bias", "causal"))
]


@by_op
@pytest.mark.parametrize("case", WITH_DROPOUT, ids=str)
def test_dropout_is_accurate(case, op):
    with gpu_of("hopper") as called:
        assert_outputs_accurate(op, case.build(torch.bfloat16), dropout_seed=5)
        assert_gradients_accurate(op, case.build(torch.bfloat16), dropout_seed=5)
    assert "_tile_attend" in called and all(name.startswith("_tile_") for name in called)
    differentiable = op in ("sdpa", "sdpa_with_lse") and case.name != "bias"  # others by the composition
    assert ("_tile_grads" in called) == differentiable


def dropout_gradients(length: int, head_dim: int, checkpoints: bool = False):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, length, head_dim, dtype=BF16, requires_grad=True) for _ in range(3)]

    def attend(*tensors):
        return attn_ext.sdpa(*tensors, dropout_p=0.3, is_causal=True)

    if checkpoints:
        output = torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)
    else:
        output = attend(*inputs)
    return output, *torch.autograd.grad(output.float().square().sum(), inputs)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_draws_are_saved_for_backward(checkpoints):
    with gpu_of("hopper") as called:
        expected = dropout_gradients(70, 32)
        assert called == ["_tile_attend", "_tile_grads"]
        called.clear()
        with attn_ext.save_weights_for_backward(True):
            results = dropout_gradients(70, 32, checkpoints)
    drawn = ["_tile_draws", "_tile_attend"]
    assert called == [*drawn, *(drawn if checkpoints else []), "_tile_grads"]
    for result, of_drawn_twice in zip(results, expected, strict=True):
        assert torch.equal(result, of_drawn_twice)


def test_draws_are_refused_for_all_threads():
    """Autograd makes a checkpointed call again in a thread of its own."""
    with gpu_of("hopper") as called, attn_ext.save_weights_for_backward(True):
        for allowed in (False, True):
            called.clear()
            with attn_ext.save_weights_for_backward(allowed), ThreadPoolExecutor(1) as threads:
                threads.submit(dropout_gradients, 70, 32, True).result()
            assert ("_tile_draws" in called) == allowed


@pytest.mark.parametrize("why", ["length", "broadcast", "mask_grad"])
def test_draws_are_not_saved(why):
    """Where they take more than the tensors, were none broadcast, or where backward would not read them."""
    rows = {"length": 64 * 8 + 1, "broadcast": 64 * 8 + 1, "mask_grad": 40}[why]
    lead = (1, 1) if why == "broadcast" else (2, 3)
    query = torch.randn(*lead, rows, 8, dtype=BF16, requires_grad=True)
    key = torch.randn(2, 3, rows, 8, dtype=BF16)
    mask = torch.zeros(rows, rows, dtype=BF16, requires_grad=True) if why == "mask_grad" else None
    with gpu_of("hopper") as called, attn_ext.save_weights_for_backward(True):
        attn_ext.sdpa(query, key, key, mask, dropout_p=0.3).sum().backward()
        assert explain(query, key, key, attn_mask=mask, dropout_p=0.3)["saved_bytes"] == 0
    assert "_tile_draws" not in called and "_tile_attend" in called


@pytest.mark.parametrize("words", [5, 2 * 3 * 128 * 128 // 32])
def test_draws_that_do_not_fit_are_refused(words):
    query = torch.randn(2, 3, 70, 32, dtype=BF16)
    scalars = (0.3 if words == 5 else 0.0, False, None, False, None, None, 0, 0.0)
    tensors = (query, query, query, None, None, torch.tensor(1), None)
    saved = (query, torch.zeros(2, 3, 70))
    wanted = [True, True, True, False, False]
    draws = torch.zeros(words, dtype=torch.int32)
    call = torch.ops.attn_ext._sdpa_backward
    everything = (query, None, None, None, *tensors, *saved, *scalars, wanted, None, False, None, draws)
    with gpu_of("hopper"), pytest.raises(RuntimeError, match="expected draws"):
        call(*everything)
    with pytest.raises(RuntimeError, match=r"expected (weights on the CPU|draws)"):
        call(*everything)


def test_explain_counts_saved_draws():
    query = torch.randn(2, 3, 70, 32, dtype=BF16, requires_grad=True)
    with gpu_of("hopper"), attn_ext.save_weights_for_backward(True):
        assert explain(query, query, query, dropout_p=0.3)["saved_bytes"] == 2 * 3 * 128 * 128 // 8
        assert explain(query, query, query)["saved_bytes"] == 0
        assert explain(query.detach(), query.detach(), query.detach(), dropout_p=0.3)["saved_bytes"] == 0


@by_gpu
@by_dtype
@pytest.mark.parametrize("options", test_packed.OPTIONS.values(), ids=test_packed.OPTIONS)
@pytest.mark.parametrize("lengths", ["mixed", "powers", "decode"])
def test_packed_sequences_go_by_kernels(lengths, options, dtype, gpu):
    with gpu_of(gpu) as called:
        test_packed.test_outputs_and_gradients_are_those_of_the_reference(
            test_packed.LENGTHS[lengths], options, dtype, "cpu"
        )
    if gpu in ("hopper", "ampere") and options in ({}, {"is_causal": True}):
        assert called


def test_packed_sequences_with_dropout_go_by_tiles():
    """Each with the draws that it has in a batch of them."""
    (query, key, value), sides = test_packed.packed([(70, 90), (40, 40), (1, 200)], torch.bfloat16)
    leaves = [t.requires_grad_() for t in (query, key, value)]

    def run():
        torch.manual_seed(3)
        output = attn_ext.sdpa_packed(*leaves, *sides, enable_gqa=True, is_causal=True, dropout_p=0.3)
        return output, *torch.autograd.grad(output.float().square().sum(), leaves)

    expected = run()
    with gpu_of("hopper") as called:
        results = run()
    assert set(called) == {"_tile_attend", "_tile_grads"}
    for result, of_cpu in zip(results, expected, strict=True):
        torch.testing.assert_close(result, of_cpu, rtol=0.03, atol=0.03 * of_cpu.abs().max().item())


def explain(query, key, value, **options):
    """What `attn_ext.explain` says on an NVIDIA GPU."""
    return _C.explain_gpu(query, key, value, *(options.get(name, OPTIONS[name]) for name in OPTIONS))


LONG = {"query": (1, 2, 40, 16), "key": (1, 2, 60, 16), "value": (1, 2, 60, 16)}
GROUPED = {"query": (1, 4, 40, 16), "key": (1, 2, 60, 16), "value": (1, 2, 60, 16)}

DECODING = {"query": (1, 4, 1, 16), "key": (1, 2, 1024, 16), "value": (1, 2, 1024, 16)}
SHORT = {name: (*shape[:2], min(shape[2], 60), 16) for name, shape in DECODING.items()}
BATCH = {name: (32, *shape[1:]) for name, shape in DECODING.items()}


def case_of(options=None, shapes=LONG, **more):
    return Case("", **shapes, options=options or {}, **more)


#: gpu, dtype, case, and the path that its call takes.
PATHS = [
    ("hopper", BF16, case_of(), "cudnn"),
    ("ampere", BF16, case_of(), "flash"),
    ("ampere", F32, case_of(), "efficient"),
    ("hopper", F64, case_of(), "aten"),
    ("hopper", BF16, case_of({"is_causal": True}), "cudnn"),
    ("hopper", BF16, case_of({"is_causal": True, "query_offset": 20}), "flash"),
    ("hopper", BF16, case_of({"is_causal": True, "query_offset": 20, "window_left": 5}), "flash"),
    ("hopper", F32, case_of({"is_causal": True, "query_offset": 20, "window_left": 5}), "efficient"),
    ("hopper", F32, case_of({"window_left": 5}), "aten"),
    ("hopper", BF16, case_of({"is_causal": True, "query_offset": -100}), "tiles"),
    ("hopper", BF16, case_of(mask="bool", mask_shape=(40, 60)), "cudnn"),
    ("ampere", BF16, case_of(mask="bool", mask_shape=(40, 60)), "efficient"),
    ("hopper", BF16, case_of(mask="bias", mask_shape=(40, 60), mask_dtype=F32), "tiles"),
    ("older", BF16, case_of(mask="bias", mask_shape=(40, 60), mask_dtype=F32), "aten"),
    ("hopper", BF16, case_of(sinks=True), "cudnn"),
    ("hopper", BF16, case_of({"softcap": 3.0}), "tiles"),
    ("hopper", BF16, case_of({"dropout_p": 0.5}), "tiles"),
    ("hopper", F32, case_of({"dropout_p": 0.5}), "aten"),
    ("hopper", BF16, case_of({"enable_gqa": True}, GROUPED), "cudnn"),
    ("hopper", F32, case_of({"enable_gqa": True}, GROUPED), "efficient"),
    ("hopper", F32, case_of({"enable_gqa": True}, DECODING), "aten"),
    ("hopper", F32, case_of({"enable_gqa": True}, BATCH), "efficient"),
    ("hopper", F32, case_of({"enable_gqa": True}, SHORT), "efficient"),
    ("hopper", BF16, case_of({"enable_gqa": True}, DECODING), "cudnn"),
    ("hopper", BF16, case_of({"scale": -1.0}), "tiles"),
    ("none", BF16, case_of(), "aten"),
]


@pytest.mark.parametrize(("gpu", "dtype", "case", "path"), PATHS)
def test_path(gpu, dtype, case, path):
    arguments = case.build(dtype)
    with gpu_of(gpu) as called:
        explanation = arguments(explain)
        assert called == []
        arguments(operator("sdpa"))
    assert explanation["path"] == path
    kernels = {"cudnn": "cudnn", "flash": "_flash", "efficient": "_efficient", "tiles": "_tile"}
    assert all(kernels[path] in name for name in called) if path != "aten" else called == []
    assert explanation["reason"].startswith("the composition") == (path == "aten")


@pytest.mark.parametrize("sides", [{}, {"sinks": True}], ids=["plain", "sinks"])
@pytest.mark.parametrize(("dtype", "gpu"), [(BF16, "hopper"), (BF16, "flash_alone"), (F32, "older")], ids=str)
def test_every_band(dtype, gpu, sides):
    """Every causal mask, window and offset of few rows and keys."""
    called = set()
    for rows, keys in ((1, 1), (1, 4), (3, 3), (3, 5), (5, 2), (4, 3)):
        shapes = {"query": (1, 1, rows, 8), "key": (1, 1, keys, 8), "value": (1, 1, keys, 8)}
        for is_causal in (False, True):
            for left in (None, 0, 2):
                for right in (None, 0, 1):
                    for offset in range(-rows, keys + 1):
                        options = {
                            "is_causal": is_causal,
                            "window_left": left,
                            "window_right": right,
                            "query_offset": offset,
                        }
                        arguments = Case("", **shapes, options=options, **sides).build(dtype)
                        with gpu_of(gpu) as kernels:
                            assert_outputs_accurate("sdpa_with_lse", arguments)
                            actual = gradients(operator("sdpa_with_lse"), arguments)
                        called.update(kernels)
                        wide = arguments.map(torch.Tensor.double)
                        exact = gradients(reference.sdpa_with_lse, wide, cotangent_dtype=dtype)
                        for name, grad in actual.items():
                            atol = 1e-5 if dtype == F32 else 0.05
                            assert torch.allclose(grad.double(), exact[name], rtol=0.02, atol=atol), name
    assert called & {"_flash_attention_backward", "_efficient_attention_backward"}


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=str)
def test_slices_of_one_row(options):
    """The stride of a dim of size 1 is any number, also where a kernel looks at it."""
    for rows, keys in ((1, 8), (8, 1), (1, 1)):
        whole = Case("", (2, 3, 8, 19), (2, 3, 8, 19), (2, 3, 8, 19), options=options).build(torch.float16)
        sliced = {"query": whole.query[:, :, :rows, :16], "key": whole.key[:, :, :keys, :16]}
        arguments = whole.with_tensors(sliced | {"value": whole.value[:, :, :keys, :16]})
        with gpu_of("hopper"):
            assert_outputs_accurate("sdpa_with_lse", arguments)
            assert_gradients_accurate("sdpa_with_lse", arguments)


def test_bias_of_one_row_and_key():
    shapes = (3, 1, 6), (3, 1, 6), (3, 1, 8)
    options = {"is_causal": True, "window_left": 69}
    for mask_shape in ((1,), (3, 1, 1)):
        case = Case("", *shapes, mask="dead_row", mask_shape=mask_shape, sinks=True, options=options)
        for dtype in (BF16, F32):
            with gpu_of("older"):
                assert_outputs_accurate("sdpa_with_lse", case.build(dtype))


def test_layouts_need_no_copies_of_results():
    """The efficient kernel lays heads inside of rows: heads outside are batches to it."""
    arguments = Case("", **LONG).build(F32)
    with gpu_of("older"):
        output = arguments(operator("sdpa"))
        assert output.is_contiguous()
        for name, grad in gradients(operator("sdpa"), arguments).items():
            assert grad.is_contiguous(), name


@pytest.mark.parametrize("expanded", [0, 1], ids=["batches", "heads"])
def test_expanded_queries_beside_values_of_other_dims(expanded):
    arguments = Case("", (3, 2, 79, 10), (3, 2, 60, 10), (3, 2, 60, 39)).build(BF16)
    query = arguments.query.narrow(expanded, 0, 1).expand(arguments.query.shape)
    arguments = replace(arguments, query=query)
    with gpu_of("hopper") as called:
        assert_outputs_accurate("sdpa_with_lse", arguments)
        assert_gradients_accurate("sdpa_with_lse", arguments)
    assert any("cudnn" in name for name in called)


def learned_bias(shape, dtype, rows=49):
    """A call whose mask, of this shape, wants a gradient."""
    shapes = [(2, 4, rows, 16)] * 3
    arguments = Case("", *shapes, mask="bias", mask_shape=shape, mask_dtype=dtype).build(dtype)
    return arguments.leaves()


@pytest.mark.parametrize("mask_shape", [(2, 4, 49, 49), (1, 4, 49, 49), (4, 1, 49)], ids=str)
def test_gradients_of_a_learned_bias(mask_shape):
    """The one that rows share has half precision rounded before it is summed, and goes to the composition."""
    arguments = learned_bias(mask_shape, BF16)
    with gpu_of("hopper") as called:
        assert arguments(explain)["path"] == "cudnn"
        assert_gradients_accurate("sdpa_with_lse", arguments)
    assert ("_efficient_attention_backward" in called) == (mask_shape[-2] == 49)


def test_a_mask_that_is_small_is_spread_rather_than_results_laid_out_anew():
    """Over heads as batches, where the efficient kernel's output and gradients lie as the query does."""
    arguments = learned_bias((1, 4, 49, 49), BF16)
    with gpu_of("hopper"):
        output = arguments(operator("sdpa"))
        with torch.profiler.profile() as profiled:
            output.backward(torch.randn_like(output))
    called = {
        event.name for event in profiled.events() if "attn_ext::_sdpa_backward" in parents_of(event)[:1]
    }
    assert "aten::_efficient_attention_backward" in called
    assert "aten::contiguous" not in called and "aten::permute" not in called


def parents_of(event):
    """Names, the nearest first."""
    parent = event.cpu_parent
    return [] if parent is None else [parent.name, *parents_of(parent)]


@pytest.mark.parametrize("mask", ["bool", "bias"])
@pytest.mark.parametrize("keys", [48, 61])
def test_lse_beside_masks_is_exact(mask, keys):
    """As the kernel gives it where a row sees anything, -inf elsewhere."""
    case = Case("", (2, 3, 40, 16), (2, 3, keys, 16), (2, 3, keys, 16), mask=mask, mask_shape=(40, keys))
    arguments = case.build(F32)
    given = arguments.options["attn_mask"]
    given[3] = False if mask == "bool" else -torch.inf
    if mask == "bias":
        given[5], given[6, 1:] = torch.finfo(F32).min, -torch.inf
        given[7] += 1e30
    raw = []

    def efficient_forward(*args, **more):
        raw.append(fused_kernels.efficient_forward(*args, **more))
        return raw[-1][0], raw[-1][1].clone(), *raw[-1][2:]

    with gpu_of("older"), torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_efficient_attention_forward", efficient_forward, "CPU", allow_override=True)
        lse = arguments(operator("sdpa_with_lse"))[1]
    expected = raw[0][1][..., :40].reshape(lse.shape).clone()
    expected[..., 3] = -torch.inf
    assert lse.is_contiguous() and torch.equal(lse, expected)


def test_masks_become_biases_by_one_kernel():
    arguments = Case("", **LONG, mask="bool", mask_shape=(40, 60)).build(BF16)
    with gpu_of("older"), torch.profiler.profile() as profiled:
        assert arguments(explain)["packed_bytes"] == 40 * 64 * 2
    called = {event.name for event in profiled.events()}
    assert "aten::log" in called and not called & {"aten::full", "aten::fill_", "aten::masked_fill_"}


def test_the_choice_follows_what_it_depends_on(device):
    """It is not asked for twice, so what was chosen before must not be taken for another call."""
    if device != "cuda":
        pytest.skip("answers are kept on a GPU alone")
    arguments = case_of().build(torch.float16)
    tensors = [t.to(device) for t in (arguments.query, arguments.key, arguments.value)]
    backends = torch.nn.attention.SDPBackend
    for _ in range(2):
        for backend, path in (
            (backends.FLASH_ATTENTION, "flash"),
            (backends.EFFICIENT_ATTENTION, "efficient"),
            (backends.MATH, "aten"),
        ):
            with torch.nn.attention.sdpa_kernel(backend):
                assert attn_ext.explain(*tensors).path == path
        mask = torch.ones(40, 60, dtype=torch.bool, device=device)
        assert attn_ext.explain(*tensors).path in ("flash", "cudnn")
        assert attn_ext.explain(*tensors, mask).path in ("efficient", "cudnn")
        assert attn_ext.explain(*(t.float() for t in tensors)).path == "efficient"


def test_padding_beside_a_band_is_not_spread_over_heads():
    case = Case(
        "",
        (2, 8, 70, 16),
        (2, 8, 70, 16),
        (2, 8, 70, 16),
        mask="padding",
        mask_shape=(2, 1, 1, 70),
        options={"is_causal": True},
    )
    arguments = case.build(F32)
    with gpu_of("older"):
        assert arguments(explain)["packed_bytes"] <= 2 * 70 * 80 * 4
        assert_outputs_accurate("sdpa", arguments)


def test_padding_of_dims_copies_no_broadcast():
    shapes = (3, 4, 40, 20), (1, 1, 60, 20), (1, 1, 60, 20)
    arguments = Case("", *shapes).build(BF16)
    with gpu_of("hopper"):
        padded = (3 * 4 * 40 + 60 + 60) * 24 * 2
        assert arguments(explain)["packed_bytes"] == padded
        expanded = replace(arguments, key=arguments.key.expand(3, 4, 60, 20))
        assert expanded(explain)["packed_bytes"] == padded


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_mask_of_no_dims(dtype):
    for mask in (torch.tensor(True), torch.tensor(1.5, dtype=dtype)):
        arguments = Case("").build(dtype)
        arguments.options["attn_mask"] = mask
        with gpu_of("hopper"):
            assert_outputs_accurate("sdpa_with_lse", arguments)
            assert_gradients_accurate("sdpa_with_lse", arguments)


def test_gradients_of_lse_beyond_float16():
    arguments = Case("", **LONG).build(torch.float16).leaves()
    with gpu_of("hopper"):
        lse = arguments(operator("sdpa_with_lse"))[1]
        for size in (1e5, 1.0):
            grad = torch.autograd.grad(lse, arguments.key, torch.full_like(lse, size), retain_graph=True)[0]
            wide = arguments.map(torch.Tensor.double).leaves()
            exact_lse = wide(reference.sdpa_with_lse)[1]
            exact = torch.autograd.grad(exact_lse, wide.key, torch.full_like(exact_lse, size))[0]
            assert torch.allclose(grad.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


def test_value_of_no_batch():
    arguments = Case("", (1, 2, 5, 8), (1, 2, 7, 8), (0, 2, 7, 8)).build(BF16)
    with gpu_of("hopper") as called:
        assert arguments(operator("sdpa")).shape == (0, 2, 5, 8)
    assert called == []


def test_nan_at_a_row_that_sees_nothing_does_not_reach_the_sinks():
    arguments = Case("", mask="dead_row", sinks=True).build(BF16).leaves()
    with gpu_of("hopper"):
        output = arguments(operator("sdpa"))
        grad = torch.ones_like(output).masked_fill((output == 0).all(-1, keepdim=True), float("nan"))
        sinks = torch.autograd.grad(output, arguments.options["sinks"], grad)[0]
    assert grad.isnan().any() and sinks.isfinite().all()
