"""Memory: no call holds a tensor of Lq x Lk numbers unless weights are asked for.

Each case runs in a process of its own and reports by how much its peak resident memory grew over
what it held before the call: on the CPU, where all is counted.
"""

import subprocess
import sys
import textwrap

import pytest

MIB = 2**20


def scores(heads, length):
    """MiB of (heads, length, length) float32 numbers."""
    return heads * length * length * 4 / MIB


#: peak() of the process alone: getrusage would count what its parent held when it started.
PREAMBLE = """
import torch, attn_ext

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
"""

PROGRAM = """
def call(length):
    shape = (1, {heads}, length, 16)
    query, key, value = (torch.randn(shape, requires_grad={requires_grad}) for _ in range(3))
    options = dict({options})
    before = peak()
    result = torch.ops.attn_ext.{op}(query, key, value, **options)
    output = result if isinstance(result, torch.Tensor) else sum(t.sum() for t in result)
    if {requires_grad}:
        output.sum().backward()
    return peak() - before

torch.manual_seed(0)
call(256)
print(call({length}))
"""

# What the call is, its op, its options as Python text, and whether its backward runs
CALLS = {
    "forward": ("sdpa", "", False),
    "causal": ("sdpa", "is_causal=True", False),
    "padding": ("sdpa", "attn_mask=torch.arange(length) < length - 9", False),
    "lse": ("sdpa_with_lse", "", False),
    "key_mass": ("sdpa_with_key_mass", "", False),
    "dropout": ("sdpa", "dropout_p=0.1", False),
    "backward": ("sdpa", "", True),
    "backward_with_dropout": ("sdpa", "dropout_p=0.1", True),
    "backward_with_softcap": ("sdpa", "softcap=5.0", True),
    "backward_of_lse": ("sdpa_with_lse", "is_causal=True", True),
    "backward_of_key_mass": ("sdpa_with_key_mass", "", True),
    "mask_gradient": (
        "sdpa",
        "attn_mask=torch.zeros(1, length, requires_grad=True)",
        True,
    ),
    "mask_gradient_of_rows": (
        "sdpa",
        "attn_mask=torch.zeros(length, 1, requires_grad=True)",
        True,
    ),
}


def printed(program):
    """What a fresh process that runs the program prints, in MiB."""
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(program)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout) / MIB


def peak_growth(op, options, requires_grad, heads, length):
    """MiB by which the peak of a fresh process grows during the call."""
    return printed(
        PROGRAM.format(op=op, options=options, requires_grad=requires_grad, heads=heads, length=length)
    )


def test_the_measure_sees_the_weights():
    """The same program does show Lq x Lk numbers where they are asked for."""
    assert peak_growth("sdpa_with_weights", "", False, 8, 4096) >= scores(8, 4096)


@pytest.mark.parametrize("name", ["forward", "mask_gradient"])
def test_no_scores_are_held(name):
    assert peak_growth(*CALLS[name], 8, 4096) < scores(8, 4096) / 4


PACKED = """
def call(lengths):
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tensors = [torch.randn(sum(lengths), 8, 16, requires_grad=True) for _ in range(3)]
    before = peak()
    attn_ext.sdpa_packed(*tensors, starts, is_causal=True).sum().backward()
    return peak() - before

call([64] * 4)
print(call({lengths}))
"""


def test_packed_sequences_hold_neither_scores_nor_padding():
    """One sequence of half of the rows and many short ones: padded, they would be a gigabyte each."""
    assert printed(PACKED.format(lengths=[4096] + [8] * 512)) < scores(8, 4096) / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"forward", "mask_gradient"}))
def test_no_scores_are_held_whatever_the_call(name):
    assert peak_growth(*CALLS[name], 8, 4096) < scores(8, 4096) / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_no_scores_are_held_at_twice_the_length(name):
    assert peak_growth(*CALLS[name], 4, 8192) < scores(4, 8192) / 8


@pytest.mark.slow
@pytest.mark.parametrize("op", ["sdpa", "sdpa_with_key_mass"])
def test_second_derivative_holds_no_scores(op):
    program = f"""
    def call(length):
        inputs = [torch.randn(1, 4, length, 16, requires_grad=True) for _ in range(3)]
        before = peak()
        result = torch.ops.attn_ext.{op}(*inputs)
        output = result if isinstance(result, torch.Tensor) else sum(t.sum() for t in result)
        grads = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)
        return peak() - before

    call(256)
    print(call(8192))
    """
    assert printed(program) < scores(4, 8192) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "derivative",
    [
        "torch.func.jvp(attn_ext.sdpa, inputs, inputs)",
        "torch.func.vmap(lambda t: torch.func.jvp(attn_ext.sdpa, inputs, t)[1])(along)",
        "torch.func.jvp(torch.func.grad(lambda *i: attn_ext.sdpa(*i).sum()), inputs, inputs)",
    ],
    ids=["jvp", "two directions", "of the gradient"],
)
def test_forward_mode_holds_no_scores(derivative):
    program = f"""
    def call(length):
        inputs = tuple(torch.randn(1, 4, length, 16) for _ in range(3))
        along = tuple(torch.stack([t, t]) for t in inputs)
        before = peak()
        {derivative}
        return peak() - before

    call(256)
    print(call(8192))
    """
    assert printed(program) < scores(4, 8192) / 4


@pytest.mark.slow
def test_mask_is_never_expanded():
    """A mask of one head and batch, for 16 of them, is read in place."""
    program = """
    def call(query, mask):
        before = peak()
        torch.ops.attn_ext.sdpa(query, query, query, mask)
        return peak() - before

    query, mask = torch.randn(4, 8, 4096, 16), torch.zeros(4096, 4096)
    call(query[..., :64, :], mask[:64, :64])
    print(call(query, mask))
    """
    assert printed(program) < scores(32, 4096) / 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared", ["query", "keys"])
def test_the_gradient_of_a_broadcast_input_is_never_expanded(shared, dtype):
    """Of one sample for a batch of 256: it would be 128 MiB in float32."""
    program = f"""
    def call(batch):
        one, many = torch.randn(1, 4, 2048, 16), torch.randn(batch, 4, 2, 16)
        one, many = (t.{dtype if dtype == "bfloat16" else "float"}().requires_grad_() for t in (one, many))
        query, key = (one, many) if "{shared}" == "query" else (many, one)
        output = attn_ext.sdpa(query, key, key)
        grad_output = torch.ones((), dtype=output.dtype).expand_as(output)
        before = peak()
        torch.autograd.grad(output, (query, key), grad_output)
        return peak() - before

    call(2)
    print(call(256))
    """
    assert printed(program) < 32


def test_many_heads_of_many_keys_take_no_more_than_few():
    """Sixteen rows of all heads at once would be 128 MiB for each of a dozen temporaries."""
    program = """
    def call(heads, keys):
        query = torch.randn(heads, 16, 2, requires_grad=True)
        key = torch.randn(heads, keys, 2, requires_grad=True)
        before = peak()
        loss = torch.ops.attn_ext.sdpa(query, key, key).square().sum()
        (grad,) = torch.autograd.grad(loss, query, create_graph=True)
        torch.autograd.grad(grad.square().sum(), (query, key))
        return peak() - before

    call(8, 64)
    print(call(1024, 2048))
    """
    assert printed(program) < 256
