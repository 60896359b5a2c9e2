"""`torch.onnx.export` of functions, modules and ops by name: checked, run in onnxruntime, and the same."""

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_ext
import attn_ext.onnx
from attn_ext._onnx.tracing import traced
from attn_ext.testing import OPS, operator, tensors

onnx = pytest.importorskip("onnx", reason="checks the models")
onnxruntime = pytest.importorskip("onnxruntime", "1.31", reason="runs the models; older ones are wrong")
pytest.importorskip("onnxscript", reason="torch.onnx.export needs it")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    onnxruntime.set_default_logger_severity(3)


def export(model: Any, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"opset_version": 23, "verbose": False, **options}
        program = torch.onnx.export(model, inputs, dynamo=True, **options)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def node_types(proto: Any) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def run(proto: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return [
        torch.from_numpy(y)
        for y in session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    ]


def assert_the_same(proto: Any, model: Any, inputs: tuple[Tensor, ...]) -> None:
    expected = [x for x in tensors(model(*inputs)) if x is not None]
    for ours, theirs in zip(run(proto, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Calls(nn.Module):
    """One call of a function."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__()
        self.function = function
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Any:
        return self.function(query, key, value, attn_mask, **self.options)


def qkv(rows: int = 5, keys: int = 7, batch: int = 2) -> tuple[Tensor, ...]:
    return torch.randn(batch, 4, rows, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 6)


def with_dead_row(rows: int = 5, keys: int = 7, batch: int = 2) -> Tensor:
    mask = torch.rand(batch, 1, rows, keys) > 0.4
    mask[0, :, 1] = False
    return mask


DYNAMIC = {
    "query": {0: "batch", 2: "rows"},
    "key": {0: "batch", 2: "keys"},
    "value": {0: "batch", 2: "keys"},
    "attn_mask": {0: "batch", 2: "rows", 3: "keys"},
}


class Everything(nn.Module):
    """Every op in grouped heads and a causal triangle that is not square."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.functions = [getattr(source, name) for name in OPS]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> tuple[Tensor, ...]:
        offset = key.shape[-2] - query.shape[-2]
        calls = (
            function(query, key, value, attn_mask, is_causal=True, enable_gqa=True, query_offset=offset)
            for function in self.functions
        )
        return tuple(x for call in calls for x in tensors(call))


class TestFunctions:
    def test_export_as_they_are(self):
        """Any batch and lengths, an offset that depends on them, and a row that sees nothing."""
        model = Everything(attn_ext)
        proto = export(model, (*qkv(), with_dead_row()), dynamic_shapes=DYNAMIC)
        assert all(node.domain == "" for node in proto.graph.node)
        assert node_types(proto).count("Attention") == 2  # one for the output alone, one with weights
        assert_the_same(proto, model, (*qkv(), with_dead_row()))
        assert_the_same(proto, model, (*qkv(9, 14, 3), with_dead_row(9, 14, 3)))

    def test_an_opset_without_attention_is_refused(self):
        with pytest.raises(Exception, match="Target opset: 22 less than node version: 23"):
            export(Calls(attn_ext.sdpa, enable_gqa=True), qkv(), opset_version=22)

    def test_refuse_what_the_op_refuses(self):
        with pytest.raises(RuntimeError, match="pass enable_gqa=True"):
            traced("sdpa")(*qkv())

    def test_refuse_dropout(self):
        with pytest.raises(ValueError, match=r"expected dropout_p to be 0 .* got 0.1: call model.eval\(\)"):
            traced("sdpa")(*qkv(), None, 0.1, enable_gqa=True)

    def test_outside_of_an_export_nothing_changes(self):
        program = torch.export.export(Calls(attn_ext.sdpa, enable_gqa=True), qkv())
        assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [
            operator("sdpa").default
        ]


class Packed(nn.Module):
    """Packed sequences with holes and with offsets, and both merged."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor) -> Any:
        options = {"is_causal": True, "window_left": 4, "enable_gqa": True, "softcap": 9.0}
        output, lse = attn_ext.sdpa_packed_with_lse(query, key, value, starts, seqlens_k=lengths, **options)
        offsets = attn_ext.sdpa_packed(
            query, key, value, starts, starts, query_offsets=lengths, is_causal=True, enable_gqa=True
        )
        return output, lse, offsets, *attn_ext.merge_partials([output, offsets], [lse.T, lse.T + 1])


def packed_inputs(*counts: int) -> tuple[Tensor, ...]:
    starts = torch.tensor([0, *counts]).cumsum(0)
    query, key, value = (torch.randn(sum(counts) + 1, heads, 8) for heads in (4, 2, 2))
    return query, key, value, starts, torch.tensor(counts) - 1


class TestPacked:
    def test_exports_with_any_number_of_sequences(self):
        rows, count = torch.export.Dim("rows", min=2), torch.export.Dim("count", min=2)
        shapes = {n: {0: rows} for n in ("query", "key", "value")}
        shapes |= {"starts": {0: count + 1}, "lengths": {0: count}}
        model = Packed()
        proto = export(model, packed_inputs(3, 5, 1, 9), dynamic_shapes=shapes)
        assert all(node.domain == "" for node in proto.graph.node)
        for counts in ((3, 5, 1, 9), (2, 30), (1, 1, 1, 1, 7)):
            assert_the_same(proto, model, packed_inputs(*counts))


class TestTable:
    def test_translates_ops_by_name(self):
        model = Everything(torch.ops.attn_ext)
        table = attn_ext.onnx.translation_table()
        inputs = (*qkv(), with_dead_row())
        proto = export(model, inputs, dynamic_shapes=DYNAMIC, custom_translation_table=table)
        assert all(node.domain == "" for node in proto.graph.node)
        assert node_types(proto).count("Attention") == 2
        assert_the_same(proto, model, (*qkv(9, 14, 3), with_dead_row(9, 14, 3)))

    def test_translates_a_decomposed_program(self):
        model = Calls(operator("sdpa_with_key_mass"), is_causal=True, enable_gqa=True)
        inputs = (*qkv(), with_dead_row())
        program = torch.export.export(model, inputs).run_decompositions()
        table = attn_ext.onnx.translation_table(24)
        proto = export(program, (), custom_translation_table=table, opset_version=24)
        assert node_types(proto).count("Attention") == 1
        assert "Log" not in node_types(proto)  # the log-sum-exp that nobody reads
        assert_the_same(proto, model, inputs)


class Modules(nn.Module):
    """All four, with the masks that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = attn_ext.ScaledDotProductAttention(0.1)
        self.self = attn_ext.SelfAttention(16)
        self.cross = attn_ext.CrossAttention(16, value_dim=12)
        self.heads = attn_ext.MultiHeadAttention(16, 4, num_kv_heads=2, value_dim=6, dropout=0.1)

    def forward(self, x: Tensor, y: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        scaled = self.scaled(x, y, y, padding.unsqueeze(-2))
        own, _ = self.self(x, is_causal=True)
        cross, _ = self.cross(x, y, key_padding_mask=padding)
        heads = self.heads(x, y, key_padding_mask=padding, is_causal=True, need_weights=True)
        return (*scaled, own, cross, *heads)


def test_modules_export_without_a_table():
    model = Modules().eval()
    inputs = (torch.randn(2, 5, 16), torch.randn(2, 6, 16), torch.arange(6) >= torch.tensor([[6], [0]]))
    shapes = {"x": {0: "batch", 1: "rows"}, "y": {0: "batch", 1: "keys"}, "padding": {0: "batch", 1: "keys"}}
    proto = export(model, inputs, dynamic_shapes=shapes)
    assert node_types(proto).count("Attention") == 4
    assert_the_same(proto, model, inputs)
    inputs = (torch.randn(3, 9, 16), torch.randn(3, 4, 16), torch.rand(3, 4) > 0.5)
    assert_the_same(proto, model, inputs)


def test_the_document_runs():
    """Block after block in one session; `print(...)  # text` prints that text."""
    text = (Path(__file__).parents[1] / "docs/onnx.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "onnx.md", "exec"), {})
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert len(expected) == 2
    assert printed.getvalue().splitlines() == expected
