// The products of a step of keys with so few query rows that these, or their sums, stay in registers:
// gradients of keys and values go from there to the caller's tensor, and keys are read where they lie. Sums
// have the order that multiply() gives them.
#pragma once

#include "../../interface/params.h"
#include "../../matrix/product.h"
#include "../plan.h"
#include "../store_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int kColumnVectors = 4;  // of a row at a time

// to (keys, columns) = scale left (rows, kStepKeys)^T . right (rows, right_stride), right in whole vectors
template <typename S>
struct OuterProduct {
  using T = typename S::Accum;
  const T *left, *right;
  int64_t right_stride;
  typename S::Element* to;
  int64_t to_stride;
  int64_t keys, columns;
  T scale;
};

// How some columns are written; a last vector of fewer columns than it has lanes in part.
enum class Write : int8_t { kWhole, kPart, kPastCaches };

template <typename S, int Rows, int Vectors, Write How>
ATTN_EXT_INLINE void write_outer_columns(const OuterProduct<S>& m, int64_t column) {
  using T = typename S::Accum;
  Vec<T> right[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v)
      right[r][v] = load(m.right + r * m.right_stride + column + v * S::kLane);
  }
  const Vec<T> scale = broadcast(m.scale);
  typename S::Element* to = m.to + column;
  for (int64_t j = 0; j < m.keys; ++j, to += m.to_stride) {
    Vec<T> sums[Vectors] = {};
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec<T> left = broadcast(m.left[r * kStepKeys + j]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[v] = PlainProduct<T>::step(left, right[r][v], sums[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      if constexpr (How == Write::kPart) {
        store_element_partial(to, sums[v] * scale, m.columns - column);
      } else if constexpr (How == Write::kPastCaches) {
        stream(to + v * S::kLane, to_element(sums[v] * scale, to));
      } else {
        store_element(to + v * S::kLane, sums[v] * scale);
      }
    }
  }
}

// Apart: beside whole vectors it would cost them some percent.
template <typename S, int Rows>
__attribute__((noinline)) void write_outer_part(const OuterProduct<S>& m, int64_t column) {
  write_outer_columns<S, Rows, 1, Write::kPart>(m, column);
}

template <typename S, int Rows, Write How>
void write_outer(const OuterProduct<S>& m) {
  int64_t c = 0;
  for (; c + kColumnVectors * S::kLane <= m.columns; c += kColumnVectors * S::kLane) {
    write_outer_columns<S, Rows, kColumnVectors, How>(m, c);
  }
  for (; c + 2 * S::kLane <= m.columns; c += 2 * S::kLane) write_outer_columns<S, Rows, 2, How>(m, c);
  for (; c + S::kLane <= m.columns; c += S::kLane) write_outer_columns<S, Rows, 1, How>(m, c);
  if (c < m.columns) write_outer_part<S, Rows>(m, c);
}

// out (rows, out_stride) += left (rows, kStepKeys) . keys (count, columns)
template <typename S>
struct KeyProduct {
  using T = typename S::Accum;
  const T* left;
  const typename S::Element* keys;
  int64_t key_stride;
  int64_t count, columns;
  T* out;
  int64_t out_stride;
};

template <typename S, int Rows, int Vectors, bool Partial = false>
ATTN_EXT_INLINE void add_key_columns(const KeyProduct<S>& m, int64_t column) {
  using T = typename S::Accum;
  Vec<T> sums[Rows][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = load(m.out + r * m.out_stride + column + v * S::kLane);
  }
  const typename S::Element* key = m.keys + column;
  for (int64_t j = 0; j < m.count; ++j, key += m.key_stride) {
    Vec<T> row[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      row[v] = Partial ? load_compute_partial(key, m.columns - column) : load_compute(key + v * S::kLane);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec<T> left = broadcast(m.left[r * kStepKeys + j]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = PlainProduct<T>::step(left, row[v], sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(m.out + r * m.out_stride + column + v * S::kLane, sums[r][v]);
  }
}

template <typename S, int Rows>
__attribute__((noinline)) void add_key_part(const KeyProduct<S>& m, int64_t column) {
  add_key_columns<S, Rows, 1, true>(m, column);
}

template <typename S, int Rows>
void add_keys(const KeyProduct<S>& m) {
  int64_t c = 0;
  for (; c + kColumnVectors * S::kLane <= m.columns; c += kColumnVectors * S::kLane) {
    add_key_columns<S, Rows, kColumnVectors>(m, c);
  }
  for (; c + S::kLane <= m.columns; c += S::kLane) add_key_columns<S, Rows, 1>(m, c);
  if (c < m.columns) add_key_part<S, Rows>(m, c);
}

// Whether a gradient can be written so; streamed: by whole lines.
ATTN_EXT_INLINE bool writes_from_registers(const ResultView& grad, int64_t rows) {
  return rows <= kRegisterRows && !grad.wide && grad.column_stride == 1;
}
template <typename S>
ATTN_EXT_INLINE bool streams_from_registers(const ResultView& grad, const typename S::Element* to,
                                            int64_t columns) {
  constexpr int64_t kSize = sizeof(typename S::Element);
  return kColumnVectors * S::kLane * kSize >= kLineBytes && columns * kSize % kLineBytes == 0 &&
         grad.row_stride * kSize % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
}

// body(rows) for 1 to kRegisterRows rows, as a constant.
template <typename Body>
ATTN_EXT_INLINE void with_rows(int64_t rows, Body body) {
  switch (rows) {
    case 1:
      return body(std::integral_constant<int, 1>{});
    case 2:
      return body(std::integral_constant<int, 2>{});
    case 3:
      return body(std::integral_constant<int, 3>{});
    default:
      return body(std::integral_constant<int, 4>{});
  }
}

template <typename S>
void write_outer(const OuterProduct<S>& m, int64_t rows, bool streamed) {
  with_rows(rows, [&](auto count) {
    constexpr int kRows = decltype(count)::value;
    streamed ? write_outer<S, kRows, Write::kPastCaches>(m) : write_outer<S, kRows, Write::kWhole>(m);
  });
}

template <typename S>
void add_keys(const KeyProduct<S>& m, int64_t rows) {
  with_rows(rows, [&](auto count) { add_keys<S, decltype(count)::value>(m); });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
