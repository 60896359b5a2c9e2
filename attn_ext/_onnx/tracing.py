"""The operators as PyTorch functions, for a call that ``torch.onnx.export`` traces."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .lowering import lower
from .operators import SIDE_OUTPUTS, Call, Size


def traced(name: str) -> Callable[..., Any]:
    """The op of this name, as a function that calls nothing but what ONNX knows."""
    side = SIDE_OUTPUTS[name]

    def function(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            with disable_proxy_modes_tracing():  # the op refuses what does not fit, and is not recorded
                getattr(torch.ops.attn_ext, name)(*args, **kwargs)
        call = Call(*args, **kwargs)
        wanted = {} if side is None else {f"need_{side}": True}
        outputs = lower(TorchOperators(call.query.device), call, **wanted)
        return outputs.output if side is None else (outputs.output, getattr(outputs, side))

    return function


class TorchOperators:
    """See :class:`attn_ext._onnx.operators.Operators`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def dtype(self, x: Tensor) -> str:
        return str(x.dtype).removeprefix("torch.")

    def sizes(self, x: Tensor) -> list[Size]:
        return list(x.shape)

    def same(self, a: Size, b: Size) -> bool:
        return statically_known_true(a == b)

    def product(self, sizes: Sequence[Size]) -> Size:
        result: Size = 1
        for size in sizes:
            result = result * size
        return result

    def next_size(self, size: Size) -> Size:
        return size + 1

    def reshape(self, x: Tensor, sizes: Sequence[Size]) -> Tensor:
        return x.reshape(list(sizes))

    def expand(self, x: Tensor, sizes: Sequence[Size]) -> Tensor:
        own = [1] * (len(sizes) - x.dim()) + list(x.shape)
        return x.expand([a if self.same(b, 1) else b for a, b in zip(own, sizes, strict=True)])

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(_torch_dtype(dtype))

    def zeros(self, sizes: Sequence[Size], dtype: str) -> Tensor:
        return torch.zeros(list(sizes), dtype=_torch_dtype(dtype), device=self.device)

    def number(self, number: float, dtype: str) -> Tensor:
        return torch.full((), number, dtype=_torch_dtype(dtype), device=self.device)

    def positions(self, size: Size) -> Tensor:
        return torch.arange(size, device=self.device)

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def subtract(self, a: Any, b: Any) -> Any:
        return a - b

    def multiply(self, a: Any, b: Any) -> Any:
        return a * b

    def divide(self, a: Any, b: Any) -> Any:
        return a / b

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def transpose(self, x: Tensor) -> Tensor:
        return x.transpose(-2, -1)

    def tanh(self, x: Tensor) -> Tensor:
        return x.tanh()

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def log(self, x: Tensor) -> Tensor:
        return x.log()

    def at_most(self, a: Any, b: Any) -> Any:
        return a <= b

    def equals(self, a: Tensor, b: Tensor) -> Tensor:
        return a == b

    def both(self, a: Tensor, b: Tensor) -> Tensor:
        return a & b

    def where(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(condition, a, b)

    def largest(self, x: Tensor) -> Tensor:
        return x.amax(-1, keepdim=True)

    def total(self, x: Tensor, axis: int) -> Tensor:
        return x.sum(axis, keepdim=True)

    def join(self, a: Tensor, b: Tensor, axis: int) -> Tensor:
        return torch.cat((a, b), axis)

    def first(self, x: Tensor, size: Size) -> Tensor:
        return x.narrow(-1, 0, size)

    def attention(
        self,
        inputs: Sequence[Any],
        attributes: dict[str, Any],
        sizes: Sequence[Sequence[Size]],
        dtype: str,
    ) -> tuple[Tensor, Tensor | None]:
        # Not torch.onnx.ops.attention: in 2.13 it gives its output the shape of the query, whatever Dv is.
        outputs = [sizes[0]]
        if len(sizes) > 1:
            attributes = {**attributes, "qk_matmul_output_mode": 3}
            outputs += [inputs[1].shape, inputs[2].shape, sizes[1]]
        dtypes = [_torch_dtype(dtype)] * len(outputs)
        results = torch.onnx.ops.symbolic_multi_out(
            "Attention", inputs, attributes, dtypes=dtypes, shapes=outputs, version=23
        )
        return results[0], results[3] if len(sizes) > 1 else None


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
