"""One case held against the oracle, and shrunk where it fails.

The rule, for each result:

1. Shape and dtype are those of the schema; a gradient's are its tensor's.
2. It is NaN or Inf just where the oracle is: what is masked never shows, what is visible always does. Outputs
   are NaN where that is NaN and Inf of its sign where that is Inf, save where a score is +inf (inf - inf) or
   the lse is of a row of scores both NaN and +inf: there, and in gradients, only that it is not finite is
   asked.
   Not decided are whether NaN or Inf times a weight that is 0 for want of range shows in a gradient, and in
   an output whether 0 or the smallest number meets the Inf; elements within a last bit of the dtype's largest
   number; and those where a score overflows in the accumulators, or the reference, computed in float32,
   although float64 does not.
3. Elsewhere it may be as far off as :mod:`oracle` allows. What is beyond that has to be within the contract:
   twice the largest error of the reference computed in the case's own dtype, plus what the oracle allows.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import DTYPES, INPUTS, Case
from oracle import Expected, expected
from subjects import Results, dropout_seed, run
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Mismatch:
    """What differs in a case: kind is "numbers", "non-finite", "shape", "exception" or "crash"."""

    case: Any  # a Case, or one of another kind of calls
    result: str
    kind: str
    told: str


def check(case: Case, subject: str) -> Mismatch | None:
    """The first mismatch of a case, None where all is well."""
    return check_as(case, case, subject, run)


def check_as(
    whole: Case, case: Any, subject: str, run_case: Callable[[Any, Tensors, str], Results]
) -> Mismatch | None:
    """The first mismatch of a case whose results, by ``run_case``, have to be those of ``whole``."""
    tensors = case.build()
    torch.set_num_threads(case.threads)
    try:
        actual = run_case(case, tensors, subject)
    except Exception:
        return Mismatch(case, "", "exception", traceback.format_exc(limit=-2))
    finally:
        torch.set_num_threads(1)
    found = _differs(whole, tensors, actual, subject)
    return Mismatch(case, *found) if found else None


def _differs(case: Case, tensors: Tensors, actual: Results, subject: str) -> tuple[str, str, str] | None:
    """The first result that differs, in which kind, and what is told of it."""
    every = expected(case, tensors, dropout_seed(case))
    # Beside a score of +inf torch.logsumexp, of which the reference is made, gives those of -inf no NaN.
    rises = "lse" in every and "lse" in case.incoming and bool((every["lse"].exact == torch.inf).any())
    for name, wanted in every.items():
        result = actual.get(name)
        if subject == "reference" and rises and name.startswith("grad."):
            continue
        if subject == "reference" and result is not None:  # of which the numbers are asked alone
            result = result.to(_dtype_of(case, tensors, name))
        found = compare(case, tensors, name, result, wanted)
        if found:
            return name, *found
    return None


def _dtype_of(case: Case, tensors: Tensors, name: str) -> torch.dtype:
    if name.startswith("grad."):
        return tensors[name.removeprefix("grad.")].dtype
    dtype = DTYPES[case.dtype]
    return torch.promote_types(dtype, torch.float32) if name == "lse" else dtype


def compare(
    case: Case, tensors: Tensors, name: str, actual: Tensor | None, wanted: Expected
) -> tuple[str, str] | None:
    exact = wanted.exact
    if actual is None or actual.shape != exact.shape:
        return "shape", f"{None if actual is None else tuple(actual.shape)}, expected {tuple(exact.shape)}"
    dtype = _dtype_of(case, tensors, name)
    if actual.dtype != dtype:
        return "shape", f"{actual.dtype}, expected {dtype}"
    wide = actual.double()
    off = (wide - exact).abs()
    if bool((off <= wanted.error).all()):
        return None
    # What is not finite on one side at least.
    allowed = wanted.error
    same = wide.isfinite() == exact.isfinite()
    kind = torch.where(exact.isnan(), wide.isnan(), wide == exact)
    same = torch.where(exact.isfinite() | torch.as_tensor(wanted.loose), same, kind)
    at_the_end = exact.abs() + 2 * allowed >= torch.finfo(dtype).max
    same = same | at_the_end & ~exact.isnan()
    numbers = wide.isfinite() & exact.isfinite()
    if bool(same.all()) and bool((off[numbers] <= allowed[numbers]).all()):
        return None
    if not bool(same.all()):
        single = torch.promote_types(
            torch.float32, torch.float64 if case.dtype == "float64" else torch.float32
        )
        same = same | _overflows(case, tensors, name, single, exact)
        seed = dropout_seed(case)
        if not bool(wide.isfinite().all()):
            overflowed = expected(case, tensors, seed, overflowing=True)[name].exact
            same = same | ~wide.isfinite() & ~overflowed.isfinite()
        if name.startswith("grad.") and not bool(same.all()):
            zeros_out = expected(case, tensors, seed, without_zeros=True)[name].exact
            same = same | wide.isfinite() & zeros_out.isfinite()
        if not bool(same.all()):
            return "non-finite", _first(~same, wide, exact, allowed)
    plain = run(case, tensors, "reference", dtype=_plain_dtype(case, dtype)).get(name)
    if plain is not None:
        error = (plain.double() - exact).abs()
        error = error[exact.isfinite()]
        most = float(error.max()) if error.numel() else 0.0
        allowed = allowed + 2 * (most if most == most else 0.0)
    bad = numbers & (off > allowed)
    return ("numbers", _first(bad, wide, exact, allowed)) if bool(bad.any()) else None


def _plain_dtype(case: Case, dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(DTYPES[case.dtype], dtype)


def _overflows(case: Case, tensors: Tensors, name: str, dtype: torch.dtype, exact: Tensor) -> Tensor:
    """Where plain PyTorch in the accumulators' dtype is not finite either, although in float64 it is."""
    plain = run(case, tensors, "reference", dtype=dtype).get(name)
    wide = run(case, tensors, "reference").get(name)
    if plain is None or wide is None:
        return torch.zeros_like(exact, dtype=torch.bool)
    return ~plain.isfinite() & wide.isfinite()


def _first(bad: Tensor, actual: Tensor, exact: Tensor, allowed: Tensor) -> str:
    index = tuple(int(i) for i in bad.nonzero()[0]) if bad.dim() else ()
    count = int(bad.sum())
    return (
        f"{count} of {bad.numel()} differ, first at {list(index)}: got {float(actual[index]):.8g}, "
        f"expected {float(exact[index]):.8g}, allowed error {float(allowed[index]):.3g}"
    )


# Shrinking ---------------------------------------------------------------------------------------


def smaller_cases(case: Case) -> Iterator[Case]:
    """Simpler cases, the greatest steps first."""
    simple = Case(op=case.op, dtype=case.dtype, seed=case.seed)
    yield replace(case, batch=(), ones=(), dropped=(), sinks_batch=False)
    yield replace(case, batch=(), ones=(), dropped=(), sinks_batch=False, heads=1, group=1, gqa=False)
    for name in (
        *("layouts", "ones", "dropped", "mask", "sinks", "plants", "options", "gqa", "mask_ones", "threads"),
        *("mask_dropped", "mask_float32", "sinks_float32", "sinks_batch", "spread", "wanted", "incoming"),
    ):
        if getattr(case, name) != getattr(simple, name):
            yield replace(case, **{name: getattr(simple, name)})
    if case.gqa:
        yield replace(case, gqa=False, group=1)
    for op in ("sdpa",):
        outputs = ("output",)
        yield replace(case, op=op, incoming=tuple(n for n in case.incoming if n in outputs))
    yield replace(case, incoming=())
    for i in range(len(case.incoming)):
        yield replace(case, incoming=case.incoming[:i] + case.incoming[i + 1 :])
    for name in INPUTS:
        if case.wanted != (name,):
            yield replace(case, wanted=(name,))
    for name in ("layouts", "ones", "dropped", "plants", "options"):
        parts = getattr(case, name)
        for i in range(len(parts)):
            yield replace(case, **{name: parts[:i] + parts[i + 1 :]})
    if case.mask_dropped < 5 and case.mask:
        yield replace(case, mask_dropped=max(0, len(case.lead)))
    for mask in ("bool", "bias"):
        if case.mask not in ("", "bool", "bias"):
            yield replace(case, mask=mask)
    for i in range(len(case.batch)):
        yield replace(case, batch=case.batch[:i] + case.batch[i + 1 :], ones=(), dropped=())
    for name in ("lq", "lk", "d", "dv", "heads", "group", "threads"):
        size = getattr(case, name)
        low = 1
        for to in dict.fromkeys((low, size // 4, size // 2, size * 3 // 4, size - 8, size - 1)):
            if low <= to < size:
                yield replace(case, **{name: to})
    for i, plant in enumerate(case.plants):
        for place in (0.0, 1.0):
            if plant.place not in (0.0, place):
                moved = replace(plant, place=place)
                yield replace(case, plants=(*case.plants[:i], moved, *case.plants[i + 1 :]))
    for name, value in case.options:
        simpler = {"dropout_p": 0.5, "softcap": 1.0, "scale": 1.0, "window_left": 0, "window_right": 0}
        simpler["query_offset"] = 1
        if name in simpler and value != simpler[name]:
            changed = tuple((n, simpler[n] if n == name else v) for n, v in case.options)
            yield replace(case, options=changed)
    if case.dtype not in ("float32", "float64"):
        yield replace(case, dtype="float32")
    if case.dtype == "float32":
        yield replace(case, dtype="float64")


def minimise(found: Mismatch, again: Callable[[Any], Mismatch | None], tries: int = 400) -> Mismatch:
    """The simplest case near a mismatch that still fails in the same kind."""
    tried = {found.case}
    shrunk = True
    while shrunk and tries > 0:
        shrunk = False
        smaller = getattr(found.case, "smaller", None)
        for case in smaller() if smaller else smaller_cases(found.case):
            if case in tried or not case.valid or tries <= 0:
                continue
            tried.add(case)
            tries -= 1
            try:
                result = again(case)
            except Exception:  # a case that cannot be built is no simpler one
                continue
            if result is not None and result.kind == found.kind:
                found, shrunk = result, True
                break
    return found


__all__ = ["Mismatch", "Results", "check", "check_as", "compare", "minimise", "smaller_cases"]
