// The matrices of a call as they lie in memory.
#pragma once

#include "../interface/params.h"
#include "../vector/simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

ATTN_EXT_INLINE int64_t batch_offset(const TensorView& view, int64_t batch) {
  return view.batch_offsets != nullptr ? view.batch_offsets[batch] : batch * view.batch_stride;
}

// Elements from the view's first to a row.
ATTN_EXT_INLINE int64_t row_offset(const TensorView& view, int64_t batch, int64_t head, int64_t row) {
  return batch_offset(view, batch) + head * view.head_stride + row * view.row_stride;
}

template <typename T>
ATTN_EXT_INLINE T* row_pointer(const TensorView& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(view.data) + row_offset(view, batch, head, row);
}

// Query heads that read one key head.
ATTN_EXT_INLINE int64_t group_size(const AttentionShape& shape) {
  return shape.query_heads / larger(1, shape.key_heads);
}

// Whether rows of the key's heads lie between each other, as in (B, L, H, D).
ATTN_EXT_INLINE bool key_heads_interleave(const CallParams& params) {
  return params.shape.key_heads > 1 && params.key.head_stride < params.key.row_stride;
}

// A matrix of elements somewhere in memory.
template <typename Element>
struct Matrix {
  const Element* data;
  int64_t row_stride;
  int64_t column_stride;
  int64_t rows;
  int64_t columns;
};

// Rows [first, first + count) of a matrix, as a matrix.
template <typename Element>
ATTN_EXT_INLINE Matrix<Element> rows_of(const TensorView& view, int64_t batch, int64_t head, int64_t first,
                                        int64_t count, int64_t columns) {
  return {row_pointer<const Element>(view, batch, head, first), view.row_stride, view.column_stride, count,
          columns};
}

// Whether neighbours in memory are elements of one column.
template <typename Element>
ATTN_EXT_INLINE bool lies_across(const Matrix<Element>& m) {
  return m.row_stride == 1 && m.column_stride != 1;
}

template <typename Element>
ATTN_EXT_INLINE Matrix<Element> transposed(const Matrix<Element>& m) {
  return {m.data, m.column_stride, m.row_stride, m.columns, m.rows};
}

template <typename Element>
ATTN_EXT_INLINE bool is_dense(const Matrix<Element>& m) {
  return m.column_stride == 1 && m.row_stride == m.columns;
}

// to += v, `count` lanes of it, elements of any stride.
template <typename T>
inline void add_row(T* to, int64_t stride, Vec<T> v, int64_t count) {
  if (stride == 1 && count == kLanes<T>) {
    store(to, load(to) + v);
  } else if (stride == 1) {
    store_partial(to, load_partial(to, count) + v, count);
  } else {
    for (int64_t j = 0; j < count; ++j) to[j * stride] += v[j];
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
