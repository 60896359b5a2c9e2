"""Where the time of a call goes: to matrix products, to attention, or to what lies between."""

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from torch.autograd.profiler import profile

__all__ = ["KINDS", "shares"]

MATMUL, ATTENTION, COPY, OTHER, BETWEEN = KINDS = (
    "matrix products",
    "attention",
    "copies and masks",
    "other operators",
    "between operators",
)
"""What time is counted as. A copy that an operator makes for itself, as of a mask, is that operator's."""

#: Beginnings of operators' names without their namespaces, in lower case.
_BEGINNINGS = {
    MATMUL: ("addmm", "addmv", "baddbmm", "bmm", "convolution", "linear", "matmul", "mkldnn", "mm", "mv"),
    ATTENTION: ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_softmax", "softmax"),
    COPY: (
        *("_to_copy", "bitwise", "cat", "clone", "contiguous", "copy", "eq", "ge", "gt", "index", "le"),
        *("logical", "lt", "masked", "ones", "repeat", "reshape", "scatter", "stack", "to", "tri", "where"),
        *("full", "zero"),
    ),
}


def shares(call: Callable[[], Any]) -> dict[str, float]:
    """One call under PyTorch's profiler.

    Returns:
        For each of :data:`KINDS` its share of the time of all threads that call operators, from 0 to 1. What
        lies between operators is Python, and what the profiler takes, some microseconds an operator.
    """
    with profile(use_kineto=False) as recorded:  # Kineto's writes lines of its own to stderr
        start = perf_counter()
        call()
        seconds = perf_counter() - start
    times = dict.fromkeys(KINDS, 0.0)
    for event in recorded.function_events or ():
        if event.cpu_parent is None:
            for operator in _outermost(event):
                times[_kind(operator.name)] += operator.cpu_time_total * 1e-6
    times[BETWEEN] = max(0.0, seconds - sum(times.values()))
    total = sum(times.values())
    return {kind: time / total for kind, time in times.items()}


def _outermost(event: Any) -> Iterator[Any]:
    """The operators that no other called. What is none is autograd's, or a range that somebody named."""
    space, colons, name = event.name.partition("::")
    if colons and name.isidentifier() and space not in ("autograd", "torch"):
        yield event
    else:
        for child in event.cpu_children:
            yield from _outermost(child)


def _kind(operator: str) -> str:
    space, _, name = operator.partition("::")
    if space == "attn_ext":
        return ATTENTION
    return next((kind for kind, names in _BEGINNINGS.items() if name.startswith(names)), OTHER)
