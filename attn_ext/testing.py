"""What the tests share: shapes, dtypes, masks and layouts, random cases, and what counts as accurate.

``CASES`` is the one list of chosen cases; ``random_cases()`` is a hypothesis strategy that draws
others. Both give a :class:`Case`, which :meth:`Case.build` turns into tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attn_ext import reference

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Every public op, the one without a side output first; tests/test_schema.py holds these lists against the
#: schemas.
OPS = ("sdpa", "sdpa_with_weights", "sdpa_with_lse", "sdpa_with_key_mass")
DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "sinks")

#: Every option of the operators with its default.
OPTIONS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
    "window_left": None,
    "window_right": None,
    "query_offset": 0,
    "softcap": 0.0,
    "sinks": None,
}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Arguments:
    """The tensors of one call: query, key and value, and in ``options`` all the rest."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, function: Callable[..., Any], **more: Any) -> Any:
        """Call ``function`` with these arguments."""
        return function(self.query, self.key, self.value, **{**self.options, **more})

    def differentiable(self) -> dict[str, Tensor]:
        """The floating tensors among the arguments, by name."""
        tensors = {"query": self.query, "key": self.key, "value": self.value, **self.options}
        return {
            name: tensors[name]
            for name in DIFFERENTIABLE
            if isinstance(tensors.get(name), Tensor) and tensors[name].is_floating_point()
        }

    def with_tensors(self, tensors: dict[str, Tensor]) -> "Arguments":
        """These arguments with some tensors replaced, by name."""
        query, key, value = (tensors.get(n, getattr(self, n)) for n in ("query", "key", "value"))
        options = {n: t for n, t in tensors.items() if n in OPTIONS}
        return Arguments(query, key, value, {**self.options, **options})

    def map(self, function: Callable[[Tensor], Tensor]) -> "Arguments":
        """These arguments with ``function`` applied to each floating tensor."""
        return self.with_tensors({n: function(t) for n, t in self.differentiable().items()})

    def leaves(self) -> "Arguments":
        """These arguments, detached, with every floating tensor a leaf that requires grad."""
        return self.map(lambda t: t.detach().requires_grad_())


# Masks -------------------------------------------------------------------------------------------


def _random_bool(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) < 0.6


def _padding(shape: Shape, generator: torch.Generator) -> Tensor:
    """Each row sees a prefix of the keys, at least one."""
    lengths = torch.randint(1, max(shape[-1], 1) + 1, (*shape[:-1], 1), generator=generator)
    return torch.arange(shape[-1]) < lengths


def _dead_row(shape: Shape, generator: torch.Generator) -> Tensor:
    """The second row of every head sees nothing, the first everything."""
    mask = _random_bool(shape, generator)
    if mask.dim() > 1:
        mask[..., :1, :] = True
        mask[..., 1:2, :] = False
    return mask


def _all_false(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _bias(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _bias_with_minus_inf(shape: Shape, generator: torch.Generator) -> Tensor:
    return _bias(shape, generator).masked_fill(~_dead_row(shape, generator), -math.inf)


def _huge_negative_bias(shape: Shape, generator: torch.Generator) -> Tensor:
    """The other habit of masking: a finite number near the lowest of float16, for a whole row too."""
    return _dead_row(shape, generator).logical_not() * -6e4


MASKS: dict[str, Callable[[Shape, torch.Generator], Tensor]] = {
    "bool": _random_bool,
    "padding": _padding,
    "dead_row": _dead_row,
    "all_false": _all_false,
    "bias": _bias,
    "bias_with_minus_inf": _bias_with_minus_inf,
    "huge_negative_bias": _huge_negative_bias,
}


# Layouts -----------------------------------------------------------------------------------------


def _heads_last(t: Tensor) -> Tensor:
    """(..., L, H, D) in memory, as a projection leaves it."""
    return t.transpose(-2, -3).contiguous().transpose(-2, -3) if t.dim() > 2 else t


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-2, -1).contiguous().transpose(-2, -1)


def _every_second(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, math.nan)], dim=-1).flatten(-2)[..., ::2]


def _padded_rows(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (1, 2), value=math.nan)[..., 1:-2]


def _one_batch_expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t) if t.dim() > 2 and t.shape[0] > 0 else t


#: Ways in which the same numbers can lie in memory; all but the last keep them.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "heads_last": _heads_last,
    "transposed": _transposed,
    "every_second": _every_second,
    "padded_rows": _padded_rows,
    "one_batch_expanded": _one_batch_expanded,
}


# Cases -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One call to test: shapes, mask, layout and options; the numbers come from ``seed``."""

    name: str
    query: Shape = (2, 3, 5, 8)
    key: Shape = (2, 3, 7, 8)
    value: Shape = (2, 3, 7, 6)
    mask: str = ""
    mask_shape: Shape = (2, 3, 5, 7)
    mask_dtype: torch.dtype | None = None
    sinks: bool = False
    layout: str = "contiguous"
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def heads(self) -> int:
        """Query heads, Hq."""
        sizes = [s[-3] for s in (self.query, self.key, self.value) if len(s) > 2]
        if self.options.get("enable_gqa") or not sizes:
            return sizes[0] if sizes else 1
        return next((size for size in sizes if size != 1), 1)

    @property
    def scores(self) -> int:
        """How many scores the call has: its size, for what must stay small."""
        return math.prod(self.query[:-1]) * self.key[-2]

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Arguments:
        """The tensors of this case; the same numbers, rounded, for every dtype and device."""
        generator = torch.Generator().manual_seed(self.seed)

        def place(t: Tensor) -> Tensor:
            return LAYOUTS[self.layout](t.to(device, dtype))

        query, key, value = (
            place(torch.randn(shape, generator=generator, dtype=torch.float64))
            for shape in (self.query, self.key, self.value)
        )
        options = dict(self.options)
        if self.mask:
            mask = MASKS[self.mask](self.mask_shape, generator)
            mask_dtype = self.mask_dtype or dtype
            options["attn_mask"] = mask.to(device, None if mask.dtype == torch.bool else mask_dtype)
        if self.sinks:
            options["sinks"] = torch.randn(self.heads, generator=generator).to(device, dtype)
        return Arguments(query, key, value, options)


def _options(**options: Any) -> dict[str, Any]:
    return {"options": options}


def _square(length: int, dim: int = 16, heads: int = 2, **more: Any) -> dict[str, Any]:
    shape = (1, heads, length, dim)
    return {"query": shape, "key": shape, "value": shape, **more}


CASES: tuple[Case, ...] = (
    # Rank and size
    Case("plain"),
    Case("two_dims", (5, 8), (7, 8), (7, 6)),
    Case("three_dims", (3, 5, 8), (3, 7, 8), (3, 7, 6)),
    Case("five_dims", (2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 6)),
    Case("one_row", (2, 3, 1, 8)),
    Case("one_column", key=(2, 3, 1, 8), value=(2, 3, 1, 6)),
    Case("one_score", (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
    Case("head_dim_one", (2, 3, 5, 1), (2, 3, 7, 1), (2, 3, 7, 1)),
    Case("odd_head_dim", (2, 3, 5, 13), (2, 3, 7, 13), (2, 3, 7, 11)),
    Case("wide_value", (2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 40)),
    Case("no_rows", (2, 3, 0, 8)),
    Case("no_columns", key=(2, 3, 0, 8), value=(2, 3, 0, 6)),
    Case("no_columns_with_sinks", key=(2, 3, 0, 8), value=(2, 3, 0, 6), sinks=True),
    Case("no_batch", (0, 3, 5, 8), (0, 3, 7, 8), (0, 3, 7, 6)),
    Case("no_batch_by_broadcast", (0, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 6)),
    Case("no_heads", (2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 6)),
    # Broadcast and layout
    Case("one_key_batch", (2, 3, 5, 8), (1, 3, 7, 8), (1, 3, 7, 6)),
    Case("one_query_batch", (1, 3, 5, 8)),
    Case("fewer_key_dims", (2, 2, 3, 5, 8), (2, 3, 7, 8), (3, 7, 6)),
    Case("more_value_dims", (3, 5, 8), (3, 7, 8), (2, 3, 7, 6)),
    Case("one_key_head_broadcast", (2, 3, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6)),
    Case("one_query_head_broadcast", (2, 1, 5, 8)),
    *(Case(name, layout=name) for name in LAYOUTS if name != "contiguous"),
    # Causality, window, offset
    Case("causal", **_options(is_causal=True)),
    Case("causal_more_rows_than_columns", (2, 3, 9, 8), **_options(is_causal=True)),
    Case("causal_bottom_right", **_options(is_causal=True, query_offset=2)),
    Case("causal_first_rows_dead", **_options(is_causal=True, query_offset=-2)),
    Case("causal_all_rows_dead", **_options(is_causal=True, query_offset=-100)),
    Case("window_left", **_options(window_left=2)),
    Case("window_right", **_options(window_right=1)),
    Case("window", **_options(window_left=1, window_right=2)),
    Case("window_of_one", **_options(window_left=0, window_right=0)),
    Case("window_past_the_last_key", **_options(window_left=2, query_offset=6)),
    Case(
        "causal_window_offset",
        **_options(is_causal=True, window_left=2, window_right=9, query_offset=1),
    ),
    Case("window_wider_than_int32", **_options(window_left=2**40, window_right=2**40)),
    # Masks
    Case("padding", mask="padding", mask_shape=(2, 1, 1, 7)),
    Case("bool_mask", mask="bool"),
    Case("bool_mask_of_rows_and_columns", mask="bool", mask_shape=(5, 7)),
    Case("bool_mask_of_columns", mask="padding", mask_shape=(7,)),
    Case("bool_mask_of_rows", mask="dead_row", mask_shape=(2, 1, 5, 1)),
    Case("dead_row", mask="dead_row"),
    Case("all_false_mask", mask="all_false"),
    Case("bias", mask="bias"),
    Case("bias_over_batch", mask="bias", mask_shape=(3, 5, 7)),
    Case("bias_over_rows", mask="bias", mask_shape=(3, 1, 7)),
    Case("bias_over_columns", mask="bias", mask_shape=(2, 1, 5, 1)),
    Case("bias_of_one_number", mask="bias", mask_shape=(1,)),
    Case("bias_float32", mask="bias", mask_dtype=torch.float32),
    Case("bias_with_minus_inf", mask="bias_with_minus_inf"),
    Case("huge_negative_bias", mask="huge_negative_bias"),
    Case("bias_of_two_dims", (5, 8), (7, 8), (7, 6), mask="bias", mask_shape=(5, 7)),
    Case("bias_and_causal", mask="bias", **_options(is_causal=True, query_offset=1)),
    Case(
        "mask_causal_and_window",
        mask="bool",
        mask_shape=(2, 1, 5, 7),
        **_options(is_causal=True, window_left=3, query_offset=2),
    ),
    # Scores
    Case("scale", **_options(scale=0.7)),
    Case("scale_zero", **_options(scale=0.0)),
    Case("scale_negative", **_options(scale=-0.5)),
    Case("scale_zero_and_mask", mask="bool", **_options(scale=0.0)),
    Case("scale_negative_and_mask", mask="bool", **_options(scale=-0.5)),
    Case("scale_negative_and_bias", mask="bias", **_options(scale=-0.5)),
    Case("softcap", **_options(softcap=0.8)),
    Case("softcap_and_bias", mask="bias", mask_shape=(3, 5, 7), **_options(softcap=0.8, scale=1.0)),
    Case("softcap_and_dead_row", mask="dead_row", **_options(softcap=2.0)),
    Case("sinks", sinks=True),
    Case("sinks_of_two_dims", (5, 8), (7, 8), (7, 6), sinks=True),
    Case("sinks_and_dead_row", mask="dead_row", sinks=True),
    Case("sinks_causal_softcap", sinks=True, **_options(is_causal=True, softcap=1.5)),
    # Grouped heads
    Case("grouped", (2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), **_options(enable_gqa=True)),
    Case("grouped_into_one", (2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 6), **_options(enable_gqa=True)),
    Case("grouped_alone", **_options(enable_gqa=True)),
    Case("grouped_one_row", (2, 6, 1, 8), (2, 2, 7, 8), (2, 2, 7, 6), **_options(enable_gqa=True)),
    Case(
        "grouped_one_key_batch",
        (2, 4, 5, 8),
        (1, 2, 7, 8),
        (2, 7, 6),
        mask="bias",
        mask_shape=(4, 5, 7),
        **_options(enable_gqa=True),
    ),
    Case(
        "grouped_with_everything",
        (2, 4, 5, 8),
        (2, 2, 7, 8),
        (2, 2, 7, 6),
        mask="bias",
        mask_shape=(2, 1, 5, 7),
        sinks=True,
        layout="heads_last",
        **_options(enable_gqa=True, is_causal=True, query_offset=2, window_left=3, softcap=3.0, scale=0.4),
    ),
    # Longer than a block of rows or columns
    Case("long", **_square(150, dim=64)),
    Case("long_causal", **_square(270, **_options(is_causal=True))),
    Case("long_one_row", (1, 2, 1, 32), (1, 2, 1100, 32), (1, 2, 1100, 32)),
    Case(
        "long_grouped_window",
        (1, 4, 130, 32),
        (1, 2, 600, 32),
        (1, 2, 600, 24),
        sinks=True,
        **_options(enable_gqa=True, is_causal=True, query_offset=470, window_left=90),
    ),
    Case("long_padding", **_square(300, mask="padding", mask_shape=(1, 1, 1, 300))),
    Case("long_bias", **_square(200, mask="bias", mask_shape=(2, 200, 200))),
    Case("long_dead_rows", **_square(140, mask="dead_row", mask_shape=(1, 2, 140, 140))),
    # Few rows, many columns
    Case(
        "few_rows_padding_of_each_head",
        (1, 12, 2, 40),
        (1, 2, 600, 40),
        (1, 2, 600, 36),
        mask="padding",
        mask_shape=(1, 12, 1, 600),
        **_options(enable_gqa=True),
    ),
    Case(
        "few_rows_bool_mask",
        (1, 8, 9, 80),
        (1, 2, 531, 80),
        (1, 2, 531, 80),
        mask="bool",
        mask_shape=(1, 8, 9, 531),
        **_options(enable_gqa=True),
    ),
    Case(
        "few_rows_window",
        (1, 2, 4, 16),
        (1, 2, 1100, 16),
        (1, 2, 1100, 16),
        **_options(window_left=10, window_right=20, query_offset=500),
    ),
    Case("few_rows_transposed", (2, 4, 3, 33), (2, 4, 300, 33), (2, 4, 300, 50), layout="transposed"),
    Case(
        "few_rows_with_everything",
        (2, 6, 16, 64),
        (2, 2, 300, 64),
        (2, 2, 300, 72),
        mask="bias",
        mask_shape=(2, 1, 16, 300),
        sinks=True,
        layout="heads_last",
        **_options(enable_gqa=True, is_causal=True, query_offset=284, softcap=3.0),
    ),
)


def cases(condition: Callable[[Case], bool] = lambda case: True) -> tuple[Case, ...]:
    """The chosen cases that meet a condition."""
    return tuple(case for case in CASES if condition(case))


#: Cases for derivatives in float64: every feature once, and so small that a Jacobian is cheap.
DERIVATIVE_CASES: tuple[Case, ...] = tuple(
    replace(
        case,
        query=case.query if case.query != Case.query else (1, 2, 3, 2),
        key=case.key if case.key != Case.key else (1, 2, 4, 2),
        value=case.value if case.value != Case.value else (1, 2, 4, 3),
    )
    for case in (
        Case("plain"),
        Case("causal", **_options(is_causal=True)),
        Case("padding", mask="padding", mask_shape=(1, 1, 1, 4), seed=1),
        Case("dead_row", mask="dead_row", mask_shape=(1, 2, 3, 4)),
        Case("bias_over_batch", (2, 2, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2), "bias", (2, 3, 3)),
        Case(
            "grouped_one_key_batch",
            (2, 2, 2, 2),
            (1, 1, 3, 2),
            (1, 1, 3, 2),
            **_options(enable_gqa=True),
        ),
        Case("window_offset", **_options(window_left=1, window_right=1, query_offset=1)),
        Case("softcap", **_options(softcap=1.5)),
        Case("sinks", sinks=True),
        Case("dropout", **_options(dropout_p=0.4)),
    )
)


def random_cases(max_length: int = 80, max_dim: int = 40) -> Any:
    """A hypothesis strategy of :class:`Case`: shapes, broadcast, layout, masks and options."""
    from hypothesis import strategies as st

    @st.composite
    def strategy(draw: Any) -> Case:
        def broadcast(shape: Shape) -> Shape:
            """The shape with some dims 1 and some leading dims left out."""
            ones = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
            return tuple(1 if one else size for one, size in zip(ones, shape, strict=True))

        def drop(shape: Shape) -> Shape:
            return shape[draw(st.integers(0, len(shape))) :]

        def size(low: int, high: int) -> int:
            return int(draw(st.integers(low, high)))

        batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        kv_heads, group = size(1, 3), size(1, 3)
        heads = kv_heads * group
        lq, lk, d, dv = size(0, max_length), size(0, max_length), size(1, max_dim), size(1, max_dim)
        options: dict[str, Any] = {}
        if group > 1 or draw(st.booleans()):
            options["enable_gqa"] = True

        def optional(name: str, strategy: Any) -> None:
            if draw(st.booleans()):
                options[name] = draw(strategy)

        optional("is_causal", st.just(True))
        optional("window_left", st.integers(0, max_length))
        optional("window_right", st.integers(0, max_length))
        optional("query_offset", st.integers(-max_length, max_length))
        optional("softcap", st.sampled_from([0.5, 3.0, 30.0]))
        optional("scale", st.sampled_from([0.0, 0.1, 1.0, -0.3]))
        return Case(
            "random",
            query=(*batch, heads, lq, d),
            key=(*drop(broadcast(batch)), kv_heads, lk, d),
            value=(*drop(broadcast(batch)), kv_heads, lk, dv),
            mask=draw(st.sampled_from(["", *MASKS])),
            mask_shape=drop(broadcast((*batch, heads, lq, lk))) or (1,),
            mask_dtype=draw(st.sampled_from([None, torch.float32])),
            sinks=draw(st.booleans()),
            layout=draw(st.sampled_from(sorted(set(LAYOUTS)))),
            options=options,
            seed=size(0, 2**16),
        )

    return strategy()


# Calls -------------------------------------------------------------------------------------------


def public_ops() -> list[str]:
    """The names of the ops that are registered, without the internal ones: ``OPS``, if nothing is missing."""
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(op for namespace, _, op in names if namespace == "attn_ext" and not op.startswith("_"))


def operator(name: str) -> Callable[..., Any]:
    """``torch.ops.attn_ext.<name>``."""
    op: Callable[..., Any] = getattr(torch.ops.attn_ext, name)
    return op


def all_outputs(
    arguments: Arguments,
    dropout_seed: Tensor | int | None = None,
    need_weights: bool = True,
    need_key_mass: bool = True,
) -> Any:
    """Output, lse, weights and key mass of one call of the internal forward operator."""
    if isinstance(dropout_seed, int):
        dropout_seed = torch.tensor(dropout_seed, device=arguments.query.device)
    return arguments(
        torch.ops.attn_ext._sdpa_forward,
        **{name: arguments.options.get(name, default) for name, default in OPTIONS.items()},
        dropout_seed=dropout_seed,
        sequences=None,
        need_weights=need_weights,
        need_key_mass=need_key_mass,
    )


def with_seed(name: str, dropout_seed: Tensor | int) -> Callable[..., Any]:
    """Operator ``name`` with the dropout draw of a given seed, where the public one draws its own."""
    place = {"sdpa": None, "sdpa_with_lse": 1, "sdpa_with_weights": 2, "sdpa_with_key_mass": 3}[name]

    def function(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        arguments = Arguments(query, key, value, options)
        outputs = all_outputs(
            arguments, dropout_seed, name == "sdpa_with_weights", name == "sdpa_with_key_mass"
        )
        return outputs[0] if place is None else (outputs[0], outputs[place])

    return function


def backward(
    grad_outputs: tuple[Tensor | None, ...],
    arguments: Arguments,
    output: Tensor,
    lse: Tensor,
    output_mask: tuple[bool, ...] = (True,) * 5,
    dropout_seed: Tensor | None = None,
) -> Any:
    """One call of the internal backward operator: gradients of output, lse, weights and key mass in,
    those of query, key, value, attn_mask and sinks out."""
    return torch.ops.attn_ext._sdpa_backward(
        *grad_outputs,
        arguments.query,
        arguments.key,
        arguments.value,
        **{name: arguments.options.get(name, default) for name, default in OPTIONS.items()},
        dropout_seed=dropout_seed,
        sequences=None,
        output=output,
        lse=lse,
        output_mask=list(output_mask),
    )


def tensors(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of any of the operators as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def cotangents(outputs: tuple[Tensor, ...], dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    """A gradient for each output: the same numbers, rounded to ``dtype``, whatever the outputs' own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).to(t) for t in outputs]


def gradients(function: Callable[..., Any], arguments: Arguments, **more: Any) -> dict[str, Tensor]:
    """The gradient of every floating tensor argument, by name, for fixed random cotangents of every floating
    output."""
    dtype = more.pop("cotangent_dtype", arguments.query.dtype)
    leaves = arguments.leaves()
    outputs = tuple(t for t in tensors(leaves(function, **more)) if t.is_floating_point())
    for i, output in enumerate(outputs):
        assert output.requires_grad, f"output {i} of {function} has no gradient"
    inputs = leaves.differentiable()
    grads = torch.autograd.grad(
        outputs, list(inputs.values()), cotangents(outputs, dtype), materialize_grads=True
    )
    return dict(zip(inputs, grads, strict=True))


# Accuracy ----------------------------------------------------------------------------------------

#: A tiny floor, relative to the terms of a sum. Every sum is float32, of float64 inputs float64, and there
#: the reference is no more exact than what it measures.
SUM_ROUNDING = {
    torch.float64: 1e-11,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-6,
    torch.float16: 1e-6,
}


def on_threads(threads: int, function: Callable[[], Any]) -> Any:
    """What ``function`` returns on so many of PyTorch's threads; their number is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


def assert_accurate(
    actual: Tensor, exact: Tensor, plain: Tensor, what: str = "result", magnitude: float = 0.0
) -> None:
    """At most twice the error of the same-precision composition.

    ``actual`` may be twice as far from ``exact`` (float64) as ``plain`` (matmul, softmax and matmul in the
    same precision), plus its own last bit, plus the rounding of sums of terms up to ``magnitude`` or the
    largest of ``exact``, which may cancel. It must be NaN and infinite just where ``exact`` is.
    """
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    assert actual.device == exact.device
    finite = exact.isfinite()
    torch.testing.assert_close(
        actual.double().masked_fill(finite, 0),
        exact.masked_fill(finite, 0),
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda m: f"{what} differs where NaN or Inf is due: {m}",
    )
    if not finite.any():
        return
    error = _largest(actual.double() - exact, finite)
    bound = 2 * _largest(plain.double() - exact, finite)
    bound += torch.finfo(actual.dtype).eps * _largest(exact, finite)
    bound += SUM_ROUNDING[actual.dtype] * (1 + max(magnitude, _largest(exact, finite)))
    assert error <= bound, f"{what}: error {error:.3g}, allowed {bound:.3g} ({actual.dtype})"


def _largest(t: Tensor, where: Tensor) -> float:
    """The largest magnitude among the chosen, 0 of none."""
    chosen = t.detach()[where]
    largest = chosen.abs().max().item() if chosen.numel() else 0.0
    return largest if math.isfinite(largest) else math.inf


def composition_dtype(arguments: Arguments, result: Tensor) -> torch.dtype:
    """The precision of the plain composition that ``result`` is held against: its own, so that a
    float32 lse of bfloat16 inputs is held against float32."""
    return torch.promote_types(arguments.query.dtype, result.dtype)


def _oracle_and_operator(
    name: str, dropout_seed: int | None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    oracle = getattr(reference, name)
    if dropout_seed is None:
        return oracle, operator(name)
    return partial(oracle, dropout_seed=dropout_seed), with_seed(name, dropout_seed)


def assert_outputs_accurate(name: str, arguments: Arguments, dropout_seed: int | None = None) -> None:
    """Every output of operator ``name`` is accurate (:func:`assert_accurate`)."""
    oracle, function = _oracle_and_operator(name, dropout_seed)
    actual = tensors(arguments(function))
    exact = tensors(arguments(oracle))
    magnitude = _rounded_bias(arguments)
    for i, (a, e) in enumerate(zip(actual, exact, strict=True)):
        plain = tensors(arguments(oracle, dtype=composition_dtype(arguments, a)))[i]
        assert_accurate(a, e, plain, f"{name}[{i}]", magnitude)


def _rounded_bias(arguments: Arguments) -> float:
    """The largest bias: a score of that size is rounded to its own last bit, however it is made, and with few
    scores the composition's rounding may happen to cancel."""
    mask = arguments.options.get("attn_mask")
    if mask is None or mask.dtype == torch.bool:
        return 0.0
    return _largest(mask, mask.isfinite())


def assert_gradients_accurate(name: str, arguments: Arguments, dropout_seed: int | None = None) -> None:
    """Every gradient of operator ``name`` is accurate and comes in its tensor's shape and dtype."""
    oracle, function = _oracle_and_operator(name, dropout_seed)
    dtype = arguments.query.dtype
    actual = gradients(function, arguments)
    wide = arguments.map(torch.Tensor.double)
    exact = gradients(oracle, wide, cotangent_dtype=dtype)
    plain = gradients(oracle, arguments, dtype=dtype)
    magnitude = max(_largest(grad, grad.isfinite()) for grad in exact.values())
    # A weight is off by as much of itself as the rounding of its score.
    of_scores = _rounded_bias(arguments) * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    magnitude *= max(1.0, of_scores / SUM_ROUNDING[dtype])
    for argument, grad in actual.items():
        leaf = arguments.differentiable()[argument]
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape, argument
        what = f"gradient of {argument}"
        walk = math.sqrt(_scores_summed(arguments, leaf)) if argument in ("attn_mask", "sinks") else 1.0
        assert_accurate(grad, exact[argument], plain[argument], what, walk * magnitude)


def _scores_summed(arguments: Arguments, leaf: Tensor) -> float:
    """How many scores' gradients each element of a bias or of sinks sums: their roundings walk at random."""
    scores = arguments.query[..., 0].numel() * arguments.key.shape[-2]
    return max(1.0, scores / max(1, leaf.numel()))
