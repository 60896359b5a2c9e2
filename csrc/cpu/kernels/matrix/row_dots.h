// Dot products of rows as they lie in memory.
#pragma once

#include <bit>

#include "../vector/lanes.h"
#include "pack.h"
#include "rows_ahead.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// out (Rows, lanes) = left (Rows, depth) . right (lanes, dim)^T, right where it lies, of a type that is
// widened on the way. As many sums as a vector has lanes are in the making at a time, of all Rows and some of
// the right rows: a dot product does not depend on which others are made beside it. `ahead` (next null:
// nothing) is asked for meanwhile.
template <typename S, int Rows, typename Element>
void dot_rows(const typename S::Operand* left, int64_t left_stride, const Matrix<Element>& right,
              const RowsAhead& ahead, typename S::Accum* out, int64_t out_stride) {
  using T = typename S::Accum;
  using Product = typename S::Product;
  constexpr int kWidth = kLanes<T>;
  // Of the right side at a time, which divide it; three rows leave a quarter of the sums idle.
  constexpr int kRows = kWidth / std::bit_ceil(unsigned{Rows});
  constexpr int64_t kStep = kWidth * S::kDepth;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t dim = right.columns;
  for (int64_t first = 0; first < kWidth; first += kRows) {
    const Element* rows = right.data + first * right.row_stride;
    const char* next[kRows];  // what is asked for
    if (ahead.next != nullptr) {
#pragma GCC unroll 16
      for (int j = 0; j < kRows; ++j) next[j] = ahead.row(first + j);
    }
    Vec<T> sums[kWidth] = {};
    const auto step = [&](int64_t k, auto load_row) __attribute__((always_inline)) {
      Vec<typename S::Operand> row[kRows];
#pragma GCC unroll 16
      for (int j = 0; j < kRows; ++j) row[j] = load_row(rows + j * right.row_stride + k);
      if (ahead.next != nullptr && k % kLine == 0) {
        const int64_t byte = k * static_cast<int64_t>(sizeof(Element));
#pragma GCC unroll 16
        for (int j = 0; j < kRows; ++j) prefetch_line(next[j] + byte, ahead.near);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Vec<typename S::Operand> q = load(left + r * left_stride + k / S::kDepth);
#pragma GCC unroll 16
        for (int j = 0; j < kRows; ++j) {
          sums[r * kRows + j] = Product::step(q, row[j], sums[r * kRows + j]);
        }
      }
    };
    int64_t k = 0;
    for (; k + kStep <= dim; k += kStep) step(k, load_operands<Product, Element>);
    if (k < dim) {
      step(k, [&](const Element* p) { return load_operands_partial<Product>(p, dim - k); });
    }
    T dots[kWidth];
    store(dots, lane_sums<T>(sums));
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) memcpy(out + r * out_stride + first, dots + r * kRows, kRows * sizeof(T));
  }
}

// body(count, r) for rows [r, end), as many at a time as share what is read.
template <typename S, typename Body>
ATTN_EXT_INLINE void each_few_rows(int64_t r, int64_t end, Body body) {
  if constexpr (S::kLane >= 4) {
    for (; r + 4 <= end; r += 4) body(std::integral_constant<int, 4>{}, r);
    if (end - r == 3) return body(std::integral_constant<int, 3>{}, r);
  }
  for (; r + 2 <= end; r += 2) body(std::integral_constant<int, 2>{}, r);
  if (r < end) body(std::integral_constant<int, 1>{}, r);
}

// a . b of one row of each.
template <typename Element>
ATTN_EXT_INLINE Compute<Element> dot_of_row(const Matrix<Element>& a, const Matrix<Element>& b, int64_t row) {
  using T = Compute<Element>;
  constexpr int64_t kWidth = kLanes<T>;
  const Element* x = a.data + row * a.row_stride;
  const Element* y = b.data + row * b.row_stride;
  if (a.column_stride != 1 || b.column_stride != 1) {
    T sum = 0;
    for (int64_t c = 0; c < a.columns; ++c)
      sum += to_compute(x[c * a.column_stride]) * to_compute(y[c * b.column_stride]);
    return sum;
  }
  Vec<T> sums = {};
  int64_t c = 0;
  for (; c + kWidth <= a.columns; c += kWidth)
    sums = multiply_add(load_compute(x + c), load_compute(y + c), sums);
  if (c < a.columns) {
    sums = multiply_add(load_compute_partial(x + c, a.columns - c),
                        load_compute_partial(y + c, a.columns - c), sums);
  }
  return lane_sum<T>(sums);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
