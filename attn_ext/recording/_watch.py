"""Sees every call of attention in a model, and which of its modules makes it.

Four ways lead to attention, and each is watched while a record is open:

- the ops of this package, by any route (Python, TorchScript, autograd, inference mode): a dispatch mode;
- ``F.scaled_dot_product_attention``: a function put in its place calls it and looks at the arguments;
- ``nn.MultiheadAttention`` where weights are asked for, which computes them by hand: the same for
  ``F.multi_head_attention_forward``; its fused path in evaluation, which calls neither, is switched off;
- the fused ops of ATen that TorchScript calls directly: the dispatch mode again.

The functions put in place are those of the process, so they look which thread calls, and let calls through
where that thread records nothing.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..reference import visible_keys
from ._call import Call

OPS = {
    "attn_ext::sdpa",
    "attn_ext::sdpa_with_weights",
    "attn_ext::sdpa_with_lse",
    "attn_ext::sdpa_with_key_mass",
    "attn_ext::sdpa_packed",
    "attn_ext::sdpa_packed_with_lse",
    "attn_ext::_sdpa_forward",
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}
_CALL_FIELDS = frozenset(Call.__dataclass_fields__)


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.paused = False


_thread = _PerThread()


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells ``on_call`` of every call of attention in this thread; see :func:`watching`."""

    def __init__(self, on_call: Callable[[Call], None], on_refusal: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_call = on_call
        self.on_refusal = on_refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._schema.name in OPS and not _thread.paused and not _in_backward():
            self.tell(call_of(func._schema, args, kwargs))
        return result

    def tell(self, call: Call) -> None:
        with looking():
            self.on_call(call)


@contextmanager
def looking() -> Iterator[None]:
    """No mode, gradient, inference tensor or record for what is computed to look at a call."""
    before, _thread.paused = _thread.paused, True
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        _thread.paused = before


@contextmanager
def _paused() -> Iterator[None]:
    """Calls that were looked at already are not looked at again further down."""
    before, _thread.paused = _thread.paused, True
    try:
        yield
    finally:
        _thread.paused = before


def _in_backward() -> bool:
    """Where a checkpoint runs a layer again, or a second derivative an op."""
    return bool(torch._C._current_graph_task_id() != -1)


def call_of(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call from the arguments of an op, whose schema names them as :class:`Call` does."""
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "cu_seqlens_q" in given:
        given |= _heads_first(given)
    call = Call(**{name: value for name, value in given.items() if name in _CALL_FIELDS})
    sequences = given.get("sequences")
    return call if sequences is None else _masked(call, sequences)


def _heads_first(given: dict[str, Any]) -> dict[str, Any]:
    """What the internal op is called with for a packed one."""
    tensors = {name: given[name].transpose(0, 1) for name in ("query", "key", "value")}
    lengths = [given.get(name) for name in ("cu_seqlens_k", "seqlens_q", "seqlens_k", "query_offsets")]
    rows = (tensors["query"].shape[1], tensors["key"].shape[1])
    return {
        **tensors,
        "sequences": torch.ops.attn_ext._packed_sequences(given["cu_seqlens_q"], *lengths, *rows),
    }


def _masked(call: Call, sequences: Tensor) -> Call:
    """Packed sequences as one, in which a mask says who sees whom."""
    mask = torch.zeros(call.num_rows, call.num_keys, dtype=torch.bool, device=call.query.device)
    rule: dict[str, Any] = {
        "is_causal": call.is_causal,
        "window_left": call.window_left,
        "window_right": call.window_right,
    }
    for row, rows, key, keys, offset in sequences.tolist():
        visible = visible_keys(rows, keys, query_offset=offset, device=mask.device, **rule)
        mask[row : row + rows, key : key + keys] = visible
    return replace(call, attn_mask=mask, is_causal=False, window_left=None, window_right=None)


# The functions put in place.


def _watched_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # What stood here before may be a patch of others that does not know the newer arguments.
        rest: dict[str, Any] = {} if scale is None else {"scale": scale}
        if enable_gqa:
            rest["enable_gqa"] = True
        called = original
        if isinstance(original, BuiltinFunctionType) and type(attn_mask).__name__ == "CausalBias":
            # Its __torch_function__ looks for the function that is in torch.nn.functional now.
            called = cast(Any, attn_mask)._dispatch
        if _thread.paused or not _thread.watchers or _in_backward():
            return called(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        with _paused():
            output = called(query, key, value, attn_mask, dropout_p, is_causal, **rest)
        _tell_all(query, key, value, attn_mask, is_causal, rest)
        return output

    return scaled_dot_product_attention


def _tell_all(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, rest: dict[str, Any]
) -> None:
    """Tell each watcher of this thread of a call of ``F.scaled_dot_product_attention``."""
    unknown = [type(tensor).__name__ for tensor in (query, key, value) if not _is_plain(tensor)]
    if unknown:
        for watcher in list(_thread.watchers):
            watcher.on_refusal(f"it attends with tensors of type {unknown[0]}")
        return
    offset = 0
    if type(attn_mask).__name__ == "CausalBias":
        lower_right = getattr(getattr(attn_mask, "variant", None), "name", "") == "LOWER_RIGHT"
        offset = key.shape[-2] - query.shape[-2] if lower_right else 0
        attn_mask, is_causal = None, True
    with looking():
        operands = _as_autocast(query, key, value)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(operands[0].dtype)
        arguments: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "query_offset": offset}
        call = Call(operands[0], operands[1], operands[2], **arguments, **rest)
    for watcher in list(_thread.watchers):
        watcher.tell(call)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_nested


def _as_autocast(*operands: Tensor) -> list[Tensor]:
    """The operands as autocast hands them to the fused kernels."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device) or operands[0].dtype == torch.float64:
        return list(operands)
    return [operand.to(torch.get_autocast_dtype(device)) for operand in operands]


def _watched_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
        if _thread.paused or not _thread.watchers or _in_backward():
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        if not arguments.get("need_weights", True):
            return original(*args, **kwargs)
        with _paused():
            result = original(*args, **kwargs)
        if arguments.get("attn_mask") is not None:
            arguments["is_causal"] = False  # a hint beside a mask that says the same
        with torch.no_grad():  # once more, by the way that calls F.scaled_dot_product_attention
            original(**(arguments | {"need_weights": False, "training": False}))
        return result

    return multi_head_attention_forward


class _Patches:
    """The functions put in place while any record of the process is open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.undo: list[Callable[[], None]] = []
        self.eager = False  # compiled models

    def install(self) -> None:
        with self.lock:
            self.users += 1
            self._run_compiled_models_eagerly()
            if self.users > 1:
                return
            self._put("scaled_dot_product_attention", _watched_sdpa)
            self._put("multi_head_attention_forward", _watched_multi_head)
            fused = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            self.undo.append(lambda: torch.backends.mha.set_fastpath_enabled(fused))

    def remove(self) -> None:
        with self.lock:
            self.users -= 1
            while self.users == 0 and self.undo:
                self.undo.pop()()
            self.eager = self.eager and self.users > 0

    def _run_compiled_models_eagerly(self) -> None:
        """They would run kernels that no longer call anything by name. The stance is one for all threads."""
        if self.eager or "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
            return
        stance = torch.compiler.set_stance("force_eager")
        self.undo.append(lambda: stance.__exit__(None, None, None))
        self.eager = True

    def _put(self, name: str, watched: Callable[[Any], Any]) -> None:
        """In torch, and in every module that has taken the function over by its name."""
        original = getattr(F, name)
        function = watched(original)
        modules = [
            module
            for path, module in list(sys.modules.items())
            if not path.startswith("torch._C") and getattr(module, "__dict__", {}).get(name) is original
        ]
        for module in modules:
            setattr(module, name, function)
            self.undo.append(partial(_put_back, module, name, function, original))


def _put_back(module: Any, name: str, ours: Any, original: Any) -> None:
    """Unless somebody else has put something there since, who then still reaches the original through it."""
    if getattr(module, name, None) is ours:
        setattr(module, name, original)


_patches = _Patches()


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """While this holds, ``watcher`` is told of the calls of this thread."""
    _patches.install()
    try:
        with watcher:
            _thread.watchers.append(watcher)
            try:
                yield
            finally:
                _thread.watchers.remove(watcher)
    finally:
        _patches.remove()
