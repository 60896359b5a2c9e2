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

// to (keys, columns) = scale left (rows, kStepKeys)^T . right (rows, right_stride); columns in whole vectors
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

template <typename S, int Rows, int Vectors, bool Streamed>
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
      const auto element = to_element(sums[v] * scale, to);
      if constexpr (Streamed) {
        stream(to + v * S::kLane, element);
      } else {
        memcpy(to + v * S::kLane, &element, sizeof(element));
      }
    }
  }
}

template <typename S, int Rows, bool Streamed>
void write_outer(const OuterProduct<S>& m) {
  int64_t c = 0;
  for (; c + kColumnVectors * S::kLane <= m.columns; c += kColumnVectors * S::kLane) {
    write_outer_columns<S, Rows, kColumnVectors, Streamed>(m, c);
  }
  for (; c + 2 * S::kLane <= m.columns; c += 2 * S::kLane) write_outer_columns<S, Rows, 2, Streamed>(m, c);
  if (c < m.columns) write_outer_columns<S, Rows, 1, Streamed>(m, c);
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

template <typename S, int Rows, int Vectors>
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
    for (int v = 0; v < Vectors; ++v) row[v] = load_compute(key + v * S::kLane);
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
void add_keys(const KeyProduct<S>& m) {
  int64_t c = 0;
  for (; c + kColumnVectors * S::kLane <= m.columns; c += kColumnVectors * S::kLane) {
    add_key_columns<S, Rows, kColumnVectors>(m, c);
  }
  for (; c < m.columns; c += S::kLane) add_key_columns<S, Rows, 1>(m, c);
}

template <typename S>
ATTN_EXT_INLINE bool fits_registers(int64_t rows, int64_t columns) {
  return rows <= kRegisterRows && columns % S::kLane == 0;
}

// Whether a gradient can be written so; streamed: by whole lines.
template <typename S>
ATTN_EXT_INLINE bool writes_from_registers(const ResultView& grad, int64_t rows, int64_t columns) {
  return fits_registers<S>(rows, columns) && !grad.wide && grad.column_stride == 1;
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
    streamed ? write_outer<S, kRows, true>(m) : write_outer<S, kRows, false>(m);
  });
}

template <typename S>
void add_keys(const KeyProduct<S>& m, int64_t rows) {
  with_rows(rows, [&](auto count) { add_keys<S, decltype(count)::value>(m); });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
