"""Attention in ONNX operators.

The node ``Attention`` of opset 23 takes most calls. Runtimes read three things of it in different ways, so
none of them is left to the node:

- softcap and mask together: opset 23 as it was released adds the mask before the softcap, its correction and
  this package after it; such a call is composed of simpler operators;
- a row that sees no key: zero, NaN, or the mean of all values; it is set to zero after the node;
- causality where the lengths differ or rows are offset: it becomes a part of the mask.

Shapes in four dims: query (B, Hq, Lq, D), key (B, Hkv, Lk, D), value (B, Hkv, Lk, Dv), and what hides keys
broadcasts to (B, Hq, Lq, Lk).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from .operators import INFINITY, Call, Operators, Size, Value
from .shapes import Sizes, in_four_dims, sizes_of


@dataclass(frozen=True)
class Outputs:
    """What a call gives; None is what was not asked for."""

    output: Value
    lse: Value | None = None
    weights: Value | None = None
    key_mass: Value | None = None


@dataclass(frozen=True)
class Problem:
    """A call in four dims and one dtype, with all that hides keys as one mask."""

    query: Value
    key: Value
    value: Value
    visible: Value | None  # bool
    bias: Value | None  # -inf where a key is hidden; never beside `visible`
    is_causal: bool  # only where the triangle is not in the mask
    scale: float
    softcap: float
    dtype: str


def lower(
    op: Operators,
    call: Call,
    *,
    need_lse: bool = False,
    need_weights: bool = False,
    need_key_mass: bool = False,
) -> Outputs:
    """One call in ONNX operators.

    Raises:
        ValueError: dropout, or sizes that have to be known and are not.
    """
    if call.dropout_p != 0:
        raise ValueError(
            f"attn_ext: expected dropout_p to be 0 in a model exported to ONNX, got {call.dropout_p}: "
            "call model.eval() before the export"
        )
    asked = op.dtype(call.query)
    sizes = sizes_of(op, call)
    if any(op.same(size, 0) for size in (sizes.batch, sizes.heads, sizes.rows)):
        return _without_rows(op, sizes, asked)
    as_node = not need_lse and _fits_node(op, call, sizes)
    dtype = _compute_dtype(op, call, as_node)
    call = in_four_dims(op, _in_dtype(op, call, dtype), sizes)
    problem = _problem(op, call, sizes, dtype, as_node)
    inner = sizes
    has_extra_key = call.sinks is not None or op.same(sizes.keys, 0)
    if has_extra_key:
        inner = replace(sizes, keys=op.next_size(sizes.keys))
        problem = _with_extra_key(op, call, sizes, problem)
    if as_node:
        outputs = _node(op, problem, inner, need_weights or need_key_mass)
    else:
        outputs = _composition(op, problem, inner)
    weights = outputs.weights
    if weights is not None and has_extra_key:
        weights = op.first(weights, sizes.keys)

    def as_called(x: Value, last: list[Size], to: str) -> Value:
        return op.reshape(x if dtype == to else op.cast(x, to), [*sizes.leading, *last])

    key_mass = None
    if need_key_mass:  # of float16 in float32
        key_mass = op.cast(op.total(op.cast(weights, sum_dtype(dtype)), -2), dtype)
    return Outputs(
        as_called(outputs.output, [sizes.rows, sizes.value_dim], asked),
        as_called(outputs.lse, [sizes.rows], sum_dtype(asked)) if need_lse else None,
        as_called(weights, [sizes.rows, sizes.keys], asked) if need_weights else None,
        as_called(key_mass, [sizes.keys], asked) if need_key_mass else None,
    )


def _without_rows(op: Operators, sizes: Sizes, dtype: str) -> Outputs:
    """Nothing has received anything. onnxruntime refuses sizes of 0 in the operators of the other ways."""
    rows = [*sizes.leading, sizes.rows]

    def zeros(shape: list[Size]) -> Value:
        return op.zeros(shape, sum_dtype(dtype))

    return Outputs(
        op.cast(zeros([*rows, sizes.value_dim]), dtype),
        zeros(rows),
        op.cast(zeros([*rows, sizes.keys]), dtype),
        op.cast(zeros([*sizes.leading, sizes.keys]), dtype),
    )


def sum_dtype(dtype: str) -> str:
    """What scores and sums are computed in."""
    return "float64" if dtype == "float64" else "float32"


# Which way ----------------------------------------------------------------------------------------


def _fits_node(op: Operators, call: Call, sizes: Sizes) -> bool:
    """Whether the node says what the call says, in every runtime; its attributes hold float32 alone."""
    if op.dtype(call.query) == "float64" or (call.softcap != 0 and (_has_mask(call) or call.is_causal)):
        return False
    return not (op.same(sizes.head_dim, 0) or op.same(sizes.value_dim, 0))


def _has_mask(call: Call) -> bool:
    optional = (call.attn_mask, call.window_left, call.window_right, call.sinks)
    return any(argument is not None for argument in optional)


def _compute_dtype(op: Operators, call: Call, as_node: bool) -> str:
    """float16 only in a node with nothing wider; runtimes on the CPU compute no bfloat16."""
    dtype = op.dtype(call.query)
    others = (op.dtype(x) for x in (call.attn_mask, call.sinks) if x is not None)
    if dtype == "float16" and as_node and "float32" not in others:
        return dtype
    return sum_dtype(dtype)


def _in_dtype(op: Operators, call: Call, dtype: str) -> Call:
    """All floating tensors in one dtype; not every runtime expands bfloat16, so this comes first."""
    named = {"query": call.query, "key": call.key, "value": call.value, "sinks": call.sinks}
    if call.attn_mask is not None and op.dtype(call.attn_mask) != "bool":
        named["attn_mask"] = call.attn_mask
    return replace(call, **{name: op.cast(x, dtype) for name, x in named.items() if x is not None})


# What is computed ---------------------------------------------------------------------------------


def _problem(op: Operators, call: Call, sizes: Sizes, dtype: str, as_node: bool) -> Problem:
    plain = isinstance(call.query_offset, int) and call.query_offset == 0
    by_attribute = as_node and plain and not _has_mask(call) and op.same(sizes.rows, sizes.keys)
    visible = _visible(op, call, sizes, call.is_causal and not by_attribute)
    bias = None
    if call.attn_mask is not None and op.dtype(call.attn_mask) == "bool":
        visible = call.attn_mask if visible is None else op.both(call.attn_mask, visible)
    elif call.attn_mask is not None:
        bias = call.attn_mask
        if visible is not None:
            bias, visible = op.where(visible, bias, op.number(-INFINITY, dtype)), None
    scale = call.scale
    if scale is None:
        if not isinstance(sizes.head_dim, int):
            raise ValueError(
                "attn_ext: expected a head dim that is known at the export, or scale; got neither"
            )
        scale = _default_scale(sizes)
    is_causal = call.is_causal and by_attribute
    return Problem(call.query, call.key, call.value, visible, bias, is_causal, scale, call.softcap, dtype)


def _default_scale(sizes: Sizes) -> float:
    return 1 / math.sqrt(sizes.head_dim) if sizes.head_dim else 1.0


def _visible(op: Operators, call: Call, sizes: Sizes, causal: bool) -> Value | None:
    """What triangle and window let through, (1, 1, Lq, Lk); None for everything."""
    if not causal and call.window_left is None and call.window_right is None:
        return None
    rows = op.reshape(op.add(op.positions(sizes.rows), call.query_offset), [1, 1, sizes.rows, 1])
    columns = op.reshape(op.positions(sizes.keys), [1, 1, 1, sizes.keys])
    visible = op.at_most(columns, rows) if causal else None
    # Differences stay small where row + window would overflow.
    for far, near, window in ((rows, columns, call.window_left), (columns, rows, call.window_right)):
        if window is not None:
            inside = op.at_most(op.subtract(far, near), window)
            visible = inside if visible is None else op.both(visible, inside)
    return visible


def _with_extra_key(op: Operators, call: Call, sizes: Sizes, problem: Problem) -> Problem:
    """One key and value of zeros behind the others: its score is 0 and its bias the sink, or -inf."""
    dtype = problem.dtype
    batch = 1 if call.attn_mask is None else sizes.batch
    bias = problem.bias
    if problem.visible is not None:
        bias = op.where(problem.visible, op.number(0.0, dtype), op.number(-INFINITY, dtype))
    if bias is None:
        bias = op.zeros([1, 1, 1, sizes.keys], dtype)
    if call.sinks is None:
        sinks = op.number(-INFINITY, dtype)
    else:
        sinks = op.reshape(call.sinks, [1, sizes.heads, 1, 1])
    bias, sinks = (
        op.expand(x, [batch, sizes.heads, sizes.rows, last]) for x, last in ((bias, sizes.keys), (sinks, 1))
    )

    def extended(x: Value, dim: Size) -> Value:
        return op.join(x, op.zeros([sizes.batch, sizes.kv_heads, 1, dim], dtype), -2)

    return replace(
        problem,
        key=extended(problem.key, sizes.head_dim),
        value=extended(problem.value, sizes.value_dim),
        visible=None,
        bias=op.join(bias, sinks, -1),
    )


# The node -----------------------------------------------------------------------------------------


def _node(op: Operators, problem: Problem, sizes: Sizes, need_weights: bool) -> Outputs:
    query = problem.query
    attributes: dict[str, Any] = {"is_causal": 1} if problem.is_causal else {}
    if not isinstance(sizes.head_dim, int) or problem.scale != _default_scale(sizes):
        scale = problem.scale
        if scale <= 0:  # which onnxruntime refuses
            query, scale = op.multiply(query, op.number(scale, problem.dtype)), 1.0
        attributes["scale"] = scale
    if problem.softcap != 0:
        attributes["softcap"] = problem.softcap
    mask = problem.bias if problem.visible is None else problem.visible
    whole = None if mask is None else op.expand(mask, [1, 1, sizes.rows, sizes.keys])
    shapes = [[sizes.batch, sizes.heads, sizes.rows, last] for last in (sizes.value_dim, sizes.keys)]
    inputs = (query, problem.key, problem.value, whole)
    output, weights = op.attention(inputs, attributes, shapes[: 1 + need_weights], problem.dtype)
    if mask is not None:
        if problem.visible is not None:
            empty = op.equals(op.largest(op.cast(mask, "float32")), op.number(0.0, "float32"))
        else:
            empty = op.equals(op.largest(mask), op.number(-INFINITY, problem.dtype))
        zero = op.number(0.0, problem.dtype)
        output = op.where(empty, zero, output)
        weights = op.where(empty, zero, weights) if need_weights else None
    return Outputs(output, weights=weights)


# The composition ----------------------------------------------------------------------------------


def _composition(op: Operators, problem: Problem, sizes: Sizes) -> Outputs:
    """S = scale Q Kᵀ, capped, then masked; P = exp(S - lse); a row of -inf gives P = 0 and lse = -inf."""
    zero, one, hidden = (op.number(number, problem.dtype) for number in (0.0, 1.0, -INFINITY))
    scores = _scores(op, problem, sizes)
    if problem.bias is not None:
        scores = op.add(scores, problem.bias)
    if problem.visible is not None:
        scores = op.where(problem.visible, scores, hidden)
    row_max = op.largest(scores)
    row_max = op.where(op.equals(row_max, hidden), zero, row_max)
    weights = op.exp(op.subtract(scores, row_max))
    row_sum = op.total(weights, -1)
    lse = op.add(row_max, op.log(row_sum))
    weights = op.divide(weights, op.where(op.equals(row_sum, zero), one, row_sum))
    output = _by_groups(op, weights, problem.value, sizes, sizes.keys, sizes.value_dim)
    return Outputs(output, lse=lse, weights=weights)


def _scores(op: Operators, problem: Problem, sizes: Sizes) -> Value:
    """Scaled and capped, (B, Hq, Lq, Lk)."""
    if op.same(sizes.head_dim, 0):  # a product over nothing, of which onnxruntime makes anything
        return op.zeros([sizes.batch, sizes.heads, sizes.rows, sizes.keys], problem.dtype)
    scale = problem.scale if problem.softcap == 0 else problem.scale / problem.softcap
    # A number for each column of the query: onnxruntime would make one number a float32 attribute.
    scale = op.expand(op.number(scale, problem.dtype), [sizes.head_dim])
    query, key = op.multiply(problem.query, scale), op.transpose(problem.key)
    scores = _by_groups(op, query, key, sizes, sizes.head_dim, sizes.keys)
    if problem.softcap != 0:
        scores = op.multiply(op.tanh(scores), op.number(problem.softcap, problem.dtype))
    return scores


def _by_groups(op: Operators, a: Value, b: Value, sizes: Sizes, inner: Size, columns: Size) -> Value:
    """(B, Hq, Lq, inner) by (B, Hkv, inner, columns), where a group of heads of the first reads the same."""
    if op.same(sizes.heads, sizes.kv_heads):
        return op.matmul(a, b)
    a = op.reshape(a, [sizes.batch, sizes.kv_heads, sizes.heads // sizes.kv_heads, sizes.rows, inner])
    b = op.reshape(b, [sizes.batch, sizes.kv_heads, 1, inner, columns])
    return op.reshape(op.matmul(a, b), [sizes.batch, sizes.heads, sizes.rows, columns])
