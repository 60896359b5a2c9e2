"""flash-attn's functions, against a softmax in float64 and the published meaning of their arguments."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attn_ext.integrations import flash_attn as fa

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "causal_window": {"causal": True, "window_size": (4, -1)},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.6},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]), "causal": True},
    "alibi_of_batches": {"alibi_slopes": torch.rand(2, 4)},
}


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of (B, L, H, D), in float64: the output and the log-sum-exp."""
    rows, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)  # j less i's place
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().reshape(-1, heads, 1, 1) * distance.abs()
    hidden = (distance > 0) if causal else torch.zeros(rows, keys, dtype=torch.bool)
    hidden = hidden | (distance < -window_size[0] if window_size[0] >= 0 else False)
    hidden = hidden | (distance > window_size[1] if window_size[1] >= 0 else False)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num()
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 9), (9, 3), (1, 40)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_dense_function(lengths, options, dtype):
    rows, keys = lengths
    q, k, v = (
        torch.randn(2, n, h, 8).to(dtype).requires_grad_() for n, h in ((rows, 4), (keys, 2), (keys, 2))
    )
    output, lse, none = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected, expected_lse = formula(q, k, v, **options)
    assert none is None
    close = {"rtol": 0, "atol": 1e-6 if dtype == torch.float64 else 3e-2}
    torch.testing.assert_close(output.double(), expected, **close)
    torch.testing.assert_close(lse.double(), expected_lse, **close)
    assert torch.equal(fa.flash_attn_func(q, k, v, **options), output)
    if dtype == torch.float64:
        for a, e in zip(
            *(torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (output, expected)), strict=True
        ):
            torch.testing.assert_close(a, e, **close)


@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if "alibi_slopes" not in o], ids=str)
def test_the_function_of_sequences(options):
    lengths = [(3, 5), (7, 7), (0, 2), (1, 30)]
    starts = [torch.tensor([0, *(pair[s] for pair in lengths)]).cumsum(0).int() for s in (0, 1)]
    q, k, v = (
        torch.randn(int(starts[s][-1]), h, 8, dtype=torch.float64) for s, h in ((0, 4), (1, 2), (1, 2))
    )
    output, lse, none = fa.flash_attn_varlen_func(
        q, k, v, *starts, 7, 30, 0.0, return_attn_probs=True, **options
    )
    assert none is None
    for (a, b), (c, d) in zip(*map(pairwise, starts), strict=True):
        expected, expected_lse = formula(q[None, a:b], k[None, c:d], v[None, c:d], **options)
        torch.testing.assert_close(output[a:b], expected[0])
        torch.testing.assert_close(lse[:, a:b], expected_lse[0])


def test_packed_projections():
    qkv = torch.randn(2, 6, 3, 4, 8)
    q, k, v = qkv.unbind(2)
    expected = fa.flash_attn_func(q, k, v, 0.0, None, True)
    assert torch.equal(fa.flash_attn_qkvpacked_func(qkv, 0.0, None, True), expected)
    assert torch.equal(fa.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    starts = torch.tensor([0, 6, 12])
    rows = qkv.flatten(0, 1)
    actual = fa.flash_attn_varlen_qkvpacked_func(rows, starts, 6, causal=True)
    assert torch.equal(actual, expected.flatten(0, 1))
    actual = fa.flash_attn_varlen_kvpacked_func(rows[:, 0], rows[:, 1:], starts, starts, 6, 6, causal=True)
    assert torch.equal(actual, expected.flatten(0, 1))


def test_dropout_acts_and_scales():
    q, k, v = torch.randn(1, 8, 2, 4), torch.randn(1, 500, 2, 4), torch.ones(1, 500, 2, 4)
    torch.manual_seed(0)
    output = fa.flash_attn_func(q, k, v, dropout_p=0.5)
    assert not torch.equal(output, fa.flash_attn_func(q, k, v))
    assert abs(float(output.mean()) - 1) < 0.1


def test_what_is_not_there_is_said():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="expected dropout_p=0, or attn_ext"):
        fa.flash_attn_func(q, q, q, dropout_p=0.1, return_attn_probs=True)
    starts = torch.tensor([0, 4])
    with pytest.raises(NotImplementedError, match="expected no alibi_slopes"):
        fa.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 4, 4, alibi_slopes=torch.zeros(2))


def pages_of(rows: Tensor, lengths: list[int], page: int) -> tuple[Tensor, Tensor]:
    """(B, L, heads, D) in pages of a pool in random order, and the table; NaN where nothing is."""
    most = -(-rows.shape[1] // page)
    order = torch.randperm(rows.shape[0] * most + 3)[: rows.shape[0] * most].reshape(-1, most)
    pool = torch.full((rows.shape[0] * most + 3, page, *rows.shape[2:]), math.nan, dtype=rows.dtype)
    for n, length in enumerate(lengths):
        for j in range(length):
            pool[order[n, j // page], j % page] = rows[n, j]
    return pool, order.int()


PLAIN = [o for o in OPTIONS.values() if "alibi_slopes" not in o]


@pytest.mark.parametrize("options", PLAIN, ids=str)
@pytest.mark.parametrize("page", [3, 16])
def test_the_function_of_sequences_over_pages(options, page):
    lengths = [(3, 5), (7, 7), (0, 2), (1, 30)]
    starts = [torch.tensor([0, *(pair[s] for pair in lengths)]).cumsum(0).int() for s in (0, 1)]
    q = torch.randn(11, 4, 8, dtype=torch.float64)
    k, v = torch.randn(4, 30, 2, 8, dtype=torch.float64), torch.randn(4, 30, 2, 6, dtype=torch.float64)
    torch.manual_seed(1)
    key_pages, table = pages_of(k, [keys for _, keys in lengths], page)
    torch.manual_seed(1)
    value_pages, _ = pages_of(v, [keys for _, keys in lengths], page)
    arguments = (q, key_pages, value_pages, *starts, 7, 30)
    output, lse, none = fa.flash_attn_varlen_func(
        *arguments, block_table=table, return_attn_probs=True, **options
    )
    assert none is None
    for n, (a, b) in enumerate(pairwise(starts[0])):
        expected = formula(q[None, a:b], k[n, None, : lengths[n][1]], v[n, None, : lengths[n][1]], **options)
        torch.testing.assert_close(output[a:b], expected[0][0])
        torch.testing.assert_close(lse[:, a:b], expected[1][0])
    assert torch.equal(fa.flash_attn_varlen_func(*arguments, block_table=table, **options), output)


def test_pages_are_for_inference():
    q, pages = torch.randn(2, 1, 8), torch.randn(1, 4, 1, 8)
    starts, table = torch.tensor([0, 2]), torch.tensor([[0]])

    def call(q, **more):
        return fa.flash_attn_varlen_func(q, pages, pages, starts, starts, 2, 2, block_table=table, **more)

    expected = call(q)
    for arguments in ({"q": q, "dropout_p": 0.1}, {"q": q.clone().requires_grad_()}):
        with pytest.raises(NotImplementedError, match="expected no block_table where a gradient or dropout"):
            call(**arguments)
    with torch.no_grad():
        assert torch.equal(call(q.clone().requires_grad_()), expected)


def rotated(x: Tensor, places: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Features of (B, L, heads, D) at places (B, L), a pair of features at a time."""
    x, result = x.double(), x.double().clone()
    half = cos.shape[1]
    for pair in range(half):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = (table[places, pair].double().unsqueeze(-1) for table in (cos, sin))
        result[..., i], result[..., j] = x[..., i] * c - x[..., j] * s, x[..., i] * s + x[..., j] * c
    return result


class TestCache:
    """Three sequences with 5, 0 and 17 keys before, in a cache of 24 rows."""

    BEFORE = [5, 0, 17]

    def make(self, new: int, rows: int, dtype=torch.float64) -> dict[str, Tensor]:
        shapes = {
            "q": (3, rows, 4, 8),
            "k_cache": (3, 24, 2, 8),
            "v_cache": (3, 24, 2, 6),
            "k": (3, new, 2, 8),
            "v": (3, new, 2, 6),
        }
        made = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
        return made | {"cache_seqlens": torch.tensor(self.BEFORE, dtype=torch.int32)}

    def expect(self, given: dict[str, Tensor], left=(0, 0, 0), **options):
        """Outputs and log-sum-exps of each sequence by itself, with keys and values in one piece."""
        results = []
        for n, length in enumerate(given["cache_seqlens"].tolist()):
            key, value = (
                torch.cat([given[cache][n, left[n] : length], given[new][n]])[None]
                for cache, new in (("k_cache", "k"), ("v_cache", "v"))
            )
            results.append(formula(given["q"][n, None], key, value, **options))
        return tuple(map(torch.cat, zip(*results, strict=True)))

    def check(self, actual, expected, dtype=torch.float64):
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=0, atol=1e-6 if dtype == torch.float64 else 3e-2)

    @pytest.mark.parametrize("options", PLAIN, ids=str)
    @pytest.mark.parametrize(("new", "rows"), [(1, 1), (3, 3), (4, 2), (2, 5), (0, 3)])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_new_rows_are_written_and_seen(self, options, new, rows, dtype):
        given = self.make(new, rows, dtype)
        expected = self.expect(given, **options)
        caches = [given[name].clone() for name in ("k_cache", "v_cache")]
        for cache, name in zip(caches, ("k", "v"), strict=True):
            for n, length in enumerate(self.BEFORE):
                cache[n, length : length + new] = given[name][n]
        output, lse = fa.flash_attn_with_kvcache(**given, return_softmax_lse=True, **options)
        self.check((output, lse), expected, dtype)
        assert torch.equal(given["k_cache"], caches[0])
        assert torch.equal(given["v_cache"], caches[1])
        # The same again, now that they are in the cache.
        del given["k"], given["v"]
        given["cache_seqlens"] += new
        assert torch.equal(fa.flash_attn_with_kvcache(**given, num_splits=3, **options), output)

    @pytest.mark.parametrize("page", [1, 5, 24, 256])
    def test_pages(self, page):
        given = self.make(3, 3)
        expected = self.expect(given, causal=True)
        lengths = [length + 3 for length in self.BEFORE]
        tables = []
        for name in ("k_cache", "v_cache"):
            torch.manual_seed(2)
            given[name], table = pages_of(given[name], lengths, page)
            tables.append(table)
        actual = fa.flash_attn_with_kvcache(
            **given, block_table=tables[0], causal=True, return_softmax_lse=True
        )
        self.check(actual, expected)

    def test_rows_of_the_cache_by_index(self):
        given = self.make(2, 2)
        expected = self.expect(given, causal=True)
        order, larger = torch.tensor([4, 0, 2], dtype=torch.int32), {}
        for name in ("k_cache", "v_cache"):
            larger[name] = torch.full((5, *given[name].shape[1:]), math.nan, dtype=torch.float64)
            larger[name][order.long()] = given[name]
        actual = fa.flash_attn_with_kvcache(
            **given | larger, cache_batch_idx=order, causal=True, return_softmax_lse=True
        )
        self.check(actual, expected)
        assert torch.equal(larger["k_cache"][4, 5:7], given["k"][0])
        assert larger["k_cache"][[1, 3]].isnan().all()

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (2, 0)}, {}], ids=str)
    def test_padding_on_the_left(self, options, transposed):
        given, left = self.make(2, 2), (3, 0, 16)
        for n, count in enumerate(left):
            given["k_cache"][n, :count] = math.nan
        expected = self.expect(given, left, **options)
        if transposed:  # in memory (B, heads, L, D)
            for name in ("k_cache", "v_cache"):
                given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
        actual = fa.flash_attn_with_kvcache(
            **given, cache_leftpad=torch.tensor(left, dtype=torch.int32), return_softmax_lse=True, **options
        )
        self.check(actual, expected)
        assert torch.equal(given["v_cache"][2, 17:19], given["v"][2])

    @pytest.mark.parametrize("interleaved", [True, False])
    @pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (9, -1)}, {}], ids=str)
    @pytest.mark.parametrize("half", [4, 2])
    @pytest.mark.parametrize("left", [None, (3, 0, 16)])
    def test_rotary_embedding(self, left, half, options, interleaved):
        given = self.make(3, 3)
        angles = torch.arange(24)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])[:half]
        cos, sin = angles.cos(), angles.sin()
        places = torch.tensor(self.BEFORE)[:, None] + torch.arange(3)
        of_query = places if options else places[:, :1].expand(-1, 3)
        turned = {
            "k": rotated(given["k"], places, cos, sin, interleaved),
            "q": rotated(given["q"], of_query, cos, sin, interleaved),
        }
        expected = self.expect(given | turned, (0, 0, 0) if left is None else left, **options)
        actual = fa.flash_attn_with_kvcache(
            **given, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, return_softmax_lse=True,
            cache_leftpad=None if left is None else torch.tensor(left), **options,
        )  # fmt: skip
        self.check(actual, expected)
        torch.testing.assert_close(given["k_cache"][2, 17:20], turned["k"][2], rtol=0, atol=1e-6)
        assert torch.equal(given["v_cache"][2, 17:20], given["v"][2])

    def test_one_length_for_all_and_none(self):
        given = self.make(1, 1)
        given["cache_seqlens"] = torch.full((3,), 7)
        expected = fa.flash_attn_with_kvcache(**given)
        assert torch.equal(fa.flash_attn_with_kvcache(**given | {"cache_seqlens": 7}), expected)
        del given["k"], given["v"], given["cache_seqlens"]
        whole = fa.flash_attn_with_kvcache(**given)
        self.check([whole], formula(given["q"], given["k_cache"], given["v_cache"])[:1])

    def test_narrow_caches(self):
        given = self.make(2, 2, torch.float32)
        for name in ("k_cache", "v_cache"):
            given[name] = given[name].bfloat16()
        exact = given | {name: t.bfloat16() for name, t in given.items() if name in "kv"}
        self.check(
            fa.flash_attn_with_kvcache(**given, causal=True, return_softmax_lse=True),
            self.expect(exact, causal=True), torch.bfloat16,
        )  # fmt: skip

    REFUSED = {
        "alibi": ({"alibi_slopes": torch.ones(4)}, NotImplementedError, "expected no alibi_slopes"),
        "k alone": ({"v": None}, ValueError, "both k and v or neither"),
        "no lengths": ({"cache_seqlens": None}, ValueError, "and cache_seqlens with them"),
        "cos alone": ({"rotary_cos": torch.ones(24, 4)}, ValueError, "both rotary_cos and rotary_sin"),
        "rotary alone": (
            {"rotary_cos": torch.ones(24, 4), "rotary_sin": torch.ones(24, 4), "k": None, "v": None},
            ValueError, "and k with them",
        ),
        "short rotary": (
            {"rotary_cos": torch.ones(18, 4), "rotary_sin": torch.ones(18, 4)},
            RuntimeError, "at least 19 rows, but got 18",
        ),
        "index and table": (
            {"cache_batch_idx": torch.arange(3), "block_table": torch.arange(3)[:, None]},
            ValueError, "no cache_batch_idx with a block_table",
        ),
        "left and table": (
            {"cache_leftpad": torch.zeros(3), "block_table": torch.arange(3)[:, None]},
            ValueError, "no cache_leftpad with a block_table",
        ),
        "left": ({"cache_leftpad": torch.tensor([0, -1, 0])}, ValueError, "cache_leftpad from 0 to"),
        "more left": ({"cache_leftpad": torch.tensor([0, 1, 0])}, ValueError, r"but got \[0, 1, 0\]"),
        "full": ({"cache_seqlens": torch.tensor([5, 0, 23])}, RuntimeError, r"from 0 to 22, .* beside 2 new"),
        "negative": ({"cache_seqlens": torch.tensor([-1, 0, 3])}, RuntimeError, r"but got \[-1, 0, 3\]"),
        "no page": ({"block_table": torch.tensor([[0], [-1], [2]])}, RuntimeError, "slots below the 72"),
        "no index": ({"cache_batch_idx": torch.tensor([0, 3, 1])}, RuntimeError, "slots below the 72"),
        "shape": ({"k": torch.zeros(3, 2, 1, 8)}, RuntimeError, "key of shape .* with the heads"),
    }  # fmt: skip

    @pytest.mark.parametrize(("changes", "error", "message"), REFUSED.values(), ids=REFUSED)
    def test_what_is_refused_is_not_written(self, changes, error, message):
        given = self.make(2, 2)
        before = given["k_cache"].clone(), given["v_cache"].clone()
        with pytest.raises(error, match=message):
            fa.flash_attn_with_kvcache(**given | changes)
        assert torch.equal(given["k_cache"], before[0])
        assert torch.equal(given["v_cache"], before[1])
