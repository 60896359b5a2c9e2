"""What a lowering is written in: each operator does what the ONNX operator of its name does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: A tensor: torch's while tracing, an ONNX value while translating.
Value = Any
#: An int where it is known, else the tracer's own symbol.
Size = Any

INFINITY = float("inf")

#: What an op gives beside its output.
SIDE_OUTPUTS = {
    "sdpa": None,
    "sdpa_with_weights": "weights",
    "sdpa_with_lse": "lse",
    "sdpa_with_key_mass": "key_mass",
}


@dataclass(frozen=True)
class Call:
    """The arguments of one call of an op."""

    query: Value
    key: Value
    value: Value
    attn_mask: Value | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    window_left: Size | None = None
    window_right: Size | None = None
    query_offset: Size = 0
    softcap: float = 0.0
    sinks: Value | None = None


class Operators(Protocol):
    """Values in, values out. A negative axis counts from the end; reductions keep their axis."""

    def dtype(self, x: Value) -> str:
        """Of an argument of the call, or of one that was reshaped or expanded."""

    def sizes(self, x: Value) -> list[Size]:
        """Of an argument of the call, or of one that was reshaped or expanded."""

    def same(self, a: Size, b: Size) -> bool:
        """Whether two sizes are known to be equal."""

    def product(self, sizes: Sequence[Size]) -> Size: ...

    def next_size(self, size: Size) -> Size:
        """The size that is larger by 1."""

    def reshape(self, x: Value, sizes: Sequence[Size]) -> Value: ...

    def expand(self, x: Value, sizes: Sequence[Size]) -> Value:
        """Broadcast to these sizes; where one of them is 1 the tensor keeps its own."""

    def cast(self, x: Value, dtype: str) -> Value: ...

    def zeros(self, sizes: Sequence[Size], dtype: str) -> Value: ...

    def number(self, number: float, dtype: str) -> Value: ...

    def positions(self, size: Size) -> Value:
        """0, 1, ..., size - 1 in int64."""

    def add(self, a: Value, b: Value) -> Value: ...

    def subtract(self, a: Value, b: Value) -> Value: ...

    def multiply(self, a: Value, b: Value) -> Value: ...

    def divide(self, a: Value, b: Value) -> Value: ...

    def matmul(self, a: Value, b: Value) -> Value: ...

    def transpose(self, x: Value) -> Value:
        """The last two of four axes swapped."""

    def tanh(self, x: Value) -> Value: ...

    def exp(self, x: Value) -> Value: ...

    def log(self, x: Value) -> Value: ...

    def at_most(self, a: Value, b: Value) -> Value: ...

    def equals(self, a: Value, b: Value) -> Value: ...

    def both(self, a: Value, b: Value) -> Value: ...

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """``a`` where the condition holds, else ``b``."""

    def largest(self, x: Value) -> Value:
        """Over the last axis."""

    def total(self, x: Value, axis: int) -> Value: ...

    def join(self, a: Value, b: Value, axis: int) -> Value: ...

    def first(self, x: Value, size: Size) -> Value:
        """The first ``size`` along the last axis."""

    def attention(
        self,
        inputs: Sequence[Value | None],
        attributes: dict[str, Any],
        sizes: Sequence[Sequence[Size]],
        dtype: str,
    ) -> tuple[Value, Value | None]:
        """The operator ``Attention`` of query, key, value and mask: output and, if two sizes are given,
        weights."""
