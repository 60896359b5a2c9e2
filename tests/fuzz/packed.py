"""Packed sequences: each held against the oracle's call of that sequence alone, and against its bits.

``fuzz.py --calls packed`` draws the cases. Rows that belong to no sequence have to give 0 (lse: -inf),
whatever they hold; outputs and gradients of a sequence are those of the formulas, and to the last bit those
of ``sdpa_with_lse`` of its rows.
"""

import math
import traceback

import torch
from cases import DTYPES, Case
from check import Mismatch, compare
from oracle import Expected, expected
from packed_cases import PackedCase
from paged_cases import PagedCase
from subjects import Results, run
from torch import Tensor

import attn_ext
from attn_ext import reference

ROW_DIM = {"lse": 1}  # of results; 0 of all others


Told = tuple[str, str, str]  # of a mismatch: result, kind and what is told


def _seed(case: PackedCase) -> Tensor | None:
    if not dict(case.options).get("dropout_p"):
        return None
    torch.manual_seed(case.seed)
    return torch.randint(2**63 - 1, ())


def run_packed(case: PackedCase, tensors: dict[str, Tensor], subject: str) -> Results:
    """Outputs and gradients by name."""
    inputs = {n: t for n, t in tensors.items() if not n.startswith("grad_")}
    wanted = case.differentiated()
    for name in wanted:
        inputs[name] = inputs[name].detach().requires_grad_()
    more, seed = case.keywords(), _seed(case)
    if subject == "reference":
        function = reference.sdpa_packed_with_lse
        if case.d == 0:
            more.setdefault("scale", 1.0)
        if seed is not None:
            more["dropout_seed"] = seed
    else:
        function = attn_ext.sdpa_packed_with_lse
        torch.manual_seed(case.seed)
    results = dict(zip(("output", "lse"), function(**inputs, **more), strict=True))
    used = [n for n in case.incoming if results[n].requires_grad]
    if wanted and used:
        given = [tensors[f"grad_{n}"].to(results[n].dtype) for n in used]
        leaves = [inputs[n] for n in wanted]
        grads = torch.autograd.grad([results[n] for n in used], leaves, given, materialize_grads=True)
        results |= {f"grad.{n}": g for n, g in zip(wanted, grads, strict=True)}
    return {n: t.detach() for n, t in results.items()}


def of_sequence(tensors: dict[str, Tensor], rows: slice, keys: slice) -> dict[str, Tensor]:
    """What belongs to a sequence, heads first."""
    found = {}
    for name, t in tensors.items():
        kind = name.removeprefix("grad_").removeprefix("grad.")
        if kind == "lse":
            found[name] = t[:, rows]
        elif kind in ("query", "output"):
            found[name] = t[rows].transpose(0, 1)
        elif kind in ("key", "value"):
            found[name] = t[keys].transpose(0, 1)
        elif name == "sinks":
            found[name] = t
    return found


def alone(case: PackedCase | PagedCase, number: int) -> Case:
    """The call of one sequence."""
    rows, keys, offset = case.sequences[number]
    return Case(
        op="sdpa_with_lse", dtype=case.dtype, heads=case.heads, group=case.group, gqa=case.gqa,
        lq=rows.stop - rows.start, lk=keys.stop - keys.start, d=case.d, dv=case.dv,
        ones=("key.h", "value.h") if case.one_key_head else (), sinks=case.sinks,
        options=(*case.sequence_options, ("query_offset", offset)), incoming=case.incoming,
        wanted=case.wanted, place=number, threads=case.threads, seed=case.seed,
    )  # fmt: skip


def outside(case: PackedCase | PagedCase, results: Results) -> Told | None:
    """Rows of nobody."""
    for name, t in results.items():
        if name == "grad.sinks":
            continue
        side = 1 if name in ("grad.key", "grad.value") else 0
        dim = ROW_DIM.get(name, 0)
        inside = torch.zeros(t.shape[dim], dtype=torch.bool)
        for sequence in case.sequences:
            inside[sequence[side]] = True
        left = t.index_select(dim, (~inside).nonzero().flatten())
        if not bool((left == (-math.inf if name == "lse" else 0)).all()):
            return name, "outside", f"rows of no sequence hold {left.flatten()[:8].tolist()}"
    return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def check_packed(case: PackedCase, subject: str) -> Mismatch | None:
    """The first mismatch of a case, None where all is well."""
    tensors = case.build()
    torch.set_num_threads(case.threads)
    try:
        results = run_packed(case, tensors, subject)
        found = _differs(case, tensors, results, subject)
    except Exception:
        found = "", "exception", traceback.format_exc(limit=-3)
    finally:
        torch.set_num_threads(1)
    return Mismatch(case, *found) if found else None


def shapes_differ(shapes: dict[str, tuple[int, ...]], results: Results) -> Told | None:
    """Of results, and gradients of inputs."""
    for name, t in results.items():
        shape = shapes.get(name.removeprefix("grad."), t.shape)
        if t.shape != shape:
            return name, "shape", f"{tuple(t.shape)}, expected {shape}"
    return None


def numbers_differ(
    case: PackedCase | PagedCase,
    number: int,
    own: dict[str, Tensor],
    actual: Results,
    wanted: dict[str, Expected],
) -> Told | None:
    """Of one sequence, from what its call alone has to give."""
    for name, result in wanted.items():
        if name in actual and name != "grad.sinks":
            differs = compare(alone(case, number), own, name, actual[name], result)
            if differs:
                return name, differs[0], f"sequence {number}: {differs[1]}"
    return None


def _differs(case: PackedCase, tensors: dict[str, Tensor], results: Results, subject: str) -> Told | None:
    shapes = case.shapes()
    shapes |= {"output": shapes["grad_output"], "lse": shapes["grad_lse"]}
    found = shapes_differ(shapes, results) or outside(case, results)
    of_sinks: list[Expected] = []
    for number, (rows, keys, _) in enumerate(case.sequences):
        own, actual = of_sequence(tensors, rows, keys), of_sequence(results, rows, keys)
        if subject == "reference":
            actual = rounded(case, actual)
        wanted = expected(alone(case, number), own, _seed(case))
        of_sinks += [wanted["grad.sinks"]] if "grad.sinks" in wanted else []
        found = found or numbers_differ(case, number, own, actual, wanted)
        if not found and subject != "reference":
            found = _bits(alone(case, number), own, actual, number)
        if found:
            return found
    return found or _sinks_differ(results, of_sinks)


def rounded(case: PackedCase | PagedCase, results: Results) -> Results:
    """The reference's results in the dtypes that the ops give."""
    dtype = DTYPES[case.dtype]
    return {
        n: t.to(torch.promote_types(dtype, torch.float32) if n == "lse" else dtype)
        for n, t in results.items()
    }


def _bits(single: Case, own: dict[str, Tensor], actual: Results, number: int) -> Told | None:
    """A call of its own draws for batch 0, and may save weights; ATen's products promise no bits."""
    if attn_ext.cpu_capability() == "aten" or ("dropout_p" in dict(single.options) and number > 0):
        return None
    with attn_ext.save_weights_for_backward(False):
        alone = run(single, own, "attn_ext")
    for name, bits in alone.items():
        if name in actual and name != "grad.sinks" and not same_bits(actual[name], bits):
            off = (actual[name].double() - bits.double()).abs().max()
            return name, "bits", f"sequence {number}: other bits than alone, by up to {float(off):.3g}"
    return None


def _sinks_differ(results: Results, parts: list[Expected]) -> Told | None:
    """The gradient of sinks is the sum over the sequences."""
    actual = results.get("grad.sinks")
    if actual is None:
        return None
    exact, error = torch.zeros(actual.shape, dtype=torch.float64), torch.zeros(())
    for part in parts:
        exact, error = exact + part.exact, error + part.error
    error = error + exact.abs() * torch.finfo(actual.dtype).eps
    wide = actual.double()
    past = (
        (exact.abs() + 2 * error >= torch.finfo(actual.dtype).max)
        & wide.isinf()
        & (wide.sign() == exact.sign())
    )
    if bool((~exact.isfinite() | past | ((wide - exact).abs() <= error)).all()):
        return None
    return "grad.sinks", "numbers", f"{actual.tolist()}, expected {exact.tolist()}, allowed {error.tolist()}"


__all__ = [
    *("Told", "alone", "check_packed", "numbers_differ", "of_sequence", "outside", "rounded", "run_packed"),
    *("same_bits", "shapes_differ"),
]
