"""A cache of keys and values, for decoding step by step."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.jit import is_scripting  # type: ignore[attr-defined]

from ._paged import cache_write_, sdpa_paged

__all__ = ["KeyValueCache"]

# Names by which TorchScript finds the types: to it a dtype is a number.
if TYPE_CHECKING:
    DType = torch.dtype
else:
    DType = int
Device = torch.device


class KeyValueCache:
    r"""Keys and values of a batch of sequences that grow, in one piece each or in pages of a common pool.

    TorchScript takes it as an argument; whatever changes is in tensors that are written in place.

    Args:
        batch_size: sequences at a time, :math:`B`.
        max_length: keys that a sequence can have.
        num_heads: key/value heads, :math:`H_{kv}`.
        head_dim: features of a key, :math:`D`.
        value_dim: features of a value, :math:`D_v`; ``head_dim`` if None.
        page_size: rows of a page; None: a sequence is one page of ``max_length`` rows, its own from the
            beginning.
        num_pages: pages of the pool, what all sequences at full length need if None. Fewer take less memory
            and are enough while sequences are short.
        dtype: of what is stored; torch's default dtype if None. It may be narrower than the queries: bfloat16
            and float16 under float32, and int8 and float8_e4m3fn under all, with a scale for each key, value
            and head that is made when they are written.
        device: where it is.

    Attributes:
        key_pages: :math:`(P, \text{page}, H_{kv}, D)`, in memory :math:`(P, H_{kv}, \text{page}, D)`.
        value_pages: :math:`(P, \text{page}, H_{kv}, D_v)`, in the same order.
        key_scale: :math:`(P, \text{page}, H_{kv}, 1)` for int8 and float8, else None.
        value_scale: the same of the values.
        block_table: :math:`(B, \text{most pages})`, the pages of each sequence, -1 where it has none.
        lengths: :math:`(B,)`, keys of each sequence.

    Raises:
        ValueError: a size that is not greater than 0; a dtype that no cache has.

    Source:
        Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".

    Example:
        >>> import torch, attn_ext
        >>> cache = attn_ext.KeyValueCache(2, 100, 4, 16, page_size=16, dtype=torch.bfloat16)
        >>> attention = attn_ext.MultiHeadAttention(64, 4).eval()
        >>> x = torch.randn(2, 7, 64)
        >>> with torch.no_grad():
        ...     prompt, _ = attention(x, is_causal=True, cache=cache)
        ...     step, _ = attention(torch.randn(2, 1, 64), is_causal=True, cache=cache)
        >>> step.shape, cache.lengths
        (torch.Size([2, 1, 64]), tensor([8, 8]))
    """

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        dtype: DType | None = None,
        device: Device | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        page_rows = max_length if page_size is None else page_size
        for size in (batch_size, max_length, num_heads, head_dim, value_dim, page_rows):
            if size <= 0:
                raise ValueError(f"attn_ext: expected sizes of a cache greater than 0, but got {size}")
        most_pages = (max_length + page_rows - 1) // page_rows
        pages = batch_size * most_pages if num_pages is None else num_pages
        if pages <= 0:
            raise ValueError(f"attn_ext: expected num_pages greater than 0, but got {pages}")
        if num_pages is not None and page_size is None:
            raise ValueError(
                f"attn_ext: expected a page_size with num_pages, but got num_pages={pages} alone"
            )
        self.max_length = max_length
        self.in_pages = page_size is not None
        # A head reads its own rows of a page: where they lie side by side, it reads them in one go.
        self.key_pages: Tensor = torch.ops.attn_ext._cache_zeros(
            [pages, num_heads, page_rows, head_dim], dtype=dtype, device=device
        ).transpose(1, 2)
        self.value_pages: Tensor = torch.ops.attn_ext._cache_zeros(
            [pages, num_heads, page_rows, value_dim], dtype=dtype, device=device
        ).transpose(1, 2)
        stored = self.key_pages.dtype
        if stored not in (
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int8,
            torch.float8_e4m3fn,
        ):
            raise ValueError(
                "attn_ext: expected a cache of float64, float32, bfloat16, float16, int8 or float8_e4m3fn, "
                f"but got {stored}"
            )
        key_scale: Tensor | None = None
        value_scale: Tensor | None = None
        # The number that the largest of a row is stored as; 0 where rows are stored as they are.
        self.largest = 0.0
        if self.key_pages.dtype == torch.int8:
            self.largest = 127.0
        elif self.key_pages.dtype == torch.float8_e4m3fn:
            self.largest = 448.0
        if self.largest > 0:
            shape = [pages, num_heads, page_rows, 1]
            key_scale = torch.ones(shape, device=device, dtype=torch.float32).transpose(1, 2)
            value_scale = torch.ones(shape, device=device, dtype=torch.float32).transpose(1, 2)
        self.key_scale = key_scale
        self.value_scale = value_scale
        self.lengths: Tensor = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.block_table: Tensor = torch.full((batch_size, most_pages), -1, dtype=torch.long, device=device)
        # The first `free_count` of them belong to nobody.
        self.free_pages: Tensor = torch.arange(pages - 1, -1, -1, device=device)
        self.free_count: Tensor = torch.full((1,), pages, dtype=torch.long)
        if not self.in_pages:
            self.block_table.copy_(torch.arange(batch_size, device=device).unsqueeze(1))
            self.free_count.zero_()

    def append(self, key: Tensor, value: Tensor) -> None:
        r"""Write the same number of new keys and values behind those of every sequence.

        Args:
            key: :math:`(B, H_{kv}, L, D)`.
            value: :math:`(B, H_{kv}, L, D_v)`.

        Raises:
            RuntimeError: shapes or dtypes that do not fit, a sequence that grows beyond ``max_length``, no
                page left; then nothing has changed.
        """
        batch = self.lengths.size(0)
        if key.dim() != 4 or value.dim() != 4 or key.size(0) != batch or key.shape[:3] != value.shape[:3]:
            raise RuntimeError(
                "attn_ext: expected key and value of shape (batch, heads, length, features) with the "
                f"{batch} sequences of the cache, but got {list(key.shape)} and {list(value.shape)}"
            )
        count, before = key.size(2), self.lengths
        # Both broadcast to (B, L).
        sequence = torch.arange(batch, device=before.device).unsqueeze(1)
        place = before.unsqueeze(1) + torch.arange(count, device=before.device)
        after = before + count
        rows = (key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1))
        self._write(rows, sequence, place, before, after, None)

    def append_packed(
        self, key: Tensor, value: Tensor, cu_seqlens: Tensor, sequences: Tensor | None = None
    ) -> None:
        r"""Write new keys and values behind those of some sequences.

        Args:
            key: :math:`(T, H_{kv}, D)`, the rows of all of them, one sequence after the other.
            value: :math:`(T, H_{kv}, D_v)`.
            cu_seqlens: :math:`(N + 1,)`, where each begins and the last one ends.
            sequences: :math:`(N,)`, which they are, each once; all in order if None.

        Raises:
            RuntimeError: as :meth:`append`; offsets that do not begin at 0, fall, or do not end at :math:`T`;
                a sequence that is not there or is named twice. Then nothing has changed.
            TypeError: ``cu_seqlens`` or ``sequences`` that is no tensor of integers.
        """
        if not is_scripting():
            _check_numbers("cu_seqlens", cu_seqlens)
        if sequences is not None:
            self._check_sequences(sequences)
        before = self._of(self.lengths, sequences)
        self._check_starts(cu_seqlens, before.size(0), key.size(0))
        counts = torch.diff(cu_seqlens)
        sequence = torch.repeat_interleave(torch.arange(before.size(0), device=before.device), counts)
        place = torch.arange(key.size(0), device=before.device) + (before - cu_seqlens[:-1])[sequence]
        self._write((key, value), sequence, place, before, before + counts, sequences)

    def attend(
        self,
        query: Tensor,
        is_causal: bool = True,
        scale: float | None = None,
        enable_gqa: bool = False,
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        r"""Attention of the last rows of every sequence to all of its keys, as :func:`attn_ext.sdpa_paged`.

        Args:
            query: :math:`(B, H_q, L, D)`, of the ``L`` keys that were appended last.
            is_causal: row ``i`` sees key ``j`` iff ``j <= i + keys - L``.
            scale: as in :func:`attn_ext.sdpa`, like the arguments after it.
            enable_gqa: as there.
            window_left: as there.
            window_right: as there.
            softcap: as there.
            sinks: as there.

        Returns:
            The output, :math:`(B, H_q, L, D_v)`.
        """
        if query.dim() != 4 or query.size(0) != self.lengths.size(0):
            raise RuntimeError(
                "attn_ext: expected a query of shape (batch, heads, length, features) with the "
                f"{self.lengths.size(0)} sequences of the cache, but got {list(query.shape)}"
            )
        batch, count = query.size(0), query.size(2)
        rows = query.transpose(1, 2).flatten(0, 1)
        starts: Tensor | None = None  # a row is a sequence
        if count != 1:
            starts = torch.arange(batch + 1, device=query.device) * count
        output = self.attend_packed(
            rows, starts, None, is_causal, scale, enable_gqa, window_left, window_right, softcap, sinks
        )
        return output.view(batch, count, output.size(1), output.size(2)).transpose(1, 2)

    def attend_packed(
        self,
        query: Tensor,
        cu_seqlens: Tensor | None,
        sequences: Tensor | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        enable_gqa: bool = False,
        window_left: int | None = None,
        window_right: int | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        r"""Attention of the last rows of some sequences to all of their keys.

        Args:
            query: :math:`(T, H_q, D)`, the rows of all of them, one sequence after the other.
            cu_seqlens: :math:`(N + 1,)`, where each begins and the last one ends; if None, each has one.
            sequences: :math:`(N,)`, which they are; all in order if None.
            is_causal: as in :meth:`attend`, like the arguments after it.
            scale: as there.
            enable_gqa: as there.
            window_left: as there.
            window_right: as there.
            softcap: as there.
            sinks: as there.

        Returns:
            The output, :math:`(T, H_q, D_v)`.

        Raises:
            TypeError: ``sequences`` that is no tensor of integers.
        """
        if sequences is not None and not is_scripting():
            _check_numbers("sequences", sequences)
        return sdpa_paged(
            query,
            self.key_pages,
            self.value_pages,
            self._of(self.block_table, sequences),
            self._of(self.lengths, sequences),
            cu_seqlens,
            is_causal,
            scale,
            enable_gqa,
            window_left,
            window_right,
            softcap,
            sinks,
            self.key_scale,
            self.value_scale,
        )

    def reset(self, sequences: Tensor | None = None) -> None:
        """Forget some sequences, each named once, or all if None: their pages are free for others."""
        if sequences is not None:
            self._check_sequences(sequences)
        if self.in_pages:
            table = self._of(self.block_table, sequences)
            pages = table[table >= 0]
            count = int(self.free_count)
            self.free_pages[count : count + pages.size(0)] = pages
            self.free_count += pages.size(0)
            self._put(self.block_table, sequences, torch.full_like(table, -1))
        self._put(self.lengths, sequences, torch.zeros_like(self._of(self.lengths, sequences)))

    def free_rows(self) -> int:
        """Rows of the pages that belong to nobody."""
        return int(self.free_count) * self.key_pages.size(1)

    def nbytes(self) -> int:
        """Memory of keys, values and scales, in bytes."""
        total = self.key_pages.numel() * self.key_pages.element_size()
        total += self.value_pages.numel() * self.value_pages.element_size()
        key_scale, value_scale = self.key_scale, self.value_scale
        if key_scale is not None and value_scale is not None:
            total += 4 * (key_scale.numel() + value_scale.numel())
        return total

    def __repr__(self) -> str:
        batch, heads, dim = self.lengths.size(0), self.key_pages.size(2), self.key_pages.size(3)
        pages = ""
        if self.in_pages:
            pages = f", {self.key_pages.size(0)} pages of {self.key_pages.size(1)} rows"
        return (
            f"KeyValueCache({batch} sequences of at most {self.max_length} keys, {heads} heads, "
            f"{dim} features{pages}, {self.key_pages.dtype}, {self.nbytes()} bytes; "
            f"{int(self.lengths.sum())} keys)"
        )

    def _of(self, all_rows: Tensor, sequences: Tensor | None) -> Tensor:
        return all_rows if sequences is None else all_rows.index_select(0, sequences)

    def _put(self, all_rows: Tensor, sequences: Tensor | None, rows: Tensor) -> None:
        if sequences is None:
            all_rows.copy_(rows)
        else:
            all_rows.index_copy_(0, sequences.long(), rows)

    def _check_sequences(self, sequences: Tensor) -> None:
        """A page that is freed twice would be given to two sequences."""
        if not is_scripting():
            _check_numbers("sequences", sequences)
        batch = self.lengths.size(0)
        numbers: list[int] = sequences.tolist()
        seen = [False] * batch
        for number in numbers:
            if number < 0 or number >= batch or seen[number]:
                raise RuntimeError(
                    f"attn_ext: expected sequences of 0 to {batch - 1}, each once, but got {numbers}"
                )
            seen[number] = True

    def _check_starts(self, cu_seqlens: Tensor, sequences: int, rows: int) -> None:
        starts: list[int] = cu_seqlens.tolist()
        right = len(starts) == sequences + 1 and starts[0] == 0 and starts[-1] == rows
        if not right or sorted(starts) != starts:
            raise RuntimeError(
                f"attn_ext: expected cu_seqlens of {sequences + 1} offsets that begin at 0, never fall and "
                f"end at the {rows} rows of key, but got {starts}"
            )

    def _write(
        self,
        rows: tuple[Tensor, Tensor],
        sequence: Tensor,
        place: Tensor,
        before: Tensor,
        after: Tensor,
        sequences: Tensor | None,
    ) -> None:
        """New rows to their places in the sequences. What can fail comes before what changes anything."""
        longest = int(after.max()) if after.size(0) > 0 else 0
        if longest > self.max_length:
            raise RuntimeError(
                f"attn_ext: expected at most {self.max_length} keys of a sequence (max_length), but got "
                f"{longest}"
            )
        table, taken = self._with_pages(self._of(self.block_table, sequences), before, after)
        page_rows = self.key_pages.size(1)
        pages, page_place = table[sequence, place // page_rows].flatten(), (place % page_rows).flatten()
        slots = pages * page_rows + page_place
        key, value = rows
        key_scale, value_scale = self.key_scale, self.value_scale
        if key_scale is None or value_scale is None:
            cache_write_(self.key_pages, self.value_pages, key, value, slots)
        else:
            of_key, of_value = self._scale(key), self._scale(value)
            cache_write_(self.key_pages, self.value_pages, key / of_key, value / of_value, slots)
            key_scale.index_put_((pages, page_place), of_key)
            value_scale.index_put_((pages, page_place), of_value)
        self._put(self.lengths, sequences, after)
        if taken > 0:
            self._put(self.block_table, sequences, table)
            self.free_count -= taken

    def _with_pages(self, table: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, int]:
        """The table with pages for what comes after, and how many of the free ones it takes."""
        if not self.in_pages:
            return table, 0
        last = self.key_pages.size(1) - 1
        had, needed = (before + last) // (last + 1), (after + last) // (last + 1)
        count = int((needed - had).sum())
        if count == 0:
            return table, 0
        free = int(self.free_count)
        if count > free:
            raise RuntimeError(
                f"attn_ext: expected {count} free pages of the cache, but got {free}: reset() sequences that "
                "are done, or build it with more num_pages"
            )
        place = torch.arange(table.size(1), device=table.device)
        new = (place >= had.unsqueeze(1)) & (place < needed.unsqueeze(1))
        return table.masked_scatter(new, self.free_pages[free - count : free]), count

    def _scale(self, rows: Tensor) -> Tensor:
        """(T, heads, 1): the largest of each row is `largest` times as much; of a row of zeros not 0."""
        if not rows.is_floating_point():
            raise RuntimeError(f"attn_ext: expected key and value of a floating dtype, but got {rows.dtype}")
        largest = rows.detach().abs().amax(-1, keepdim=True).float()
        return (largest / self.largest).clamp_min(1.1754943508222875e-38)


@torch.jit.unused
def _check_numbers(name: str, numbers: object) -> None:
    if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int64, torch.int32):
        got = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
        raise TypeError(f"attn_ext: expected {name} as a tensor of int64 or int32, but got {got}")
