"""The memory of tensors: that is gone, that is too small, that is shared until somebody writes."""

from dataclasses import replace

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor

import attn_ext  # noqa: F401  (loads the operators)
from attn_ext.testing import OPS, Arguments, Case, all_outputs, backward, operator, tensors

DROPOUT = Case("everything", mask="bias", sinks=True, options={"dropout_p": 0.5})
SEED = torch.tensor(5)

#: What the internal operators take beside query, key and value.
INPUTS = ["query", "key", "value", "attn_mask", "sinks"]
GRADS = ["grad_output", "grad_lse", "grad_weights", "grad_key_mass"]


def free(tensor: Tensor) -> None:
    """Frees the memory and leaves the tensor's shape: as FSDP and offloading do."""
    tensor.untyped_storage().resize_(0)


def input_of(arguments: Arguments, name: str) -> Tensor:
    return arguments.options[name] if name in arguments.options else getattr(arguments, name)


def all_inputs(arguments: Arguments) -> dict[str, Tensor]:
    return {name: input_of(arguments, name) for name in INPUTS}


def gone(name: str):
    return pytest.raises(RuntimeError, match=rf"attn_ext: .*storage of {name} .*got 0 bytes.*freed")


# freed


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", INPUTS)
def test_freed_input(name, op, device):
    arguments = DROPOUT.build(torch.float32, device)
    free(input_of(arguments, name))
    with gone(name):
        arguments(operator(op))
    with gone(name):
        arguments(operator(op), dropout_p=0.0)


@pytest.mark.parametrize("name", INPUTS)
def test_freed_input_with_gradients(name, device):
    arguments = DROPOUT.build(torch.float32, device).leaves()
    free(input_of(arguments, name))
    with gone(name):
        arguments(operator("sdpa"))


@pytest.mark.parametrize("name", [*INPUTS, "output"])
def test_freed_between_forward_and_backward(name, device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float32, device).leaves()
    output = arguments(operator("sdpa"))
    free(output if name == "output" else input_of(arguments, name))
    with gone(name):
        torch.autograd.grad(
            output, list(arguments.differentiable().values()), torch.ones(output.shape, device=device)
        )


@pytest.mark.parametrize("name", [*GRADS, "output", "lse", "dropout_seed"])
def test_freed_tensor_of_the_internal_backward(name, device):
    arguments = DROPOUT.build(torch.float32, device)
    seed = SEED.to(device).clone()
    outputs = all_outputs(arguments, seed)
    grads = [torch.ones_like(output) for output in outputs]
    taken = dict(zip(GRADS, grads, strict=True))
    free((taken | {"output": outputs[0], "lse": outputs[1], "dropout_seed": seed})[name])
    with gone(name):
        backward(tuple(grads), arguments, *outputs[:2], dropout_seed=seed)


@pytest.mark.parametrize("name", ["outputs", "lses"])
def test_freed_part(name, device):
    parts = {"outputs": torch.randn(2, 3, 4, 8, device=device), "lses": torch.randn(2, 3, 4, device=device)}
    parts = {key: [t.clone() for t in both] for key, both in parts.items()}
    free(parts[name][1])
    with gone(name):
        torch.ops.attn_ext.merge_partials(parts["outputs"], parts["lses"])


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_freed_tangent(name, dtype, device):
    """Freed after ``make_dual``, which ends the process itself where the memory is gone before."""
    arguments = DROPOUT.build(dtype, device)
    with fwad.dual_level():
        dual = fwad.make_dual(input_of(arguments, name), input_of(arguments, name).clone())
        free(fwad.unpack_dual(dual).tangent)
        if name in arguments.options:
            arguments.options[name] = dual
        else:
            arguments = replace(arguments, **{name: dual})
        with gone(f"the tangent of {name}"):
            arguments(operator("sdpa"))


def test_freed_seed_of_the_internal_forward(device):
    seed = SEED.to(device).clone()
    free(seed)
    with gone("dropout_seed"):
        all_outputs(DROPOUT.build(torch.float32, device), seed)


def test_storage_that_ends_before_the_tensor(device):
    query = torch.randn(2, 4, 8, device=device)
    query.untyped_storage().resize_(query.nbytes - 4)
    with pytest.raises(
        RuntimeError, match=rf"query .*\({query.nbytes} bytes\), but got {query.nbytes - 4} b"
    ):
        torch.ops.attn_ext.sdpa(query, query, query)


def test_storage_that_ends_before_a_view_with_an_offset(device):
    whole = torch.randn(3, 4, 8, device=device)
    view = whole[2:]
    whole.untyped_storage().resize_(whole.nbytes - 4)
    with pytest.raises(RuntimeError, match="storage of query"):
        torch.ops.attn_ext.sdpa(view, view, view)
    assert torch.ops.attn_ext.sdpa(whole[:2], whole[:2], whole[:2]).isfinite().all()


def test_broadcast_views_reach_no_further_than_their_storage(device):
    one = torch.randn(1, 1, 8, device=device)
    query = one.expand(50, 40, 8)
    assert query.untyped_storage().nbytes() == 32
    torch.testing.assert_close(torch.ops.attn_ext.sdpa(query, query, query), query)


def test_no_elements_need_no_storage(device):
    query = torch.randn(2, 0, 8, device=device)
    free(query)
    key = torch.randn(2, 3, 8, device=device)
    assert torch.ops.attn_ext.sdpa(query, key, key).shape == (2, 0, 8)


# tensors without memory of their own


class Wrapper(Tensor):
    """A tensor that holds another, and no memory."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner_of(tensor):
            return tensor.inner if isinstance(tensor, Wrapper) else tensor

        args, kwargs = torch.utils._pytree.tree_map(inner_of, (args, kwargs or {}))
        return func(*args, **kwargs)


class Memory(Tensor):
    """A tensor with memory of its own and a dispatch of its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_wrapper_subclass(dropout_p):
    query = torch.randn(2, 4, 8)
    torch.manual_seed(1)
    output = torch.ops.attn_ext.sdpa(Wrapper(query), Wrapper(query), Wrapper(query), dropout_p=dropout_p)
    torch.manual_seed(1)
    assert torch.equal(output, torch.ops.attn_ext.sdpa(query, query, query, dropout_p=dropout_p))


def test_freed_tensor_of_a_subclass_with_memory():
    query = Tensor._make_subclass(Memory, torch.randn(2, 4, 8))
    assert torch.ops.attn_ext.sdpa(query, query, query).shape == (2, 4, 8)
    free(query)
    with gone("query"):
        torch.ops.attn_ext.sdpa(query, query, query)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_freed_meta_and_fake_tensors_still_have_shapes(dropout_p):
    meta = torch.randn(2, 4, 8, device="meta")
    free(meta)
    assert torch.ops.attn_ext.sdpa(meta, meta, meta, dropout_p=dropout_p).shape == (2, 4, 8)
    with torch._subclasses.FakeTensorMode():
        fake = torch.randn(2, 4, 8)
        assert torch.ops.attn_ext.sdpa(fake, fake, fake, dropout_p=dropout_p).shape == (2, 4, 8)


def test_zero_tensor(device):
    """What autograd makes of a gradient that is known to be zero."""
    zero = torch._efficientzerotensor(2, 4, 8, device=device)
    key = torch.randn(2, 4, 8, device=device)
    torch.testing.assert_close(
        torch.ops.attn_ext.sdpa(zero, key, key), key.mean(-2, keepdim=True).expand(2, 4, 8)
    )
    assert torch.ops.attn_ext.sdpa(zero, key, key, dropout_p=0.5).shape == (2, 4, 8)


# copy on write


def lazy(tensor: Tensor) -> Tensor:
    """A clone that shares the memory until one of the two is written to."""
    clone = torch._lazy_clone(tensor)
    assert torch._C._is_cow_tensor(clone)
    return clone


def copied(named: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in named.items() if not torch._C._is_cow_tensor(tensor)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_copies_no_lazy_clone(op, dtype, device):
    arguments = DROPOUT.build(dtype, device)
    clones = {name: lazy(tensor) for name, tensor in all_inputs(arguments).items()}
    arguments.with_tensors(clones)(operator(op))
    assert not copied(clones)


def test_forward_copies_no_lazy_clone_of_a_bool_mask_or_a_seed(device):
    arguments = Case("", mask="bool", options={"dropout_p": 0.5}).build(torch.float32, device)
    clones = {"attn_mask": lazy(arguments.options["attn_mask"]), "seed": lazy(SEED.to(device))}
    all_outputs(arguments.with_tensors({"attn_mask": clones["attn_mask"]}), clones["seed"])
    assert not copied(clones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_copies_no_lazy_clone(dtype, device):
    arguments = DROPOUT.build(dtype, device)
    outputs = all_outputs(arguments, SEED.to(device))
    inputs = {name: lazy(tensor) for name, tensor in all_inputs(arguments).items()}
    grads = {name: lazy(torch.ones_like(output)) for name, output in zip(GRADS, outputs, strict=True)}
    other = {"output": lazy(outputs[0]), "lse": lazy(outputs[1]), "seed": lazy(SEED.to(device))}
    gradients = backward(
        tuple(grads.values()),
        arguments.with_tensors(inputs),
        other["output"],
        other["lse"],
        dropout_seed=other["seed"],
    )
    assert all(gradient.isfinite().all() for gradient in tensors(gradients))
    assert not copied(inputs | grads | other)


def test_train_step_copies_no_lazy_clone(device):
    arguments = Case("", mask="bias", sinks=True).build(torch.float32, device)
    leaves = {name: lazy(tensor).requires_grad_() for name, tensor in all_inputs(arguments).items()}
    output = arguments.with_tensors(leaves)(operator("sdpa"))
    torch.autograd.grad(output, list(leaves.values()), lazy(torch.ones_like(output)))
    assert not copied(leaves)
