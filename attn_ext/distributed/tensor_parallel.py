"""The attention modules of a model over the ranks of a mesh, each rank some of the heads."""

from typing import TYPE_CHECKING

from torch import nn

from ..modules import MultiHeadAttention

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def tensor_parallel_plan(module: nn.Module) -> "dict[str, ParallelStyle]":
    r"""For :func:`torch.distributed.tensor.parallel.parallelize_module`: the attention modules of a model.

    Of each :class:`attn_ext.MultiHeadAttention` a rank then has some heads: their rows of the projections and
    columns of the output projection, and their sinks. Inputs and outputs are plain tensors, the same on every
    rank. One parameter for all projections becomes three, as with ``packed=False``, so make the optimizer
    afterwards; a state dict of either layout still loads. Modules of one head stay as they are.

    Args:
        module: a model, or an attention module itself.

    Returns:
        A style for each name; add those of other layers.

    Raises:
        ValueError: a model without any such module. When the plan is applied: heads that do not divide by the
            ranks; no output projection.

    Source:
        Shoeybi et al. 2019, "Megatron-LM", section 3.

    Example:
        >>> import torch, attn_ext
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> from attn_ext.distributed import tensor_parallel_plan
        >>> model = torch.nn.ModuleDict({"attention": attn_ext.MultiHeadAttention(16, 4)})
        >>> model.update({"up": torch.nn.Linear(16, 64), "down": torch.nn.Linear(64, 16)})
        >>> plan = {**tensor_parallel_plan(model), "up": ColwiseParallel(), "down": RowwiseParallel()}
        >>> [*plan]
        ['attention', 'up', 'down']
    """
    from .styles import AttentionParallel

    names = [name for name, part in module.named_modules() if isinstance(part, MultiHeadAttention)]
    if not names:
        raise ValueError(
            f"expected a model with a MultiHeadAttention, but got {type(module).__name__} without any"
        )
    return {name: AttentionParallel() for name in names}
