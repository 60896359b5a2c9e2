"""Whether the forward pass may save its weights for the backward pass."""

from contextlib import ContextDecorator
from types import TracebackType

from ._library import _C

__all__ = ["save_weights_for_backward"]


class save_weights_for_backward(ContextDecorator):
    """Allow calls to save their weights for the backward pass, or refuse it; for the current thread.

    With them, backward makes neither scores nor exponentials again. It is allowed unless the environment
    variable ``ATTN_EXT_SAVE_WEIGHTS`` is 0, and happens where all of this holds:

    - a gradient is wanted, and query, key and value are on the CPU, of two bytes each, and multiplied by
      vectors of pairs or of 512 bits: bfloat16 on the instruction sets ``avx512``, ``avx512_bf16`` and
      ``neon_bf16``, float16 on ``avx512``, ``avx512_bf16`` and ``amx``;
    - the weights, in the same dtype, take no more memory than query, key, value and output together (``Lk``
      up to 4 ``D`` where ``Lq`` is ``Lk``);
    - ``Lk`` is at most 1024 and ``Lq`` at least 17 (beyond 128 keys of wide heads that are not multiplied in
      pairs, 21), or ``D`` is more than 256 and several query heads of up to 16 rows share each key head
      (latent attention);
    - there is neither dropout nor softcap, nor sinks in float16, and all sizes are known when the call is
      made, or traced.

    On an NVIDIA GPU a call with dropout in bfloat16 or float16 that goes by attn_ext's own kernels saves its
    draws instead, a bit for each weight, where they take no more memory than query, key, value and output
    together (``Lk`` up to 64 ``D`` where ``Lq`` is ``Lk``); backward draws nothing again, with the same bits.
    There what was allowed last holds for the whole process, as backward runs in a thread of its own.

    Memory is counted by shapes, as if nothing were broadcast but the keys of a group. Packed sequences and
    calls that return weights or key mass save none. :func:`attn_ext.explain` tells of a call with tensors of
    these dtypes, autocast apart. The output has the same bits either way; gradients come from weights that
    were rounded to that dtype. Memory (..., Hq, Lq, Lk) is held from forward to backward.

    Works as a context manager, as a decorator, and is undone at the end. A compiled function does what was
    allowed when it was traced, also where the compiler finds it in its cache of earlier processes; put it
    around the function rather than into it. A checkpointed one must be recomputed under what it ran under.

    Args:
        enabled: whether it is allowed.

    Example:
        >>> import torch, attn_ext
        >>> query = torch.randn(1, 8, 197, 64, dtype=torch.bfloat16, requires_grad=True)
        >>> with attn_ext.save_weights_for_backward(False):
        ...     attn_ext.explain(query, query, query).saved_bytes
        0
    """

    def __init__(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"attn_ext: expected enabled to be a bool, but got {enabled!r}")
        self.enabled = enabled
        self._before: list[bool] = []

    def _recreate_cm(self) -> "save_weights_for_backward":
        """A decorated function's calls, in several threads at a time, each have one of their own."""
        return save_weights_for_backward(self.enabled)

    def __enter__(self) -> None:
        self._before.append(_C.save_weights_for_backward())
        _C.set_save_weights_for_backward(self.enabled)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _C.set_save_weights_for_backward(self._before.pop())
