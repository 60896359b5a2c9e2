"""Paged caches: what is written to them, and what is read from them by each sequence.

``fuzz.py --calls paged`` draws the cases. In half of them ``cache_write_`` fills the pages: each slot has to
hold its row as it is stored, and not a bit may change outside of the slots. Then each sequence is held
against the oracle's call of that sequence alone, of the numbers that its pages hold, times their scales; and
to the last bit against the same keys in one piece, or in pages of another size where they have scales or are
of a byte. Rows that belong to no sequence have to give 0 (lse: -inf), and what lies in pages must not reach
those who do not have it. There is no gradient, and backward has to say so.
"""

import traceback

import torch
from cases import DTYPES
from check import Mismatch
from oracle import expected
from packed import Told, alone, numbers_differ, of_sequence, outside, rounded, same_bits, shapes_differ
from paged_cases import NARROW, PagedCase
from subjects import Results
from torch import Tensor

import attn_ext
from attn_ext import reference

Tensors = dict[str, Tensor]
SIDES = ("key", "value")


def run_paged(case: PagedCase, tensors: Tensors, subject: str) -> Results:
    """Output, and lse where it is asked for; the pages have been filled."""
    given, more = {n: tensors[n] for n in case.given()}, case.keywords()
    source = reference if subject == "reference" else attn_ext
    if subject == "reference" and case.d == 0:
        more.setdefault("scale", 1.0)
    if case.lse:
        return dict(zip(("output", "lse"), source.sdpa_paged_with_lse(**given, **more), strict=True))
    return {"output": source.sdpa_paged(**given, **more)}


def write(case: PagedCase, tensors: Tensors) -> None:
    """The new rows into their slots."""
    scales = {n: tensors[n] for n in ("key_scale", "value_scale") if n in tensors}
    names = ("key_pages", "value_pages", "key", "value", "slot_mapping")
    attn_ext.cache_write_(*(tensors[n] for n in names), **scales)


def check_paged(case: PagedCase, subject: str) -> Mismatch | None:
    """The first mismatch of a case, None where all is well."""
    tensors = case.build()
    torch.set_num_threads(case.threads)
    try:
        found = _written_differs(case, tensors, subject) if case.written else None
        found = found or _differs(case, tensors, run_paged(case, tensors, subject), subject)
        if not found and case.gradient and subject != "reference":
            found = _gradient_differs(case, tensors)
    except Exception:
        found = "", "exception", traceback.format_exc(limit=-3)
    finally:
        torch.set_num_threads(1)
    return Mismatch(case, *found) if found else None


# What is written


def _stored(rows: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """New rows as pages hold them."""
    if factors is None and rows.dtype == dtype:
        return rows
    wide = rows if rows.dtype == torch.float64 else rows.float()
    if factors is not None:
        wide = torch.where(factors == 0, 0.0, wide / factors)
    if dtype == torch.int8:
        wide = torch.where(wide.isnan(), 0.0, wide).round().clamp(-127, 127)
    elif dtype == torch.float8_e4m3fn:
        wide = wide.clamp(-448, 448)
    return wide.to(dtype)


def memory_of(t: Tensor) -> Tensor:
    """All memory that a tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


def _by_row(scale: Tensor, pages: Tensor) -> Tensor:
    """A scale as (P, page, Hkv, 1)."""
    return (scale if scale.dim() == 4 else scale.reshape(-1, 1)).expand(*pages.shape[:3], 1)


def _written_differs(case: PagedCase, tensors: Tensors, subject: str) -> Told | None:
    """The reference's pages are filled by the formulas, those of the package by its op."""
    slots = tensors["slot_mapping"].long()
    kept = slots >= 0
    place = slots[kept] // case.page, slots[kept] % case.page
    before = {name: memory_of(tensors[f"{name}_pages"]).clone() for name in SIDES}
    old = {name: tensors[f"{name}_pages"][place] for name in SIDES}
    if subject != "reference":
        write(case, tensors)
    for name in SIDES:
        pages, scale = tensors[f"{name}_pages"], tensors.get(f"{name}_scale")
        factors = None if scale is None else _by_row(scale, pages)[place]
        wanted = _stored(tensors[name][kept], factors, pages.dtype)
        if subject == "reference":
            pages[place] = wanted
            continue
        actual = pages[place]
        if not same_bits(actual.double(), wanted.double()):
            differ = (actual.double() != wanted.double()).nonzero()[0].tolist()
            told = f"{actual[tuple(differ)].item()}, expected {wanted[tuple(differ)].item()}"
            return f"{name}_pages", "written", f"slot {int(slots[kept][differ[0]])}: {told}"
        pages[place] = old[name]
        if not torch.equal(memory_of(pages), before[name]):
            return f"{name}_pages", "written", "something outside of the slots has changed"
        pages[place] = actual
    return None


# What is read


def _slots(case: PagedCase, tensors: Tensors) -> Tensor:
    """The slots of all sequences, one after the other."""
    found = [torch.arange(0)]
    for row, keys in zip(tensors["block_table"].long(), case.keys, strict=True):
        places = torch.arange(keys)
        found.append(row[places // case.page] * case.page + places % case.page)
    return torch.cat(found)


def _differs(case: PagedCase, tensors: Tensors, results: Results, subject: str) -> Told | None:
    found = shapes_differ(case.shapes(), results) or outside(case, results)
    if found:
        return found
    slots = _slots(case, tensors)
    exact = {n: tensors[n] for n in ("query", "sinks") if n in tensors}
    for name in SIDES:
        pages, scale = tensors[f"{name}_pages"], tensors.get(f"{name}_scale")
        exact[name] = pages.flatten(0, 1)[slots].double()
        if scale is not None:
            exact[name] = exact[name] * _by_row(scale, pages).flatten(0, 1)[slots].double()
    for number, (rows, keys, _) in enumerate(case.sequences):
        own, actual = of_sequence(exact, rows, keys), of_sequence(results, rows, keys)
        actual = rounded(case, actual) if subject == "reference" else actual
        found = numbers_differ(case, number, own, actual, expected(alone(case, number), own, None))
        if found:
            return found
    if subject == "reference" or attn_ext.cpu_capability() == "aten":  # whose products promise no bits
        return None
    return _bits_differ(case, tensors, results, exact, slots)


def _bits_differ(
    case: PagedCase, tensors: Tensors, results: Results, exact: Tensors, slots: Tensor
) -> Told | None:
    """From those of the same keys in one piece, or in pages of another size, on one thread."""
    torch.set_num_threads(1)
    if case.key_scale or case.value_scale or case.stored_dtype in NARROW:
        where = "in pages of another size"
        bits = run_paged(case, tensors | _in_other_pages(case, tensors, slots), "attn_ext")
    else:
        where = "in one piece"
        one_piece = [t.to(DTYPES[case.dtype]) for t in (exact["key"], exact["value"])]
        ends = [torch.tensor([0, *(s[side].stop for s in case.sequences)]) for side in (0, 1)]
        ends[0][0] = case.before
        options = {**dict(case.sequence_options), **case.keywords()}
        options |= {"sinks": tensors["sinks"]} if case.sinks else {}
        both = attn_ext.sdpa_packed_with_lse(tensors["query"], *one_piece, *ends, **options)
        bits = dict(zip(("output", "lse"), both, strict=True))
    for name, actual in results.items():
        if not same_bits(actual, bits[name]):
            off = float((actual.double() - bits[name].double()).abs().nan_to_num().max())
            return name, "bits", f"other bits than {where}, by up to {off:.3g}"
    return None


def _in_other_pages(case: PagedCase, tensors: Tensors, slots: Tensor) -> Tensors:
    """The rows of each sequence in pages of its own, in order."""
    page = 16 if case.page != 16 else 7
    used = [-(-keys // page) for keys in case.keys]
    table = torch.full((len(used), max(used, default=0)), -1)
    places, end = [torch.arange(0)], 0
    for row, keys, n in zip(table, case.keys, used, strict=True):
        row[:n] = torch.arange(end, end + n)
        places.append(torch.arange(keys) + end * page)
        end += n
    changed = {"block_table": table}
    names = [f"{name}_{what}" for name in SIDES for what in ("pages", "scale")]
    for name in names:
        old = tensors.get(name)
        if old is not None and old.dim() == 4:
            changed[name] = torch.zeros(end, page, *old.shape[2:]).to(old.dtype)
            changed[name].flatten(0, 1)[torch.cat(places)] = old.flatten(0, 1)[slots]
    return changed


def _gradient_differs(case: PagedCase, tensors: Tensors) -> Told | None:
    """There is none, and it is an error to ask for it."""
    asked = tensors | {"query": tensors["query"].detach().requires_grad_()}
    output = run_paged(case, asked, "attn_ext")["output"]
    try:
        output.sum().backward()
    except RuntimeError as error:
        if "derivative for attn_ext::sdpa_paged" in str(error):
            return None
        raise
    return "grad.query", "gradient", "backward raises no exception"


__all__ = ["check_paged", "memory_of", "run_paged", "write"]
