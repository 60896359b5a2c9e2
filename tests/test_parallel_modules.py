"""Attention modules over a sequence whose rows lie on several ranks: `context_parallel=layout`."""

import copy

import pytest
import torch

from attn_ext import KeyValueCache, MultiHeadAttention, ScaledDotProductAttention, SelfAttention
from attn_ext.distributed import SequenceLayout, run_in_memory

LENGTH, DIM = 11, 16
ONE = SequenceLayout.zigzag(LENGTH, rank=0, world_size=2)


def layout_of(rank) -> SequenceLayout:
    return SequenceLayout.zigzag(LENGTH, rank)


@pytest.mark.parametrize("method", ["auto", "allgather", "ulysses", "ring"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2, "sinks": True, "window_left": 4, "softcap": 3.0, "scale": 0.4}],
    ids=["plain", "all"],
)
def test_rows_and_gradients_are_those_of_the_whole_sequence(options, method):
    whole = MultiHeadAttention(DIM, 4, **options)
    x = torch.randn(2, LENGTH, DIM)
    mask = torch.rand(2, 1, LENGTH, LENGTH) < 0.3  # True is masked out
    padding = torch.rand(2, LENGTH) < 0.2
    expected, _ = whole(x, mask=mask, key_padding_mask=padding, is_causal=True)
    expected.square().sum().backward()
    expected = expected.detach()

    def on_rank(rank):
        layout = layout_of(rank)
        module = MultiHeadAttention(
            DIM, 4, **options, context_parallel=layout, context_parallel_method=method
        )
        module.load_state_dict(whole.state_dict())
        rows, columns = layout.shard(mask, -2), padding
        output, _ = module(layout.shard(x, 1), mask=rows, key_padding_mask=columns, is_causal=True)
        output.square().sum().backward()
        return layout.rows(), output.detach(), [p.grad for p in module.parameters()]

    ranks = run_in_memory(2, on_rank)
    for rows, output, _ in ranks:
        torch.testing.assert_close(output, expected[:, rows])
    for parts, parameter in zip(
        zip(*(grads for _, _, grads in ranks), strict=True), whole.parameters(), strict=True
    ):
        torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-4, atol=1e-5)


def test_one_head():
    whole, x = SelfAttention(DIM, sinks=True), torch.randn(2, LENGTH, DIM)
    expected = whole(x, is_causal=True)[0].detach()

    def on_rank(rank):
        layout = layout_of(rank)
        module = SelfAttention(DIM, sinks=True, context_parallel=layout)
        module.load_state_dict(whole.state_dict())
        return layout.rows(), module(layout.shard(x, 1), is_causal=True)[0].detach()

    for rows, output in run_in_memory(3, on_rank):
        torch.testing.assert_close(output, expected[:, rows])


def test_the_layout_may_change_from_call_to_call():
    whole = MultiHeadAttention(DIM, 2)
    inputs = [torch.randn(1, length, DIM) for length in (5, 9)]

    def on_rank(rank):
        module = MultiHeadAttention(DIM, 2)
        module.load_state_dict(whole.state_dict())
        outputs = []
        for x in inputs:
            module.context_parallel = SequenceLayout.zigzag(x.shape[1], rank)
            outputs.append(module.context_parallel.unshard(module(module.context_parallel.shard(x, 1))[0], 1))
        return outputs

    for outputs in run_in_memory(2, on_rank):
        for output, x in zip(outputs, inputs, strict=True):
            torch.testing.assert_close(output, whole(x)[0])


def test_dropout_drops_what_one_machine_drops():
    whole, x = MultiHeadAttention(DIM, 4, dropout=0.5), torch.randn(2, LENGTH, DIM)
    torch.manual_seed(5)
    expected = whole(x, is_causal=True)[0].detach()
    torch.manual_seed(5)

    def on_rank(rank):
        layout = layout_of(rank)
        module = copy.deepcopy(whole).train()
        module.context_parallel = layout
        training = layout.rows(), module(layout.shard(x, 1), is_causal=True)[0].detach()
        return *training, module.eval()(layout.shard(x, 1), is_causal=True)[0].detach()

    evaluated = whole.eval()(x, is_causal=True)[0].detach()
    for rows, output, without in run_in_memory(2, on_rank):
        torch.testing.assert_close(output, expected[:, rows])
        torch.testing.assert_close(without, evaluated[:, rows])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_is_refused_with_a_layout_only():
    """What TorchScript cannot hold it must not leave out."""
    x = torch.randn(2, 6, DIM)
    module = MultiHeadAttention(DIM, 4)
    torch.testing.assert_close(torch.jit.script(module)(x)[0], module(x)[0])
    module.context_parallel = ONE
    with pytest.raises(RuntimeError, match=r"context_parallel.*failed to convert"):
        torch.jit.script(module)


def test_is_shown():
    assert "context_parallel=2 ranks" in repr(MultiHeadAttention(DIM, 4, context_parallel=ONE))


X = torch.randn(2, 6, DIM)
BAD = {
    "weights": (lambda: MultiHeadAttention(DIM, 4, context_parallel=ONE)(X, need_weights=True), "no weights"),
    "offset": (
        lambda: MultiHeadAttention(DIM, 4, context_parallel=ONE)(X, query_offset=1),
        "no weights, query_offset",
    ),
    "always_weights": (lambda: ScaledDotProductAttention(context_parallel=ONE)(X, X, X), "no weights"),
    "cache": (
        lambda: MultiHeadAttention(DIM, 4, context_parallel=ONE)(X, cache=KeyValueCache(2, 8, 4, 4)),
        "no context_parallel with a cache",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_had_is_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


def test_rows_of_another_number_are_refused():
    with pytest.raises(ValueError, match="query of 5 rows, those of rank 0, but got 6"):
        MultiHeadAttention(DIM, 4, context_parallel=ONE)(X)


def test_a_copied_module_has_the_same_layout():
    def of_rank(rank):
        layout = SequenceLayout.zigzag(4, rank)
        module = MultiHeadAttention(8, 2, context_parallel=layout)
        return copy.deepcopy(module).context_parallel is layout

    assert run_in_memory(2, of_rank) == [True, True]
