"""`attn_ext.onnx.translation_table`: each op in ONNX operators gives in onnxruntime what the op gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attn_ext.onnx
from attn_ext import reference
from attn_ext.testing import CASES, OPS, Case, assert_accurate, cases, operator, tensors

onnx = pytest.importorskip("onnx", reason="checks the models")
ir = pytest.importorskip("onnx_ir", reason="holds the models")
onnxscript = pytest.importorskip("onnxscript", reason="writes the models")
onnxruntime = pytest.importorskip("onnxruntime", "1.31", reason="runs the models; older ones are wrong")

DTYPES = {
    torch.bool: ir.DataType.BOOL,
    torch.float64: ir.DataType.DOUBLE,
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
}


def empty(case: Case) -> bool:
    return 0 in (*case.query, *case.key, *case.value)


class Model:
    """The model of one call, as the exporter would put it together, with no program to export around it."""

    def __init__(self, op: str, arguments: Any, opset: int = 23, dynamic: bool = False) -> None:
        from onnx_ir.passes.common import RemoveUnusedNodesPass
        from torch.onnx._internal.exporter import _building, _tensors

        self.onnx = onnxscript.values.Opset("", opset)
        self.inputs: list[Any] = []
        self.arrays: list[Any] = []
        self.dynamic = dynamic
        self.make_input = _tensors.SymbolicTensor
        overload = operator(op).default
        translation = attn_ext.onnx.translation_table(opset)[overload]
        recorder = _building.OpRecorder(self.onnx, {})
        with onnxscript.evaluator.default_as(recorder):
            query, key, value = (
                self.add(getattr(arguments, name), name) for name in ("query", "key", "value")
            )
            options = {
                name: self.add(option, name) if isinstance(option, Tensor) else option
                for name, option in arguments.options.items()
            }
            outputs = translation(query, key, value, **options)
            outputs = [outputs] if op == "sdpa" else outputs
            outputs = [self.onnx.Cast(x, to=ir.DataType.DOUBLE) for x in outputs]
        for i, (output, expected) in enumerate(zip(outputs, tensors(arguments(operator(op))), strict=True)):
            output.name, output.type = f"output_{i}", ir.TensorType(ir.DataType.DOUBLE)
            output.shape = ir.Shape([None] * expected.dim())
        graph = ir.Graph(self.inputs, outputs, nodes=recorder.nodes, opset_imports={"": opset}, name="call")
        model = ir.Model(graph, ir_version=10)
        RemoveUnusedNodesPass()(model)  # as the exporter does
        self.proto = ir.to_proto(model)

    def add(self, tensor: Tensor, name: str) -> Any:
        """An input; in bfloat16, which numpy does not know, given as float32."""
        given = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        shape = list(tensor.shape)
        if self.dynamic:
            known = {"query": (-1, -3), "key": (-1, -3), "value": (-1, -3)}.get(name, (-3, -4))
            lengths = {"query": ("Lq", "D"), "attn_mask": ("Lq", "Lk")}.get(name, ("Lk", "D"))
            for axis in range(-len(shape), 0):
                if axis not in known and shape[axis] != 1 and name != "sinks":
                    shape[axis] = lengths[axis] if axis >= -2 else f"batch{axis}"
        value = self.make_input(self.onnx, name, ir.Shape(shape), ir.TensorType(DTYPES[given.dtype]))
        self.inputs.append(value)
        self.arrays.append(given.contiguous().numpy())
        if given.dtype == tensor.dtype:
            return value
        value = self.onnx.Cast(value, to=ir.DataType.BFLOAT16)
        value.dtype, value.shape = ir.DataType.BFLOAT16, ir.Shape(shape)
        return value

    def run(self) -> list[Tensor]:
        onnx.checker.check_model(self.proto, full_check=True)
        session = onnxruntime.InferenceSession(
            self.proto.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        feed = dict(zip((value.name for value in self.inputs), self.arrays, strict=True))
        return [torch.from_numpy(array) for array in session.run(None, feed)]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    onnxruntime.set_default_logger_severity(3)


def check(op: str, case: Case, dtype: torch.dtype, **model: Any) -> None:
    """By the measure that the kernels are held to."""
    arguments = case.build(dtype)
    oracle = getattr(reference, op)
    exact = tensors(arguments(oracle))
    plain = tensors(arguments(oracle, dtype=torch.promote_types(dtype, torch.float16)))
    given = tensors(arguments(operator(op)))
    for i, output in enumerate(Model(op, arguments, **model).run()):
        assert_accurate(output.to(given[i].dtype), exact[i], plain[i], f"{op}[{i}]")


#: Beside the output: the weights, through the node, and the composition.
QUICK_OPS = ("sdpa_with_key_mass", "sdpa_with_lse")
ALL_OPS = [op if op in QUICK_OPS else pytest.param(op, marks=pytest.mark.slow) for op in OPS]
#: One for each way through the lowering.
FEW_NAMES = {
    *("plain", "two_dims", "five_dims", "fewer_key_dims", "no_rows", "no_columns", "causal_bottom_right"),
    *("dead_row", "bias_float32", "bias_with_minus_inf", "scale_negative", "softcap"),
    *("sinks_causal_softcap", "grouped_with_everything", "long_causal"),
}
FEW = cases(lambda case: case.name in FEW_NAMES)


@pytest.mark.parametrize("op", ALL_OPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gives_what_the_op_gives(op, case):
    check(op, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_in_other_dtypes(case, dtype):
    check("sdpa_with_weights", case, dtype)


@pytest.mark.parametrize("op", ["sdpa_with_weights", pytest.param("sdpa_with_lse", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", cases(lambda case: not empty(case)), ids=str)
def test_with_dynamic_shapes(op, case):
    check(op, case, torch.float32, dynamic=True)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_in_opset_24(case):
    check("sdpa", case, torch.float32, opset=24)


def test_without_a_head_dim_all_scores_are_0():
    check("sdpa", Case("no_head_dim", (2, 3, 5, 0), (2, 3, 7, 0), mask="dead_row"), torch.float32)


def nodes(op: str, case: Case, dtype: torch.dtype = torch.float32) -> list[str]:
    return [node.op_type for node in Model(op, case.build(dtype)).proto.graph.node]


@pytest.mark.parametrize("name", ["plain", "softcap", "grouped", "dead_row", "causal_bottom_right", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_is_one_attention_node(name, dtype):
    (case,) = cases(lambda case: case.name == name)
    assert nodes("sdpa_with_weights", case, dtype).count("Attention") == 1


@pytest.mark.parametrize("name", ["softcap_and_bias", "softcap_and_dead_row", "sinks_causal_softcap"])
def test_softcap_under_a_mask_is_composed(name):
    """Released versions of opset 23, and the runtimes that follow them, add the mask before they cap."""
    (case,) = cases(lambda case: case.name == name)
    assert "Attention" not in nodes("sdpa", case)


def test_causality_is_an_attribute_of_square_calls_only():
    square, oblong = (
        Model("sdpa", case.build(torch.float32)).proto
        for case in cases(lambda case: case.name in ("long_causal", "causal"))[::-1]
    )
    (node,) = (node for node in square.graph.node if node.op_type == "Attention")
    assert [a.i for a in node.attribute if a.name == "is_causal"] == [1]
    (node,) = (node for node in oblong.graph.node if node.op_type == "Attention")
    assert [a.i for a in node.attribute if a.name == "is_causal"] in ([], [0])


def test_the_op_of_decomposed_programs_has_a_translation_too():
    overloads = {operator(op).default for op in (*OPS, "_sdpa_forward")}
    assert set(attn_ext.onnx.translation_table()) == overloads


@pytest.mark.parametrize("opset", [18, 22, 25])
def test_refuses_other_opsets(opset):
    with pytest.raises(ValueError, match=f"expected opset 23 or 24.*got {opset}"):
        attn_ext.onnx.translation_table(opset)


def test_says_which_extra_is_missing(monkeypatch):
    monkeypatch.setattr(attn_ext.onnx, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'attn_ext\[onnx\]'"):
        attn_ext.onnx.translation_table()


def test_refuses_dropout():
    arguments = Case("dropout", options={"dropout_p": 0.1}).build(torch.float32)
    with pytest.raises(ValueError, match=r"expected dropout_p to be 0 .* got 0.1: call model.eval\(\)"):
        Model("sdpa", arguments)
