"""The five small systems that define what attention must do here, each with its figures, through the ops."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import attn_ext

SENTENCE = "the quick brown fox jumps over a lazy dog"

# Of the second word of the sentence, as the query of all nine.
SCORES = [32.4191, -44.9209, 30.4341, -121.9629, -61.8859, -123.4025, 171.9292, 4.6947, 79.1044]
WEIGHTS = [
    4.2897e-13, 5.9736e-20, 2.8606e-13, 8.8403e-27, 1.8719e-21, 6.5893e-27, 1.0000, 1.4951e-15, 5.9031e-09
]  # fmt: skip
CONTEXT = [
    -6.1658, 3.3317, -1.4784, 3.0280, -3.0778, -1.9382, 3.2093, 2.9632, 4.7867, 2.5697,
    -1.9187, -0.8907, 3.5392, -0.1726, -2.6539, 5.6142, -1.1907, 2.2681, -6.4134, 2.0330,
    3.2004, -8.4279, -5.9757, -6.8775, 3.2998, 4.7060, -3.5087, 5.1399,
]  # fmt: skip


def plain(
    query: Tensor, key: Tensor, value: Tensor, masked_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(D)) V and its weights, written out."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if masked_out is not None:
        scores = scores.masked_fill(masked_out, -math.inf)
    weights = scores.softmax(-1)
    return weights @ value, weights


def assert_figures(actual: Tensor, expected: list, digits: float = 5e-5) -> None:
    """Equal to figures printed with 4 decimals."""
    assert_close(actual.cpu(), torch.tensor(expected), atol=digits, rtol=1e-6)


class TestScaledDotProductAndSelfAttention:
    def test_function_gives_output_and_weights_whose_rows_sum_to_one(self, device):
        query, key, value = torch.randn(3, 1, 4, 8, device=device)
        output, weights = torch.ops.attn_ext.sdpa_with_weights(query, key, value)
        expected_output, expected_weights = plain(query, key, value)
        assert_close(output, expected_output)
        assert_close(weights, expected_weights)
        assert_close(weights.sum(-1), torch.ones(1, 4, device=device))

    def test_self_attention_with_three_projections_of_the_same_size(self, device):
        attention = attn_ext.SelfAttention(64).to(device)
        assert [tuple(p.shape) for p in attention.parameters()] == [(64, 64)] * 3
        x = torch.randn(2, 10, 64, device=device)
        output, weights = attention(x, need_weights=True)
        assert output.shape == (2, 10, 64)
        assert weights.shape == (2, 10, 10)
        projected = [x @ p.T for p in attention.parameters()]
        assert_close(output, plain(*projected)[0])


class TestASentenceStepByStep:
    @pytest.fixture
    def embedded(self, device) -> Tensor:
        """The nine words in 16 dims."""
        words = SENTENCE.split()
        ids = torch.tensor([sorted(words).index(word) for word in words])
        assert ids.tolist() == [8, 7, 1, 3, 4, 6, 0, 5, 2]
        torch.manual_seed(0)
        return nn.Embedding(9, 16)(ids).detach().to(device)

    @pytest.fixture
    def projections(self, embedded) -> list[Tensor]:
        """W_q, W_k and W_v: (24, 16), (24, 16), (28, 16)."""
        return [torch.randn(size, 16).to(embedded) for size in (24, 24, 28)]

    @pytest.fixture
    def projected(self, embedded, projections) -> list[Tensor]:
        """Query, key and value of every word: (9, 24), (9, 24), (9, 28)."""
        return [embedded @ projection.T for projection in projections]

    def test_scores_of_one_query(self, projected):
        query, key, value = projected
        # The log-sum-exp over a single key is its score.
        _, lse = torch.ops.attn_ext.sdpa_with_lse(query[1:2], key[:, None], value[:, None], scale=1.0)
        assert_figures(lse.flatten(), SCORES)

    def test_small_weights_of_one_query_are_right_to_four_digits(self, projected):
        query, key, value = projected
        _, weights = torch.ops.attn_ext.sdpa_with_weights(query[1:2], key, value)
        assert_close(weights[0].cpu(), torch.tensor(WEIGHTS), atol=0.0, rtol=5e-5)

    def test_context_of_one_query(self, projected):
        query, key, value = projected
        context = torch.ops.attn_ext.sdpa(query[1:2], key, value)
        assert_figures(context[0], CONTEXT)

    def test_all_nine_words_at_once(self, projected):
        context, weights = torch.ops.attn_ext.sdpa_with_weights(*projected)
        assert context.shape == (9, 28)
        assert weights.shape == (9, 9)
        assert_figures(context[1], CONTEXT)

    def test_module_gives_the_same_context(self, embedded, projections):
        attention = attn_ext.SelfAttention(16, head_dim=24, value_dim=28).to(embedded.device)
        for linear, weight in zip(attention.children(), projections, strict=True):
            linear.weight.data = weight
        output, _ = attention(embedded)
        assert_figures(output[1], CONTEXT)

    def test_three_heads_with_their_own_projections(self, embedded):
        attention = attn_ext.MultiHeadAttention(
            16, 3, head_dim=24, value_dim=28, bias=False, out_proj=False, packed=False
        ).to(embedded.device)
        output, _ = attention(embedded)
        context = output.unflatten(-1, (3, 28))  # a context (3, 28) a word
        for head in range(3):
            query, key, value = (
                embedded @ linear.weight.unflatten(0, (3, -1))[head].T
                for linear in (attention.query_proj, attention.key_proj, attention.value_proj)
            )
            assert_close(context[:, head], plain(query, key, value)[0])

    def test_cross_attention_to_a_second_sequence(self, embedded):
        attention = attn_ext.CrossAttention(16, head_dim=24, value_dim=28).to(embedded.device)
        other = torch.randn(8, 16).to(embedded)
        output, weights = attention(embedded, other, need_weights=True)
        assert output.shape == (9, 28)
        assert weights.shape == (9, 8)
        expected = plain(
            embedded @ attention.query_proj.weight.T,
            other @ attention.key_proj.weight.T,
            other @ attention.value_proj.weight.T,
        )
        assert_close((output, weights), expected)


class TestModulesWithMaskAndDropout:
    @pytest.mark.parametrize("shape", [(2, 1, 1, 7), (2, 1, 5, 7)])
    def test_true_is_masked_out(self, device, shape):
        query, key, value = (torch.randn(2, 3, length, 16, device=device) for length in (5, 7, 7))
        mask = torch.rand(shape, device=device) < 0.4
        mask[..., 0] = False
        output, weights = attn_ext.ScaledDotProductAttention()(query, key, value, mask)
        assert_close((output, weights), plain(query, key, value, mask))
        assert weights[mask.expand_as(weights)].eq(0).all()

    def test_weights_are_those_after_dropout(self, device):
        attention = attn_ext.ScaledDotProductAttention(dropout=0.5)
        query, key, value = torch.randn(3, 2, 3, 8, 16, device=device)
        output, weights = attention(query, key, value)
        kept = weights != 0
        assert 0.3 < kept.float().mean() < 0.7
        assert_close(weights[kept], 2 * plain(query, key, value)[1][kept])
        assert_close(output, weights @ value)
        assert_close(attention.eval()(query, key, value), plain(query, key, value))

    def test_multi_head_attention_without_biases(self, device):
        attention = attn_ext.MultiHeadAttention(512, 8, bias=False).to(device)
        assert [tuple(p.shape) for p in attention.parameters()] == [(3 * 512, 512), (512, 512)]
        x = torch.randn(2, 32, 512, device=device)
        output, nothing = attention(x)
        assert output.shape == (2, 32, 512)
        assert nothing is None
        _, weights = attention(x, x, x, need_weights=True)
        assert weights.shape == (2, 8, 32, 32)

    def test_weights_are_kept_for_looking_at_on_request(self, device):
        attention = attn_ext.MultiHeadAttention(512, 8, bias=False).to(device)
        x = torch.randn(2, 32, 512, device=device)
        attention(x)
        assert attention.last_weights is None
        attention.keep_weights = True
        attention(x)
        assert attention.last_weights.shape == (2, 8, 32, 32)
        assert_close(attention.last_weights, attention(x, need_weights=True)[1])

    def test_heads_that_do_not_divide_are_refused_with_both_numbers(self):
        with pytest.raises(ValueError, match=r"embed_dim=512, num_heads=7"):
            attn_ext.MultiHeadAttention(512, 7)


class TestWorkedNumbersBiasesAndConcatenatedHeads:
    def test_one_query_over_two_keys(self, device):
        query = torch.tensor([[1.0, 2.0, 3.0]], device=device)
        key = torch.tensor([[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], device=device)
        assert_figures(torch.ops.attn_ext.sdpa(query, key, key), [[6.9999, 7.9999, 8.9999]])

    @pytest.mark.parametrize("scale", [math.sqrt(2), 1 / math.sqrt(2)])
    def test_a_scale_of_ones_own(self, device, scale):
        query, key, value = torch.randn(3, 3, 4, device=device)
        output, weights = torch.ops.attn_ext.sdpa_with_weights(query, key, value, scale=scale)
        assert_close((output, weights), plain(query * (scale * 2.0), key, value))

    def test_self_attention_with_biases_on_an_unbatched_matrix(self, device):
        attention = attn_ext.SelfAttention(4, bias=True).to(device)
        x = torch.randn(3, 4, device=device)
        output, weights = attention(x, need_weights=True)
        projected = [x @ linear.weight.T + linear.bias for linear in attention.children()]
        assert_close((output, weights), plain(*projected))

    def test_two_heads_concatenated_without_output_projection(self, device):
        attention = attn_ext.MultiHeadAttention(4, 2, head_dim=4, out_proj=False, packed=False).to(device)
        x = torch.randn(3, 4, device=device)
        output, _ = attention(x)
        assert output.shape == (3, 8)
        heads = []
        for rows in (slice(0, 4), slice(4, 8)):
            projections = (attention.query_proj, attention.key_proj, attention.value_proj)
            heads.append(plain(*(x @ p.weight[rows].T + p.bias[rows] for p in projections))[0])
        assert_close(output, torch.cat(heads, -1))

    def test_multi_head_attention_with_biases_and_output_projection(self, device):
        attention = attn_ext.MultiHeadAttention(512, 8).to(device)
        shapes = {name: tuple(parameter.shape) for name, parameter in attention.named_parameters()}
        assert shapes == {
            "in_proj_weight": (3 * 512, 512),
            "in_proj_bias": (3 * 512,),
            "out_proj.weight": (512, 512),
            "out_proj.bias": (512,),
        }
        theirs = nn.MultiheadAttention(512, 8, batch_first=True).to(device)
        x = torch.randn(2, 6, 512, device=device)
        ours = attn_ext.MultiHeadAttention.from_torch(theirs)
        assert_close(ours(x)[0], theirs(x, x, x)[0])


class TestSelfAttentionByHand:
    @pytest.fixture
    def attention(self, device) -> attn_ext.SelfAttention:
        torch.manual_seed(42)
        query, value, key = (nn.Linear(2, 2, bias=False) for _ in range(3))
        attention = attn_ext.SelfAttention(2)
        attention.query_proj, attention.key_proj, attention.value_proj = query, key, value
        return attention.to(device)

    @pytest.fixture
    def x(self, device) -> Tensor:
        return torch.tensor([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]], device=device)

    def test_projections(self, attention):
        assert_figures(attention.query_proj.weight.T, [[0.5406, -0.1657], [0.5869, 0.6496]])
        assert_figures(attention.key_proj.weight.T, [[0.6233, 0.6146], [-0.5188, 0.1323]])
        assert_figures(attention.value_proj.weight.T, [[-0.1549, -0.3443], [0.1427, 0.4153]])

    def test_weights(self, attention, x):
        _, weights = attention(x, need_weights=True)
        assert_figures(
            weights, [[0.1403, 0.0845, 0.7752], [0.0292, 0.0123, 0.9586], [0.3715, 0.2413, 0.3872]]
        )

    def test_output(self, attention, x):
        output, _ = attention(x)
        assert_figures(output, [[-0.7802, -1.8837], [-0.9534, -2.3194], [-0.4130, -0.9592]])
