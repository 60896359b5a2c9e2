"""The operators as ONNX nodes, for an op in a program that was exported."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.values import Opset

from .lowering import lower
from .operators import SIDE_OUTPUTS, Call, Size, Value

DTYPES = {
    "bool": ir.DataType.BOOL,
    "float64": ir.DataType.DOUBLE,
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Symbol:
    """A size that is known by its name alone: the tensor that has it, and where."""

    def __init__(self, name: str | None, value: Value) -> None:
        self.name = name
        self.value = value  # int64, (1,)

    def __str__(self) -> str:
        return str(self.name)


class OnnxOperators:
    """See :class:`attn_ext._onnx.operators.Operators`."""

    def __init__(self, opset: Opset) -> None:
        self.op = opset

    def dtype(self, x: Value) -> str:
        return NAMES[x.dtype]

    def sizes(self, x: Value) -> list[Size]:
        return [
            dim if isinstance(dim, int) else Symbol(dim.value, self.op.Shape(x, start=i, end=i + 1))
            for i, dim in enumerate(x.shape)
        ]

    def same(self, a: Size, b: Size) -> bool:
        if isinstance(a, Symbol) and isinstance(b, Symbol):
            return a is b or (a.name is not None and a.name == b.name)
        return isinstance(a, int) and isinstance(b, int) and a == b

    def product(self, sizes: Sequence[Size]) -> Size:
        known, result = 1, None
        for size in sizes:
            if isinstance(size, int):
                known *= size
            else:
                result = size if result is None else Symbol(None, self.op.Mul(result.value, size.value))
        if result is None or known == 1:
            return known if result is None else result
        return Symbol(None, self.op.Mul(result.value, self._ints([known])))

    def next_size(self, size: Size) -> Size:
        if isinstance(size, int):
            return size + 1
        return Symbol(None, self.op.Add(size.value, self._ints([1])))

    def _ints(self, numbers: Sequence[int]) -> Value:
        return self.op.Constant(value_ints=list(numbers))

    def _shape(self, sizes: Sequence[Size]) -> Value:
        if all(isinstance(size, int) for size in sizes):
            return self._ints(sizes)
        parts = [self._ints([size]) if isinstance(size, int) else size.value for size in sizes]
        return self.op.Concat(*parts, axis=0)

    def _sized(self, result: Value, x: Value, sizes: Sequence[Size]) -> Value:
        """With what the recorder does not know, so that `dtype` and `sizes` can be asked for again."""
        if x.dtype is not None:
            result.dtype = x.dtype
        result.shape = ir.Shape([size if isinstance(size, int) else size.name for size in sizes])
        return result

    def reshape(self, x: Value, sizes: Sequence[Size]) -> Value:
        # A size of 0 is a 0, not the one of x.
        return self._sized(self.op.Reshape(x, self._shape(sizes), allowzero=1), x, sizes)

    def expand(self, x: Value, sizes: Sequence[Size]) -> Value:
        result = self.op.Expand(x, self._shape(sizes))
        if x.dtype is not None:
            result.dtype = x.dtype
        return result

    def cast(self, x: Value, dtype: str) -> Value:
        if x.dtype == DTYPES[dtype]:
            return x
        result = self.op.Cast(x, to=DTYPES[dtype])
        result.dtype = DTYPES[dtype]
        result.shape = x.shape
        return result

    def zeros(self, sizes: Sequence[Size], dtype: str) -> Value:
        return self.expand(self.number(0.0, dtype), sizes)

    def number(self, number: float, dtype: str) -> Value:
        result = self.op.Constant(value=ir.tensor(DTYPES[dtype].numpy().type(number)))
        result.dtype = DTYPES[dtype]
        return result

    def positions(self, size: Size) -> Value:
        stop = self.op.Constant(value_int=size) if isinstance(size, int) else self.op.Squeeze(size.value)
        return self.op.Range(self.op.Constant(value_int=0), stop, self.op.Constant(value_int=1))

    def add(self, a: Value, b: Value) -> Value:
        return self.op.Add(a, b)

    def subtract(self, a: Value, b: Value) -> Value:
        return self.op.Sub(a, b)

    def multiply(self, a: Value, b: Value) -> Value:
        return self.op.Mul(a, b)

    def divide(self, a: Value, b: Value) -> Value:
        return self.op.Div(a, b)

    def matmul(self, a: Value, b: Value) -> Value:
        return self.op.MatMul(a, b)

    def transpose(self, x: Value) -> Value:
        return self.op.Transpose(x, perm=[0, 1, 3, 2])

    def tanh(self, x: Value) -> Value:
        return self.op.Tanh(x)

    def exp(self, x: Value) -> Value:
        return self.op.Exp(x)

    def log(self, x: Value) -> Value:
        return self.op.Log(x)

    def at_most(self, a: Value, b: Value) -> Value:
        return self.op.LessOrEqual(a, b)

    def equals(self, a: Value, b: Value) -> Value:
        return self.op.Equal(a, b)

    def both(self, a: Value, b: Value) -> Value:
        return self.op.And(a, b)

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        return self.op.Where(condition, a, b)

    def largest(self, x: Value) -> Value:
        return self.op.ReduceMax(x, self._ints([-1]))

    def total(self, x: Value, axis: int) -> Value:
        return self.op.ReduceSum(x, self._ints([axis]))

    def join(self, a: Value, b: Value, axis: int) -> Value:
        return self.op.Concat(a, b, axis=axis)

    def first(self, x: Value, size: Size) -> Value:
        return self.op.Slice(x, self._ints([0]), self._shape([size]), self._ints([-1]))

    def attention(
        self,
        inputs: Sequence[Value | None],
        attributes: dict[str, Any],
        sizes: Sequence[Sequence[Size]],
        dtype: str,
    ) -> tuple[Value, Value | None]:
        if len(sizes) > 1:
            attributes = {**attributes, "qk_matmul_output_mode": 3}
        output, _, _, weights = self.op.Attention(*inputs, **attributes)
        return output, weights


def table(opset: int) -> dict[Callable[..., Any], Callable[..., Any]]:
    """The overloads of all ops, public and internal, with their translations."""
    ops = torch.ops.attn_ext
    result = {getattr(ops, name).default: _public(name, opset) for name in SIDE_OUTPUTS}
    result[ops._sdpa_forward.default] = _internal(opset)
    return result


def _public(name: str, opset: int) -> Callable[..., Any]:
    side = SIDE_OUTPUTS[name]

    def translation(*args: Any, **kwargs: Any) -> Any:
        wanted = {} if side is None else {f"need_{side}": True}
        outputs = lower(OnnxOperators(Opset("", opset)), Call(*args, **kwargs), **wanted)
        return outputs.output if side is None else (outputs.output, getattr(outputs, side))

    return translation


def _internal(opset: int) -> Callable[..., Any]:
    """The op that a decomposed program holds, with its four outputs."""
    names = [argument.name for argument in torch.ops.attn_ext._sdpa_forward.default._schema.arguments]
    of_call = {field.name for field in fields(Call)}

    def translation(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        call = Call(**{name: given.pop(name) for name in of_call if name in given})
        needs = {name: given.pop(name) for name in ("need_weights", "need_key_mass")}
        del given["dropout_seed"]  # which nobody reads: dropout is refused
        unknown = [name for name, value in given.items() if value is not None and value is not False]
        if unknown:
            raise ValueError(f"attn_ext: expected no {unknown[0]}, which has no counterpart in ONNX")
        op = OnnxOperators(Opset("", opset))
        outputs = lower(op, call, **needs)
        # Apart from the node, which gives no lse: the export drops what nobody reads.
        lse = lower(op, call, need_lse=True).lse
        unused = op.op.Identity(call.query)
        sides = (unused if side is None else side for side in (outputs.weights, outputs.key_mass))
        return outputs.output, lse, *sides

    return translation
