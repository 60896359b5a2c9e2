"""`torch.nn.attention.varlen` on the CPU: against float64 and F.sdpa; and off, as if it had never been on."""

import json
import math
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import attn_ext
from attn_ext import reference
from attn_ext.integrations import varlen

module = pytest.importorskip("torch.nn.attention.varlen")
registry = torch.nn.attention
if not hasattr(module, "varlen_attn_out"):
    pytest.skip("varlen_attn of this torch has neither groups nor seqused_k", allow_module_level=True)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WINDOWS = [(-1, -1), (-1, 0), (4, 0), (4, 3), (0, 0), (-1, 5), (7, -1), (200, 0)]
by_window = pytest.mark.parametrize("window", WINDOWS, ids=str)
#: Query and key lengths of the sequences.
LENGTHS = {
    "self": [(5, 5), (1, 1), (64, 64), (17, 17)],
    "cross": [(3, 40), (20, 33), (1, 130)],
    "more_queries": [(9, 3), (0, 4), (4, 0), (70, 65)],
    "powers": [(2**n, 2**n) for n in range(8)],
}
by_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
KERNELS = [
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
]
#: What both may be off by. In float64 the reference is F.sdpa's own arithmetic, so that this makes no error;
#: a row of one key, too, is exact in a softmax, and not where weights are made again from the log-sum-exp.
LAST_PLACES = {torch.float64: 100, torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}
LSE = module.AuxRequest(lse=True)


@pytest.fixture(autouse=True)
def _active():
    varlen.activate()
    yield
    varlen.deactivate()
    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU") for name in KERNELS)
    assert registry.current_flash_attention_impl() is None


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(lengths, dtype=torch.float32, heads=(4, 4), dim=16, grad=False):
    """Query, key and value; and what follows them in a call."""
    sides = tuple(starts([pair[side] for pair in lengths]) for side in (0, 1))
    rows = [int(side[-1]) for side in sides]
    shapes = [(rows[0], heads[0], dim), *[(rows[1], heads[1], dim)] * 2]
    tensors = [torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes]
    return tensors, (*sides, *(max(pair[side] for pair in lengths) for side in (0, 1)))


def exact(tensors, sides, window, **options):
    """Output and log-sum-exp in float64; tensors may want gradients."""
    left, right = (None if size < 0 else size for size in window)
    return reference.sdpa_packed_with_lse(
        *tensors, *sides[:2], window_left=left, window_right=right, enable_gqa=True, **options
    )


def by_sequence(tensors, sides, window):
    """F.scaled_dot_product_attention of each sequence, with a mask."""
    outputs = []
    for (q0, q1), (k0, k1) in zip(*(side.unfold(0, 2, 1).tolist() for side in sides[:2]), strict=True):
        query, key, value = (
            t[s].transpose(0, 1) for t, s in zip(tensors, (slice(q0, q1), *[slice(k0, k1)] * 2), strict=True)
        )
        left, right = (None if size < 0 else size for size in window)
        mask = reference.visible_keys(
            q1 - q0, k1 - k0, window_left=left, window_right=right, query_offset=k1 - k0 - q1 + q0
        )
        output = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def error(actual: Tensor, expected: Tensor) -> float:
    return (actual.double() - expected).abs().nan_to_num().max().item()


@by_dtype
@by_window
@by_lengths
def test_errors_are_at_most_twice_those_of_f_sdpa(lengths, window, dtype):
    tensors, sides = packed(lengths, dtype, heads=(4, 2), grad=True)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    copies = [t.detach().clone().requires_grad_() for t in tensors]
    output, lse = module.varlen_attn(*tensors, *sides, return_aux=LSE, window_size=window, enable_gqa=True)
    expected, expected_lse = exact(doubles, sides, window)
    plain = by_sequence(copies, sides, window).nan_to_num()
    incoming = torch.randn(output.shape).to(dtype)
    seen = (expected_lse > -math.inf).T.unsqueeze(-1)  # others are NaN in F.sdpa
    results = [
        [result, *torch.autograd.grad(result, inputs, torch.where(seen, incoming, 0).to(result.dtype))]
        for result, inputs in ((output, tensors), (plain, copies), (expected, doubles))
    ]
    for name, ours, theirs, right in zip(("output", *"qkv"), *results, strict=True):
        assert ours.dtype == dtype
        floor = LAST_PLACES[dtype] * torch.finfo(dtype).eps * (1 + right.abs().max().item())
        assert error(ours, right) <= 2 * error(theirs, right) + floor, name
    assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_scale(scale):
    tensors, sides = packed(LENGTHS["self"], torch.float64)
    output = module.varlen_attn(*tensors, *sides, scale=scale)
    assert_close(output, exact(tensors, sides, (-1, -1), scale=scale)[0])


@by_dtype
@by_window
def test_seqused_k_shortens_the_keys(dtype, window):
    lengths = [(3, 12), (5, 20), (1, 7), (2, 9)]
    tensors, sides = packed(lengths, dtype)
    used = torch.tensor([4, 20, 0, 1], dtype=torch.int32)
    output, lse = module.varlen_attn(*tensors, *sides, return_aux=LSE, window_size=window, seqused_k=used)
    expected, expected_lse = exact(tensors, sides, window, seqlens_k=used)
    tolerance = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    assert_close(output.double(), expected, **tolerance)
    assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)


@by_dtype
def test_it_is_the_op_bit_by_bit(dtype):
    tensors, sides = packed(LENGTHS["cross"], dtype, grad=True)
    incoming = torch.randn(tensors[0].shape).to(dtype)
    results = []
    for output in (
        module.varlen_attn(*tensors, *sides, window_size=(-1, 0), num_splits=3),
        attn_ext.sdpa_packed(*tensors, *sides[:2], is_causal=True),
    ):
        results.append([output, *torch.autograd.grad(output, tensors, incoming)])
    assert all(map(torch.equal, *results))


@by_dtype
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0)])
def test_a_block_table_names_the_pages_of_the_keys(window, dtype):
    pages = torch.randn(2, 5, 4, 2, 16).to(dtype)
    table = torch.tensor([[3, 0, -1], [1, 4, 2]], dtype=torch.int32)
    lengths, ends = torch.tensor([6, 11], dtype=torch.int32), starts([1, 7])
    query = torch.randn(8, 4, 16).to(dtype)
    options = {"seqused_k": lengths, "block_table": table, "window_size": window, "enable_gqa": True}
    output, lse = module.varlen_attn(query, *pages, ends, None, 7, 11, return_aux=LSE, **options)
    bounds = {"window_left": window[0] if window[0] >= 0 else None, "is_causal": window[1] == 0}
    expected = attn_ext.sdpa_paged_with_lse(query, *pages, table, lengths, ends, enable_gqa=True, **bounds)
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1].float())


@by_dtype
def test_into_a_tensor_that_is_given(dtype):
    tensors, sides = packed(LENGTHS["cross"], dtype)
    expected, expected_lse = module.varlen_attn(*tensors, *sides, return_aux=LSE, window_size=(4, 0))
    out = torch.full((4, len(expected), 16), math.nan, dtype=dtype).transpose(0, 1)
    output, lse = module.varlen_attn_out(out, *tensors, *sides, return_aux=LSE, window_size=(4, 0))
    assert output is out
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert module.varlen_attn_out(tensors[0], *tensors, *sides, window_size=(4, 0)) is tensors[0]
    assert torch.equal(tensors[0], expected)  # which was the query


def test_gradients_are_those_of_finite_differences():
    tensors, sides = packed([(2, 3), (3, 2)], torch.float64, heads=(2, 1), dim=3, grad=True)

    def attend(*inputs):
        return module.varlen_attn(*inputs, *sides, window_size=(-1, 0), enable_gqa=True)

    assert torch.autograd.gradcheck(attend, tensors)


LAYOUTS = {
    "dense": lambda t: t,
    "heads_first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "part_of_a_row": lambda t: torch.stack([t, t], 1)[:, 0],
    "dims_first": lambda t: torch.cat([t, t]).transpose(1, 2).contiguous().transpose(1, 2)[: len(t)],
    "every_other_dim": lambda t: t.repeat_interleave(2, dim=2)[..., ::2],
    "heads_last_and_spread": lambda t: (
        t.transpose(1, 2).repeat_interleave(2, dim=2)[..., ::2].transpose(1, 2)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_in_memory_as_empty_like(layout):
    tensors, sides = packed([(3, 3), (2, 2)], grad=True)
    inputs = [layout(t) for t in tensors]
    output = module.varlen_attn(*inputs, *sides)
    grads = torch.autograd.grad(output, inputs, torch.randn(output.shape))
    for result, like in zip((output, *grads), (inputs[0], *inputs), strict=True):
        assert result.stride() == torch.empty_like(like).stride()
    assert_close(output, module.varlen_attn(*tensors, *sides))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("part_of_a_row", torch.float64), ("heads_last_and_spread", torch.bfloat16), ("dense", torch.float32)],
    ids=str,
)
def test_compiled(name, dtype):
    """A compiler takes for granted how results lie in memory, and their dtypes."""
    torch._dynamo.reset()
    tensors, sides = packed([(30, 30), (3, 3)], dtype)
    tensors = [LAYOUTS[name](t).detach().requires_grad_() for t in tensors]

    def attend(query, key, value):
        output, lse = module.varlen_attn(query, key, value, *sides, return_aux=LSE, window_size=(-1, 0))
        return output * 2, lse + 1

    results = []
    for function in (attend, torch.compile(attend, fullgraph=True)):
        output, lse = function(*tensors)
        results.append([output, lse, *torch.autograd.grad(output.square().sum(), tensors)])
    for actual, expected in zip(*reversed(results), strict=True):
        assert_close(actual, expected)


def test_compiled_into_a_tensor_that_is_given():
    tensors, sides = packed(LENGTHS["self"])

    def attend(out, *inputs):
        return module.varlen_attn_out(out, *inputs, *sides, window_size=(-1, 0)) + 1

    out = torch.empty_like(tensors[0])
    actual = torch.compile(attend, fullgraph=True)(out, *tensors)
    expected = module.varlen_attn(*tensors, *sides, window_size=(-1, 0))
    assert_close(out, expected)
    assert_close(actual, expected + 1)


def test_a_graph_works_again_after_it_was_off():
    tensors, sides = packed(LENGTHS["self"])
    compiled = torch.compile(lambda *inputs: module.varlen_attn(*inputs, *sides), backend="aot_eager")
    expected = compiled(*tensors)
    varlen.deactivate()
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        compiled(*tensors)
    varlen.activate()
    assert torch.equal(compiled(*tensors), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    tensors, sides = packed(LENGTHS["self"], grad=True)
    with mode():
        output = module.varlen_attn(*tensors, *sides)
    assert not output.requires_grad
    assert_close(output, module.varlen_attn(*tensors, *sides).detach())


def test_a_layer_of_a_model_learns():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 24)

        def forward(self, x, sides):
            query, key, value = self.project(x).unflatten(-1, (3, 2, 4)).unbind(1)
            return module.varlen_attn(query, key, value, *sides, window_size=(-1, 0)).flatten(-2)

    layer, (_, sides) = Layer(), packed([(5, 5), (9, 9)])
    x, target = torch.randn(2, 14, 8).unbind(0)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(layer(x, sides), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


class TestRefusing:
    @pytest.fixture
    def call(self):
        tensors, sides = packed([(3, 3), (2, 2)])
        return lambda **options: module.varlen_attn(*tensors, *sides, **options)

    def test_a_block_table_without_lengths(self):
        query, pages, table = torch.randn(2, 2, 8), torch.randn(3, 4, 2, 8), torch.tensor([[0, 1], [2, -1]])
        with pytest.raises(
            RuntimeError, match="expected seqused_k with block_table in varlen_attn on the CPU"
        ):
            module.varlen_attn(query, pages, pages, starts([1, 1]), None, 1, 6, block_table=table.int())

    def test_keys_without_their_lengths(self):
        (query, key, value), sides = packed([(3, 3), (2, 2)])
        with pytest.raises(RuntimeError, match="expected cu_seq_k in varlen_attn on the CPU, but got None"):
            module.varlen_attn(query, key, value, sides[0], None, *sides[2:])

    def test_a_head_dim_of_its_own_for_values(self):
        (query, key, _), sides = packed([(3, 3), (2, 2)])
        with pytest.raises(
            RuntimeError, match="query and value of one head dim in varlen_attn, but got 16 and 8"
        ):
            module.varlen_attn(query, key, torch.randn(5, 4, 8), *sides)

    def test_lengths_beyond_the_tensors(self):
        (query, key, value), sides = packed([(3, 3), (2, 2)])
        with pytest.raises(RuntimeError, match="attn_ext: expected cu_seqlens_q"):
            module.varlen_attn(query, key, value, sides[0] + 1, *sides[1:])

    @pytest.mark.parametrize(
        "out", [torch.empty(5, 4, 8), torch.empty(5, 4, 16, dtype=torch.float64)], ids=["shape", "dtype"]
    )
    def test_an_out_that_does_not_fit(self, out):
        tensors, sides = packed([(3, 3), (2, 2)])
        with pytest.raises(
            RuntimeError, match=r"expected out of shape .* and dtype torch\.float32, as query has"
        ):
            module.varlen_attn_out(out, *tensors, *sides)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("dropout_p", 0.1), ("return_debug_mask", True), ("alibi_slopes", torch.ones(4))],
    )
    def test_what_pytorchs_function_does_not_pass(self, name, value):
        tensors, sides = packed([(3, 3), (2, 2)])
        usual = {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
        with pytest.raises(NotImplementedError, match=f"expected no {name} in varlen_attn on the CPU"):
            torch.ops.aten._flash_attention_forward(*tensors, *sides, **usual | {name: value})


FRESH = f"""
import json, sys, torch, attn_ext
from attn_ext.integrations import varlen
seen = {{"active_when_imported": varlen.is_active()}}
seen["varlen_is_imported"] = "torch.nn.attention.varlen" in sys.modules
query, starts = torch.randn(3, 2, 8), torch.tensor([0, 3])
try:
    torch.ops.aten._flash_attention_forward(query, query, query, starts, starts, 3, 3, 0.0, False, False)
except NotImplementedError as error:
    seen["error"] = str(error).splitlines()[0]
def kernels():
    tables = [torch._C._dispatch_dump_table("aten::" + name).splitlines() for name in {KERNELS}]
    return [line for table in tables for line in table if not line.startswith("CPU")]
seen["kernels"] = [kernels()]
varlen.activate()
seen["kernels"].append(kernels())
varlen.deactivate()
seen["kernels"].append(kernels())
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def fresh():
    """What a process sees in which attn_ext has never been active."""
    command = [sys.executable, "-W", "ignore", "-c", FRESH]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


class TestOnAndOff:
    def call(self):
        tensors, sides = packed([(3, 3), (2, 2)])
        return module.varlen_attn(*tensors, *sides)

    def test_afterwards_the_error_is_pytorchs_own(self, fresh):
        varlen.deactivate()
        with pytest.raises(NotImplementedError) as error:
            self.call()
        sentence = str(error.value).splitlines()[0].partition(". This")[0]
        assert sentence == fresh["error"].partition(". This")[0]

    def test_many_activations_are_one(self):
        varlen.activate()
        varlen.activate()
        assert varlen.is_active()
        self.call()
        varlen.deactivate()
        assert not varlen.is_active()
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            self.call()

    def test_again_and_again_without_a_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                varlen.deactivate()
                varlen.deactivate()
                varlen.activate()
                self.call()

    def test_pytorchs_own_functions_turn_it_on_and_off(self):
        assert varlen.NAME in registry.list_flash_attention_impls()
        assert registry.current_flash_attention_impl() == varlen.NAME
        registry.restore_flash_attention_impl()
        assert not varlen.is_active()
        with pytest.raises(NotImplementedError, match="'CPU' backend"):
            self.call()
        registry.activate_flash_attention_impl(varlen.NAME)
        registry.activate_flash_attention_impl(varlen.NAME)
        assert varlen.is_active()
        self.call()

    def test_another_implementation_stays(self):
        varlen.deactivate()
        removed = []

        class Other:
            def remove(self):
                removed.append(True)

        registry.register_flash_attention_impl("OTHER", register_fn=Other)
        registry.activate_flash_attention_impl("OTHER")
        try:
            varlen.activate()
            self.call()
            assert registry.current_flash_attention_impl() == "OTHER"
            varlen.deactivate()
            with pytest.raises(NotImplementedError, match="'CPU' backend"):
                self.call()
            assert registry.current_flash_attention_impl() == "OTHER"
            assert not removed
        finally:
            registry.restore_flash_attention_impl()
            registry._registry._FLASH_ATTENTION_IMPLS.pop("OTHER")

    def test_other_devices_are_as_they_were(self, fresh):
        before, active, after = fresh["kernels"]
        assert any("CUDA" in line for line in before)
        assert before == active == after

    def test_kernels_of_others_for_the_cpu_stay(self):
        varlen.deactivate()
        with torch.library._scoped_library("aten", "IMPL", "CPU") as library:
            library.impl(KERNELS[-1], lambda *_, **__: None)
            with pytest.raises(RuntimeError, match=f"expected aten::{KERNELS[-1]} to have no kernel"):
                varlen.activate()
            assert not varlen.is_active()
            assert registry.current_flash_attention_impl() is None

    def test_a_torch_without_it(self, monkeypatch):
        varlen.deactivate()
        monkeypatch.setattr(varlen, "find_spec", lambda name: None)
        with pytest.raises(
            ImportError, match=r"expected a torch with torch\.nn\.attention\.varlen, but torch 2"
        ):
            varlen.activate()
        assert not varlen.is_active()

    def test_a_torch_without_a_way_back_in_its_registry(self, monkeypatch):
        varlen.deactivate()
        monkeypatch.delattr(registry, "restore_flash_attention_impl")
        for _ in range(2):
            varlen.activate()
            self.call()
            varlen.deactivate()
            with pytest.raises(NotImplementedError, match="'CPU' backend"):
                self.call()

    def test_importing_activates_nothing(self, fresh):
        assert not fresh["active_when_imported"]
        assert not fresh["varlen_is_imported"]
