"""From tensors of any number of dims to the four of the ONNX operator."""

from dataclasses import dataclass, replace

from .operators import Call, Operators, Size, Value


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call in four dims."""

    batch_dims: list[Size]  # one or more
    rank: int  # of the outputs
    heads: Size
    kv_heads: Size
    rows: Size  # Lq
    keys: Size  # Lk
    head_dim: Size  # D
    value_dim: Size  # Dv
    batch: Size

    @property
    def leading(self) -> list[Size]:
        """The dims of the outputs before the last two: nothing for 2-D tensors, which are one head."""
        return [*self.batch_dims, self.heads][max(0, 4 - self.rank) :]


def sizes_of(op: Operators, call: Call) -> Sizes:
    """The sizes of a call.

    Raises:
        ValueError: groups of heads whose numbers are not known at the export.
    """
    query, key, value = (op.sizes(x) for x in (call.query, call.key, call.value))
    rank = max(len(query), len(key), len(value))
    q, k, v = (_padded(sizes, max(rank, 4)) for sizes in (query, key, value))
    batch_dims = [_broadcast(op, [q[i], k[i], v[i]]) for i in range(max(rank, 4) - 3)]
    kv_heads = _broadcast(op, [k[-3], v[-3]])
    heads = q[-3] if call.enable_gqa else _broadcast(op, [q[-3], kv_heads])
    if not op.same(heads, kv_heads) and not (isinstance(heads, int) and isinstance(kv_heads, int)):
        raise ValueError(
            f"attn_ext: expected numbers of heads that are known at the export, got {heads} query heads "
            f"and {kv_heads} key heads"
        )
    batch = op.product(batch_dims)
    return Sizes(batch_dims, rank, heads, kv_heads, q[-2], k[-2], q[-1], v[-1], batch)


def in_four_dims(op: Operators, call: Call, sizes: Sizes) -> Call:
    """The call with all batch dims in the first of four, expanded to it; a mask keeps its dims of 1."""

    def flat(x: Value, heads: Size) -> Value:
        own = _padded(op.sizes(x), len(sizes.batch_dims) + 3)
        return _flatten(op, x, own, [*sizes.batch_dims, heads, *own[-2:]])

    return replace(
        call,
        query=flat(call.query, sizes.heads),
        key=flat(call.key, sizes.kv_heads),
        value=flat(call.value, sizes.kv_heads),
        attn_mask=_flatten_mask(op, call.attn_mask, sizes.batch_dims),
    )


def _padded(sizes: list[Size], rank: int) -> list[Size]:
    return [1] * (rank - len(sizes)) + sizes


def _broadcast(op: Operators, sizes: list[Size]) -> Size:
    """What they broadcast to: the first that is not known to be 1."""
    return next((size for size in sizes if not op.same(size, 1)), 1)


def _flatten(op: Operators, x: Value, sizes: list[Size], target: list[Size]) -> Value:
    """``x``, of these sizes once dims of 1 are put in front, expanded to the target, with four dims."""
    if len(op.sizes(x)) != len(sizes):
        x = op.reshape(x, sizes)
    if not all(op.same(a, b) for a, b in zip(sizes, target, strict=True)):
        x = op.expand(x, target)
    return x if len(target) == 4 else op.reshape(x, [op.product(target[:-3]), *target[-3:]])


def _flatten_mask(op: Operators, mask: Value | None, batch: list[Size]) -> Value | None:
    if mask is None:
        return None
    sizes = _padded(op.sizes(mask), len(batch) + 3)
    if all(op.same(size, 1) for size in sizes[:-3]):
        return op.reshape(mask, [1, *sizes[-3:]])
    return _flatten(op, mask, sizes, [*batch, *sizes[-3:]])
