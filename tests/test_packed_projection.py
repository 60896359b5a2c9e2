"""The product of packed projections: that of F.linear in every way of calling, by the faster library."""

import platform
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from attn_ext import _C, MultiHeadAttention

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

ROWS, FEATURES = 30, 512  # large enough for oneDNN
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # others: assert_close's
ONEDNN = "mkldnn::_linear_pointwise"


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """An input, and weight and bias scaled so that results are about 1."""
    weight = torch.randn(3 * FEATURES, FEATURES, dtype=dtype) / FEATURES**0.5
    return torch.randn(ROWS, FEATURES, dtype=dtype), weight, torch.randn(3 * FEATURES, dtype=dtype)


def is_zen5() -> bool:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return fields.get("vendor_id") == "AuthenticAMD" and int(fields["cpu family"]) >= 26


def ops_of(function: Callable[[], object]) -> set[str]:
    with profile() as events:
        function()
    return {event.key for event in events.key_averages()}


LAYOUTS = {
    "rows": lambda x, w, b: (x, w, b),
    "no_bias": lambda x, w, b: (x, w, None),
    "batch": lambda x, w, b: (x.view(2, 3, 5, FEATURES), w, b),
    "no_rows": lambda x, w, b: (x[:0], w, b),
    "one_row": lambda x, w, b: (x[0], w, b),
    "transposed": lambda x, w, b: (x.t().contiguous().t(), w, b),
    "batch_second": lambda x, w, b: (x.view(6, 5, FEATURES).transpose(0, 1), w, b),
    "every_second_row": lambda x, w, b: (x.repeat_interleave(2, 0)[::2], w, b),
    "one_row_repeated": lambda x, w, b: (x[:1].expand(ROWS, FEATURES), w, b),
    "part_of_weight": lambda x, w, b: (x, w[FEATURES:], b[FEATURES:]),
    "weight_transposed": lambda x, w, b: (x, w.t().contiguous().t(), b),
    "weight_repeated": lambda x, w, b: (x, w[:1].expand(FEATURES, FEATURES), None),
    "weight_overlapping": lambda x, w, b: (x, w.as_strided((FEATURES, FEATURES), (1, 1)), None),
    "rows_overlapping": lambda x, w, b: (x.as_strided((ROWS, FEATURES), (1, 1)), w, b),
    "bias_apart": lambda x, w, b: (x, w, torch.stack([b, b + 1], 1)[:, 0]),
    "bias_repeated": lambda x, w, b: (x, w, b[:1].expand(3 * FEATURES)),
    "no_results": lambda x, w, b: (x, w[:0], b[:0]),
    "no_features": lambda x, w, b: (x[:, :0], w[:, :0], b),
    "negative_view": lambda x, w, b: (torch._neg_view(-x), w, b),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_product(layout: str, dtype: torch.dtype):
    arguments = LAYOUTS[layout](*inputs(dtype))
    expected = F.linear(*(x if x is None else x.double() for x in arguments)).to(dtype)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            result = _C.linear(*arguments)
        assert_close(result, expected, rtol=TOLERANCES.get(dtype), atol=TOLERANCES.get(dtype))


def test_nan_and_inf_stay_in_their_row():
    x, weight, bias = inputs()
    x[3, 7], x[5, 9] = torch.nan, torch.inf
    with torch.no_grad():
        result = _C.linear(x, weight, bias)
    assert result[3].isnan().all()
    assert not result[5].isfinite().any()
    assert_close(result[6:], F.linear(x[6:], weight, bias), rtol=1e-5, atol=1e-5)


def test_the_faster_library():
    arguments = inputs()
    with torch.no_grad():
        assert (ONEDNN in ops_of(lambda: _C.linear(*arguments))) == is_zen5()
        assert ONEDNN not in ops_of(lambda: _C.linear(arguments[0][:3], *arguments[1:]))
        assert ONEDNN not in ops_of(lambda: _C.linear(*inputs(torch.bfloat16)))
        with torch.backends.mkldnn.flags(enabled=False):
            assert ONEDNN not in ops_of(lambda: _C.linear(*arguments))
    arguments[1].requires_grad_()
    assert ONEDNN not in ops_of(lambda: _C.linear(*arguments))


def test_module_asks_the_faster_library():
    module = MultiHeadAttention(FEATURES, 8).eval()
    x = torch.randn(2, 15, FEATURES)
    with torch.inference_mode():
        assert (ONEDNN in ops_of(lambda: module(x))) == is_zen5()
        result = module(x)[0]
    assert_close(result, module(x)[0].detach(), rtol=1e-5, atol=1e-5)


def test_gradients():
    arguments = [x.requires_grad_() for x in inputs()]
    grad = torch.randn(ROWS, 3 * FEATURES)
    ours = torch.autograd.grad(_C.linear(*arguments), arguments, grad)
    assert_close(ours, torch.autograd.grad(F.linear(*arguments), arguments, grad))


def test_forward_derivative_without_grad_mode():
    x, weight, bias = inputs()
    tangent = torch.randn_like(x)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        result = torch.autograd.forward_ad.unpack_dual(_C.linear(dual, weight, bias))
        assert_close(result.tangent, F.linear(tangent, weight))


def test_vmap():
    x, weight, bias = inputs()
    with torch.no_grad():
        result = torch.vmap(_C.linear, (0, None, None))(x.view(2, 15, FEATURES), weight, bias)
    assert_close(result.view(ROWS, -1), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_autocast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert _C.linear(*inputs()).dtype == torch.bfloat16


def test_modes_see_it():
    arguments = inputs()
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            _C.linear(*arguments)
        assert counter.get_total_flops() == 2 * ROWS * FEATURES * 3 * FEATURES
        graph = make_fx(_C.linear)(*arguments)
        assert any("aten" in str(node.target) for node in graph.graph.nodes)
        assert "mkldnn" not in graph.code
        traced = torch.jit.trace(_C.linear, arguments)
        assert "aten::linear" in str(traced.graph)


def test_functions_of_tensors_see_it():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    module = MultiHeadAttention(FEATURES, 8).eval()
    with torch.no_grad(), Mode():
        module(torch.randn(2, 15, FEATURES))
    assert F.linear in seen

    class Own(Tensor):
        pass

    x = torch.randn(2, 15, FEATURES)
    with torch.no_grad():
        assert isinstance(module(x.as_subclass(Own))[0], Own)
        bias = module.in_proj_bias.detach().as_subclass(Own)
        del module.in_proj_bias
        module.in_proj_bias = bias
        assert isinstance(module(x)[0], Own)


def test_python_goes_on_meanwhile():
    """Another thread runs while a product of a tenth of a second is made."""
    x, weight = torch.randn(2048, 2048), torch.randn(4096, 2048)
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(1e-3):
            ticks += 1

    thread = threading.Thread(target=tick)
    with torch.no_grad():
        thread.start()
        before = ticks
        _C.linear(x, weight)
        during = ticks - before
    done.set()
    thread.join()
    assert during >= 3


def test_errors_are_those_of_torch():
    x, weight, bias = inputs()
    for arguments in ((x[:, :5], weight, bias), (x, weight, bias[:7]), (x, weight.double(), bias)):
        with torch.no_grad():
            with pytest.raises(RuntimeError) as ours:
                _C.linear(*arguments)
            with pytest.raises(RuntimeError) as theirs:
                F.linear(*arguments)
        assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]
