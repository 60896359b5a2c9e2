"""The ops on DTensors: whatever the placements, results and gradients are those of plain tensors.

All ranks of a mesh live in this process: what they send is really exchanged, but by no network.
`tests/test_parallel_training.py` has two processes.
"""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attn_ext
from attn_ext.distributed import register_dtensor

local_tensor = pytest.importorskip("torch.distributed._local_tensor")
fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

WORLD = 4
WHOLE = Replicate()
Inputs = dict[str, Tensor | None]


@pytest.fixture(scope="module", autouse=True)
def _ranks():
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=fake.FakeStore())
    register_dtensor()
    with local_tensor.LocalTensorMode(WORLD):
        yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def meshes(_ranks):
    """Of so many dims, all of 2; one of 4, to which 2 heads of keys do not fit."""
    square = init_device_mesh("cpu", (2, 2))
    return {"line": init_device_mesh("cpu", (WORLD,)), "square": square}


def inputs_of(shapes: dict[str, tuple[int, ...]]) -> Inputs:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def qkv(batch=(4,), heads=4, key_heads=None, rows=5, keys=7, key_batch=None) -> dict[str, tuple[int, ...]]:
    kv = (*(batch if key_batch is None else key_batch), heads if key_heads is None else key_heads, keys)
    return {"query": (*batch, heads, rows, 4), "key": (*kv, 4), "value": (*kv, 3)}


CASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": (qkv(), {}),
    "causal_window": (qkv(), {"is_causal": True, "query_offset": 2, "window_left": 3}),
    "grouped": (qkv(heads=8, key_heads=4), {"enable_gqa": True}),
    "key_heads_that_do_not_divide": (qkv(heads=6, key_heads=3), {"enable_gqa": True}),
    "one_key_head": (qkv(key_heads=1), {"enable_gqa": True}),
    "broadcast_heads": (qkv(key_heads=1), {}),
    "broadcast_batch": (qkv(key_batch=(1,)), {}),
    "keys_without_batch": (qkv(key_batch=()), {}),
    "broadcast_query": ({**qkv(), "query": (1, 1, 5, 4)}, {}),
    "uneven_batch": (qkv(batch=(5,)), {}),
    "two_batch_dims": (qkv(batch=(2, 4)), {}),
    "no_batch": (qkv(batch=()), {}),
    "matrices": ({"query": (5, 4), "key": (7, 4), "value": (7, 3)}, {}),
    "mask_of_keys": ({**qkv(), "attn_mask": (7,)}, {}),
    "mask_of_rows": ({**qkv(), "attn_mask": (5, 1)}, {}),
    "mask_of_heads": ({**qkv(), "attn_mask": (4, 1, 7)}, {"softcap": 2.0}),
    "mask_of_batch": ({**qkv(), "attn_mask": (4, 1, 5, 7)}, {"scale": 0.3}),
    "mask_of_all": ({**qkv(), "attn_mask": (4, 4, 5, 7)}, {"is_causal": True}),
    "sinks": ({**qkv(heads=8, key_heads=4), "sinks": (8,)}, {"enable_gqa": True}),
    "sinks_of_batch": ({**qkv(), "sinks": (4, 4)}, {}),
    "all": ({**qkv(heads=8, key_heads=4), "attn_mask": (8, 5, 7), "sinks": (8,)}, {"enable_gqa": True}),
}
OPS: dict[str, Callable[..., Any]] = {
    "sdpa": attn_ext.sdpa,
    "lse": attn_ext.sdpa_with_lse,
    "weights": attn_ext.sdpa_with_weights,
    "key_mass": attn_ext.sdpa_with_key_mass,
}


def results_of(op: Callable[..., Any], inputs: Inputs, options: dict[str, Any]) -> list[Tensor]:
    results = op(**inputs, **options)
    return [results] if isinstance(results, Tensor) else list(results)


def with_gradients(
    op: Callable[..., Any], inputs: Inputs, options: dict[str, Any], like: Callable
) -> dict[str, Tensor]:
    leaves = {name: like(name, x).requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    results = results_of(op, leaves, options)
    # Weights that differ from element to element, and have no placement of their own to be moved.
    loss = sum((x.square() + x.sin()).sum() for x in results)
    loss.backward()
    found = {f"result {i}": x.detach() for i, x in enumerate(results)}
    return found | {f"grad of {name}": x.grad for name, x in leaves.items() if x.grad is not None}


def plain(x: Tensor) -> Tensor:
    """The whole of a DTensor, which every rank finds alike."""
    if isinstance(x, DTensor):
        x = x.full_tensor()
    return x.reconcile() if isinstance(x, local_tensor.LocalTensor) else x


def check(
    op, inputs: Inputs, options: dict[str, Any], mesh: DeviceMesh, where: dict[str, tuple[Placement, ...]]
) -> dict[str, Tensor]:
    expected = with_gradients(op, inputs, options, lambda name, x: x.clone())
    actual = with_gradients(op, inputs, options, lambda name, x: distribute_tensor(x, mesh, where[name]))
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        torch.testing.assert_close(
            plain(actual[name]), e, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}, {where}: {m}"
        )
    return actual


def placements_of(x: Tensor, mesh: DeviceMesh) -> list[tuple[Placement, ...]]:
    each = [WHOLE, *(Shard(dim) for dim in range(x.dim()) if x.shape[dim] > 1)]
    return [*itertools.product(each, repeat=mesh.ndim)]


@pytest.mark.parametrize("mesh_name", ["line", "square"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_placements_give_what_plain_tensors_give(meshes, case, mesh_name):
    """Some of the combinations, drawn; in half of them query, key and value lie alike."""
    shapes, options = case
    mesh, inputs = meshes[mesh_name], inputs_of(shapes)
    draw = random.Random(repr((shapes, mesh_name)))
    every = {name: placements_of(x, mesh) for name, x in inputs.items()}
    for _ in range(2):
        where = {name: draw.choice(choices) for name, choices in every.items()}
        check(attn_ext.sdpa, inputs, options, mesh, where)
    for alike in draw.sample(every["query"], 2):
        where = {name: alike if alike in choices else draw.choice(choices) for name, choices in every.items()}
        check(attn_ext.sdpa, inputs, options, mesh, where)


@pytest.mark.parametrize("name", OPS)
def test_side_outputs(meshes, name):
    inputs = inputs_of({**qkv(heads=8, key_heads=4), "attn_mask": (8, 5, 7), "sinks": (8,)})
    every = {tensor: placements_of(x, meshes["line"]) for tensor, x in inputs.items()}
    for p in every["query"]:
        where = {tensor: p if p in choices else (WHOLE,) for tensor, choices in every.items()}
        check(OPS[name], inputs, {"enable_gqa": True}, meshes["line"], where)


BATCH, HEADS = Shard(0), Shard(1)
#: Placements that need no communication forward; those of results and gradients that follow.
KEPT = {
    "batch": (qkv(), {"query": BATCH, "key": BATCH, "value": BATCH}, [BATCH], [BATCH] * 3),
    "heads": (qkv(), {"query": HEADS, "key": HEADS, "value": HEADS}, [HEADS], [HEADS] * 3),
    "one_key_head": (
        qkv(key_heads=1),
        {"query": HEADS, "key": WHOLE, "value": WHOLE},
        [HEADS],
        [HEADS, Partial(), Partial()],
    ),
    "broadcast_batch": (
        qkv(key_batch=(1,)),
        {"query": BATCH, "key": WHOLE, "value": WHOLE},
        [BATCH],
        [BATCH, Partial(), Partial()],
    ),
    "mask": (
        {**qkv(), "attn_mask": (5, 7)},
        {"query": HEADS, "key": HEADS, "value": HEADS, "attn_mask": WHOLE},
        [HEADS],
        [HEADS] * 3 + [Partial()],
    ),
    "mask_of_heads": (
        {**qkv(), "attn_mask": (4, 5, 7)},
        {"query": HEADS, "key": HEADS, "value": HEADS, "attn_mask": Shard(0)},
        [HEADS],
        [HEADS] * 3 + [Shard(0)],
    ),
    "sinks": (
        {**qkv(), "sinks": (4,)},
        {"query": HEADS, "key": HEADS, "value": HEADS, "sinks": Shard(0)},
        [HEADS],
        [HEADS] * 3 + [Shard(0)],
    ),
    "sinks_of_batches": (
        {**qkv(), "sinks": (4,)},
        {"query": BATCH, "key": BATCH, "value": BATCH, "sinks": WHOLE},
        [BATCH],
        [BATCH] * 3 + [Partial()],
    ),
}


@pytest.mark.parametrize(("shapes", "where", "results", "grads"), KEPT.values(), ids=KEPT)
def test_what_fits_is_not_moved(meshes, shapes, where, results, grads):
    mesh = meshes["line"]
    leaves = {
        name: distribute_tensor(x, mesh, [where[name]]).requires_grad_()
        for name, x in inputs_of(shapes).items()
    }
    options = {"enable_gqa": shapes["key"][-3] == 1}
    with CommDebugMode() as counted:
        output, lse = results_of(attn_ext.sdpa_with_lse, leaves, options)
        torch.autograd.backward([output, lse], [torch.ones_like(output), torch.ones_like(lse)])
    assert counted.get_total_counts() == 0
    assert [*output.placements] == [*lse.placements] == results
    assert [leaf.grad.placements[0] for leaf in leaves.values()] == grads


def test_heads_that_do_not_divide_are_gathered(meshes):
    """Groups of query heads would lie on a rank without the key head that they read."""
    inputs = inputs_of(qkv(heads=12, key_heads=6))  # 6 over 4 ranks are 2, 2, 2 and none
    uneven = dict.fromkeys(inputs, (HEADS,))
    found = check(attn_ext.sdpa, inputs, {"enable_gqa": True}, meshes["line"], uneven)
    assert found["result 0"].placements != (HEADS,)
    inputs = inputs_of(qkv(heads=8, key_heads=2))
    where = {"query": [HEADS], "key": [WHOLE], "value": [WHOLE]}
    placed = {name: distribute_tensor(x, meshes["line"], where[name]) for name, x in inputs.items()}
    assert HEADS not in attn_ext.sdpa(**placed, enable_gqa=True).placements
    square = {name: distribute_tensor(x, meshes["square"], [HEADS, HEADS]) for name, x in inputs.items()}
    assert [*attn_ext.sdpa(**square, enable_gqa=True).placements].count(HEADS) == 1


def test_a_mask_is_not_taken_for_sinks_of_its_shape(meshes):
    """DTensor remembers rules by the placements of what was passed, which are the same here."""
    mesh, inputs = meshes["line"], inputs_of(qkv(keys=4))
    heads = {"query": (HEADS,), "key": (HEADS,), "value": (HEADS,)}
    for name in ("attn_mask", "sinks", "attn_mask"):
        check(attn_ext.sdpa, {**inputs, name: torch.randn(4)}, {}, mesh, {**heads, name: (WHOLE,)})


def test_a_call_that_is_part_of_a_whole_one(meshes):
    """A given delta is cut like the lse, and needs no output."""
    query, key, value, grad = (torch.randn(4, 4, 8, 4) for _ in range(4))
    output, lse = attn_ext.sdpa_with_lse(query, key, value)
    delta = (grad * output).sum(-1)
    rest = (0.0, False, None, False, None, None, 0, 0.0, [True, True, True, False, False], None, True)

    def gradients(grad, query, key, value, lse, delta):
        none = (None,) * 3
        op = torch.ops.attn_ext._sdpa_backward
        return op(grad, *none, query, key, value, None, None, *none[:2], None, lse, *rest, delta)[:3]

    inputs = (grad, query, key, value, lse, delta)
    expected = gradients(*inputs)
    for at in (WHOLE, BATCH, HEADS):
        placed = [distribute_tensor(x, meshes["line"], [at]) for x in inputs]
        with CommDebugMode() as counted:
            found = gradients(*placed)
        assert counted.get_total_counts() == 0
        for actual, e in zip(found, expected, strict=True):
            assert actual.placements == (at,)
            torch.testing.assert_close(plain(actual), e)


def test_dropout_of_a_shard_is_refused(meshes):
    mesh, inputs = meshes["line"], inputs_of(qkv())
    placed = {name: distribute_tensor(x, mesh, [BATCH]) for name, x in inputs.items()}
    for _ in range(2):  # with the rule of the other call remembered
        attn_ext.sdpa(**placed)
        with pytest.raises(
            RuntimeError, match=r"but got query with .*attn_ext.distributed.context_parallel_sdpa"
        ):
            attn_ext.sdpa(**placed, dropout_p=0.5)
    placed["query"] = distribute_tensor(inputs["query"], mesh, [WHOLE])
    with pytest.raises(RuntimeError, match="but got key with"):
        attn_ext.sdpa(**placed, dropout_p=0.5)


def test_dropout_of_what_every_rank_has_whole(meshes):
    inputs = inputs_of(qkv())
    torch.manual_seed(3)
    expected = attn_ext.sdpa(**inputs, dropout_p=0.5)
    placed = {name: distribute_tensor(x, meshes["line"], [WHOLE]) for name, x in inputs.items()}
    torch.manual_seed(3)
    assert torch.equal(plain(attn_ext.sdpa(**placed, dropout_p=0.5)), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", OPS)
def test_without_gradients(meshes, name, mode):
    inputs = inputs_of({**qkv(), "sinks": (4,)})
    placed = {
        tensor: distribute_tensor(x, meshes["line"], [HEADS if x.dim() > 1 else Shard(0)])
        for tensor, x in inputs.items()
    }
    with mode():
        results = results_of(OPS[name], placed, {"is_causal": True})
        expected = results_of(OPS[name], inputs, {"is_causal": True})
        for actual, e in zip(results, expected, strict=True):
            assert actual.placements == (HEADS,)
            torch.testing.assert_close(plain(actual), e)


class TestPacked:
    SHAPES = {"query": (11, 8, 4), "key": (11, 4, 4), "value": (11, 4, 3), "sinks": (8,)}
    STARTS = torch.tensor([0, 3, 3, 11])

    @pytest.mark.parametrize("op", [attn_ext.sdpa_packed, attn_ext.sdpa_packed_with_lse])
    def test_any_placements(self, meshes, op):
        mesh, inputs = meshes["line"], inputs_of(self.SHAPES)
        for at in (WHOLE, Shard(0), Shard(1), Shard(2)):
            where = {name: (at if name != "sinks" or at.is_replicate() else Shard(0),) for name in inputs} | {
                "cu_seqlens_q": (WHOLE,)
            }
            options = {"enable_gqa": True, "is_causal": True}
            found = check(op, {**inputs, "cu_seqlens_q": self.STARTS}, options, mesh, where)
            if at == Shard(1):
                assert found["result 0"].placements == (Shard(1),)

    def test_plain_lengths_are_refused_by_dtensor(self, meshes):
        placed = {
            name: distribute_tensor(x, meshes["line"], [WHOLE]) for name, x in inputs_of(self.SHAPES).items()
        }
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            attn_ext.sdpa_packed(**placed, cu_seqlens_q=self.STARTS, enable_gqa=True)


class TestPaged:
    def tensors(self, key_heads: int = 4) -> Inputs:
        pages = inputs_of({"key_pages": (6, 4, key_heads, 4), "value_pages": (6, 4, key_heads, 4)})
        return {
            "query": torch.randn(4, 8, 4),
            **pages,
            "block_table": torch.tensor([[5, 0], [2, -1], [1, 3], [4, -1]]),
            "seqlens_k": torch.tensor([7, 3, 8, 1]),
        }

    @pytest.mark.parametrize("key_heads", [1, 2, 4])
    @pytest.mark.parametrize("op", [attn_ext.sdpa_paged, attn_ext.sdpa_paged_with_lse])
    def test_any_placements(self, meshes, op, key_heads):
        inputs, options = self.tensors(key_heads), {"enable_gqa": True}
        expected = results_of(op, inputs, options)
        draw = random.Random(key_heads)
        for mesh in meshes.values():
            for _ in range(5):
                placed = {
                    name: distribute_tensor(x, mesh, draw.choice(placements_of(x, mesh)))
                    for name, x in inputs.items()
                }
                for actual, e in zip(results_of(op, placed, options), expected, strict=True):
                    torch.testing.assert_close(plain(actual), e)

    HEADS = {"query": 1, "key_pages": 2, "value_pages": 2, "sinks": 0, "key_scale": 0, "value_scale": 2}
    SEQUENCES = {"query": 0, "block_table": 0, "seqlens_k": 0}

    @pytest.mark.parametrize("dims", [HEADS, SEQUENCES], ids=["heads", "sequences"])
    def test_what_fits_is_not_moved(self, meshes, dims):
        where = {name: Shard(dim) for name, dim in dims.items()}
        inputs = {
            **self.tensors(),
            "sinks": torch.randn(8),
            "key_scale": torch.rand(4),
            "value_scale": torch.rand(6, 4, 4, 1),
        }
        for name in ("key_pages", "value_pages"):
            inputs[name] = (inputs[name] * 30).to(torch.int8)
        expected = attn_ext.sdpa_paged(**inputs, enable_gqa=True)
        placed = {
            name: distribute_tensor(x, meshes["line"], [where.get(name, WHOLE)]) for name, x in inputs.items()
        }
        with CommDebugMode() as counted:
            output = attn_ext.sdpa_paged(**placed, enable_gqa=True)
        assert counted.get_total_counts() == 0
        assert output.placements == (where["query"],)
        torch.testing.assert_close(plain(output), expected)

    def test_keywords_decide_what_the_others_move_to(self, meshes):
        inputs = {**self.tensors(), "sinks": torch.randn(8)}
        placed = {
            name: distribute_tensor(x, meshes["line"], [Shard(0) if name == "sinks" else WHOLE])
            for name, x in inputs.items()
        }
        output = attn_ext.sdpa_paged(**placed, enable_gqa=True)
        assert output.placements == (Shard(1),)
        torch.testing.assert_close(plain(output), attn_ext.sdpa_paged(**inputs, enable_gqa=True))

    def test_keywords_that_fit_nothing_are_refused(self, meshes):
        inputs = {**self.tensors(2), "sinks": torch.randn(8)}
        placed = {
            name: distribute_tensor(x, meshes["line"], [Shard(0) if name == "sinks" else WHOLE])
            for name, x in inputs.items()
        }
        with pytest.raises(
            RuntimeError, match=r"expected placements that fit together .*sinks \(Shard\(dim=0\)"
        ):
            attn_ext.sdpa_paged(**placed, enable_gqa=True)

    @pytest.mark.parametrize("at", [WHOLE, Shard(2)], ids=str)
    def test_a_cache_is_written_where_it_lies(self, meshes, at):
        inputs = self.tensors()
        pages = {name: inputs[name] for name in ("key_pages", "value_pages")}
        rows = {
            "key": torch.randn(3, 4, 4),
            "value": torch.randn(3, 4, 4),
            "slot_mapping": torch.tensor([9, 0, 22]),
        }
        placed_pages = [distribute_tensor(x, meshes["line"], [at]) for x in pages.values()]
        for where in (WHOLE, Shard(1)):
            placed = [
                distribute_tensor(x, meshes["line"], [where if x.dim() == 3 else WHOLE])
                for x in rows.values()
            ]
            attn_ext.cache_write_(*placed_pages, *placed)
        attn_ext.cache_write_(*pages.values(), *rows.values())
        for actual, expected in zip(placed_pages, pages.values(), strict=True):
            assert actual.placements == (at,)
            torch.testing.assert_close(plain(actual), expected)

    def test_a_cache_that_cannot_be_written_where_it_lies_is_refused(self, meshes):
        inputs = self.tensors()
        pages = [
            distribute_tensor(inputs[name], meshes["line"], [Shard(1)])
            for name in ("key_pages", "value_pages")
        ]
        rows = [torch.randn(3, 4, 4), torch.randn(3, 4, 4), torch.tensor([9, 0, 22])]
        with pytest.raises(RuntimeError, match="pages that are written to stay as they are"):
            attn_ext.cache_write_(*pages, *(distribute_tensor(x, meshes["line"], [WHOLE]) for x in rows))


@pytest.mark.parametrize("at", [WHOLE, Shard(0), Shard(1), Shard(2)], ids=str)
def test_partials_are_merged_where_they_lie(meshes, at):
    parts = {f"part {i}": torch.randn(4, 4, 8, 3) for i in range(3)} | {
        f"lse {i}": torch.randn(4, 4, 8) for i in range(3)
    }
    parts["lse 0"][:, :, 2] = -torch.inf

    def merge(**tensors: Tensor) -> Any:
        values = [*tensors.values()]
        return attn_ext.merge_partials(values[:3], values[3:])

    # Without the gradient of the row that saw nothing, sin(-inf).
    expected = merge(**parts)
    placed = {name: distribute_tensor(x, meshes["line"], [at]) for name, x in parts.items()}
    for actual, e in zip(merge(**placed), expected, strict=True):
        assert actual.placements == (at,)
        torch.testing.assert_close(plain(actual), e)
    parts["lse 0"][:, :, 2] = -1.0
    check(merge, parts, {}, meshes["line"], dict.fromkeys(parts, (at,)))


def test_importing_needs_no_dtensor():
    import subprocess
    import sys

    code = "import sys, attn_ext.distributed; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
