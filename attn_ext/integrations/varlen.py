r"""``torch.nn.attention.varlen`` on the CPU.

PyTorch's attention of packed sequences, ``varlen_attn`` and ``varlen_attn_out``, has kernels for CUDA alone.
Between ``activate()`` and ``deactivate()`` it works on tensors of the CPU, too, by
:func:`attn_ext.sdpa_packed`: forward and backward, windows, grouped heads, ``seqused_k`` and the log-sum-exp,
in float64, float32, bfloat16 and float16, also under ``torch.compile``. CUDA keeps what it has.

    >>> import torch
    >>> from attn_ext.integrations import varlen
    >>> from torch.nn.attention.varlen import varlen_attn
    >>> varlen.activate()
    >>> query, key, value = torch.randn(3, 8, 2, 16).unbind(0)  # (rows of all sequences, heads, head dim)
    >>> starts = torch.tensor([0, 3, 8], dtype=torch.int32)  # a sequence of 3 rows, and one of 5
    >>> varlen_attn(query, key, value, starts, starts, 5, 5, window_size=(-1, 0)).shape
    torch.Size([8, 2, 16])
    >>> varlen.deactivate()

What to know: causality and windows are aligned with the end of a sequence's keys, as in FlashAttention. A
row that sees no key gives 0, and its log-sum-exp is -inf, where CUDA's is inf. The log-sum-exp is float32
for every dtype, as PyTorch declares it. A sequence's bits are the same in every batch, so ``num_splits`` has
nothing to choose, and ``max_q`` and ``max_k`` are not needed. PyTorch's function gives no gradient of the
log-sum-exp and no second derivative; :func:`attn_ext.sdpa_packed_with_lse` has both. Pages of a
cache, ``block_table`` with ``seqused_k``, go to :func:`attn_ext.sdpa_paged`.
"""

import threading
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from .. import functional

__all__ = ["NAME", "activate", "deactivate", "is_active"]

#: What ``torch.nn.attention.list_flash_attention_impls()`` calls it.
NAME = "ATTN_EXT"


def activate() -> None:
    """Let ``torch.nn.attention.varlen`` work on tensors of the CPU, in the whole process.

    Where no other implementation is active, it becomes the one that
    ``torch.nn.attention.current_flash_attention_impl()`` names; one that is active for CUDA stays what it is.
    May be called any number of times; once is enough.

    Raises:
        ImportError: this version of PyTorch has no ``torch.nn.attention.varlen``.
        RuntimeError: the CPU has kernels for it that are not of attn_ext.

    Source:
        ``torch.nn.attention.activate_flash_attention_impl``.
    """
    if find_spec("torch.nn.attention.varlen") is None:
        raise ImportError(
            f"attn_ext: expected a torch with torch.nn.attention.varlen, but torch {torch.__version__} has "
            "none: call attn_ext.sdpa_packed"
        )
    registry = _registry()
    with _lock:
        if registry is not None:
            registry.register_flash_attention_impl(NAME, register_fn=_install)
        if _kernels.library is not None:
            return
        if registry is not None and registry.current_flash_attention_impl() is None:
            registry.activate_flash_attention_impl(NAME)
        else:  # PyTorch knows of one at a time, and would take the other one away
            _install()


def deactivate() -> None:
    """Take back :func:`activate`: the CPU is again as it was. Does nothing where it is not active."""
    registry = _registry()
    with _lock:
        if registry is not None and registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()
        _kernels.remove()


def is_active() -> bool:
    """Whether ``torch.nn.attention.varlen`` takes tensors of the CPU by attn_ext."""
    return _kernels.library is not None


def _registry() -> Any:
    """The module ``torch.nn.attention``; None where it has no registry of which one can be taken back."""
    import torch.nn.attention as attention

    return attention if hasattr(attention, "restore_flash_attention_impl") else None


class _Kernels:
    """The CPU's kernels, while there are any; what PyTorch's registry holds, and calls ``remove`` of."""

    library: Library | None = None

    def install(self) -> None:
        if self.library is not None:
            return
        kernels = {name: kernel for name, kernel in _KERNELS.items() if hasattr(torch.ops.aten, name)}
        for name in kernels:
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
                raise RuntimeError(
                    f"attn_ext: expected aten::{name} to have no kernel for the CPU, but it has"
                )
        library = Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
        for name, kernel in kernels.items():
            library.impl(name, kernel)  # type: ignore[no-untyped-call]
        self.library = library

    def remove(self) -> None:
        self.library = None  # with which the kernels go


_kernels = _Kernels()
_lock = threading.RLock()  # PyTorch's registry calls back


def _install() -> _Kernels:
    with _lock:
        _kernels.install()
    return _kernels


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_forward``."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    output, lse = _output_and_lse(query, key, value, cum_seq_q, cum_seq_k, is_causal, **options)
    # Nothing is drawn, so the state of the generator and its offset say nothing.
    state = torch.zeros(2, dtype=torch.uint64)
    return output, lse, state, torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def _forward_inplace(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: into ``out``, which may be an input."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    if out.shape != query.shape or out.dtype != query.dtype:
        raise RuntimeError(
            f"attn_ext: expected out of shape {list(query.shape)} and dtype {query.dtype}, as query has, but "
            f"got shape {list(out.shape)} and dtype {out.dtype}"
        )
    output, lse = _output_and_lse(query, key, value, cum_seq_q, cum_seq_k, is_causal, **options)
    out.copy_(output)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """``aten::_flash_attention_backward``."""
    _refuse(dropout_p=dropout_p)
    ops = torch.ops.attn_ext
    sequences = ops._packed_sequences(cum_seq_q, cum_seq_k, None, None, None, query.shape[0], key.shape[0])
    tensors = tuple(t.transpose(0, 1) for t in (query, key, value))  # (heads, rows, head dim)
    bounds = (_bound(window_size_left), _bound(window_size_right))
    inputs = (*tensors, None, None, None, sequences)  # no mask, sinks, dropout seed
    scalars = (0.0, is_causal, scale, True, *bounds, 0, 0.0)
    output, lse = out.transpose(0, 1), logsumexp
    if query.dtype == torch.float64:  # the log-sum-exp that was saved is float32
        output, lse, _, _ = ops._sdpa_forward(*inputs, *scalars, False, False)
    grad_output = grad_out.transpose(0, 1)
    wanted = [True, True, True, False, False]
    grads = ops._sdpa_backward(grad_output, None, None, None, *inputs, output, lse, *scalars, wanted)
    return tuple(
        _laid_out_like(g.transpose(0, 1), t) for g, t in zip(grads, (query, key, value), strict=False)
    )


_KERNELS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_inplace,
    "_flash_attention_backward": _backward,
}


def _output_and_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    is_causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (Tq, Hq, D) and lse (Hq, Tq), laid out in memory and in the dtypes that PyTorch declares."""
    _refuse(alibi_slopes=alibi_slopes)
    ends = ("cu_seq_k", cum_seq_k) if block_table is None else ("seqused_k with block_table", seqused_k)
    for name, starts in (("cu_seq_q", cum_seq_q), ends):
        if starts is None:
            raise RuntimeError(f"attn_ext: expected {name} in varlen_attn on the CPU, but got None")
    assert cum_seq_q is not None
    if value.shape[-1] != query.shape[-1]:  # PyTorch declares the output to be as the query
        raise RuntimeError(
            f"attn_ext: expected query and value of one head dim in varlen_attn, but got "
            f"{query.shape[-1]} and {value.shape[-1]}: attn_ext.sdpa_packed takes them"
        )
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": True,
        "window_left": _bound(window_size_left),
        "window_right": _bound(window_size_right),
    }
    if block_table is None:
        output, lse = functional.sdpa_packed_with_lse(
            query, key, value, cum_seq_q, cum_seq_k, seqlens_k=seqused_k, **options
        )
    else:
        output, lse = functional.sdpa_paged_with_lse(
            query,
            key,
            value,
            block_table,
            seqused_k,  # type: ignore[arg-type]
            cum_seq_q,
            **options,
        )
    return _laid_out_like(output, query), lse.float()


def _bound(size: int | None) -> int | None:
    """A side of a window, of which -1 is open."""
    return None if size is None or size < 0 else size


def _laid_out_like(result: Tensor, tensor: Tensor) -> Tensor:
    """With the strides that ``torch.empty_like`` gives, which compiled code counts on."""
    expected = torch.empty_like(tensor, device="meta").stride()
    return result if result.stride() == expected else torch.empty_like(tensor).copy_(result)


def _refuse(**arguments: Any) -> None:
    for name, argument in arguments.items():
        if isinstance(argument, Tensor) or argument:
            raise NotImplementedError(f"attn_ext: expected no {name} in varlen_attn on the CPU")
