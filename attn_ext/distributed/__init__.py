"""Attention of one sequence that lies on several machines.

Nothing here is imported by ``import attn_ext``, and nothing of torch is replaced.
"""

from .context_parallel import context_parallel_sdpa
from .cost import Cost, cost
from .dtensor import register_dtensor
from .layout import Run, SequenceLayout
from .memory import run_in_memory
from .plan import Step, plan
from .tensor_parallel import tensor_parallel_plan
from .transport import Transport

__all__ = [
    "Cost",
    "Run",
    "SequenceLayout",
    "Step",
    "Transport",
    "context_parallel_sdpa",
    "cost",
    "plan",
    "register_dtensor",
    "run_in_memory",
    "tensor_parallel_plan",
]
