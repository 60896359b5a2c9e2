"""KeyValueCache, and MultiHeadAttention that decodes with it: what attention without a cache gives."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

by_page = pytest.mark.parametrize("page", [None, 1, 5, 16], ids=lambda page: f"page {page}")
OPTIONS = {
    "plain": {},
    "window": {"window_left": 4},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "open": {"is_causal": False, "window_right": 1},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
# A prompt, a token, some tokens at once, a token.
STEPS = (9, 1, 4, 1)


def make(page=None, batch=3, dim=8, value_dim=6, dtype=None, **more) -> attn_ext.KeyValueCache:
    return attn_ext.KeyValueCache(batch, 20, 2, dim, value_dim, page_size=page, dtype=dtype, **more)


def rows(count, batch=3, dtype=torch.float32, device="cpu") -> list[Tensor]:
    """Query, key and value of so many new tokens."""
    shapes = (batch, 4, count, 8), (batch, 2, count, 8), (batch, 2, count, 6)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def state(cache) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in vars(cache).items() if isinstance(value, Tensor)}


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    as_bytes = ({name: t.contiguous().view(torch.uint8) for name, t in s.items()} for s in (before, after))
    first, second = as_bytes
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def stored_key(cache, sequence: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a sequence, (heads, keys, features), in float64."""
    table, length = cache.block_table[sequence, None], cache.lengths[sequence, None]
    return tuple(
        reference.gather_pages(pages, table, length, scale)[0].transpose(0, 1)
        for pages, scale in ((cache.key_pages, cache.key_scale), (cache.value_pages, cache.value_scale))
    )


class TestStepByStep:
    @pytest.mark.same_bits
    @by_page
    @by_options
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
    def test_the_bits_of_contiguous_keys(self, dtype, options, page, device):
        cache = make(page, dtype=dtype, device=device)
        keys, values = torch.empty(3, 2, 0, 8), torch.empty(3, 2, 0, 6)
        options = {"is_causal": True, **options}
        if "sinks" in options:
            options["sinks"] = options["sinks"].to(device, dtype)
        for count in STEPS:
            query, key, value = rows(count, dtype=dtype, device=device)
            cache.append(key, value)
            keys, values = torch.cat([keys.to(key), key], 2), torch.cat([values.to(value), value], 2)
            actual = cache.attend(query, enable_gqa=True, **options)
            for n in range(3):
                alone = (t[n, None] for t in (query, keys, values))
                expected = attn_ext.sdpa(
                    *alone, enable_gqa=True, query_offset=keys.shape[2] - count, **options
                )
                assert torch.equal(actual[n, None], expected)
        assert cache.lengths.tolist() == [sum(STEPS)] * 3

    @by_page
    @pytest.mark.parametrize(
        "stored", [torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16], ids=str
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_narrow_caches(self, dtype, stored, page, device):
        if dtype != torch.float32 and stored == torch.float16:
            pytest.skip("bfloat16 has no float16 cache")
        cache = make(page, dtype=stored, device=device)
        everything = []
        for count in STEPS:
            query, key, value = rows(count, dtype=dtype, device=device)
            key, value = key * 5, value * 0.01  # scales have to be the row's own
            cache.append(key, value)
            everything.append((key, value))
            actual = cache.attend(query, enable_gqa=True).double()
            for n in range(3):
                key, value = stored_key(cache, n)
                expected = reference.sdpa(
                    query[n].double(),
                    key,
                    value,
                    is_causal=True,
                    enable_gqa=True,
                    query_offset=key.shape[1] - count,
                )
                bound = (3e-5 if dtype == torch.float32 else 2e-2) * value.abs().max().item()
                torch.testing.assert_close(actual[n], expected, rtol=0, atol=bound)
        # A number is stored to within half a step of its row's largest, or half of its last bit.
        relative = {torch.float8_e4m3fn: 2**-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(stored, 0)
        for place, given in enumerate(zip(*everything, strict=True)):
            given = torch.cat(given, 2).double()
            got = torch.stack([stored_key(cache, n)[place] for n in range(3)])
            largest = given.abs().amax(-1, keepdim=True)
            bound = largest / 254 if stored == torch.int8 else relative * given.abs() + largest * 2**-17
            assert ((got - given).abs() <= bound * 1.0001).all()

    @by_page
    def test_sequences_of_their_own_lengths_in_any_order(self, page, device):
        cache = make(page, dtype=torch.float64, device=device)
        keys = [torch.empty(2, 0, 8), torch.empty(2, 0, 8), torch.empty(2, 0, 8)]
        values = [torch.empty(2, 0, 6), torch.empty(2, 0, 6), torch.empty(2, 0, 6)]
        for counts in ({2: 7, 0: 3}, {1: 1}, {0: 1, 1: 0, 2: 5}, {}, {1: 12, 0: 1}):
            query, key, value = (
                t[0].transpose(0, 1) for t in rows(sum(counts.values()), 1, torch.float64, device)
            )
            starts = torch.tensor([0, *counts.values()]).cumsum(0).to(device)
            sequences = torch.tensor([*counts], dtype=torch.int64, device=device)
            cache.append_packed(key, value, starts, sequences)
            output = cache.attend_packed(query, starts, sequences, enable_gqa=True)
            for (n, count), begin in zip(counts.items(), starts.tolist(), strict=False):
                part = slice(begin, begin + count)
                keys[n] = torch.cat([keys[n].to(key), key[part].transpose(0, 1)], 1)
                values[n] = torch.cat([values[n].to(key), value[part].transpose(0, 1)], 1)
                expected = reference.sdpa(
                    query[part].transpose(0, 1), keys[n], values[n],
                    is_causal=True, enable_gqa=True, query_offset=keys[n].shape[1] - count,
                )  # fmt: skip
                torch.testing.assert_close(output[part].transpose(0, 1), expected)
        assert cache.lengths.tolist() == [k.shape[1] for k in keys]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_offsets_and_sequences_of_either_integer(self, dtype):
        cache = make(5)
        _, key, value = (t[0].transpose(0, 1) for t in rows(5, 1))
        starts, sequences = torch.tensor([0, 2, 5], dtype=dtype), torch.tensor([2, 1], dtype=dtype)
        cache.append_packed(key, value, starts, sequences)
        assert cache.lengths.tolist() == [0, 3, 2]
        assert cache.attend_packed(torch.randn(5, 2, 8), starts, sequences).shape == (5, 2, 6)
        cache.reset(sequences)
        assert cache.lengths.tolist() == [0, 0, 0]

    def test_all_sequences_in_order_by_default(self):
        cache, other = make(5), make(5)
        query, key, value = rows(2)
        packed = [t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
        starts = torch.tensor([0, 2, 4, 6])
        cache.append(key, value)
        other.append_packed(*packed[1:], starts)
        assert same(state(cache), state(other))
        expected = cache.attend(query, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        assert torch.equal(other.attend_packed(packed[0], starts, enable_gqa=True), expected)
        assert torch.equal(
            cache.attend(query[:, :, :1], enable_gqa=True)[:, :, 0],
            cache.attend_packed(query[:, :, 0], None, enable_gqa=True),
        )


class TestNumbers:
    @pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("tiny", [0.0, 1e-44, 1e-39])
    def test_rows_of_zeros_and_of_next_to_nothing(self, tiny, stored):
        cache = make(dtype=stored)
        query, key, value = rows(3)
        key[0], value[0] = tiny, tiny
        key[1, :, :, ::2] = 0
        cache.append(key, value)
        output = cache.attend(query, enable_gqa=True)
        assert output.isfinite().all()
        assert output[0].abs().max() <= 1e-38
        assert output[1:].abs().min() > 0
        assert not stored_key(cache, 1)[0][..., ::2].any()

    @pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_nan_is_kept_and_seen_by_its_sequence_and_heads_alone(self, bad, stored):
        cache = make(5, dtype=stored)
        query, key, value = rows(6)
        value[1, 0, 4, 2] = bad
        cache.append(key, value)
        seen = ~cache.attend(query, enable_gqa=True).isfinite()
        assert seen[1, :2, 4:].any(-1).all()  # the query heads of key head 0, from that key on
        seen[1, :2, 4:] = False
        assert not seen.any()

    def test_a_cache_is_no_part_of_a_graph(self):
        for stored in (None, torch.int8):
            cache = make(dtype=stored)
            for _ in range(2):
                query, key, value = (t.requires_grad_() for t in rows(2))
                cache.append(key, value)
            assert not any(t.requires_grad for t in state(cache).values())
            with pytest.raises(RuntimeError, match="derivative for attn_ext::sdpa_paged is not implemented"):
                cache.attend(query, enable_gqa=True).sum().backward()


class TestPages:
    def test_freed_pages_are_used_again(self):
        cache = make(5, num_pages=4)  # of 12 that three sequences at full length need
        one = [t[0].transpose(0, 1) for t in rows(12, 1)]
        first, second = torch.tensor([0]), torch.tensor([2])
        all_rows = torch.tensor([0, 12])
        cache.append_packed(*one[1:], all_rows, first)
        assert cache.free_rows() == 5
        used = set(cache.block_table[0, :3].tolist())
        assert len(used) == 3
        cache.reset(first)
        assert (cache.free_rows(), cache.block_table.max()) == (20, -1)
        cache.append_packed(*one[1:], all_rows, second)
        assert used & set(cache.block_table[2, :3].tolist())
        fresh = make(5)
        fresh.append_packed(*one[1:], all_rows, second)
        actual, expected = (
            c.attend_packed(one[0], all_rows, second, enable_gqa=True) for c in (cache, fresh)
        )
        assert torch.equal(actual, expected)

    def test_no_page_belongs_to_two(self):
        cache, generator = make(3, batch=5, num_pages=12), torch.Generator().manual_seed(0)
        refused = 0
        for _ in range(300):
            n = torch.randint(5, (1,), generator=generator)
            count = int(torch.randint(1, 8, (1,), generator=generator))
            try:
                cache.append_packed(
                    torch.zeros(count, 2, 8), torch.zeros(count, 2, 6), torch.tensor([0, count]), n
                )
            except RuntimeError:
                refused += 1
                cache.reset(n)
            owned = cache.block_table[cache.block_table >= 0].tolist()
            free = cache.free_pages[: int(cache.free_count)].tolist()
            assert sorted(owned + free) == [*range(12)]
            assert ((cache.block_table >= 0).sum(1) == (cache.lengths + 2) // 3).all()
        assert 10 < refused < 200

    def test_reset_of_all(self):
        for page in (None, 5):
            cache = make(page)
            _, key, value = rows(20)
            cache.append(key, value)
            assert cache.free_rows() == 0
            cache.reset()
            assert cache.lengths.tolist() == [0, 0, 0]
            assert cache.free_rows() == (60 if page else 0)
            cache.append(key, value)

    @pytest.mark.parametrize("page", [None, 16])
    def test_memory(self, page):
        rows_there = 20 if page is None else 32
        assert make(page).nbytes() == 3 * rows_there * 2 * (8 + 6) * 4
        assert make(page, dtype=torch.int8).nbytes() == 3 * rows_there * 2 * (8 + 6 + 2 * 4)
        assert make(16, num_pages=1, dtype=torch.bfloat16).nbytes() == 16 * 2 * (8 + 6) * 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
    @by_page
    def test_a_heads_rows_of_a_page_lie_side_by_side(self, page, dtype):
        cache = make(page, dtype=dtype)
        cache.append(*rows(5)[1:])
        memory = [cache.key_pages, cache.value_pages, cache.key_scale, cache.value_scale]
        assert all(t.transpose(1, 2).is_contiguous() for t in memory if t is not None)

    def test_the_device(self, device):
        cache = make(5, dtype=torch.int8, device=device)
        tensors = state(cache)
        count = tensors.pop("free_count")  # read at every step
        assert count.device.type == "cpu"
        assert {t.device.type for t in tensors.values()} == {torch.device(device).type}
        assert make(device="meta").key_pages.is_meta

    def test_what_it_says_of_itself(self):
        cache = make(16, num_pages=4, dtype=torch.bfloat16)
        cache.append(*rows(5, dtype=torch.bfloat16)[1:])
        assert repr(cache) == (
            "KeyValueCache(3 sequences of at most 20 keys, 2 heads, 8 features, 4 pages of 16 rows, "
            "torch.bfloat16, 3584 bytes; 15 keys)"
        )
        assert "pages" not in repr(make())


def packed(count, heads=2, dtype=torch.float32) -> dict[str, Tensor]:
    return {"key": torch.randn(count, heads, 8).to(dtype), "value": torch.randn(count, heads, 6).to(dtype)}


REFUSED = {
    "too long": (packed(16), [0, 16], [0], r"at most 20 keys of a sequence \(max_length\), but got 21"),
    "no page": (packed(15), [0, 12, 15], [1, 2], r"expected 4 free pages of the cache, but got 2: reset\(\)"),
    "key heads": (packed(3, 3), [0, 3], [1], r"key of shape \(rows, heads, features\) with the heads"),
    "value": (
        {**packed(3), "value": torch.randn(3, 2, 8)},
        [0, 3],
        [1],
        r"value of shape \(rows, heads, feat",
    ),
    "value rows": (
        {**packed(3), "value": torch.randn(2, 2, 6)},
        [0, 3],
        [1],
        r"a row for each of the 3 slots",
    ),
    "integers": (packed(3, dtype=torch.int64), [0, 3], [1], r"floating"),
    "starts late": (
        packed(3),
        [1, 3],
        [1],
        r"cu_seqlens of 2 offsets that begin at 0.* 3 rows of key, but got \[1, 3\]",
    ),
    "starts fall": (packed(3), [0, 4, 3], [1, 2], r"never fall .* but got \[0, 4, 3\]"),
    "ends early": (packed(3), [0, 2], [1], r"but got \[0, 2\]"),
    "starts": (packed(3), [0, 3], [1, 2], r"cu_seqlens of 3 offsets"),
    "twice": (packed(4), [0, 2, 4], [1, 1], r"sequences of 0 to 2, each once, but got \[1, 1\]"),
    "not there": (packed(3), [0, 3], [3], r"sequences of 0 to 2, each once, but got \[3\]"),
    "negative": (packed(3), [0, 3], [-1], r"sequences of 0 to 2, each once, but got \[-1\]"),
}


class TestErrors:
    @pytest.mark.parametrize("stored", [None, torch.int8, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("new", "starts", "sequences", "message"), REFUSED.values(), ids=REFUSED)
    def test_what_is_refused_changes_nothing(self, new, starts, sequences, message, stored):
        cache = make(5, num_pages=4, dtype=stored)
        cache.append_packed(**packed(8), cu_seqlens=torch.tensor([0, 5, 8]), sequences=torch.tensor([0, 2]))
        before = state(cache)
        with pytest.raises(RuntimeError, match=message):
            cache.append_packed(**new, cu_seqlens=torch.tensor(starts), sequences=torch.tensor(sequences))
        assert same(before, state(cache))

    def test_too_long_in_one_piece(self):
        cache = make()
        cache.append(*rows(20)[1:])
        before = state(cache)
        with pytest.raises(RuntimeError, match=r"at most 20 keys .* but got 21"):
            cache.append(*rows(1)[1:])
        assert same(before, state(cache))

    @pytest.mark.parametrize(
        ("key", "value"), [((2, 2, 1, 8), (2, 2, 1, 6)), ((3, 2, 8), (3, 2, 6)), ((3, 2, 1, 8), (3, 2, 2, 6))]
    )
    def test_another_batch_or_shape(self, key, value):
        with pytest.raises(
            RuntimeError, match=r"key and value of shape .* with the 3 sequences .* but got \["
        ):
            make().append(torch.zeros(key), torch.zeros(value))

    def test_queries_of_another_batch(self):
        cache = make()
        cache.append(*rows(2)[1:])
        for shape in ((2, 2, 1, 8), (6, 2, 8)):
            with pytest.raises(RuntimeError, match=r"query of shape .* 3 sequences of the cache, but got \["):
                cache.attend(torch.zeros(shape))

    def test_a_dtype_that_the_cache_cannot_hold(self):
        with pytest.raises(RuntimeError, match="expected key_pages of the dtype of key"):
            make(dtype=torch.float32).append(*rows(1, dtype=torch.bfloat16)[1:])

    @pytest.mark.parametrize("sequences", [[0, 0], [3], [-1]])
    def test_reset_of_what_is_not_there(self, sequences):
        cache = make(5)
        cache.append(*rows(2)[1:])
        before = state(cache)
        with pytest.raises(RuntimeError, match="each once, but got"):
            cache.reset(torch.tensor(sequences))
        assert same(before, state(cache))

    @pytest.mark.parametrize(
        "name", ["batch_size", "max_length", "num_heads", "head_dim", "value_dim", "page_size"]
    )
    @pytest.mark.parametrize("size", [0, -1])
    def test_sizes(self, name, size):
        sizes = {"batch_size": 1, "max_length": 4, "num_heads": 2, "head_dim": 8, name: size}
        with pytest.raises(ValueError, match=f"sizes of a cache greater than 0, but got {size}"):
            attn_ext.KeyValueCache(**sizes)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float8_e5m2, torch.bool])
    def test_dtypes_that_no_cache_has(self, dtype):
        with pytest.raises(ValueError, match=f"float16, int8 or float8_e4m3fn, but got {dtype}"):
            make(dtype=dtype)

    def test_numbers_that_are_no_tensors_of_integers(self):
        cache = make(5)
        key = torch.randn(3, 2, 8)
        with pytest.raises(TypeError, match="expected sequences as a tensor of int64 or int32, but got list"):
            cache.reset([0])
        with pytest.raises(TypeError, match=r"expected sequences .*, but got torch\.bool"):
            cache.reset(torch.tensor([True, False, False]))
        with pytest.raises(TypeError, match=r"expected sequences as a tensor .*, but got list"):
            cache.attend_packed(key, None, [0, 1, 2])
        with pytest.raises(TypeError, match=r"expected cu_seqlens as a tensor .*, but got list"):
            cache.append_packed(key, key[..., :6], [0, 1, 2, 3])

    def test_number_of_pages(self):
        with pytest.raises(ValueError, match="num_pages greater than 0, but got 0"):
            make(5, num_pages=0)
        with pytest.raises(ValueError, match="a page_size with num_pages, but got num_pages=2 alone"):
            make(num_pages=2)


MODULES = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "apart": {"packed": False, "num_kv_heads": 1, "value_dim": 6},
    "window": {"window_left": 3, "softcap": 4.0},
    "sinks": {"sinks": True, "scale": 0.4},
    "no projection": {"out_proj": False, "head_dim": 6},
}


def cache_for(module, batch=2, **options):
    return attn_ext.KeyValueCache(
        batch, 32, module.num_kv_heads, module.head_dim, module.value_dim, **options
    )


def decode(module, x, cache, dim=1):
    """The output of a prompt, of single tokens, and of some at once."""
    with torch.no_grad():
        return torch.cat(
            [module(part, is_causal=True, cache=cache)[0] for part in x.split([6, 1, 1, 3], dim)], dim
        )


class TestModule:
    @by_page
    @pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
    def test_equals_the_module_without_a_cache(self, options, page, device):
        module = attn_ext.MultiHeadAttention(32, 4, **options).eval().to(device)
        x = torch.randn(2, 11, 32, device=device)
        cache = cache_for(module, page_size=page, device=device)
        torch.testing.assert_close(decode(module, x, cache), module(x, is_causal=True)[0].detach())
        assert cache.lengths.tolist() == [11, 11]

    @pytest.mark.parametrize(
        ("stored", "bound"),
        [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.int8, 4e-3), (torch.float8_e4m3fn, 3e-2)],
        ids=str,
    )
    def test_narrow_caches_come_near(self, stored, bound):
        module = attn_ext.MultiHeadAttention(32, 4).eval()
        x = torch.randn(2, 11, 32)
        actual, expected = decode(module, x, cache_for(module, dtype=stored)), module(x, is_causal=True)[0]
        assert 0 < (actual - expected).abs().max().item() < bound

    @pytest.mark.parametrize("batch_first", [True, False])
    def test_of_torch(self, batch_first):
        theirs = torch.nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
        ours = attn_ext.MultiHeadAttention.from_torch(theirs)
        x = torch.randn(2, 11, 32)
        mask = torch.ones(11, 11, dtype=torch.bool).triu(1)
        x = x if batch_first else x.transpose(0, 1)
        expected, _ = theirs(x, x, x, attn_mask=mask)
        actual = decode(ours, x, cache_for(ours), 1 if batch_first else 0)
        torch.testing.assert_close(actual, expected.detach())

    def test_other_keys_than_queries(self):
        """The query's last row stands at the last key."""
        module = attn_ext.MultiHeadAttention(32, 4, key_dim=12, value_in_dim=5).eval()
        cache, query = cache_for(module), torch.randn(2, 3, 32)
        key, value = torch.randn(2, 9, 12), torch.randn(2, 9, 5)
        with torch.no_grad():
            actual, weights = module(query, key, value, cache=cache)
            torch.testing.assert_close(actual, module(query, key, value)[0])
        assert weights is None

    @pytest.mark.parametrize("page", [None, 5])
    @pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
    def test_scripted(self, page, stored):
        module = attn_ext.MultiHeadAttention(32, 4, num_kv_heads=2, sinks=True).eval()
        scripted = torch.jit.script(module)
        x = torch.randn(2, 11, 32)
        caches = [cache_for(module, page_size=page, dtype=stored) for _ in range(2)]
        assert torch.equal(decode(scripted, x, caches[0]), decode(module, x, caches[1]))
        assert same(*map(state, caches))  # the caller's cache has been written to

    def test_scripted_loop(self):
        module = attn_ext.MultiHeadAttention(32, 4).eval()
        loop = torch.jit.script(Loop(module))
        prompt = torch.randn(2, 4, 32)
        with torch.no_grad():
            assert torch.equal(loop(prompt, 6), Loop(module)(prompt, 6))
            # Without a cache, from the start at each step.
            x = prompt
            for _ in range(6):
                x = torch.cat([x, module(x, is_causal=True)[0][:, -1:]], 1)
            torch.testing.assert_close(loop(prompt, 6), x)

    def test_without_gradients_of_its_own(self):
        module = attn_ext.MultiHeadAttention(32, 4)
        output, _ = module(torch.randn(2, 3, 32), cache=cache_for(module))
        with pytest.raises(RuntimeError, match="not implemented"):
            output.sum().backward()

    @pytest.mark.parametrize(
        "changes",
        [
            {"mask": torch.zeros(3, 3, dtype=torch.bool)},
            {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)},
            {"need_weights": True},
            {"query_offset": 1},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_what_a_cache_cannot_have(self, changes):
        module = attn_ext.MultiHeadAttention(32, 4).eval()
        cache = cache_for(module)
        with pytest.raises(RuntimeError, match="expected no mask, weights or query_offset with a cache"):
            module(torch.randn(2, 3, 32), cache=cache, **changes)
        assert not cache.lengths.any()

    def test_queries_that_are_no_batch_and_dropout(self):
        module = attn_ext.MultiHeadAttention(32, 4, dropout=0.1)
        cache = cache_for(module)
        with pytest.raises(RuntimeError, match=r"but got shape \[2, 3, 32\] and dropout 0.1"):
            module(torch.randn(2, 3, 32), cache=cache)
        module.eval()
        jagged = torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(3, 32)], layout=torch.jagged)
        for query, shape in ((torch.randn(3, 32), r"\[3, 32\]"), (jagged, "of a nested tensor")):
            with pytest.raises(RuntimeError, match=f"but got shape {shape} and dropout 0.0"):
                module(query, cache=cache)
        with pytest.raises(RuntimeError, match=r"with the 2 sequences of the cache, but got \[5, "):
            module(torch.randn(5, 3, 32), cache=cache)
        with pytest.raises(RuntimeError, match=r"key of shape .* with the heads and features of key_pages"):
            module(torch.randn(2, 3, 32), cache=attn_ext.KeyValueCache(2, 32, 3, 8))
        assert not cache.lengths.any()


class Loop(torch.nn.Module):
    """Feeds every output in as the next input; makes its cache itself."""

    def __init__(self, attention: attn_ext.MultiHeadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, prompt: Tensor, steps: int) -> Tensor:
        cache = attn_ext.KeyValueCache(prompt.size(0), 32, 4, 8, page_size=4)
        result, new = [prompt], prompt
        for _ in range(steps):
            output, _ = self.attention(new, is_causal=True, cache=cache)
            new = output[:, -1:]
            result.append(new)
        return torch.cat(result, 1)


def by_torch(cache, weights_only=False):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def by_torch_safely(cache):
    with torch.serialization.safe_globals([attn_ext.KeyValueCache]):
        return by_torch(cache, True)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch.save": by_torch,
    "weights_only": by_torch_safely,
}


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("copy_of", COPIES.values(), ids=COPIES)
def test_copies_go_on_by_themselves(copy_of, stored, request):
    if stored == torch.float8_e4m3fn and "pickle" in request.node.callspec.id:
        pytest.skip("torch's own tensors of float8 cannot be pickled, but for torch.save")
    cache = make(5, dtype=stored)
    cache.append(*rows(7)[1:])
    other, before = copy_of(cache), state(cache)
    assert same(before, state(other))
    query, key, value = rows(3)
    other.append(key, value)
    assert same(before, state(cache))
    cache.append(key, value)
    assert torch.equal(cache.attend(query, enable_gqa=True), other.attend(query, enable_gqa=True))
    assert repr(cache) == repr(other)
