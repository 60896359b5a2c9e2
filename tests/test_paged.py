"""Paged caches: the numbers of the reference, and the bits of contiguous keys."""

import math

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import reference
from attn_ext.testing import on_threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_page = pytest.mark.parametrize("page", [1, 3, 16, 24, 256])
# Query rows and keys of each sequence: decode, chunked prefill, a mix, the splits of the kernels, none.
LENGTHS = {
    "decode": [(1, 500), (1, 17), (1, 2), (1, 1300)],
    "prefill": [(40, 200), (130, 130), (20, 300), (24, 1200)],
    "mixed": [(1, 300), (16, 16), (0, 5), (33, 1100), (3, 0), (5, 2), (0, 0), (1, 1)],
    "none": [],
}
by_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
OPTIONS = {
    "causal": {},
    "open": {"is_causal": False},
    "window": {"window_left": 20, "softcap": 4.0, "scale": 0.5},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Cache:
    """Pages in random order, two of them to spare, and NaN in every row that no sequence has."""

    def __init__(self, lengths, page, dtype, heads=2, dims=(8, 6), device="cpu", stored=None):
        self.lengths = torch.tensor([keys for _, keys in lengths], dtype=torch.int32, device=device)
        needed = [-(-keys // page) for _, keys in lengths]
        count = sum(needed) + 2
        order = iter(torch.randperm(count).tolist())
        self.table = torch.full((len(lengths), max(needed, default=0) + 1), -1, dtype=torch.int32)
        for row, used in zip(self.table, needed, strict=True):
            row[:used] = torch.tensor([next(order) for _ in range(used)])
        self.table = self.table.to(device)
        self.key, self.value = (
            torch.randn(sum(k for _, k in lengths), heads, dim, device=device).to(dtype) for dim in dims
        )
        stored = dtype if stored is None else stored
        fill = 7 if stored == torch.int8 else math.nan
        self.pages = [torch.full((count, page, heads, dim), fill, device=device).to(stored) for dim in dims]
        self.page = page

    def slots(self) -> Tensor:
        slots = []
        for row, length in zip(self.table.long(), self.lengths.tolist(), strict=True):
            places = torch.arange(length, device=row.device)
            slots.append(row[places // self.page] * self.page + places % self.page)
        return torch.cat([*slots, torch.empty(0, dtype=torch.int64, device=self.table.device)])

    def write(self, **scales):
        attn_ext.cache_write_(*self.pages, self.key, self.value, self.slots(), **scales)
        return self


def queries(lengths, dtype, heads=4, dim=8, device="cpu", spare=0):
    rows = [rows for rows, _ in lengths]
    starts = torch.tensor([0, *rows]).cumsum(0).to(device)
    return torch.randn(sum(rows) + spare, heads, dim, device=device).to(dtype), starts


def ends_of(cache: Cache) -> Tensor:
    return torch.nn.functional.pad(cache.lengths.long().cumsum(0), (1, 0))


def check(actual, expected, dtype):
    for name, a, e in zip(("output", "lse"), actual, expected, strict=True):
        bound = TOLERANCE[dtype] * (1 + max([0.0, *e[e.isfinite()].abs().flatten().tolist()]))
        torch.testing.assert_close(
            a.double(),
            e,
            rtol=0,
            atol=bound,
            equal_nan=False,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )


@by_dtype
@by_page
@by_options
@by_lengths
def test_the_reference_and_the_bits_of_contiguous_keys(lengths, options, page, dtype, device):
    torch.manual_seed(0)
    cache = Cache(lengths, page, dtype, device=device).write()
    query, starts = queries(lengths, dtype, device=device, spare=2)
    sinks = torch.randn(4, device=device)
    arguments = (query, *cache.pages, cache.table, cache.lengths, starts)
    options = {"enable_gqa": True, "sinks": sinks.to(dtype), **options}
    actual = attn_ext.sdpa_paged_with_lse(*arguments, **options)
    check(actual, reference.sdpa_paged_with_lse(*arguments, **options), dtype)
    options = {"is_causal": True, **options}
    contiguous = attn_ext.sdpa_packed_with_lse(
        query, cache.key, cache.value, starts, ends_of(cache), **options
    )
    assert all(map(torch.equal, actual, contiguous))
    assert torch.equal(attn_ext.sdpa_paged(*arguments, **options), actual[0])


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.int8], ids=str)
def test_sinks_are_not_rounded(stored, device):
    cache = Cache([(1, 0)], 4, torch.bfloat16, stored=stored, device=device)
    query, starts = queries([(1, 0)], torch.bfloat16, device=device)
    sinks = torch.tensor([150.57, 0.1, -0.3, 1e-3], device=device)
    arguments = (query, *cache.pages, cache.table, cache.lengths, starts)
    for given in (sinks, sinks.bfloat16()):
        lse = attn_ext.sdpa_paged_with_lse(*arguments, enable_gqa=True, sinks=given)[1]
        torch.testing.assert_close(lse.flatten(), given.float(), rtol=1e-6, atol=0)


def test_without_starts_each_row_is_a_sequence(device):
    lengths = [(1, 40), (1, 3), (1, 0)]
    cache = Cache(lengths, 16, torch.float32, device=device).write()
    query, starts = queries(lengths, torch.float32, device=device)
    arguments = (query, *cache.pages, cache.table, cache.lengths)
    output = attn_ext.sdpa_paged(*arguments, enable_gqa=True)
    assert torch.equal(output, attn_ext.sdpa_paged(*arguments, starts, enable_gqa=True))
    assert not output[2].any()


@by_dtype
@pytest.mark.parametrize("page", [16, 5])
def test_pages_may_be_shared_and_of_any_strides(page, dtype, device):
    prefix, rows = 3 * page, [2, page + 1]
    lengths = torch.tensor([prefix + n for n in rows], device=device)
    table = torch.tensor([[4, 2, 0, 1, -1], [4, 2, 0, 5, 3]], device=device)
    # As (P, heads, page, dim), and every other of more pages.
    stored = [torch.randn(12, 2, page, dim, device=device).to(dtype) for dim in (8, 6)]
    pages = [t[::2].transpose(1, 2) for t in stored]
    query, starts = queries([(2, 0), (3, 0)], dtype, heads=2, device=device)
    actual = attn_ext.sdpa_paged_with_lse(query, *pages, table, lengths, starts)
    check(actual, reference.sdpa_paged_with_lse(query, *pages, table, lengths, starts), dtype)
    dense = attn_ext.sdpa_paged_with_lse(query, *(p.contiguous() for p in pages), table, lengths, starts)
    assert all(map(torch.equal, actual, dense))


def test_one_page_a_sequence_is_a_static_cache(device):
    caches = torch.randn(2, 3, 64, 2, 8, device=device)
    lengths = torch.tensor([64, 10, 33], device=device)
    query = torch.randn(3, 4, 8, device=device)
    table = torch.arange(3, device=device)[:, None]
    output = attn_ext.sdpa_paged(query, *caches, table, lengths, enable_gqa=True)
    mask = torch.arange(64, device=device) < lengths[:, None]
    padded = attn_ext.sdpa(
        query[:, :, None], *caches.transpose(2, 3), mask[:, None, None], enable_gqa=True
    )  # fmt: skip
    torch.testing.assert_close(output, padded[:, :, 0])


STORED = [torch.int8, torch.float8_e4m3fn]


def scale_of(kind, cache, device):
    if kind == "one":
        return torch.tensor(0.05, device=device)
    if kind == "head":
        return torch.tensor([0.05, 0.08], device=device)
    return torch.rand(*cache.pages[0].shape[:3], 1, device=device) * 0.03 + 0.05


@by_dtype
@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("kind", ["one", "head", "row"])
@pytest.mark.parametrize("page", [3, 16, 256])
def test_narrow_caches_with_scales(kind, page, stored, dtype, device):
    lengths = LENGTHS["mixed"] + LENGTHS["decode"] + [(40, 1100)]
    cache = Cache(lengths, page, dtype, stored=stored, device=device)
    scales = {"key_scale": scale_of(kind, cache, device), "value_scale": scale_of(kind, cache, device)}
    cache.write(**scales)
    query, starts = queries(lengths, dtype, device=device)
    arguments = (query, *cache.pages, cache.table, cache.lengths, starts)
    actual = attn_ext.sdpa_paged_with_lse(*arguments, enable_gqa=True, **scales)
    expected = reference.sdpa_paged_with_lse(*arguments, enable_gqa=True, **scales)
    check(actual, expected, dtype)
    # A number is stored to within half a step, or half of the last of three bits.
    key_rows = reference.gather_pages(cache.pages[0], cache.table, cache.lengths, scales["key_scale"])
    stored_key, step = torch.cat(key_rows), scales["key_scale"].max().item()
    bound = 0.5 * step if stored == torch.int8 else stored_key.abs() / 16 + step / 512
    assert ((stored_key - cache.key.double()).abs() <= bound * 1.001 + 1e-6).all()
    # The bits of the same numbers in pages of another size.
    other = Cache(lengths, 7, dtype, stored=stored, device=device)
    if kind != "row":
        other.key, other.value = cache.key, cache.value
        other.write(**scales)
        again = attn_ext.sdpa_paged_with_lse(
            query, *other.pages, other.table, other.lengths, starts, enable_gqa=True, **scales
        )
        assert all(map(torch.equal, actual, again))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_half_caches_under_wider_queries(stored, dtype, device):
    lengths = LENGTHS["mixed"] + LENGTHS["prefill"]
    cache = Cache(lengths, 16, dtype, stored=stored, device=device).write()
    query, starts = queries(lengths, dtype, device=device)
    actual = attn_ext.sdpa_paged_with_lse(
        query, *cache.pages, cache.table, cache.lengths, starts, enable_gqa=True
    )
    exact = [t.to(stored).to(dtype) for t in (cache.key, cache.value)]
    contiguous = attn_ext.sdpa_packed_with_lse(
        query, *exact, starts, ends_of(cache), is_causal=True, enable_gqa=True
    )
    assert all(map(torch.equal, actual, contiguous))


def every_code() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@by_dtype
def test_every_float8_is_read_as_torch_reads_it(dtype, device):
    codes = every_code().to(device).reshape(1, 256, 1, 1)
    table, length = torch.zeros(256, 1, dtype=torch.int64, device=device), torch.ones(256, device=device)
    # One key a sequence: the output is its value.
    pages = codes.reshape(256, 1, 1, 1)
    table = torch.arange(256, device=device)[:, None]
    query = torch.zeros(256, 1, 1, device=device, dtype=dtype)
    output = attn_ext.sdpa_paged(query, torch.zeros_like(pages), pages, table, length.int())
    torch.testing.assert_close(
        output.flatten(), codes.flatten().to(torch.float32).to(dtype), rtol=0, atol=0, equal_nan=True
    )


@by_dtype
def test_nan_shows_where_it_is_seen_alone(dtype, device):
    lengths = [(1, 40), (20, 40), (1, 40)]
    cache = Cache(lengths, 16, dtype, device=device).write()
    cache.pages[1][cache.table[1, 1], 3] = math.nan  # key 19 of the second sequence
    cache.pages[0][cache.table[2, 0], 0] = math.nan
    query, starts = queries(lengths, dtype, device=device)
    output = attn_ext.sdpa_paged(
        query, *cache.pages, cache.table, cache.lengths, starts, enable_gqa=True, window_left=10
    )
    nan = output.isnan().flatten(1).any(1)
    # Row i of 20 stands at key 20 + i and sees the ten before it: key 19 by rows 0 to 9.
    assert nan[1:11].all()
    assert not nan[11:].any()
    assert not nan[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    torch.manual_seed(0)
    lengths = LENGTHS["mixed"] + LENGTHS["prefill"]
    cache = Cache(lengths, 16, torch.bfloat16).write()
    query, starts = queries(lengths, torch.bfloat16)

    def run():
        return attn_ext.sdpa_paged(query, *cache.pages, cache.table, cache.lengths, starts, enable_gqa=True)

    assert torch.equal(run(), on_threads(threads, run))


@by_dtype
def test_write_puts_rows_in_their_slots_and_nowhere_else(dtype, device):
    pages = [torch.full((3, 4, 2, dim), 9.0, device=device).to(dtype) for dim in (5, 3)]
    key, value = (torch.randn(4, 2, dim, device=device).to(dtype) for dim in (5, 3))
    slots = torch.tensor([11, -1, 0, 5], dtype=torch.int32, device=device)
    expected = [p.clone() for p in pages]
    for tensor, rows in zip(expected, (key, value), strict=True):
        tensor[2, 3], tensor[0, 0], tensor[1, 1] = rows[0], rows[2], rows[3]
    versions = [p._version for p in pages]
    assert attn_ext.cache_write_(*pages, key, value, slots) is None
    assert all(map(torch.equal, pages, expected))
    assert all(p._version > v for p, v in zip(pages, versions, strict=True))


@pytest.mark.parametrize("kind", ["none", "one", "head", "row"])
@pytest.mark.parametrize("stored", [torch.bfloat16, *STORED], ids=str)
def test_write_on_devices_without_a_kernel_of_its_own(stored, kind):
    """The composition, which they dispatch to, on the CPU's tensors: the same bits, slots of none and all."""
    caches = [Cache([(1, 20), (1, 3)], 4, torch.float32, stored=stored) for _ in range(2)]
    first, other = caches
    other.pages = [p.clone() for p in first.pages]
    scale = {} if kind == "none" else {n: scale_of(kind, first, "cpu") for n in ("key_scale", "value_scale")}
    slots = first.slots()
    slots[[2, 7]] = -1
    attn_ext.cache_write_(*first.pages, first.key, first.value, slots, **scale)
    other_device = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    composed = torch.ops.attn_ext.cache_write_.default.redispatch
    composed(other_device, *other.pages, first.key, first.value, slots, **scale)
    for a, b in zip(first.pages, other.pages, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_write_keeps_numbers_within_the_type(device):
    key = torch.tensor([[[1e9, -1e9, math.nan, 0.6]]], device=device)
    for stored, expected in (
        (torch.int8, [127.0, -127.0, 0.0, 1.0]),
        (torch.float8_e4m3fn, [448.0, -448.0, math.nan, 0.625]),
    ):
        pages = torch.zeros(1, 1, 1, 4, device=device).to(stored)
        attn_ext.cache_write_(pages, pages.clone(), key, key, torch.tensor([0], device=device))
        torch.testing.assert_close(
            pages.float().flatten(), torch.tensor(expected, device=device), equal_nan=True
        )


def small():
    cache = Cache([(1, 3), (2, 5)], 2, torch.float32).write()
    query, starts = queries([(1, 3), (2, 5)], torch.float32)
    return (query, *cache.pages, cache.table, cache.lengths, starts), cache


@pytest.mark.parametrize("test", ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"])
def test_opcheck(test):
    arguments, cache = small()
    for name in ("sdpa_paged", "sdpa_paged_with_lse"):
        torch.library.opcheck(
            getattr(torch.ops.attn_ext, name).default, arguments, {"enable_gqa": True}, test_utils=test
        )
    torch.library.opcheck(
        torch.ops.attn_ext.cache_write_.default,
        (*cache.pages, cache.key, cache.value, cache.slots()),
        test_utils=test,
    )


def test_there_is_no_gradient_and_backward_says_so():
    arguments, _ = small()
    query = arguments[0].requires_grad_()
    output = attn_ext.sdpa_paged(query, *arguments[1:], enable_gqa=True)
    with pytest.raises(RuntimeError, match="derivative for attn_ext::sdpa_paged is not implemented"):
        output.sum().backward()


def test_torchscript():
    arguments, _ = small()
    scripted = torch.jit.script(attn_ext.sdpa_paged)
    assert torch.equal(
        scripted(*arguments, enable_gqa=True), attn_ext.sdpa_paged(*arguments, enable_gqa=True)
    )


@pytest.mark.slow
def test_compiled_decoding_step():
    def step(query, key, value, key_pages, value_pages, slots, table, lengths):
        attn_ext.cache_write_(key_pages, value_pages, key, value, slots)
        return attn_ext.sdpa_paged(query, key_pages, value_pages, table, lengths)

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    table = torch.arange(8).reshape(2, 4)
    pages = [[torch.zeros(8, 4, 2, 8) for _ in range(2)] for _ in range(2)]
    for length in range(1, 4):
        query, key, value = torch.randn(3, 2, 2, 8)
        slots = table[:, (length - 1) // 4] * 4 + (length - 1) % 4
        lengths = torch.full((2,), length)
        results = [
            f(query, key, value, *p, slots, table, lengths)
            for f, p in zip((compiled, step), pages, strict=True)
        ]
        torch.testing.assert_close(*results)
    assert torch.equal(pages[0][0], pages[1][0])


def call(**changes):
    options = {
        "query": torch.randn(2, 4, 8),
        "key_pages": torch.randn(3, 4, 2, 8),
        "value_pages": torch.randn(3, 4, 2, 6),
        "block_table": torch.tensor([[0, 1], [2, -1]]),
        "seqlens_k": torch.tensor([7, 4]),
        "enable_gqa": True,
    }
    return attn_ext.sdpa_paged(**options | changes)


BAD = {
    "page_out_of_range": (
        {"block_table": torch.tensor([[0, 3], [2, -1]])},
        r"row 0 of block_table to be pages, 0 to 2, but got 3 at place 1",
    ),
    "page_missing": (
        {"seqlens_k": torch.tensor([7, 5])},
        r"row 1 of block_table to be pages, .* but got -1 at place 1",
    ),
    "too_long": (
        {"seqlens_k": torch.tensor([9, 4])},
        r"seqlens_k between 0 and what the 2 pages .*\(8\), but got 9 for sequence 0",
    ),
    "negative": ({"seqlens_k": torch.tensor([-1, 4])}, r"seqlens_k between 0 .* got -1"),
    "lengths_count": (
        {"seqlens_k": torch.tensor([7])},
        r"seqlens_k to have 2 elements, as block_table has rows, but got 1",
    ),
    "lengths_dtype": (
        {"seqlens_k": torch.tensor([7.0, 4.0])},
        r"seqlens_k of dtype Int or Long, but got Float",
    ),
    "table_dims": (
        {"block_table": torch.tensor([0, 1])},
        r"block_table of shape \(sequences, pages of a sequence\), but got shape \[2\]",
    ),
    "rows_without_starts": (
        {"query": torch.randn(3, 4, 8)},
        r"a row for each of the 2 sequences of block_table, or cu_seqlens_q",
    ),
    "starts_count": (
        {"cu_seqlens_q": torch.tensor([0, 2])},
        r"cu_seqlens_q to have 3 elements, one more than block_table has rows, but got 2",
    ),
    "starts_fall": (
        {"cu_seqlens_q": torch.tensor([0, 2, 1])},
        r"cu_seqlens_q to begin at 0 or later, never to fall.*got 2 and 1",
    ),
    "starts_late": (
        {"cu_seqlens_q": torch.tensor([0, 1, 3])},
        r"within the 2 rows of query, but got 1 and 3",
    ),
    "pages_dims": (
        {"key_pages": torch.randn(3, 4, 8)},
        r"key_pages of shape \(pages, rows of a page, heads, features\)",
    ),
    "pages_differ": (
        {"value_pages": torch.randn(3, 5, 2, 6)},
        r"value_pages to have the pages, rows and heads of key_pages",
    ),
    "pages_dtype": (
        {"key_pages": torch.randn(3, 4, 2, 8).double()},
        r"key_pages of the dtype of query \(Float\).* but got Double",
    ),
    "last_dim": (
        {"key_pages": torch.randn(3, 4, 8, 2).transpose(2, 3)},
        r"key_pages with a contiguous last dimension",
    ),
    "scale_shape": (
        {"key_scale": torch.ones(3)},
        r"key_scale of shape \(\), \(heads,\) = \[2\] or .* but got shape \[3\]",
    ),
    "scale_dtype": ({"value_scale": torch.ones(2).double()}, r"value_scale of dtype Float, but got Double"),
    "heads": ({"enable_gqa": False}, r"heads"),
    "head_dim": ({"query": torch.randn(2, 4, 7)}, r"head dim|size"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(changes, message):
    call()
    with pytest.raises(RuntimeError, match=message):
        call(**changes)


BAD_WRITES = {
    "slot_late": (
        {"slot_mapping": torch.tensor([0, 12])},
        r"slots below the 12 of the cache, or -1 .* but got 12 at place 1",
    ),
    "slot_negative": ({"slot_mapping": torch.tensor([-2, 0])}, r"but got -2 at place 0"),
    "slots_count": (
        {"slot_mapping": torch.tensor([0])},
        r"a row for each of the 1 slots of slot_mapping, but got 2",
    ),
    "slots_dtype": ({"slot_mapping": torch.tensor([0.0, 1.0])}, r"slot_mapping of dtype Int or Long"),
    "heads": (
        {"key": torch.randn(2, 3, 8)},
        r"key of shape \(rows, heads, features\) with the heads and features of key_pages",
    ),
    "overlap": ({"key_pages": torch.randn(3, 4, 1, 8).expand(3, 4, 2, 8)}, r"single memory location"),
    "scale": ({"key_scale": torch.ones(1, 1, 2, 1)}, r"key_scale of shape"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_WRITES.values(), ids=BAD_WRITES)
def test_bad_writes_change_nothing(changes, message):
    options = {
        "key_pages": torch.zeros(3, 4, 2, 8),
        "value_pages": torch.zeros(3, 4, 2, 6),
        "key": torch.randn(2, 2, 8),
        "value": torch.randn(2, 2, 6),
        "slot_mapping": torch.tensor([0, 5]),
    }
    options |= changes
    with pytest.raises(RuntimeError, match=message):
        attn_ext.cache_write_(**options)
    assert not options["value_pages"].any()


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "name", ["key_pages", "value_pages", "block_table", "seqlens_k", "query", "key_scale"]
)
def test_freed_memory_is_refused(name):
    changes = {
        "key_pages": torch.randn(3, 4, 2, 8),
        "value_pages": torch.randn(3, 4, 2, 6),
        "block_table": torch.tensor([[0, 1], [2, -1]]),
        "seqlens_k": torch.tensor([7, 4]),
        "query": torch.randn(2, 4, 8),
        "key_scale": torch.ones(2),
    }
    with pytest.raises(RuntimeError, match="was its memory freed"):
        call(**{name: freed(changes[name])})


@pytest.mark.parametrize("name", ["key", "value", "slot_mapping", "key_pages"])
def test_freed_memory_is_not_written(name):
    options = {
        "key_pages": torch.zeros(3, 4, 2, 8),
        "value_pages": torch.zeros(3, 4, 2, 6),
        "key": torch.randn(2, 2, 8),
        "value": torch.randn(2, 2, 6),
        "slot_mapping": torch.tensor([0, 5]),
    }
    freed(options[name])
    with pytest.raises(RuntimeError, match="was its memory freed"):
        attn_ext.cache_write_(**options)


def test_a_scale_of_zero_stores_zero(device):
    for stored in STORED:
        pages = torch.ones(1, 2, 1, 4, device=device).to(stored)
        key = torch.zeros(1, 1, 4, device=device)
        scale = torch.zeros(1, device=device)
        slots = torch.tensor([1], device=device)
        attn_ext.cache_write_(pages, pages.clone(), key, key, slots, scale, scale)
        assert not pages[0, 1].float().any()
