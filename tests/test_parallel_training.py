"""Models with our attention train on two processes as on one, whatever is sharded."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import attn_ext
from attn_ext.distributed import SequenceLayout, register_dtensor, tensor_parallel_plan

RANKS, STEPS, BATCH, LENGTH, DIM, HEADS = 2, 3, 4, 10, 16, 4


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = attn_ext.MultiHeadAttention(DIM, HEADS, **options)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask=mask, is_causal=True)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


VARIANTS: dict[str, dict[str, Any]] = {
    "packed_weights": {},
    "grouped_sinks": {"num_kv_heads": 2, "sinks": True, "window_left": 6},
    "one_key_head_no_bias": {"num_kv_heads": 1, "bias": False, "packed": False, "softcap": 5.0},
    "value_dim": {"value_dim": 6, "sinks": True},
}


def data(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input, target, and a mask that no head and no sequence has to itself; True is masked out."""
    draw = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, BATCH, LENGTH, DIM, generator=draw)
    return x, target, torch.rand(LENGTH, LENGTH, generator=draw) < 0.2


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor],
    summed: Callable[[Tensor], Tensor] = lambda loss: loss,
    ready: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, Any]:
    """Losses of the steps, and the parameters behind them."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=1e-3
    )  # no steps by noise, where a gradient is 0
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        ready(model)
        optimizer.step()
        losses.append(float(summed(loss.detach())))
    # Either layout of the projections as one.
    state = {name: full(x).detach().clone() for name, x in model.state_dict().items()}
    return {"losses": losses, "state": {name.removeprefix("module."): x for name, x in state.items()}}


def on_one(options: dict[str, Any]) -> dict[str, Any]:
    def loss(model: nn.Module, step: int) -> Tensor:
        x, target, mask = data(step)
        return (model(x, mask) - target).square().mean()

    return train(Model(**options), loss)


# On each of two processes ---------------------------------------------------------------------------


def own_batch(model: nn.Module, step: int) -> Tensor:
    x, target, mask = data(step)
    rows = slice(dist.get_rank() * BATCH // RANKS, (dist.get_rank() + 1) * BATCH // RANKS)
    return (model(x[rows], mask) - target[rows]).square().mean()


def all_batch(model: nn.Module, step: int) -> Tensor:
    x, target, mask = data(step)
    return (model(x, mask) - target).square().mean()


def mean(loss: Tensor) -> Tensor:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / RANKS


def total(loss: Tensor) -> Tensor:
    return mean(loss) * RANKS


def by_ddp(options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    return train(nn.parallel.DistributedDataParallel(Model(**options)), own_batch, mean)


def by_fsdp(options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    model = Model(**options)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return train(fully_shard(model, mesh=mesh), own_batch, mean)


def by_tensor_parallelism(options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Model(**options)
    others = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, {**tensor_parallel_plan(model), **others})
    return train(model, all_batch)


def by_dtensor(options: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Replicated parameters, a batch that is sharded: the rules alone, without a style."""
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    def loss(model: nn.Module, step: int) -> Tensor:
        x, target, mask = data(step)
        x, target = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, target))
        error = model(x, distribute_tensor(mask, mesh, [Replicate()])) - target
        return error.square().mean()

    def ready(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

    return train(distribute_module(Model(**options), mesh), loss, full, ready)


def by_sequence(options: dict[str, Any], mesh: Any, group: Any = None) -> dict[str, Any]:
    layout = SequenceLayout.zigzag(LENGTH, group)

    def loss(model: nn.Module, step: int) -> Tensor:
        x, target, mask = data(step)
        x, target = layout.shard(x, 1), layout.shard(target, 1)
        mask = layout.shard(mask, 0)
        return (model(x, mask) - target).square().sum() / (BATCH * LENGTH * DIM)

    def ready(model: nn.Module) -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return train(Model(**options, context_parallel=layout), loss, total, ready)


WAYS = {
    "ddp": by_ddp,
    "fsdp": by_fsdp,
    "tensor": by_tensor_parallelism,
    "dtensor": by_dtensor,
    "sequence": by_sequence,
}


def remembered(mesh: Any) -> dict[str, Any]:
    """DTensor remembers rules; with dropout, or sinks in place of a mask, a call is another one."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    inputs, four = torch.randn(3, 2, 4, 5, 4), torch.randn(4)
    placed = [distribute_tensor(x, mesh, [Shard(1)]) for x in inputs]
    placed[1:] = (x[..., :4, :] for x in placed[1:])
    query, (key, value) = inputs[0], inputs[1:, ..., :4, :]
    apart: dict[str, Any] = {}
    for turn, name in enumerate(("attn_mask", "sinks", "attn_mask")):
        expected = attn_ext.sdpa(query, key, value, **{name: four})
        found = attn_ext.sdpa(*placed, **{name: distribute_tensor(four, mesh, [Replicate()])})
        apart[f"{name} {turn}"] = (full(found) - expected).abs().max().item()
    attn_ext.sdpa(*placed)
    try:
        attn_ext.sdpa(*placed, dropout_p=0.5)
        apart["refused"] = ""
    except RuntimeError as error:
        apart["refused"] = str(error)
    return apart


def of_process(rank: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    register_dtensor()
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {
        (way, name): train_by(options, mesh)
        for way, train_by in WAYS.items()
        for name, options in VARIANTS.items()
    }
    found["remembered"] = remembered(mesh)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_processes() -> list[dict[tuple[str, str], dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_process, (folder,), nprocs=RANKS)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(of_processes, way, variant):
    expected = on_one(VARIANTS[variant])
    loaded = Model(**VARIANTS[variant])
    for found in of_processes:
        torch.testing.assert_close(found[way, variant]["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
        loaded.load_state_dict(found[way, variant]["state"])  # in either layout
        for name, parameter in loaded.state_dict().items():
            torch.testing.assert_close(
                parameter, expected["state"][name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_rules_are_remembered_for_calls_like_them_only(of_processes):
    for found in of_processes:
        apart = dict(found["remembered"])
        assert "context_parallel_sdpa" in apart.pop("refused")
        assert len(apart) == 3
        assert max(apart.values()) < 1e-5
