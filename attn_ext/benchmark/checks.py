"""Whether the contenders compute the same, before it is timed: their results against the float64 reference.

Who is wrong is not timed.

Of large problems a part is checked: one key head with the query heads that read it, in the last sequence of
the batch, and its first and last rows.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attn_ext import reference

from .cells import Problem
from .peers import BASELINE, Contender

__all__ = ["TOLERANCE", "errors"]

PAIRS = 2**22  # of query and key that the reference computes
#: Largest error, as a part of the largest number there is in the result.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def errors(problem: Problem, contenders: list[Contender], threads: int) -> dict[str, float]:
    """The largest error of each contender in any result, as a part of the results' largest number.

    Of all results, because one of them may be 0, as gradients are where every query sees one key.
    """
    contenders = [contender for contender in contenders if contender.name != BASELINE]
    if problem.mode == "dropout":
        return _mean_of_dropout(problem, contenders, threads)
    part = _part(problem)
    checked = replace(problem, grad_output=_only(part, problem.grad_output))
    expected = _expected(checked, part)
    largest = max(result.abs().max().item() for result in expected.values())
    found = {}
    for contender in contenders:
        with torch.set_grad_enabled(problem.mode == "fwdbwd"):
            call = contender.prepare(checked, threads)
            if call is None:
                continue
            results = call()
        actual = _cut(problem, part, results if isinstance(results, tuple) else (results,))
        found[contender.name] = max(_distance(actual[name], expected[name], largest) for name in expected)
    return found


Part = tuple[int, slice, slice, list[int]]  # sequence, query heads, key heads, rows


def _part(problem: Problem) -> Part:
    shape = problem.cell.shape
    group = shape.query_heads // shape.kv_heads
    last = shape.kv_heads - 1
    count = min(shape.query_length, max(2, PAIRS // (group * shape.key_length)))
    rows = [*range(count - count // 2), *range(shape.query_length - count // 2, shape.query_length)]
    return shape.batch - 1, slice(last * group, shape.query_heads), slice(last, last + 1), rows


def _only(part: Part, grad_output: Tensor | None) -> Tensor | None:
    """Zero but in the part, so that the part alone decides the gradients."""
    if grad_output is None:
        return None
    sequence, heads, _, rows = part
    kept = torch.zeros_like(grad_output)
    kept[sequence, heads, rows] = grad_output[sequence, heads, rows]
    return kept


def _cut_mask(mask: Tensor, part: Part) -> Tensor:
    """The part's own mask, ([Hq,] [Lq,] Lk)."""
    sequence, heads, _, rows = part
    mask = mask[sequence if mask.shape[0] > 1 else 0]
    mask = mask[heads if mask.shape[0] > 1 else slice(None)]
    return mask[:, rows] if mask.shape[1] > 1 else mask


def _cut(problem: Problem, part: Part, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The part's results, by name."""
    sequence, heads, kv_heads, rows = part
    if not problem.with_grad:
        names = ("output", "weights")
        return {n: t[sequence, heads][:, rows] for n, t in zip(names, results, strict=False)}
    query, key, value, *mask = results
    cut = {"query": query[sequence, heads][:, rows]}
    cut.update(key=key[sequence, kv_heads], value=value[sequence, kv_heads])
    if mask:
        cut["mask"] = _cut_mask(mask[0], part)
    return cut


def _expected(problem: Problem, part: Part) -> dict[str, Tensor]:
    """The same by the reference, in float64, of the part alone."""
    sequence, heads, kv_heads, rows = part
    mask, visible = problem.attn_mask, problem.visible()
    tensors = {
        "query": problem.query[sequence, heads][:, rows],
        "key": problem.key[sequence, kv_heads],
        "value": problem.value[sequence, kv_heads],
    }
    bias = mask is not None and mask.is_floating_point()
    if mask is not None and bias:
        tensors["mask"] = _cut_mask(mask, part)
    elif visible is not None:
        visible = _cut_mask(visible.reshape((1,) * (4 - visible.dim()) + visible.shape), part)
    leaves = {n: t.detach().double().requires_grad_(problem.with_grad) for n, t in tensors.items()}
    with torch.set_grad_enabled(problem.with_grad):
        result = reference.attention(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            leaves["mask"] if bias else visible,
            enable_gqa=True,
        )
    if not problem.with_grad or problem.grad_output is None:
        weights = {"weights": result.weights} if problem.mode == "weights" else {}
        return {"output": result.output, **weights}
    grad_output = problem.grad_output[sequence, heads][:, rows].double()
    gradients = torch.autograd.grad(result.output, list(leaves.values()), grad_output)
    return dict(zip(leaves, gradients, strict=True))


def _distance(actual: Tensor, expected: Tensor, largest: float) -> float:
    """Largest difference over ``largest``; NaN where a NaN is."""
    difference = (actual.detach().double() - expected).abs().max()
    return difference.item() / max(largest, 1e-30)


def _mean_of_dropout(problem: Problem, contenders: list[Contender], threads: int) -> dict[str, float]:
    """Everyone draws otherwise. With values of one a row's output is the sum of the weights that were kept,
    which is 1 in the mean, up to the scatter of the draw."""
    problem = replace(problem, value=torch.ones_like(problem.value))
    found: dict[str, float] = {}
    for contender in contenders:
        with torch.no_grad():
            call = contender.prepare(problem, threads)
            if call is None:
                continue
            output: Tensor = call()
        rows = output[..., 0].double()
        # Five standard deviations of the mean are still right.
        scatter = 5 * rows.std().item() / rows.numel() ** 0.5 if rows.numel() > 1 else 1.0
        found[contender.name] = max(0.0, abs(rows.mean().item() - 1) - scatter)
        if problem.cell.shape.key_length > 100 and not rows.std() > 0:
            found[contender.name] = float("nan")  # nothing was dropped
    return found
