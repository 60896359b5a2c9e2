"""Who computes attention: attn_ext, and those that it is held against.

A contender's ``prepare`` does everything that a user does once, before the first call, and returns the call
that is timed; None where the contender cannot express the problem.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import attn_ext

from .cells import Problem

__all__ = [
    "BASELINE",
    "CONTENDERS",
    "OURS",
    "Call",
    "Contender",
    "available",
    "explain",
    "missing",
    "missing_in_words",
]

Call = Callable[[], Any]
Attend = Callable[[Problem], Call | None]

OURS = "attn_ext"
#: attn_ext without the dropout or the mask that the cell has: shown, but no peer.
BASELINE = "without"


@dataclass(frozen=True)
class Contender:
    """Someone who computes attention."""

    name: str
    prepare: Callable[[Problem, int], Call | None]  # problem, threads
    modules: tuple[str, ...] = ()

    @property
    def missing_modules(self) -> list[str]:
        return [module for module in self.modules if find_spec(module) is None]

    @property
    def installed(self) -> bool:
        return not self.missing_modules


def available(names: list[str] | None = None) -> list[Contender]:
    """Ours, and the peers of these names that are installed; all of them by default."""
    return [contender for contender in _wanted(names) if contender.installed]


def missing(names: list[str] | None = None) -> list[Contender]:
    """Of the same, those that are not installed."""
    return [contender for contender in _wanted(names) if not contender.installed]


def missing_in_words(contenders: list[Contender]) -> str:
    """Who is left out, and how to have them."""
    names = ", ".join(contender.name for contender in contenders)
    modules = dict.fromkeys(module for contender in contenders for module in contender.missing_modules)
    return f"not installed, so left out: {names}; to have them: pip install {' '.join(modules)}"


def _wanted(names: list[str] | None) -> list[Contender]:
    return [c for c in CONTENDERS if names is None or c.name in (OURS, BASELINE, *names)]


# Forward, backward, or both, of a function that returns the output --------------------------------


def _timed(attend: Attend) -> Callable[[Problem, int], Call | None]:
    """What the mode times of a differentiable function; gradients are kept out of the leaves."""

    def prepare(problem: Problem, threads: int) -> Call | None:
        call = attend(problem)
        if call is None or not problem.with_grad:
            return call
        inputs, grad_output = problem.differentiable(), problem.grad_output
        if problem.mode == "fwdbwd":
            return lambda: torch.autograd.grad(call(), inputs, grad_output)
        with torch.enable_grad():
            output = call()
        return lambda: torch.autograd.grad(output, inputs, grad_output, retain_graph=True)

    return prepare


# attn_ext -----------------------------------------------------------------------------------------


def _our_arguments(problem: Problem) -> tuple[list[Any], dict[str, Any]]:
    """Only what differs from the defaults, as one would write the call."""
    cell = problem.cell
    options = {
        "attn_mask": problem.attn_mask,
        "dropout_p": problem.dropout_p or None,
        "is_causal": cell.is_causal or None,
        "enable_gqa": problem.grouped or None,
        "window_left": cell.window_left,
        "query_offset": cell.query_offset or None,
    }
    given = {name: option for name, option in options.items() if option is not None}
    return [problem.query, problem.key, problem.value], given


def _ours(problem: Problem) -> Call:
    tensors, options = _our_arguments(problem)
    function = attn_ext.sdpa_with_weights if problem.mode == "weights" else attn_ext.sdpa
    return lambda: function(*tensors, **options)


def _ours_without(problem: Problem) -> Call | None:
    """The same call without dropout, or without the mask: what those cost."""
    if problem.mode == "dropout":
        return _ours(replace(problem, mode="fwd"))
    if problem.mode == "fwd" and problem.attn_mask is not None:
        return _ours(replace(problem, attn_mask=None))
    return None


def explain(problem: Problem) -> attn_ext.Explanation:
    """The way that our call takes."""
    tensors, options = _our_arguments(problem)
    return attn_ext.explain(*tensors, **options)


def _plainly_causal(problem: Problem) -> bool:
    """Whether the one kind of causality that everybody has an argument for is all there is."""
    return problem.cell.mask == "causal" and problem.cell.query_offset == 0


# torch --------------------------------------------------------------------------------------------


def _f_sdpa(problem: Problem) -> Call | None:
    """F.scaled_dot_product_attention; what it has no argument for is a mask made beforehand."""
    if problem.mode == "weights":
        return None
    plainly_causal = _plainly_causal(problem)
    mask = problem.visible() if problem.cell.is_causal and not plainly_causal else problem.attn_mask
    query, key, value = problem.query, problem.key, problem.value
    options: dict[str, Any] = {}
    if mask is not None:
        options["attn_mask"] = mask
    if problem.dropout_p > 0:
        options["dropout_p"] = problem.dropout_p
    if plainly_causal:
        options["is_causal"] = True
    if problem.grouped:
        options["enable_gqa"] = True
    return lambda: F.scaled_dot_product_attention(query, key, value, **options)


def _eager(problem: Problem) -> Call:
    """matmul, mask, softmax, matmul, at its best: what can be done beforehand is, what can be done in place
    is, and the query heads of a group are rows of one product, so that no key is repeated."""
    query, key, value = problem.query, problem.key, problem.value
    b, hq, hkv, lq, lk, d, dv = problem.cell.shape
    visible = problem.visible()
    hidden = None if visible is None else ~visible
    bias = problem.attn_mask if problem.attn_mask is not None and visible is None else None
    in_place, with_weights = not problem.with_grad, problem.mode == "weights"
    scale, dropout_p, grouped = 1.0 / math.sqrt(d), problem.dropout_p, problem.grouped

    def attend() -> Any:
        rows = query.reshape(b, hkv, -1, d) if grouped else query
        scores = (rows * scale) @ key.transpose(-2, -1)
        if grouped:
            scores = scores.view(b, hq, lq, lk)
        if hidden is not None and in_place:
            scores.masked_fill_(hidden, -math.inf)
        elif hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        if bias is not None:
            scores = scores.add_(bias) if in_place else scores + bias
        weights = scores.softmax(-1)
        if dropout_p > 0:
            weights = F.dropout(weights, dropout_p)
        output = (weights.view(b, hkv, -1, lk) if grouped else weights) @ value
        output = output.view(b, hq, lq, dv) if grouped else output
        return (output, weights) if with_weights else output

    return attend


# onnxruntime ----------------------------------------------------------------------------------------


def _onnxruntime(problem: Problem, threads: int) -> Call | None:
    """MultiHeadAttention of onnxruntime's own operators, on the layout that it likes best: heads last.

    Inputs and output are bound beforehand, so that nothing is copied.
    """
    if problem.mode != "fwd" or problem.dtype != torch.float32 or problem.grouped:
        return None
    runtime, onnx = import_module("onnxruntime"), import_module("onnx")
    helper = onnx.helper
    b, hq, _, lq, lk, d, dv = problem.cell.shape
    inputs = {
        "query": problem.query.transpose(1, 2).reshape(b, lq, hq * d),
        "key": problem.key.transpose(1, 2).reshape(b, lk, hq * d),
        "value": problem.value.transpose(1, 2).reshape(b, lk, hq * dv),
        **_onnxruntime_mask(problem),
    }
    order = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")
    node = helper.make_node(
        "MultiHeadAttention",
        [name if name in inputs else "" for name in order],
        ["output"],
        domain="com.microsoft",
        num_heads=hq,
        unidirectional=int(_plainly_causal(problem)),
    )
    kinds = {torch.float32: onnx.TensorProto.FLOAT, torch.int32: onnx.TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, kinds[t.dtype], tuple(t.shape)) for n, t in inputs.items()],
        [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, (b, lq, hq * dv))],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    session = runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])

    binding = session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(tensor.numpy()))
    output = torch.empty(b, lq, hq * dv)
    binding.bind_output("output", "cpu", 0, "float32", list(output.shape), output.data_ptr())
    result = output.view(b, lq, hq, dv).transpose(1, 2)

    def attend() -> Tensor:
        session.run_with_iobinding(binding)
        return result

    return attend


def _onnxruntime_mask(problem: Problem) -> dict[str, Tensor]:
    """Padding as such; any other mask as an addend, made beforehand."""
    mask = problem.attn_mask
    if problem.cell.mask == "padding" and mask is not None:
        return {"key_padding_mask": mask[:, 0, 0].to(torch.int32)}
    if mask is not None and mask.is_floating_point():
        return {"attention_bias": mask.contiguous()}
    visible = None if _plainly_causal(problem) else problem.visible()
    if visible is None:
        return {}
    addend = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return {"attention_bias": addend.expand(1, 1, *visible.shape[-2:]).contiguous()}


# OpenVINO -------------------------------------------------------------------------------------------


def _openvino(problem: Problem, threads: int) -> Call | None:
    """ScaledDotProductAttention of opset 13, on tensors that are shared with torch's."""
    cell = problem.cell
    kinds = {torch.float32: "f32", torch.bfloat16: "bf16"}
    if problem.mode != "fwd" or problem.dtype not in kinds or problem.grouped:
        return None
    openvino = import_module("openvino")
    opset = import_module("openvino.opset13")
    element = getattr(openvino.Type, kinds[problem.dtype])

    kept = []  # OpenVINO does not hold on to the memory that it is given

    def shared(tensor: Tensor) -> Any:
        plain = tensor.detach().contiguous()
        kept.append(plain)
        if plain.dtype == torch.bfloat16:
            return openvino.Tensor(plain.view(torch.int16).numpy(), list(plain.shape), element)
        return openvino.Tensor(plain.numpy(), shared_memory=True)

    tensors = [problem.query, problem.key, problem.value]
    parameters = [opset.parameter(list(t.shape), element) for t in tensors]
    plainly_causal = _plainly_causal(problem)
    mask = problem.visible() if cell.is_causal and not plainly_causal else problem.attn_mask
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)  # it misreads masks of fewer dims
        mask_type = openvino.Type.boolean if mask.dtype == torch.bool else element
        parameters.append(opset.parameter(list(mask.shape), mask_type))
        tensors.append(mask)
    attention = opset.scaled_dot_product_attention(*parameters, causal=plainly_causal)
    model = openvino.Model([attention], parameters, "attention")
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": kinds[problem.dtype],
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    for i, tensor in enumerate(tensors):
        request.set_input_tensor(i, shared(tensor))
    b, hq, _, lq, _, _, dv = cell.shape
    request.set_output_tensor(0, shared(torch.empty(b, hq, lq, dv, dtype=problem.dtype)))

    def attend() -> Tensor:
        request.infer()
        return kept[-1]

    return attend


def _without_threads(attend: Attend) -> Callable[[Problem, int], Call | None]:
    return lambda problem, _: attend(problem)


CONTENDERS = (
    Contender(OURS, _timed(_ours)),
    Contender("F.sdpa", _timed(_f_sdpa)),
    Contender("eager", _timed(_eager)),
    Contender("onnxruntime", _onnxruntime, ("onnxruntime", "onnx")),
    Contender("openvino", _openvino, ("openvino",)),
    Contender(BASELINE, _without_threads(_ours_without)),
)
