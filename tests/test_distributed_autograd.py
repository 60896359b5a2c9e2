"""What autograd and the rest of torch do with attention over ranks; side outputs; seeds; many sequences."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import attn_ext
from attn_ext.distributed import SequenceLayout, allgather, context_parallel_sdpa, run_in_memory

LENGTH, RANKS = 21, 2
METHODS = ("ulysses", "allgather", "ring")
by_method = pytest.mark.parametrize("method", METHODS)


def whole(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(4, LENGTH, 6, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3)]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def compare(function: Any, method: str) -> None:
    """``function`` of leaves and an attention gives tensors of rows: the same on ranks and on one machine."""

    def of_rank(group):
        layout = SequenceLayout.zigzag(LENGTH, group)
        attend = lambda *x, **o: context_parallel_sdpa(*x, layout=layout, method=method, **o)  # noqa: E731
        return layout.rows(), function(leaves([layout.shard(x, -2) for x in whole()]), attend)

    expected = function(leaves(whole()), attn_ext.sdpa)
    for rows, found in run_in_memory(RANKS, of_rank):
        for actual, e in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, e[:, rows])


@by_method
def test_second_derivatives(method):
    def penalty(inputs, attend):
        out = attend(*inputs, is_causal=True)
        grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)

    compare(penalty, method)


@by_method
def test_checkpointing(method):
    def checkpointed(inputs, attend):
        block = lambda q, k, v: attend(q * 2, k.sin(), v, is_causal=True) + q  # noqa: E731
        checkpoint(block, *inputs, use_reentrant=False).square().sum().backward()
        return [x.grad for x in inputs]

    compare(checkpointed, method)


@by_method
def test_gradients_accumulate_over_uses_and_passes(method):
    def used_twice(inputs, attend):
        q, k, v = inputs
        for _ in range(2):
            out = attend(attend(q, k, v, is_causal=True), k, v, window_left=4)
            loss = out.square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [x.grad for x in inputs]

    compare(used_twice, method)


@by_method
def test_only_some_inputs_want_gradients(method):
    def of_value(inputs, attend):
        q, k, v = inputs
        attend(q.detach(), k.detach(), v).square().sum().backward()
        assert q.grad is None and k.grad is None
        return [v.grad]

    compare(of_value, method)


def test_autocast_lowers_inputs_as_it_does_on_one_machine():
    def lowered(attend: Any, tensors: list[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(*tensors)

    tensors = whole(torch.float32)

    def of_rank(group):
        layout = SequenceLayout.zigzag(LENGTH, group)
        attend = lambda *x: context_parallel_sdpa(*x, layout=layout, method="ulysses")  # noqa: E731
        return layout.rows(), lowered(attend, [layout.shard(x, -2) for x in tensors])

    expected = lowered(attn_ext.sdpa, tensors)
    for rows, found in run_in_memory(RANKS, of_rank):
        assert torch.equal(found, expected[:, rows])


def test_a_compiled_model_calls_it_between_its_graphs():
    q, k, v = whole(torch.float32)

    def of_rank(group):
        layout = SequenceLayout.zigzag(LENGTH, group)

        def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return context_parallel_sdpa(q * 2, k, v, layout=layout, is_causal=True).relu()

        return torch.compile(model, backend="aot_eager")(q, k, v)

    expected = attn_ext.sdpa(q * 2, k, v, is_causal=True).relu()
    torch.testing.assert_close(run_in_memory(1, of_rank)[0], expected)


@pytest.mark.parametrize(
    "way",
    [
        *({"method": method} for method in ("ulysses", "allgather", "ring")),
        *({"ulysses_size": 2, "method": method} for method in ("allgather", "ring")),
    ],
    ids=lambda way: "-".join(map(str, way.values())),
)
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"window_left": 3},
        {"enable_gqa": True, "softcap": 3.0},
        {"dropout_p": 0.3, "dropout_seed": 9},
        {"dropout_p": 0.3, "dropout_seed": 9, "is_causal": True, "enable_gqa": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_key_mass_is_that_of_one_machine(way, options):
    q, k, v = whole()
    grouped = options.get("enable_gqa", False)
    k, v = (k[::2], v[::2]) if grouped else (k, v)
    weight = torch.randn(4, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def of_rank(group):
        layout = SequenceLayout.zigzag(LENGTH, group)
        inputs = leaves([layout.shard(x, -2) for x in (q, k, v)])
        _, lse, mass = context_parallel_sdpa(
            *inputs, layout=layout, return_lse=True, return_key_mass=True, **way, **options
        )
        ((mass * layout.shard(weight, -1)).sum() + lse.sum()).backward()
        return layout.rows(), mass.detach(), [x.grad for x in inputs[:2]]

    inputs = leaves([q, k, v])
    p = options.get("dropout_p", 0.0)
    seed = torch.tensor(options.get("dropout_seed", 0)) if p else None
    rule = [p, options.get("is_causal", False), None, grouped, options.get("window_left"), None, 0]
    rule.append(options.get("softcap", 0.0))
    _, lse, _, mass = torch.ops.attn_ext._sdpa_forward(*inputs, None, None, seed, None, *rule, False, True)
    ((mass * weight).sum() + lse.sum()).backward()
    for rows, found, grads in run_in_memory(4, of_rank):
        torch.testing.assert_close(found, mass[:, rows])
        for actual, x in zip(grads, inputs, strict=False):
            torch.testing.assert_close(actual, x.grad[:, rows])


@by_method
def test_without_a_seed_dropout_draws_as_one_machine_does(method):
    q, k, v = whole()

    def of_rank(group):
        if group.rank == 0:
            torch.manual_seed(11)
        layout = SequenceLayout.zigzag(LENGTH, group)
        own = [layout.shard(x, -2) for x in (q, k, v)]
        # A thread's next draw is another's too: nobody else may draw between, so the first rank is the first.
        return layout.rows(), context_parallel_sdpa(*own, layout=layout, method=method, dropout_p=0.4)

    torch.manual_seed(11)
    expected = attn_ext.sdpa(q, k, v, dropout_p=0.4)
    for rows, found in run_in_memory(RANKS, of_rank):
        torch.testing.assert_close(found, expected[:, rows])


def test_many_short_sequences_are_one_call_a_rank(monkeypatch):
    counts = []
    for name in ("attend", "attend_packed"):
        original = getattr(allgather, name)
        counted = lambda *args, f=original, n=name: counts.append(n) or f(*args)  # noqa: E731
        monkeypatch.setattr(allgather, name, counted)
    starts = list(range(0, 601, 3))
    x = torch.randn(2, 600, 4, generator=torch.Generator().manual_seed(0))

    def of_rank(group):
        layout = SequenceLayout.from_cu_seqlens(starts, group)
        own = layout.shard(x, -2)
        return layout.rows(), context_parallel_sdpa(
            own, own, own, layout=layout, method="allgather", is_causal=True
        )

    found = run_in_memory(3, of_rank)
    packed = x.transpose(0, 1)
    expected = attn_ext.sdpa_packed(packed, packed, packed, torch.tensor(starts), is_causal=True).transpose(
        0, 1
    )
    for rows, output in found:
        assert torch.equal(output, expected[:, rows])
    assert counts.count("attend_packed") == 3
    assert counts.count("attend") <= 3 + 2 * 3  # the checks, and what was left to be cut


def test_communication_is_counted_by_torch(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        x = torch.randn(2, 5, 4)
        with CommDebugMode() as counted:
            context_parallel_sdpa(x, x, x, layout=SequenceLayout.zigzag(5), method="allgather")
        assert (
            counted.get_total_counts() == 1
        )  # whether all make the same call; alone there are no keys to get
    finally:
        torch.distributed.destroy_process_group()
