"""The oracle: attention in plain PyTorch, written to be read.

It shares nothing with the compiled operators, holds every intermediate in memory, and computes in
float64 unless ``dtype`` says otherwise. ``sdpa``, ``sdpa_with_weights``, ``sdpa_with_lse`` and
``sdpa_with_key_mass`` take the arguments of the operators of the same name; autograd differentiates
them in query, key, value, a floating attn_mask and sinks.

With S the scores and P the weights of one head::

    S = scale * Q K^T;  S = softcap * tanh(S / softcap) if softcap > 0;  S = S + attn_mask
    S_ij = -inf where query i does not see key j
    lse_i = log(sum_j exp(S_ij) + exp(sink));  P_ij = exp(S_ij - lse_i)
    output = dropout(P) V
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Attention",
    "attention",
    "dropout_keep",
    "philox4x32",
    "sdpa",
    "sdpa_packed",
    "sdpa_packed_with_lse",
    "sdpa_paged",
    "sdpa_paged_with_lse",
    "sdpa_with_key_mass",
    "sdpa_with_lse",
    "sdpa_with_weights",
    "visible_keys",
]


class Attention(NamedTuple):
    """Everything that the operators can return, in the dtype of the computation."""

    output: Tensor  # (..., Hq, Lq, Dv)
    weights: Tensor  # (..., Hq, Lq, Lk), after dropout
    lse: Tensor  # (..., Hq, Lq)
    key_mass: Tensor  # (..., Hq, Lk)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_seed: Tensor | int = 0,
    dtype: torch.dtype = torch.float64,
) -> Attention:
    """Masked scaled dot-product attention and all its side outputs.

    The arguments up to ``sinks`` are those of :func:`attn_ext.sdpa`. ``dropout_seed`` keys the dropout
    draw (an int, or an int64 tensor whose dims cover the leading batch dims), ``dtype`` is what is
    computed in and returned.
    """
    single_head = query.dim() == key.dim() == value.dim() == 2
    query, key, value = ((t.unsqueeze(0) if t.dim() == 2 else t).to(dtype) for t in (query, key, value))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
    leading = (t.shape[:-2] for t in (query, key, value))
    heads = torch.broadcast_shapes(*leading)  # type: ignore[no-untyped-call]
    query, key, value = (t.expand(*heads, *t.shape[-2:]) for t in (query, key, value))
    shape = (*heads, query.shape[-2], key.shape[-2])

    visible = visible_keys(
        query.shape[-2],
        key.shape[-2],
        is_causal=is_causal,
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        device=query.device,
    ).expand(shape)
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        if not attn_mask.is_floating_point():
            raise ValueError(f"attn_mask must be bool (True = takes part) or floating, got {attn_mask.dtype}")
        visible = visible & (attn_mask != -math.inf)
        bias = attn_mask.to(dtype)

    scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = scale * _scores(query, key, visible)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + torch.where(visible, bias, 0.0)
    scores = scores.masked_fill(~visible, -math.inf)

    weights, lse = _softmax(scores, visible, sinks)
    if dropout_p > 0:
        keep = dropout_keep(dropout_seed, dropout_p, shape, query.device)
        kept_scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0
        weights = weights * keep.to(dtype) * kept_scale
    output = _mix(weights, value, visible)

    result = Attention(output, weights, lse, weights.sum(-2))
    return Attention(*(t.squeeze(0) for t in result)) if single_head else result


def sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """The output of :func:`attention`, of which it takes the arguments."""
    return attention(*args, **kwargs).output


def sdpa_with_weights(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Output and weights (after dropout) of :func:`attention`, of which it takes the arguments."""
    result = attention(*args, **kwargs)
    return result.output, result.weights


def sdpa_with_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of :func:`attention`, of which it takes the arguments."""
    result = attention(*args, **kwargs)
    return result.output, result.lse


def sdpa_with_key_mass(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Output and weights summed over the queries, of :func:`attention`, of which it takes the arguments."""
    result = attention(*args, **kwargs)
    return result.output, result.key_mass


def sdpa_packed_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    query_offsets: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_seed: Tensor | int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output (Tq, Hq, Dv) and lse (Hq, Tq) of packed sequences, one after the other.

    The arguments are those of :func:`attn_ext.sdpa_packed`, and ``dropout_seed`` and ``dtype`` of
    :func:`attention`.
    """
    ends_k = (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).tolist()
    ends_q = cu_seqlens_q.tolist()
    dtype = options.get("dtype", torch.float64)
    output = query.new_zeros(query.shape[0], query.shape[1], value.shape[2], dtype=dtype)
    lse = query.new_full((query.shape[1], query.shape[0]), -math.inf, dtype=dtype)
    for n in range(len(ends_q) - 1):
        rows = ends_q[n + 1] - ends_q[n] if seqlens_q is None else int(seqlens_q[n])
        keys = ends_k[n + 1] - ends_k[n] if seqlens_k is None else int(seqlens_k[n])
        of_query = slice(ends_q[n], ends_q[n] + rows)
        of_key = slice(ends_k[n], ends_k[n] + keys)
        # The draw is that of a padded batch: batch n of it.
        batches = n + 1 if dropout_p > 0 else 1
        own = (query[of_query], key[of_key], value[of_key])
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in own)
        result = attention(
            q.expand(batches, -1, -1, -1),
            k,
            v,
            dropout_p=dropout_p,
            is_causal=is_causal,
            query_offset=keys - rows if query_offsets is None else int(query_offsets[n]),
            sinks=sinks,
            dropout_seed=dropout_seed,
            **options,
        )
        place = torch.arange(query.shape[0], device=query.device)[of_query]
        output = output.index_copy(0, place, result.output[-1].transpose(0, 1))
        lse = lse.index_copy(1, place, result.lse[-1])
    return output, lse


def sdpa_packed(*args: Any, **kwargs: Any) -> Tensor:
    """The output of :func:`sdpa_packed_with_lse`, of which it takes the arguments."""
    return sdpa_packed_with_lse(*args, **kwargs)[0]


def gather_pages(
    pages: Tensor, block_table: Tensor, seqlens_k: Tensor, scale: Tensor | None = None
) -> list[Tensor]:
    """The rows of each sequence of a paged cache, (keys, heads, features), in float64, times their scale."""
    page_rows = pages.shape[1]
    rows = []
    for places, length in zip(block_table, seqlens_k.tolist(), strict=True):
        used = places[: -(-length // page_rows)].long()
        sequence = pages[used].double()
        if scale is not None:
            by_row = scale.dim() == 4
            sequence = sequence * (scale[used] if by_row else scale.reshape(1, 1, -1, 1)).double()
        rows.append(sequence.flatten(0, 1)[:length])
    return rows


def sdpa_paged_with_lse(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor | None = None,
    is_causal: bool = True,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output (Tq, Hq, Dv) and lse (Hq, Tq) over a paged cache: that of the gathered keys as packed sequences.

    The arguments are those of :func:`attn_ext.sdpa_paged`, and ``dtype`` of :func:`attention`.
    """
    keys = gather_pages(key_pages, block_table, seqlens_k, key_scale)
    values = gather_pages(value_pages, block_table, seqlens_k, value_scale)
    count, lengths = len(keys), seqlens_k.long()
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    starts = torch.arange(count + 1, device=query.device) if cu_seqlens_q is None else cu_seqlens_q
    empty = [torch.zeros_like(pages[:0, 0], dtype=torch.float64) for pages in (key_pages, value_pages)]
    key, value = torch.cat([*keys, empty[0]]), torch.cat([*values, empty[1]])
    return sdpa_packed_with_lse(query.double(), key, value, starts, ends, 0.0, is_causal, **options)


def sdpa_paged(*args: Any, **kwargs: Any) -> Tensor:
    """The output of :func:`sdpa_paged_with_lse`, of which it takes the arguments."""
    return sdpa_paged_with_lse(*args, **kwargs)[0]


def visible_keys(
    query_length: int,
    key_length: int,
    *,
    is_causal: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    query_offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The (Lq, Lk) bool mask of causality and window: True where query i sees key j."""
    i = torch.arange(query_length, device=device).unsqueeze(-1) + query_offset
    j = torch.arange(key_length, device=device)
    visible = torch.ones(query_length, key_length, dtype=torch.bool, device=device)
    if is_causal:
        visible &= j <= i
    if window_left is not None:
        visible &= j >= i - window_left
    if window_right is not None:
        visible &= j <= i + window_right
    return visible


def _scores(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """Q K^T, in which a pair that is not visible gives 0 whatever it holds, and takes no gradient."""
    if query.isfinite().all() and key.isfinite().all():
        return query @ key.transpose(-2, -1)
    pair = visible.unsqueeze(-1)  # (..., Lq, Lk, 1)
    rows = torch.where(pair, query.unsqueeze(-2), 0.0)  # (..., Lq, Lk, D)
    columns = torch.where(pair, key.unsqueeze(-3), 0.0)
    return (rows * columns).sum(-1)


class _VisibleProduct(torch.autograd.Function):
    """The product of left (..., rows, inner), 0 where not visible, with right (..., inner, columns), in which
    a row of the right side reaches only the rows that see it, whatever it holds. So do its gradients."""

    @staticmethod
    def forward(left: Tensor, right: Tensor, visible: Tensor) -> Tensor:
        if right.isfinite().all():
            return left @ right
        seen = torch.where(visible.unsqueeze(-1), right.unsqueeze(-3), 0.0)  # (..., rows, inner, columns)
        return (left.unsqueeze(-1) * seen).sum(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right, visible = ctx.saved_tensors
        grad_left = torch.where(visible, grad @ right.transpose(-2, -1), 0.0)
        return grad_left, _mix(left.transpose(-2, -1), grad, visible.transpose(-2, -1)), None

    @staticmethod
    def jvp(ctx: Any, left_tangent: Tensor, right_tangent: Tensor, _: None) -> Tensor:
        left, right, visible = ctx.saved_tensors
        return _mix(left_tangent, right, visible) + _mix(left, right_tangent, visible)


def _mix(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """P V, in which a value reaches only the rows that see its key."""
    return _VisibleProduct.apply(weights, value, visible)  # type: ignore[no-untyped-call, no-any-return]


def _softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and log-sum-exp. A row with nothing to sum has weights 0, lse -inf and zero gradients."""
    columns = scores.shape[-1]
    if sinks is not None:
        sinks = sinks.masked_fill(sinks == -math.inf, -math.inf)  # is none, and takes no gradient
        sink = sinks.to(scores.dtype)[..., None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1)[..., :columns]
    weights = weights.masked_fill(~visible | empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)
    return weights, lse


def dropout_keep(
    seed: Tensor | int, dropout_p: float, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> Tensor:
    """The dropout draw for weights of the given shape (..., Hq, Lq, Lk): True where a weight is kept.

    Philox4x32-10, keyed by the seed's low and high halves. Column j of (batch, head, row) reads word
    (j >> 4) & 3 of the block at counter ((j >> 6) * 16 + (j & 15), row, head, batch), and is kept if
    that word is at least floor(dropout_p * 2^32). ``batch`` counts the batch dims that the seed's own
    dims do not cover.
    """
    *batch_shape, heads, rows, columns = shape
    seed = torch.as_tensor(seed, dtype=torch.int64, device=device)
    covered, free = batch_shape[: seed.dim()], batch_shape[seed.dim() :]
    seed = seed.reshape(*seed.shape, *[1] * (len(free) + 3))
    batch = torch.arange(math.prod(free), device=device)
    batch = batch.reshape(*[1] * len(covered), *free, 1, 1, 1)
    head = torch.arange(heads, device=device).reshape(-1, 1, 1)
    row = torch.arange(rows, device=device).reshape(-1, 1)
    column = torch.arange(columns, device=device)

    block = (column >> 6) * 16 + (column & 15)
    words = philox4x32((block, row, head, batch), (seed & _WORD, (seed >> 32) & _WORD))
    which = ((column >> 4) & 3).expand(words.shape[1:])
    word = words.gather(0, which.unsqueeze(0)).squeeze(0)
    return (word >= math.floor(dropout_p * 2**32)).expand(shape)


_WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = 10) -> Tensor:
    """Philox4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    Four counter words and two key words, as int64 tensors that hold unsigned 32-bit numbers and
    broadcast together; returns the four random words stacked in front.
    """
    words = torch.broadcast_tensors(*counter, *key)  # type: ignore[no-untyped-call]
    c0, c1, c2, c3 = words[:4]
    k0, k1 = key
    for _ in range(rounds):
        # The low 64 bits of an int64 product are right even where it wraps round.
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        high0, low0 = (product0 >> 32) & _WORD, product0 & _WORD
        high1, low1 = (product1 >> 32) & _WORD, product1 & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack([c0, c1, c2, c3])
