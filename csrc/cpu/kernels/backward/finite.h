// What is NaN or Inf. Weights and dS are 0 where a query does not see a key, and 0 NaN would be NaN: so a
// query's NaN and Inf stay out of dK, a key's out of dQ (where those that are seen show through dS itself),
// and whatever a dead row of dO holds stays out of dV.
#pragma once

#include "../matrix/matrix.h"
#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename Element>
ATTN_EXT_INLINE bool is_finite_at(const Matrix<Element>& m, int64_t r, int64_t c) {
  const Compute<Element> x = to_compute(m.data[r * m.row_stride + c * m.column_stride]);
  return x - x == 0;
}

template <typename Element>
bool all_finite(const Matrix<Element>& m) {
  using T = Compute<Element>;
  constexpr int64_t kWidth = kLanes<T>;
  Vec<Bits<T>> residue = {};  // x - x is 0, NaN for what is not finite
  bool finite = true;
  for (int64_t r = 0; r < m.rows; ++r) {
    const Element* row = m.data + r * m.row_stride;
    int64_t c = 0;
    for (; m.column_stride == 1 && c + kWidth <= m.columns; c += kWidth) {
      const Vec<T> x = load_compute(row + c);
      residue |= (Vec<Bits<T>>)(x - x);
    }
    for (; c < m.columns; ++c) finite &= is_finite_at(m, r, c);
  }
  for (int i = 0; i < kLanes<T>; ++i) finite &= residue[i] == 0;
  return finite;
}

// body(row, column, value) for every NaN and Inf of m.
template <typename Element, typename Body>
ATTN_EXT_INLINE void each_nonfinite(const Matrix<Element>& m, Body body) {
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.columns; ++c) {
      if (!is_finite_at(m, r, c)) body(r, c, to_compute(m.data[r * m.row_stride + c * m.column_stride]));
    }
  }
}

// m with 0 where keep(r, c) is false, dense in `buffer`.
template <typename Element, typename Keep>
ATTN_EXT_INLINE Matrix<Element> selected_copy(const Matrix<Element>& m, Element* buffer, Keep keep) {
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.columns; ++c) {
      const Element x = m.data[r * m.row_stride + c * m.column_stride];
      buffer[r * m.columns + c] = keep(r, c) ? x : Element{};
    }
  }
  return {buffer, m.columns, 1, m.rows, m.columns};
}

// m, or a copy with 0 for what is not finite.
template <typename Element>
Matrix<Element> finite_only(const Matrix<Element>& m, Element* buffer) {
  if (all_finite(m)) return m;
  return selected_copy(m, buffer, [&](int64_t r, int64_t c) { return is_finite_at(m, r, c); });
}

// m, or, if there is anything that is not finite, a copy with 0 for all of the rows that is_dead(r) names.
template <typename Element, typename IsDead>
Matrix<Element> live_only(const Matrix<Element>& m, Element* buffer, IsDead is_dead) {
  if (all_finite(m)) return m;
  return selected_copy(m, buffer, [&](int64_t r, int64_t) { return !is_dead(r); });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
