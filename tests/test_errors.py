"""Bad input: a RuntimeError that says what was expected and what came, before any work."""

import math
import re

import pytest
import torch

import attn_ext  # noqa: F401  (loads the operators)
from attn_ext.testing import OPS, Case, all_outputs, backward, operator

BASE = {"query": (2, 8, 5, 16), "key": (2, 8, 7, 16), "value": (2, 8, 7, 16)}


def case(name, message, **arguments):
    return pytest.param(message, arguments, id=name)


def of(shape, dtype=torch.float32):
    """A tensor argument, made on the device of the test."""
    return ("tensor", shape, dtype)


# name, what the message must hold in this order (between them anything), what is wrong
BAD_INPUT = [
    # Rank
    case("query_of_one_dim", r"query|at least 2|\[16\]", query=of((16,))),
    case("key_of_one_dim", r"key|at least 2|\[16\]", key=of((16,))),
    case("value_of_no_dims", r"value|at least 2|\[\]", value=of(())),
    # Sizes
    case("head_dim", r"key|query|16|got|12", key=of((2, 8, 7, 12))),
    case("value_length", r"value|key|7|got|6", value=of((2, 8, 6, 16))),
    case("batch", r"batch|\[2, 8, 5, 16\]|\[3, 8, 7, 16\]", key=of((3, 8, 7, 16))),
    case("value_batch", r"batch|\[2, 8, 5, 16\]|\[3, 8, 7, 16\]", value=of((3, 8, 7, 16))),
    case("batch_zero", r"batch|\[2, 8, 5, 16\]|\[0, 8, 7, 16\]", key=of((0, 8, 7, 16))),
    # Heads
    case(
        "heads",
        r"key|heads|query|8|got|2|enable_gqa=True",
        key=of((2, 2, 7, 16)),
        value=of((2, 2, 7, 16)),
    ),
    case("heads_of_value", r"value|heads|8|got|4", value=of((2, 4, 7, 16))),
    case("heads_that_do_not_divide", r"key|heads|8|got|3", key=of((2, 3, 7, 16))),
    case(
        "grouped_heads_that_do_not_divide",
        r"heads|multiple|8|3",
        key=of((2, 3, 7, 16)),
        value=of((2, 3, 7, 16)),
        enable_gqa=True,
    ),
    case(
        "grouped_heads_of_value",
        r"value|heads|key|2|got|4",
        key=of((2, 2, 7, 16)),
        value=of((2, 4, 7, 16)),
        enable_gqa=True,
    ),
    case(
        "grouped_without_a_head_dim",
        r"head dim|enable_gqa|\[5, 16\]",
        query=of((5, 16)),
        key=of((7, 16)),
        value=of((7, 16)),
        enable_gqa=True,
    ),
    # Dtypes
    case("query_dtype", r"query|float|got|long", query=of((2, 8, 5, 16), torch.int64)),
    case("complex", r"query|float|got|complex", query=of((2, 8, 5, 16), torch.complex64)),
    case("key_dtype", r"key|float|got|double", key=of((2, 8, 7, 16), torch.float64)),
    case("value_dtype", r"value|float|got|bfloat16", value=of((2, 8, 7, 16), torch.bfloat16)),
    # attn_mask
    case("mask_columns", r"attn_mask|\[2, 8, 5, 7\]|got|\[5, 6\]", attn_mask=of((5, 6))),
    case("mask_rows", r"attn_mask|\[2, 8, 5, 7\]|got|\[4, 7\]", attn_mask=of((4, 7), torch.bool)),
    case("mask_heads", r"attn_mask|\[2, 8, 5, 7\]|got|\[2, 4, 5, 7\]", attn_mask=of((2, 4, 5, 7))),
    case("mask_batch", r"attn_mask|\[2, 8, 5, 7\]|got|\[3, 1, 1, 7\]", attn_mask=of((3, 1, 1, 7))),
    case("mask_rank", r"attn_mask|\[2, 8, 5, 7\]|got|\[1, 2, 8, 5, 7\]", attn_mask=of((1, 2, 8, 5, 7))),
    case("mask_int", r"attn_mask|bool|float|got|long", attn_mask=of((5, 7), torch.int64)),
    case("mask_float64", r"attn_mask|bool|float|got|double", attn_mask=of((5, 7), torch.float64)),
    case("mask_half", r"attn_mask|bool|float|got|half", attn_mask=of((5, 7), torch.float16)),
    # Numbers
    case("dropout_negative", r"dropout_p|0|1|got|-0.1", dropout_p=-0.1),
    case("dropout_above_one", r"dropout_p|0|1|got|1.5", dropout_p=1.5),
    case("dropout_nan", r"dropout_p|0|1|got|nan", dropout_p=math.nan),
    case("window_left", r"window_left|0|got|-1", window_left=-1),
    case("window_right", r"window_right|0|got|-2", window_right=-2),
    case("softcap_negative", r"softcap|0|got|-1", softcap=-1.0),
    case("softcap_nan", r"softcap|0|got|nan", softcap=math.nan),
    case("softcap_inf", r"softcap|finite|got|inf", softcap=math.inf),
    case("scale_nan", r"scale|finite|got|nan", scale=math.nan),
    # sinks
    case("sinks_length", r"sinks|\[8\]|got|\[7\]", sinks=of((7,))),
    case("sinks_of_one", r"sinks|\[8\]|got|\[1\]", sinks=of((1,))),
    case("sinks_of_no_dims", r"sinks|\[8\]|got|\[\]", sinks=of(())),
    case("sinks_dtype", r"sinks|float|got|long", sinks=of((8,), torch.int64)),
    case("sinks_float64", r"sinks|float|got|double", sinks=of((8,), torch.float64)),
]

by_bad_input = pytest.mark.parametrize(("message", "wrong"), BAD_INPUT)


def build(wrong, device):
    """Query, key, value and options of a call with the wrong arguments in place."""

    def make(argument):
        if isinstance(argument, tuple) and argument[0] == "tensor":
            return torch.zeros(argument[1], dtype=argument[2], device=device)
        return argument

    arguments = {name: of(shape) for name, shape in BASE.items()} | wrong
    made = {name: make(argument) for name, argument in arguments.items()}
    return tuple(made.pop(name) for name in BASE), made


def pattern(message):
    """`message`'s parts in their order, whatever stands between, in any case."""
    return re.compile("(?is)attn_ext: .*" + ".*".join(message.split("|")))


@pytest.mark.parametrize("op", OPS)
@by_bad_input
def test_message_names_what_was_expected_and_what_came(message, wrong, op, device):
    tensors, options = build(wrong, device)
    with pytest.raises(RuntimeError, match=pattern(message)):
        operator(op)(*tensors, **options)


@by_bad_input
def test_meta_tensors_meet_the_same_checks(message, wrong):
    tensors, options = build(wrong, "meta")
    with pytest.raises(RuntimeError, match=pattern(message)):
        torch.ops.attn_ext.sdpa(*tensors, **options)


@by_bad_input
def test_compiled_functions_meet_the_same_checks(message, wrong, device):
    tensors, options = build(wrong, device)
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(query, key, value, options):
        return torch.ops.attn_ext.sdpa(query, key, value, **options)

    with pytest.raises(RuntimeError, match=pattern(message)):
        compiled(*tensors, options)


@by_bad_input
def test_tensors_that_require_grad_meet_the_same_checks(message, wrong, device):
    tensors, options = build(wrong, device)
    tensors = tuple(t.requires_grad_() if t.is_floating_point() else t for t in tensors)
    with pytest.raises(RuntimeError, match=pattern(message)):
        torch.ops.attn_ext.sdpa(*tensors, **options)


@by_bad_input
def test_nothing_is_computed(message, wrong, device):
    tensors, options = build(wrong, device)
    with torch.profiler.profile() as profile, pytest.raises(RuntimeError):
        torch.ops.attn_ext.sdpa(*tensors, **options)
    assert not [e.name for e in profile.events() if e.name.startswith("aten::")]


@pytest.mark.parametrize("moved", ["key", "value", "attn_mask", "sinks"])
def test_mixed_devices(moved, device):
    arguments = Case("", mask="bool", sinks=True).build(torch.float32, device)
    tensors = {
        "key": arguments.key,
        "value": arguments.value,
        "attn_mask": arguments.options["attn_mask"],
        "sinks": arguments.options["sinks"],
    }
    arguments = arguments.with_tensors({moved: tensors[moved].to("meta")})
    with pytest.raises(RuntimeError, match=pattern(f"{moved}|device|{device}|got|meta")):
        arguments(torch.ops.attn_ext.sdpa)


def test_hint_of_enable_gqa_is_given_only_where_it_helps(device):
    query, key = torch.zeros(2, 8, 5, 16, device=device), torch.zeros(2, 3, 7, 16, device=device)
    with pytest.raises(RuntimeError) as error:
        torch.ops.attn_ext.sdpa(query, key, key)
    assert "enable_gqa" not in str(error.value)


def test_mask_that_would_widen_the_batch(device):
    query = torch.zeros(1, 2, 5, 8, device=device)
    mask = torch.zeros(3, 1, 5, 5, device=device)
    with pytest.raises(RuntimeError, match=pattern(r"attn_mask|\[1, 2, 5, 5\]|got|\[3, 1, 5, 5\]")):
        torch.ops.attn_ext.sdpa(query, query, query, mask)


@pytest.mark.parametrize(
    "seed", [torch.tensor(1.0), torch.zeros(3, dtype=torch.int64), torch.tensor(1, dtype=torch.int32)]
)
def test_dropout_seed(seed, device):
    arguments = Case("", options={"dropout_p": 0.5}).build(torch.float32, device)
    with pytest.raises(RuntimeError, match=pattern("dropout_seed|long|got")):
        all_outputs(arguments, seed.to(device))


GRADS = ["grad_output", "grad_lse", "grad_weights", "grad_key_mass"]
LIKE_OUTPUTS = [*GRADS, "output", "lse"]

#: What is wrong with a tensor that the backward takes, and what the message must hold.
WRONG_TENSORS = {
    "shape": (lambda t: t[..., :1], r"shape|\[2, .*got|1\]"),
    "rank": (lambda t: t[0], r"shape|\[2, .*got"),
    "dtype": (lambda t: t.double(), r"dtype|float|query|got|double"),
    "lower_dtype": (lambda t: t.bfloat16(), r"dtype|float|query|got|bfloat16"),
    "integers": (lambda t: t.long(), r"dtype|float|query|got|long"),
    "layout": (lambda t: t.to_sparse(), r"dense|got|sparse"),
}


def backward_with(arguments, changes, output_mask=(True, True, True, False, False)):
    """The internal backward with its own tensors made, then changed by name."""
    made = all_outputs(arguments)
    taken = dict(zip(GRADS, [torch.ones_like(t) for t in made], strict=True))
    taken |= {"output": made[0], "lse": made[1]}
    taken = {name: changes.get(name, lambda t: t)(tensor) for name, tensor in taken.items()}
    grads = tuple(taken[name] for name in GRADS)
    return backward(grads, arguments, taken["output"], taken["lse"], output_mask)


@pytest.mark.parametrize("tensor", LIKE_OUTPUTS)
@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_tensors_of_the_internal_backward(tensor, wrong, device):
    change, message = WRONG_TENSORS[wrong]
    arguments = Case("").build(torch.float32, device)
    with pytest.raises(RuntimeError, match=pattern(f"{tensor} |{message}")):
        backward_with(arguments, {tensor: change})


@pytest.mark.parametrize("tensor", LIKE_OUTPUTS)
@pytest.mark.parametrize("wrong", sorted(set(WRONG_TENSORS) - {"layout"}))
def test_meta_tensors_of_the_internal_backward(tensor, wrong):
    change, message = WRONG_TENSORS[wrong]
    arguments = Case("").build(torch.float32, "meta")
    with pytest.raises(RuntimeError, match=pattern(f"{tensor} |{message}")):
        backward_with(arguments, {tensor: change})


@pytest.mark.parametrize("tensor", LIKE_OUTPUTS)
def test_tensors_of_the_internal_backward_on_another_device(tensor, device):
    arguments = Case("").build(torch.float32, device)
    with pytest.raises(RuntimeError, match=pattern(f"{tensor} |device|{device}|got|meta")):
        backward_with(arguments, {tensor: lambda t: t.to("meta")})


@pytest.mark.parametrize("where", ["the device", "meta"])
@pytest.mark.parametrize(
    ("mask", "asked", "message"),
    [
        ("", 3, "output_mask|attn_mask|got none"),
        ("bool", 3, "output_mask|attn_mask|floating|got a bool"),
        ("bias", 4, "output_mask|sinks|got none"),
    ],
)
def test_gradient_of_what_has_none(mask, asked, message, where, device):
    arguments = Case("", mask=mask).build(torch.float32, "meta" if where == "meta" else device)
    with pytest.raises(RuntimeError, match=pattern(message)):
        backward_with(arguments, {}, tuple(place == asked for place in range(5)))


def test_saved_tensors_hooks_that_give_back_another_dtype(device):
    arguments = Case("").build(torch.float32, device).leaves()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t):
        output = arguments(operator("sdpa"))
    with pytest.raises(RuntimeError, match=pattern("lse of dtype float|got half")):
        output.sum().backward()


@pytest.mark.parametrize("where", ["the device", "meta"])
def test_dropout_without_a_seed(where, device):
    arguments = Case("", options={"dropout_p": 0.5}).build(
        torch.float32, "meta" if where == "meta" else device
    )
    with pytest.raises(RuntimeError, match=pattern("dropout_seed|got none")):
        all_outputs(arguments)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout):
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
    with pytest.raises(RuntimeError, match=pattern("query|dense|got")):
        torch.ops.attn_ext.sdpa(nested, nested, nested, dropout_p=0.5)


def test_error_leaves_the_operator_usable(device):
    arguments = Case("").build(torch.float32, device)
    with pytest.raises(RuntimeError):
        arguments(operator("sdpa"), softcap=-1.0)
    assert arguments(operator("sdpa")).isfinite().all()
