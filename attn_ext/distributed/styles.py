"""Tensor parallelism of the attention modules; imported by :func:`tensor_parallel_plan` alone."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..caches import KeyValueCache
from ..modules import MultiHeadAttention
from .sharding import register


class AttentionParallel(ParallelStyle):
    """Each rank has some of the heads of a :class:`attn_ext.MultiHeadAttention`.

    Inputs and outputs are plain tensors, the same on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MultiHeadAttention):
            raise TypeError(f"expected a MultiHeadAttention, but got {type(module).__name__}")
        _check_heads(module, device_mesh.size())
        register()
        if module.in_proj_weight is not None:
            unpack(module)
        keys = Shard(0) if module.num_kv_heads > 1 else Replicate()
        self._distribute(module.query_proj, device_mesh, Shard(0), Shard(0))
        self._distribute(module.key_proj, device_mesh, keys, keys)
        self._distribute(module.value_proj, device_mesh, keys, keys)
        self._distribute(module.out_proj, device_mesh, Shard(1), Replicate())
        if module.sinks is not None:
            self._place(module, "sinks", device_mesh, Shard(0))
        module.register_forward_pre_hook(partial(_to_mesh, device_mesh), with_kwargs=True)
        module.register_forward_hook(_from_mesh)
        return module

    def _distribute(self, layer: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement) -> None:
        """Of a Linear; an Identity has no parameters."""
        for name, _ in [*layer.named_parameters(recurse=False)]:
            self._place(layer, name, mesh, weight if name == "weight" else bias)

    def _place(self, owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
        whole = getattr(owner, name)
        placed = distribute_tensor(whole, mesh, [placement], src_data_rank=self.src_data_rank)
        parameter = nn.Parameter(placed, requires_grad=whole.requires_grad)
        owner.register_parameter(name, parameter)
        if isinstance(placement, Replicate) and parameter.requires_grad:
            # One head of keys: each rank has what its own heads of queries add to the gradient.
            parameter.register_hook(_summed)  # type: ignore[no-untyped-call]


def _summed(grad: DTensor) -> DTensor:
    return grad.redistribute(placements=[Replicate()])


def unpack(module: MultiHeadAttention) -> None:
    """Three projections instead of one parameter, as with ``packed=False``."""
    weight, bias = module.in_proj_weight, module.in_proj_bias
    assert weight is not None
    biases = [None] * 3 if bias is None else bias.detach().split_with_sizes(module.out_dims)
    names = ("query_proj", "key_proj", "value_proj")
    for name, part, part_bias in zip(
        names, weight.detach().split_with_sizes(module.out_dims), biases, strict=True
    ):
        layer = nn.Linear(part.shape[1], part.shape[0], bias is not None, device="meta")
        layer.weight = nn.Parameter(part.clone(), requires_grad=weight.requires_grad)
        if part_bias is not None and bias is not None:
            layer.bias = nn.Parameter(part_bias.clone(), requires_grad=bias.requires_grad)
        setattr(module, name, layer.train(module.training))
    module.in_proj_weight = module.in_proj_bias = None


def _check_heads(module: MultiHeadAttention, ranks: int) -> None:
    keys = module.num_kv_heads
    if module.num_heads % ranks or (keys > 1 and keys % ranks):
        raise ValueError(
            f"expected heads that divide by the {ranks} ranks, and heads of keys that do or are one, but got "
            f"num_heads={module.num_heads}, num_kv_heads={keys}"
        )
    if isinstance(module.out_proj, nn.Identity):
        raise ValueError("expected a module with an output projection, but got out_proj=False")


def _to_mesh(mesh: DeviceMesh, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    seen: dict[int, Tensor] = {}  # what is passed twice stays one tensor: self-attention projects it once

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            return x
        if id(x) not in seen:
            seen[id(x)] = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return seen[id(x)]

    if any(isinstance(x, KeyValueCache) for x in (*args, *kwargs.values())):
        raise RuntimeError("attn_ext: expected no cache with tensor parallelism")
    return tuple(map(placed, args)), {name: placed(x) for name, x in kwargs.items()}


def _from_mesh(module: nn.Module, args: Any, results: tuple[Tensor, Tensor | None]) -> Any:
    def whole(x: Any) -> Any:
        return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x

    return tuple(map(whole, results))
