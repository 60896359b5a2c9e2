"""The op in the place of ``F.scaled_dot_product_attention``, for code that cannot be changed.

One function, :func:`scaled_dot_product_attention`, stands in ``torch.nn.functional`` while anybody wants it
there. It reads one piece of state, ``_patch``, so that graphs compiled while it is on and while it is off are
told apart by their guards and both kept.
"""

import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import has_torch_function_unary

from ..functional import sdpa

__all__ = ["SdpaCalls", "override_sdpa"]

_BUILTIN: Callable[..., Any] = torch._C._nn.scaled_dot_product_attention
_PLAIN_TYPES = (Tensor, nn.Parameter)


class SdpaCalls:
    """What became of the calls of ``F.scaled_dot_product_attention`` while this was on.

    Made by :func:`attn_ext.override_sdpa`, on inside of ``with``, or between :meth:`enable` and
    :meth:`disable`.

    Attributes:
        taken: calls that attn_ext computed.
        passed_on: reason -> calls that went to PyTorch's function for it.
        compiled: places in graphs, of torch.compile or torch.export, that now hold attn_ext's op. They are
            counted once, while the graph is made; the graph's runs are not.
    """

    passed_on: dict[str, int]
    compiled: int

    def __init__(self) -> None:
        self.passed_on = {}
        self.compiled = 0
        self._taken = 0
        self._depth = 0

    @property
    def taken(self) -> int:
        return self._taken + (_patch.taken if self._depth else 0)

    def enable(self) -> None:
        """Put attn_ext in the place of ``F.scaled_dot_product_attention``; each call wants a disable()."""
        with _patch.lock:
            self._depth += 1
            if self._depth == 1:
                _patch.add(self)

    def disable(self) -> None:
        """Take back one :meth:`enable`; the last one of all puts back what was there.

        Raises:
            RuntimeError: there is no :meth:`enable` to take back.
        """
        with _patch.lock:
            if self._depth == 0:
                raise RuntimeError("disable() wants an enable() before it, but this override is off")
            self._depth -= 1
            if self._depth == 0:
                _patch.remove(self)

    def __enter__(self) -> "SdpaCalls":
        self.enable()
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    @property
    def not_reached(self) -> list[str]:
        """Names of modules that hold PyTorch's function under a name of their own, and go on calling it.

        Those that ran ``from torch.nn.functional import scaled_dot_product_attention`` before; looked up in
        ``sys.modules`` when asked. What objects and closures hold is not seen.
        """
        modules = [module for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]
        return sorted({module.__name__ for module in modules if _holds_builtin(module)})

    def __repr__(self) -> str:
        state = "on" if self._depth else "off"
        return (
            f"override_sdpa ({state}): {self.taken} taken, {self.compiled} compiled, "
            f"passed on {self.passed_on or 'none'}"
        )


def override_sdpa() -> SdpaCalls:
    r"""Let attn_ext compute every call of ``torch.nn.functional.scaled_dot_product_attention``.

    The function is replaced **in the whole process**, for all threads and all models, until the ``with`` is
    left, or between ``enable()`` and ``disable()`` of the object. Both nest, in any order. What is put back
    at the end is what was there; a function that somebody else has put in its place meanwhile stays.

    Calls that attn_ext has no fast kernel for go to PyTorch's function, and are counted by the reason:
    tensors on other devices than the CPU, nested tensors and other subclasses, tensors and modes with a
    ``__torch_function__`` (``torch.set_default_device`` is none such), and what the op refuses.
    ``torch.nn.attention.bias.CausalBias`` is taken, without a mask being made.

    While it is on, ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` do not take the short cut of
    inference (``torch.backends.mha.set_fastpath_enabled``) that does not come by here, nor nested tensors.

    Code that is compiled while it is on holds the op, and code that is compiled while it is off does not;
    torch.compile makes another graph where it changes, and keeps both. What torch.export or
    ``torch.jit.trace`` makes while it is on keeps the op for good; ``torch.jit.script`` keeps PyTorch's.

    What differs from PyTorch's function: which weights a seed's dropout drops; a gradient of a mask comes in
    its own shape however it was broadcast, and double backward works; a hidden NaN stays hidden.

    Returns:
        SdpaCalls: ``taken``, ``passed_on``, ``compiled`` and ``not_reached``, as numbers, reasons and names.

    Source:
        :func:`torch.nn.functional.scaled_dot_product_attention`, whose arguments and errors it keeps.

    Example:
        >>> import torch, attn_ext
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> expected = layer.eval()(x)
        >>> with attn_ext.override_sdpa() as calls:
        ...     torch.testing.assert_close(layer(x), expected)
        >>> calls.taken, calls.passed_on
        (1, {})
    """
    return SdpaCalls()


class _Patch:
    """What stands in ``torch.nn.functional``, and what stood there before."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # One number for all, as counting is to cost little: each of `counting` knows where it began.
        self.taken = 0
        self.counting: list[SdpaCalls] = []
        self.enabled = False
        # What calls are passed on to.
        self.original = _BUILTIN
        # What is put back: `original`, or a patch of others that may itself call ours.
        self._replaced: Callable[..., Any] = _BUILTIN
        self._mha_forward = F.multi_head_attention_forward
        self._mha_twin: Callable[..., Any] | None = None
        self._fast_path = True
        self._covered = False

    def add(self, calls: SdpaCalls) -> None:
        if not self.counting:
            self._install()
        self.counting.append(calls)
        calls._taken -= self.taken

    def remove(self, calls: SdpaCalls) -> None:
        self.counting.remove(calls)
        calls._taken += self.taken
        if not self.counting:
            self._uninstall()

    def _install(self) -> None:
        self._install_function()
        if F.multi_head_attention_forward is not self._mha_forward or self._mha_twin is None:
            self._mha_forward = F.multi_head_attention_forward
            self._mha_twin = _twin(self._mha_forward)
        F.multi_head_attention_forward = self._mha_twin
        self._fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self.enabled = True

    def _install_function(self) -> None:
        current = F.scaled_dot_product_attention
        if current is scaled_dot_product_attention:  # others found it, and put it back when we were off
            self._replaced = self.original
            return
        # A patch that was put over ours may call ours: calls are not passed on to that, for ever and ever.
        if not self._covered or current is _BUILTIN:
            self.original = current
        self._replaced = current
        F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]

    def _uninstall(self) -> None:
        self.enabled = False
        if F.scaled_dot_product_attention is scaled_dot_product_attention:
            F.scaled_dot_product_attention = self._replaced
        self._covered = F.scaled_dot_product_attention is not self.original
        if F.multi_head_attention_forward is self._mha_twin:
            F.multi_head_attention_forward = self._mha_forward
        if not torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(self._fast_path)

    def count_compiled(self) -> None:
        with self.lock:
            for calls in self.counting:
                calls.compiled += 1

    def count_passed_on(self, reason: str) -> None:
        with self.lock:
            for calls in self.counting:
                calls.passed_on[reason] = calls.passed_on.get(reason, 0) + 1

    def renew_lock(self) -> None:
        self.lock = threading.Lock()


_patch = _Patch()
os.register_at_fork(after_in_child=_patch.renew_lock)  # another thread of the parent may hold it


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Stand in for ``F.scaled_dot_product_attention``, by attn_ext's op where that can be."""
    mask, causal, offset = attn_mask, is_causal, 0
    if not _patch.enabled:
        reason = None
    else:
        if attn_mask is not None and _is_causal_bias(attn_mask):
            mask, causal, offset = _from_causal_bias(attn_mask, is_causal, query, key)
        reason = _why_not(query, key, value, mask, causal, enable_gqa)
        if reason is None:
            try:
                output = sdpa(
                    query, key, value, mask, dropout_p, causal, scale, enable_gqa, query_offset=offset
                )
            except (RuntimeError, TypeError, ValueError):
                reason = _refusal(query)
            else:
                _count_taken()
                return output
        _count_passed_on(reason)
    return _original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _original(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """What stood there before; it may be a patch of others, which does not know the newer arguments."""
    options: dict[str, Any] = {}
    if scale is not None:
        options["scale"] = scale
    if enable_gqa:
        options["enable_gqa"] = enable_gqa
    if attn_mask is not None and _is_causal_bias(attn_mask):
        # Its __torch_function__ looks for the function that is in torch.nn.functional now.
        return attn_mask._dispatch(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return _patch.original(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _why_not(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> str | None:
    """Why a call is not for the op; None if it is."""
    if is_causal and attn_mask is not None:
        return "is_causal together with attn_mask"
    if not type(query) is type(key) is type(value) is Tensor or attn_mask is not None:
        for tensor in (query, key, value, attn_mask):
            if tensor is not None and not is_plain(tensor):
                return f"a tensor of class {type(tensor).__name__}"
    # Plain tensors have no __torch_function__ of their own: then it is a mode's.
    if has_torch_function_unary(query) and not (is_compiling() or _only_default_device()):
        return "an active TorchFunctionMode"
    if not query.is_cpu:
        return f"a tensor on {query.device.type}"
    if attn_mask is not None and attn_mask.dim() < 2:
        return "an attn_mask of less than two dims"
    if enable_gqa and key.dim() > 2 and value.dim() > 2 and key.size(-3) != value.size(-3):
        return "key and value of different numbers of heads"
    return None


def is_plain(tensor: object) -> bool:
    """Whether it is a plain tensor, or a fake or functional one that stands for it while a graph is made."""
    return type(tensor) in _PLAIN_TYPES or type(tensor).__module__.startswith("torch._subclasses.")


def _only_default_device() -> bool:
    """Whether the modes are those of ``torch.set_default_device`` alone, which let this function be."""
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return all(type(mode) is torch.utils._device.DeviceContext for mode in modes)


def _refusal(query: Tensor) -> str:
    """The reason for a call that the op refused."""
    if query.is_nested:
        return "a nested tensor"
    if query.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {query.dtype}"
    return "arguments that attn_ext refuses"


def _is_causal_bias(attn_mask: object) -> bool:
    """Whether it is a torch.nn.attention.bias.CausalBias, without importing that, which takes long."""
    kind = type(attn_mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def _from_causal_bias(
    bias: Any, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool, int]:
    """``attn_mask``, ``is_causal`` and ``query_offset`` that mean a CausalBias; itself where none do."""
    if is_causal:
        return bias, is_causal, 0
    if bias.variant.name == "UPPER_LEFT":
        return None, True, 0
    if (bias.seq_len_q, bias.seq_len_kv) == (query.size(-2), key.size(-2)):
        return None, True, bias.seq_len_kv - bias.seq_len_q
    return bias, False, 0


def _count_taken() -> None:
    if is_compiling():
        _count_compiled()
    else:
        with _patch.lock:
            _patch.taken += 1


def _count_passed_on(reason: str) -> None:
    if is_compiling():
        _count_compiled_passed_on(reason)
    else:
        _patch.count_passed_on(reason)


def _count_compiled() -> None:
    _patch.count_compiled()


def _count_compiled_passed_on(reason: str) -> None:
    _patch.count_passed_on(reason)


# Run while Dynamo makes a graph, and no part of it. It is what torch.compiler.assume_constant_result does,
# which would import Dynamo into every process.
_count_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
_count_compiled_passed_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _twin(function: Any) -> Any:
    """The same function as another object.

    Dynamo puts ``F.multi_head_attention_forward`` into its graphs unread, and so would not see that what it
    calls has been replaced. It reads the twin, and guards on which of the two is there.
    """
    if not isinstance(function, types.FunctionType):
        return function
    code, names = function.__code__.replace(), function.__globals__
    twin = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    return functools.update_wrapper(twin, function, updated=("__dict__",))


def _holds_builtin(module: types.ModuleType) -> bool:
    if module.__name__ in ("torch.nn.functional", "torch._C._nn", __name__):
        return False
    return any(value is _BUILTIN for value in list(vars(module).values()))


# TorchScript compiles no keyword-only arguments: to it, this is the function that it stands for.
torch.jit._builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
