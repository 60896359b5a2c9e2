"""What a call would do, and what this machine can do."""

from dataclasses import dataclass

from torch import Tensor

from ._library import _C

__all__ = ["Explanation", "available_cpu_capabilities", "cpu_capability", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The way that a call takes; printed, it is a short report."""

    path: str
    """How the CPU kernels go: ``"whole-row"``, ``"online"``, ``"split"``, ``"few-rows"`` or
    ``"unit-rows"``; on an NVIDIA GPU which of ATen's fused kernels: ``"flash"``, ``"efficient"`` or
    ``"cudnn"``, or ``"tiles"``, kernels of attn_ext's; or ``"aten"``, the composition over ATen ops."""
    capability: str
    """The instruction set on the CPU, the device elsewhere."""
    block_rows: int
    """Query rows worked on at once; of a GPU's fused kernels, which have blocks of their own, all."""
    block_keys: int
    """Keys worked on at once; of a GPU's fused kernels all that any row sees."""
    packed_bytes: int
    """Key and value in another layout or dtype, for the time of the call."""
    scratch_bytes: int
    """Memory beyond inputs, outputs and what is packed, an upper bound."""
    saved_bytes: int
    """Weights that are saved for the backward pass, where a gradient is wanted, or on an NVIDIA GPU the draws
    of dropout (:class:`attn_ext.save_weights_for_backward`)."""
    reason: str
    """Why this path."""

    def __str__(self) -> str:
        saved = "draws" if self.path == "tiles" else "weights"
        return (
            f"path        {self.path} ({self.capability})\n"
            f"because     {self.reason}\n"
            f"block       {self.block_rows} query rows x {self.block_keys} keys\n"
            f"packed      {self.packed_bytes:,} bytes\n"
            f"scratch     at most {self.scratch_bytes:,} bytes"
            + (f"\nsaved       {self.saved_bytes:,} bytes, {saved} for backward" if self.saved_bytes else "")
        )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Explanation:
    """Tell which way :func:`attn_ext.sdpa` would take with these arguments, without computing anything.

    The arguments are those of :func:`attn_ext.sdpa`.

    Returns:
        Explanation: path, instruction set, block sizes, bytes of packing and scratch, bytes of weights or
            draws that are saved for backward, and the reason.

    Raises:
        RuntimeError: what the call itself would raise.

    Example:
        >>> import torch, attn_ext
        >>> query = torch.randn(1, 8, 128, 64)
        >>> attn_ext.explain(query, query, query).block_keys
        128
    """
    return Explanation(
        **_C.explain(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            window_left,
            window_right,
            query_offset,
            softcap,
            sinks,
        )
    )


def cpu_capability() -> str:
    """Name the instruction set that calls on the CPU run on.

    Chosen once, when the package is imported: the best that this machine and build have, or what the
    environment variable ``ATTN_EXT_CPU_CAPABILITY`` names. One that is not available is an error at import.
    """
    return _C.cpu_capability()


def available_cpu_capabilities() -> list[str]:
    """List what ``ATTN_EXT_CPU_CAPABILITY`` may name on this machine, best last."""
    return _C.available_cpu_capabilities()
