"""flash-attn's function over a cache of keys and values."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import functional


class _Rows(NamedTuple):
    """Where the rows of each sequence lie: as pages, and the table of them."""

    key_pages: Tensor
    value_pages: Tensor
    table: Tensor

    @property
    def most(self) -> int:
        """Rows that a sequence has room for."""
        return self.table.shape[1] * self.key_pages.shape[1]

    def slots(self, places: Tensor) -> Tensor:
        """Of row ``places[n, i]`` of each sequence n."""
        page_rows = self.key_pages.shape[1]
        pages = self.table.long().gather(1, places // page_rows)
        # -1 would be a row that is not written, -2 is refused.
        return torch.where(pages < 0, -2, pages * page_rows + places % page_rows)


def _rows_of(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, batch_idx: Tensor | None, batch: int
) -> _Rows:
    """A cache without a table is one page a sequence."""
    if block_table is not None:
        return _Rows(k_cache, v_cache, block_table)
    if batch_idx is None:
        batch_idx = torch.arange(batch, device=k_cache.device)
    return _Rows(k_cache, v_cache, batch_idx[:, None])


def _without_left(rows: _Rows, left: Tensor) -> _Rows:
    """From row ``left[n]`` of each sequence on: every row is a page of its own."""
    length = rows.key_pages.shape[1]
    places = torch.arange(length, device=left.device) + left[:, None].long()
    # What comes after the last row is not looked at.
    table = rows.table.long() * length + places.clamp_max(length - 1)
    key_pages, value_pages = (p.flatten(0, 1).unsqueeze(1) for p in (rows.key_pages, rows.value_pages))
    return _Rows(key_pages, value_pages, table)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Of x (B, L, heads, D), the first features, by the angles of (B, L, half of them)."""
    count = 2 * cos.shape[-1]
    turned, kept = x[..., :count].float(), x[..., count:]
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([turned.to(x.dtype), kept], -1)


def _check_arguments(
    k: Tensor | None,
    v: Tensor | None,
    rotary: tuple[Tensor | None, Tensor | None],
    cache_seqlens: int | Tensor | None,
    block_table: Tensor | None,
    others: dict[str, Tensor | None],
) -> None:
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        raise ValueError("attn_ext: expected both k and v or neither, and cache_seqlens with them")
    if (rotary[0] is None) != (rotary[1] is None) or (rotary[0] is not None and k is None):
        raise ValueError("attn_ext: expected both rotary_cos and rotary_sin or neither, and k with them")
    for name, argument in others.items():
        if argument is not None and block_table is not None:
            raise ValueError(f"attn_ext: expected no {name} with a block_table, which says where rows are")


def _check_room(begins: Tensor, new_rows: int, most: int) -> None:
    if begins.numel() > 0 and (int(begins.min()) < 0 or int(begins.max()) + new_rows > most):
        raise RuntimeError(
            f"attn_ext: expected cache_seqlens from 0 to {most - new_rows}, what the cache has room for "
            f"beside {new_rows} new rows, but got {begins.tolist()}"
        )


def _check_angles(places: Tensor, rotary_cos: Tensor) -> None:
    needed = int(places.max()) + 1 if places.numel() > 0 else 0
    if needed > rotary_cos.shape[0]:
        raise RuntimeError(
            f"attn_ext: expected rotary_cos and rotary_sin of at least {needed} rows, but got "
            f"{rotary_cos.shape[0]}"
        )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Attention to a cache, to which new keys and values are written first: :func:`attn_ext.sdpa_paged`.

    Args:
        q: :math:`(B, L_q, H_q, D)`.
        k_cache: :math:`(B_c, L_c, H_{kv}, D)`; with a ``block_table``, :math:`(P, \text{page}, H_{kv}, D)`.
        v_cache: the same of the values, :math:`D_v`.
        k: :math:`(B, L_n, H_{kv}, D)`, written to the cache from row ``cache_seqlens`` on, in place.
        v: the same of the values.
        rotary_cos: :math:`(\text{rows}, R / 2)`: the first :math:`R` features of ``k`` are rotated by the row
            that each is written to; those of ``q`` likewise if causal or with a window, else all by the row
            ``cache_seqlens``.
        rotary_sin: the same.
        cache_seqlens: :math:`(B,)`, or one number: rows of the cache that are filled, without ``k``; all if
            None.
        cache_batch_idx: :math:`(B,)`, the row of the cache that is each sequence's; in order if None.
        cache_leftpad: :math:`(B,)`, rows of the cache before the first key; 0 if None. A cache with other
            strides than of its shape is then copied.
        block_table: :math:`(B, \text{most pages})`, the pages of each sequence, of any size.
        softmax_scale: as in :func:`attn_ext.integrations.flash_attn.flash_attn_func`, as are three more.
        causal: as there.
        window_size: as there.
        softcap: as there.
        rotary_interleaved: features 0 and 1 are a pair, else 0 and :math:`R / 2`.
        alibi_slopes: None.
        num_splits: changes nothing.
        return_softmax_lse: return the log-sum-exp, too.

    Returns:
        The output, :math:`(B, L_q, H_q, D_v)`; or that, and the log-sum-exp, :math:`(B, H_q, L_q)`.

    Raises:
        RuntimeError: what :func:`attn_ext.sdpa_paged` refuses, or a cache without room for ``k``.
        ValueError: arguments that do not go together.
        NotImplementedError: ``alibi_slopes``.

    Source:
        The arguments are those of the flash-attn package, 2.8. Unlike there the cache may be narrower than
        the queries, and pages may have any number of rows.

    Example:
        >>> import torch
        >>> from attn_ext.integrations.flash_attn import flash_attn_with_kvcache
        >>> caches = torch.zeros(2, 1, 32, 2, 8)
        >>> filled = torch.tensor([7], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 1, 1, 2, 8)
        >>> flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=filled, causal=True).shape
        torch.Size([1, 1, 2, 8])
        >>> torch.equal(caches[0, 0, 7], k[0, 0])
        True
    """
    if alibi_slopes is not None:
        raise NotImplementedError("attn_ext: expected no alibi_slopes in flash_attn_with_kvcache")
    others = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    _check_arguments(k, v, (rotary_cos, rotary_sin), cache_seqlens, block_table, others)
    batch, length = q.shape[:2]
    rows = _rows_of(k_cache, v_cache, block_table, cache_batch_idx, batch)
    filled = rows.most if cache_seqlens is None else cache_seqlens
    begins = torch.as_tensor(filled, device=q.device).long().expand(batch)
    new_rows = 0 if k is None else k.shape[1]
    _check_room(begins, new_rows, rows.most)
    if cache_leftpad is not None and ((cache_leftpad < 0) | (cache_leftpad > begins)).any():
        raise ValueError(
            "attn_ext: expected cache_leftpad from 0 to cache_seqlens, but got "
            f"{cache_leftpad.tolist()} and {begins.tolist()}"
        )

    if k is not None and v is not None:
        places = begins[:, None] + torch.arange(new_rows, device=q.device)
        if rotary_cos is not None and rotary_sin is not None:
            moves = causal or max(window_size) >= 0
            at = begins[:, None] + torch.arange(length, device=q.device) * moves
            _check_angles(torch.cat([places, at], 1), rotary_cos)
            k = _rotate(k, rotary_cos[places], rotary_sin[places], rotary_interleaved)
            q = _rotate(q, rotary_cos[at], rotary_sin[at], rotary_interleaved)
        slots = rows.slots(places).flatten()
        functional.cache_write_(k_cache, v_cache, k.flatten(0, 1), v.flatten(0, 1), slots)

    lengths = begins + new_rows
    if cache_leftpad is not None:
        rows, lengths = _without_left(rows, cache_leftpad), lengths - cache_leftpad
    output, lse = functional.sdpa_paged_with_lse(
        q.flatten(0, 1),
        *rows,
        lengths,
        torch.arange(batch + 1, device=q.device) * length,
        causal,
        scale=softmax_scale,
        enable_gqa=True,
        window_left=None if window_size[0] < 0 else window_size[0],
        window_right=None if window_size[1] < 0 else window_size[1],
        softcap=softcap,
    )
    output = output.view(batch, length, *output.shape[1:])
    if not return_softmax_lse:
        return output
    return output, lse.view(-1, batch, length).transpose(0, 1)
