"""The fuzzer: a minute of fixed seeds on every instruction set, and that it finds what is planted."""

import dataclasses
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attn_ext

FUZZ = Path(__file__).parent / "fuzz"
SUBJECTS = [*attn_ext.available_cpu_capabilities(), "reference"]

pytestmark = pytest.mark.skipif(
    attn_ext.cpu_capability() == "aten", reason="it forces every capability itself"
)


def fuzz(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(FUZZ / "fuzz.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(("calls", "count"), [("plain", 1000), ("packed", 50), ("paged", 50), ("merged", 50)])
def test_random_calls_agree_with_the_formulas(calls, count):
    options = ("--calls", calls, "--cases", str(count), "--seed", "0", "--max-found", "5", "--jobs", "1")
    done = fuzz(*options, *(f"--capability={name}" for name in SUBJECTS))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.splitlines() == [f"{name}: {count} cases, 0 mismatches" for name in SUBJECTS]


# What is planted is found


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch):
    """The fuzzer's modules, by their names."""
    monkeypatch.syspath_prepend(FUZZ)
    import cases
    import check

    return cases, check


def wrong_scale(query, key, value, *, original, **options):
    return original(query, key, value, **{**options, "scale": (options.get("scale") or 0.5) * 1.001})


def wrong_triangle(query, key, value, *, original, **options):
    later = options.get("query_offset", 0) + 1
    return original(query, key, value, **{**options, "query_offset": later})


def masked_nan_leaks(query, key, value, *, original, **options):
    leak = value.sum(-2, keepdim=True) * 0
    return original(query, key, value, **options) + leak


def gradient_loses_nan(query, key, value, *, original, **options):
    key = key * 1
    if key.requires_grad:
        key.register_hook(torch.nan_to_num)
    return original(query, key, value, **options)


def no_gradient_of_key(query, key, value, *, original, **options):
    return original(query, key.detach(), value, **options)


def wrong_dropout(query, key, value, *, original, **options):
    torch.rand(1)
    return original(query, key, value, **options)


def raises(query, key, value, *, original, **options):
    if options.get("softcap"):
        raise RuntimeError("planted")
    return original(query, key, value, **options)


@pytest.mark.parametrize(
    ("plant", "kind", "needed"),
    [
        (wrong_scale, "numbers", {"float64", "float32"}),
        (wrong_triangle, "numbers", {"is_causal", "window_left", "window_right"}),
        (masked_nan_leaks, "non-finite", {"plant:nan"}),
        (gradient_loses_nan, "non-finite", {"plant:nan"}),
        (no_gradient_of_key, "numbers", {"sdpa"}),
        (wrong_dropout, "numbers", {"dropout_p"}),
        (raises, "exception", {"softcap"}),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_planted_fault_is_found_and_shrunk(tools, monkeypatch, plant: Callable, kind, needed):
    cases, check = tools
    original = attn_ext.sdpa
    monkeypatch.setattr(attn_ext, "sdpa", lambda *args, **kw: plant(*args, original=original, **kw))
    drawn = (dataclasses.replace(cases.draw_case(7, n), op="sdpa", incoming=("output",)) for n in range(3000))
    # Where NaN is planted, nothing else that is special: the shrinking would go after that.
    plain = {"plant:inf", "plant:-inf", "plant:1e30", "sinks", "softcap", "dim:0", "scale"}
    chosen = (case for case in drawn if case.valid and case.features() & needed)
    if kind == "non-finite":
        chosen = (c for c in chosen if not c.features() & plain and not c.mask.startswith("bias"))
    tried = (check.check(case, "attn_ext") for case in chosen)
    found = next(mismatch for mismatch in tried if mismatch and mismatch.kind == kind)
    small = check.minimise(found, lambda case: check.check(case, "attn_ext")).case
    assert small.features() & needed
    assert small.scores <= 16 and max(small.d, small.dv) <= 4
    assert len(small.options) + len(small.plants) + len(small.layouts) + bool(small.mask) <= 2, small


def top_left(*tensors, original, query_offsets=None, **options):
    zeros = torch.zeros_like(options["cu_seqlens_q"][1:]) if query_offsets is None else query_offsets
    return original(*tensors, query_offsets=zeros, **options)


def neighbours_leak(query, key, value, *, original, **options):
    output, lse = original(query, key, value, **options)
    return output + value.nansum() * 1e-3 * lse.isfinite().T[..., None], lse


def rows_of_nobody(query, key, value, *, original, **options):
    output, lse = original(query, key, value, **options)
    return torch.where(lse.T[..., None] == -torch.inf, 1, output), lse


def no_holes(*tensors, original, seqlens_k=None, **options):
    return original(*tensors, **options)


def one_draw(query, key, value, *, original, dropout_p=0.0, **options):
    output, lse = original(query, key, value, **options)
    keep = torch.rand(output.shape[1:2])[:, None] >= dropout_p
    return output * keep / max(1 - dropout_p, 1e-9), lse


def last_bits(query, key, value, *, original, **options):
    output, lse = original(query, key, value, **options)
    return next_numbers(output), lse


def next_numbers(output):
    return output.nextafter(output * 2) if output.dtype != torch.float16 else output


@pytest.mark.parametrize(
    ("plant", "kind", "needed"),
    [
        (top_left, "numbers", {"is_causal", "window_left", "window_right"}),
        (neighbours_leak, "numbers", {"float32"}),
        (rows_of_nobody, "outside", {"float32"}),
        (no_holes, "numbers", {"holes"}),
        (one_draw, "numbers", {"dropout_p"}),
        (last_bits, "bits", {"float32"}),
    ],
    ids=lambda x: getattr(x, "__name__", None) or (x if isinstance(x, str) else "-".join(sorted(x))),
)
def test_a_fault_of_packed_calls_is_found_and_shrunk(tools, monkeypatch, plant: Callable, kind, needed):
    _, check = tools
    import packed
    import packed_cases

    original = attn_ext.sdpa_packed_with_lse

    def planted(query, key, value, **options):
        return plant(query, key, value, original=original, **options)

    monkeypatch.setattr(attn_ext, "sdpa_packed_with_lse", planted)

    def again(case):
        return packed.check_packed(case, "attn_ext")

    drawn = (packed_cases.draw_packed_case(7, number) for number in range(2000))
    tried = (again(case) for case in drawn if case.features() & needed)
    found = next(mismatch for mismatch in tried if mismatch and mismatch.kind == kind)
    small = check.minimise(found, again).case
    assert small.features() & needed
    assert len(small.parts) <= 2
    assert len(small.options) + len(small.plants) + len(small.layouts) <= 1, small


def neighbours_page(*, original, **options):
    tables = options["block_table"].clone()
    if options["seqlens_k"].numel() and options["seqlens_k"][[0, -1]].all():
        tables[-1, 0] = tables[0, 0]
    return original(**{**options, "block_table": tables})


def other_heads_scale(*, original, **options):
    scale = options.get("value_scale")
    if scale is not None and scale.dim() == 1:
        options["value_scale"] = scale.flip(0)
    return original(**options)


def rows_beyond_leak(*, original, **options):
    output, lse = original(**options)
    pages, keys = options["value_pages"], options["seqlens_k"]
    if len(keys) and keys[0] % pages.shape[1]:
        last = options["block_table"][0, keys[0] // pages.shape[1]]
        output = output + (pages[last, keys[0] % pages.shape[1]].to(output.dtype) * 0).sum()
    return output, lse


def last_bits_in_pages(*, original, **options):
    output, lse = original(**options)
    return next_numbers(output), lse


def no_exception_in_backward(*, original, **options):
    query = options["query"]
    output, lse = original(**{**options, "query": query.detach()})
    return output + 0 * query.sum().nan_to_num() if query.requires_grad else output, lse


@pytest.mark.parametrize(
    ("plant", "kind", "needed"),
    [
        (neighbours_page, "numbers", {"float32", "float64"}),
        (other_heads_scale, "numbers", {"scale:head"}),
        (rows_beyond_leak, "non-finite", {"float32", "float64"}),
        (last_bits_in_pages, "bits", {"float32"}),
        (no_exception_in_backward, "gradient", {"gradient"}),
    ],
    ids=lambda x: getattr(x, "__name__", None) or (x if isinstance(x, str) else "-".join(sorted(x))),
)
def test_a_fault_of_paged_calls_is_found_and_shrunk(tools, monkeypatch, plant: Callable, kind, needed):
    _, check = tools
    import paged
    import paged_cases

    original = attn_ext.sdpa_paged_with_lse
    monkeypatch.setattr(
        attn_ext, "sdpa_paged_with_lse", lambda *args, **kw: plant(*args, original=original, **kw)
    )

    def again(case):
        return paged.check_paged(case, "attn_ext")

    drawn = (paged_cases.draw_paged_case(7, number) for number in range(2000))
    tried = (again(case) for case in drawn if case.features() & needed)
    found = next(mismatch for mismatch in tried if mismatch and mismatch.kind == kind)
    small = check.minimise(found, again).case
    assert small.features() & needed
    assert len(small.lengths) <= 2
    assert len(small.options) + len(small.plants) + len(small.layouts) <= 1, small


def one_slot_too_many(*tensors, original, **scales):
    original(*tensors, **scales)
    pages = tensors[1].view(torch.uint8)
    last = int(tensors[4][-1]) + 1 if len(tensors[4]) else 0
    if 0 < last < pages.shape[0] * pages.shape[1]:
        pages[last // pages.shape[1], last % pages.shape[1]] = 3


def skipped_row_written(*tensors, original, **scales):
    original(*tensors[:4], tensors[4].clamp(min=0) if tensors[0].numel() else tensors[4], **scales)


def scale_forgotten(*tensors, original, **scales):
    original(*tensors, **{n: t for n, t in scales.items() if n != "value_scale"})


@pytest.mark.parametrize(
    ("plant", "needed"),
    [
        (one_slot_too_many, "written"),
        (skipped_row_written, "skipped"),
        (scale_forgotten, "written"),
    ],
)
def test_a_fault_of_written_rows_is_found_and_shrunk(tools, monkeypatch, plant: Callable, needed):
    _, check = tools
    import paged
    import paged_cases

    original = attn_ext.cache_write_
    monkeypatch.setattr(attn_ext, "cache_write_", lambda *args, **kw: plant(*args, original=original, **kw))

    def again(case):
        return paged.check_paged(case, "attn_ext")

    drawn = (paged_cases.draw_paged_case(7, number) for number in range(2000))
    tried = (again(case) for case in drawn if needed in case.features())
    found = next(mismatch for mismatch in tried if mismatch and mismatch.kind == "written")
    small = check.minimise(found, again).case
    assert needed in small.features()
    assert small.slots <= 4
    assert len(small.options) + len(small.plants) + len(small.layouts) == 0, small


def equal_shares(outputs, lses, *, original):
    return original(outputs, [torch.zeros_like(t) for t in lses])


def few_digits_of_lses(outputs, lses, *, original):
    return original(outputs, [t.bfloat16().to(t.dtype) for t in lses])


def no_gradient_of_lses(outputs, lses, *, original):
    return original(outputs, [t.detach() for t in lses])


@pytest.mark.parametrize("plant", [equal_shares, few_digits_of_lses, no_gradient_of_lses])
def test_a_fault_of_merging_is_found_and_shrunk(tools, monkeypatch, plant: Callable):
    _, check = tools
    import merged

    original = attn_ext.merge_partials
    monkeypatch.setattr(attn_ext, "merge_partials", lambda *parts: plant(*parts, original=original))

    def again(case):
        return merged.check_merged(case, "attn_ext")

    drawn = (merged.draw_merged_case(7, number) for number in range(2000))
    tried = (again(case) for case in drawn if not case.whole.plants)
    found = next(mismatch for mismatch in tried if mismatch and mismatch.kind == "numbers")
    small = check.minimise(found, again).case
    assert len(small.parts) <= 1
    assert small.whole.scores <= 16
    assert len(small.whole.options) + len(small.whole.layouts) + bool(small.whole.mask) <= 1, small


@pytest.mark.parametrize("calls", ["packed", "paged", "merged"])
def test_a_case_of_sequences_or_parts_is_printed_as_a_program_that_runs(tools, calls):
    import fuzz as program

    for number in range(30):
        case = program.DRAW[calls](11, number)
        assert program.read_case(str(case)) == case
        exec(compile(case.snippet("output", "avx2", "told"), "snippet", "exec"), {})
    torch.set_num_threads(1)


def test_a_process_that_dies_is_found_and_shrunk():
    few = ("--cases", "20", "--max-found", "1", "--crash-tries", "4")
    done = fuzz("--capability", attn_ext.cpu_capability(), "--plant", "is_causal", *few)
    assert done.returncode == 1
    told = re.search(r"^==== .*: crash", done.stdout, re.M)
    assert told and "Fatal Python error: Aborted" in done.stdout, done.stdout
    case = re.search(r"^# (Case\(.*\))$", done.stdout, re.M)
    assert case and "('is_causal', True)" in case[1]


def test_what_is_found_is_printed_at_once_and_an_interrupt_says_what_was_tried():
    capability = attn_ext.cpu_capability()
    endless = ("--capability", capability, "--plant", "is_causal", "--no-shrink", "--max-found", "1000")
    command = [sys.executable, str(FUZZ / "fuzz.py"), *endless, "--seconds", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert next(line for line in process.stdout if line.startswith(f"==== {capability}, case 0/"))
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(rf"^{capability}: \d+ cases, [1-9]\d* mismatches, interrupted$", rest, re.M), rest


def test_a_case_is_printed_as_a_program_that_runs(tools):
    cases, _ = tools
    wanted = {"attn_mask": False, "sinks": False, "dropout_p": False, "layout": False}
    for number in range(200):
        case = cases.draw_case(11, number)
        seen = {"attn_mask": bool(case.mask), "sinks": bool(case.sinks), "layout": bool(case.layouts)}
        seen["dropout_p"] = "dropout_p" in case.features()
        if case.d and any(seen[n] and not wanted[n] for n in wanted):
            wanted = {n: wanted[n] or seen[n] for n in wanted}
            exec(compile(case.snippet("output", "avx2", "told"), "snippet", "exec"), {})
    assert all(wanted.values())
    torch.set_num_threads(1)
