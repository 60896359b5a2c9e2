"""Who is held against the oracle: the package on the instruction set of this process, or its reference."""

from collections.abc import Callable
from typing import Any

import torch
from cases import Case
from torch import Tensor

import attn_ext
from attn_ext import reference

Results = dict[str, Tensor]


def dropout_seed(case: Case) -> Tensor | None:
    """The seed that the public op draws after ``torch.manual_seed(case.seed)``."""
    if not dict(case.options).get("dropout_p"):
        return None
    torch.manual_seed(case.seed)
    return torch.randint(2**63 - 1, ())


def run(
    case: Case,
    tensors: dict[str, Tensor],
    subject: str,
    dtype: torch.dtype | None = None,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Results:
    """Outputs and gradients by name.

    ``dtype`` is what the reference computes in; ``around`` makes what is called of the op.
    """
    inputs = {n: tensors[n] for n in ("query", "key", "value", "attn_mask", "sinks") if n in tensors}
    wanted = [n for n in case.differentiable() if n in case.wanted] if case.incoming else []
    for name in wanted:
        inputs[name] = inputs[name].detach().requires_grad_()
    leaves = dict(inputs)
    more: dict[str, Any] = case.keywords()
    seed = dropout_seed(case)
    if subject == "reference":
        function = getattr(reference, case.op)
        more["dtype"] = dtype or torch.float64
        if case.d == 0:
            more.setdefault("scale", 1.0)
        if seed is not None:
            more["dropout_seed"] = seed
    else:
        function = getattr(attn_ext, case.op)
        torch.manual_seed(case.seed)
    if subject == "reference" and seed is not None and case.place:
        inputs["query"] = inputs["query"].expand(case.place + 1, *inputs["query"].shape)
    outputs = around(function)(**inputs, **more)
    outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    if subject == "reference" and seed is not None and case.place:
        outputs = tuple(t[case.place] for t in outputs)
    results = dict(zip(case.output_shapes(), outputs, strict=True))
    if wanted:
        used = [n for n in case.incoming if results[n].requires_grad]  # the reference's lse needs no value
        through = [results[n] for n in used]
        given = [tensors[f"grad_{n}"].to(results[n].dtype) for n in used]
        if not used:
            return results | {f"grad.{n}": torch.zeros_like(inputs[n]) for n in wanted}
        grads = torch.autograd.grad(through, [leaves[n] for n in wanted], given, materialize_grads=True)
        results |= {f"grad.{n}": g for n, g in zip(wanted, grads, strict=True)}
    return {n: t.detach() for n, t in results.items()}
