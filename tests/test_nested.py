"""Jagged nested tensors: each sequence's result, and its gradients, are those of a call of its own."""

import pytest
import torch
from torch import Tensor

import attn_ext

LENGTHS = [5, 1, 0, 30, 9]
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 3, "window_right": 0, "query_offset": 2},
    "softcap": {"softcap": 2.0, "scale": 0.3},
}
by_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def jagged(lengths: list[int], heads: int, dim: int, grad: bool = True) -> Tensor:
    rows = [torch.randn(length, heads, dim) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


def heads_first(tensor: Tensor) -> list[Tensor]:
    return [t.transpose(0, 1) for t in tensor.unbind()]


@by_options
def test_each_sequence_is_a_call_of_its_own(options):
    rows = jagged(LENGTHS, 4, 8)
    keys = torch.nested.nested_tensor_from_jagged(torch.randn(45, 2, 8), rows.offsets()).requires_grad_()
    query, key = (t.transpose(1, 2) for t in (rows, keys))
    output, lse = attn_ext.sdpa_with_lse(query, key, key, enable_gqa=True, **options)
    assert output.shape == query.shape  # j is the query's
    assert torch.equal(attn_ext.sdpa(query, key, key, enable_gqa=True, **options).values(), output.values())
    leaves = [heads_first(t.detach()) for t in (rows, keys)]
    for one in (*leaves[0], *leaves[1]):
        one.requires_grad_()
    expected = [
        attn_ext.sdpa_with_lse(q, k, k, enable_gqa=True, **options) for q, k in zip(*leaves, strict=True)
    ]
    for a, b, (e, f) in zip(output.unbind(), lse.unbind(), expected, strict=True):
        assert torch.equal(a, e)
        assert torch.equal(b, f)
    output.values().sin().sum().backward()
    sum(e.sin().sum() for e, _ in expected).backward()
    for tensor, each in zip((rows, keys), leaves, strict=True):
        for actual, leaf in zip(heads_first(tensor.grad), each, strict=True):
            torch.testing.assert_close(actual, leaf.grad)


def test_keys_of_other_lengths_and_sequences_with_holes():
    padded = torch.randn(3, 6, 2, 8)
    lengths = torch.tensor([2, 3, 4])
    rows = torch.nested.narrow(padded, 1, torch.tensor([0, 1, 2]), lengths, layout=torch.jagged)
    keys = jagged([7, 1, 3], 2, 8).transpose(1, 2)
    output = attn_ext.sdpa(rows.transpose(1, 2), keys, keys)
    for n, k in enumerate(keys.unbind()):
        q = padded[n, n : n + lengths[n]].transpose(0, 1)
        torch.testing.assert_close(output.unbind()[n], attn_ext.sdpa(q, k, k))


def test_modules_take_them_and_train():
    torch.manual_seed(0)
    module = attn_ext.MultiHeadAttention(16, 4)
    tokens = [torch.randn(n, 16) for n in LENGTHS]
    batch = torch.nested.nested_tensor(tokens, layout=torch.jagged)
    output, weights = module(batch, is_causal=True)
    assert weights is None
    assert output.shape == batch.shape
    output.values().square().sum().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    alone = [module(t.unsqueeze(0), is_causal=True)[0].squeeze(0) for t in tokens]
    for actual, expected in zip(output.unbind(), alone, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    sum(t.square().sum() for t in alone).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-4, atol=1e-5)


def test_one_head_needs_no_dim():
    module, context = attn_ext.SelfAttention(16, sinks=True), attn_ext.CrossAttention(16)
    batch = torch.nested.nested_tensor([torch.randn(n, 16) for n in LENGTHS], layout=torch.jagged)
    output = module(batch, is_causal=True)[0]
    output.values().sum().backward()
    assert output.shape == batch.shape
    for one, actual in zip(batch.unbind(), output.unbind(), strict=True):
        torch.testing.assert_close(actual, module(one, is_causal=True)[0])
    for one, actual in zip(batch.unbind(), context(batch, batch)[0].unbind(), strict=True):
        torch.testing.assert_close(actual, context(one, one)[0])
    assert attn_ext.sdpa_with_lse(batch, batch, batch)[1].shape == batch.shape[:-1]


def test_dropout_and_sinks_act():
    query = jagged(LENGTHS, 2, 4).transpose(1, 2)
    plain = attn_ext.sdpa(query, query, query).values()
    assert not torch.equal(attn_ext.sdpa(query, query, query, dropout_p=0.5).values(), plain)
    assert not torch.equal(attn_ext.sdpa(query, query, query, sinks=torch.ones(2)).values(), plain)


@pytest.mark.slow
def test_compiled():
    def function(query):
        return attn_ext.sdpa(query, query, query, is_causal=True).transpose(1, 2).flatten(-2) * 2

    compiled = torch.compile(function, fullgraph=True)
    for lengths in (LENGTHS, [3, 3]):
        query = jagged(lengths, 2, 8, grad=False).transpose(1, 2)
        torch.testing.assert_close(compiled(query).values(), function(query).values())


def test_what_does_not_fit_is_said():
    rows = jagged(LENGTHS, 2, 4)
    query, dense = rows.transpose(1, 2), torch.randn(5, 2, 3, 4)
    other = jagged([5, 1, 0, 29, 10], 2, 4).transpose(1, 2)
    bad = {
        "as jagged nested tensors .* got a tensor of layout torch.strided for key": lambda: attn_ext.sdpa(
            query, dense, dense
        ),
        r"\(batch, heads, j, head dim\), but got shape .* for query": lambda: attn_ext.sdpa(rows, rows, rows),
        "no attn_mask with nested tensors": lambda: attn_ext.sdpa(
            query, query, query, torch.ones(1, dtype=torch.bool)
        ),
        "key and value with the same lengths": lambda: attn_ext.sdpa(query, query, other),
        "no nested tensors in sdpa_with_weights": lambda: attn_ext.sdpa_with_weights(query, query, query),
        "no nested tensors in sdpa_with_key_mass": lambda: attn_ext.sdpa_with_key_mass(query, query, query),
    }
    for message, call in bad.items():
        with pytest.raises(RuntimeError, match=message):
            call()


def test_holes_of_key_and_value_are_the_same_or_it_is_said():
    padded, begin = torch.randn(3, 6, 2, 8), torch.tensor([0, 1, 2])
    query, key, value = (
        torch.nested.narrow(padded, 1, begin, torch.tensor(lengths), layout=torch.jagged).transpose(1, 2)
        for lengths in ([2, 3, 4], [2, 3, 4], [2, 3, 3])
    )
    assert attn_ext.sdpa(query, key, key).shape == query.shape
    with pytest.raises(RuntimeError, match="key and value with the same lengths"):
        attn_ext.sdpa(query, key, value)
