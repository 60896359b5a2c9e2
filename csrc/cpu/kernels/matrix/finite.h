// NaN and Inf in a factor of a product. Its other factor, weights or dS, is 0 where a query does not see a
// key, and 0 NaN would be NaN: so they are taken out of the product, and shown to those alone that see them.
#pragma once

#include "../vector/convert.h"
#include "../vector/lanes.h"
#include "gather.h"
#include "matrix.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename Element>
ATTN_EXT_INLINE bool is_finite_at(const Matrix<Element>& m, int64_t r, int64_t c) {
  const Compute<Element> x = to_compute(m.data[r * m.row_stride + c * m.column_stride]);
  return x - x == 0;
}

// Elements of two bytes, two vectors of lanes of them: adding 1 to the exponents of both halves of a lane
// carries into their sign bits where an exponent is that of NaN and Inf.
template <typename Element>
ATTN_EXT_INLINE Vec<uint32_t> exponents_carried(const Element* p) {
  constexpr uint32_t kExponent = std::is_same_v<Element, BFloat16> ? 0x7f807f80 : 0x7c007c00;
  constexpr uint32_t kOne = std::is_same_v<Element, BFloat16> ? 0x00800080 : 0x04000400;
  Vec<uint32_t> pairs;
  memcpy(&pairs, p, sizeof(pairs));
  return (pairs & kExponent) + kOne;
}

template <typename Element>
bool all_finite(Matrix<Element> m, bool asks_ahead = false);

// Of columns that are no neighbours: block by block.
template <typename Element>
bool all_gathered_finite(const Matrix<Element>& m) {
  constexpr int64_t kRows = 16, kColumns = 64;
  Element block[kRows * kColumns];
  bool finite = true;
  for (int64_t r = 0; r < m.rows; r += kRows) {
    const int64_t rows = smaller(kRows, m.rows - r);
    for (int64_t c = 0; c < m.columns; c += kColumns) {
      gather_block(m, r, rows, c, kColumns, block);
      finite &= all_finite(Matrix<Element>{block, kColumns, 1, rows, kColumns});
    }
  }
  return finite;
}

template <typename Element>
bool all_finite(Matrix<Element> m, bool asks_ahead) {
  using T = Compute<Element>;
  if (lies_across(m)) m = transposed(m);
  if (m.column_stride != 1) return all_gathered_finite(m);
  if (m.column_stride == 1 && m.row_stride == m.columns) {  // one long row
    m.columns *= m.rows;
    m.rows = 1;
  }
  constexpr int64_t kWidth = kLanes<T>;
  Vec<Bits<T>> residue = {};  // x - x is 0, NaN for what is not finite
  [[maybe_unused]] Vec<uint32_t> carried = {};
  for (int64_t r = 0; r < m.rows; ++r) {
    const Element* row = m.data + r * m.row_stride;
    if (asks_ahead && m.rows > 1) prefetch_row(row + kRowsAhead * m.row_stride, 1, m.columns);
    int64_t c = 0;
    if constexpr (sizeof(Element) == 2) {
      for (; c + 2 * kWidth <= m.columns; c += 2 * kWidth) carried |= exponents_carried(row + c);
    }
    for (; c < m.columns; c += kWidth) {
      const bool whole = c + kWidth <= m.columns;
      const Vec<T> x = whole ? load_compute(row + c) : load_compute_partial(row + c, m.columns - c);
      residue |= (Vec<Bits<T>>)(x - x);
    }
  }
  bool finite = true;
  for (int i = 0; i < kLanes<T>; ++i) finite &= residue[i] == 0;
  if constexpr (sizeof(Element) == 2) {
    for (int i = 0; i < kLanes<uint32_t>; ++i) finite &= (carried[i] & 0x80008000) == 0;
  }
  return finite;
}

// m, or, dense in `buffer`, a copy with 0 for what is not finite.
template <typename Element>
Matrix<Element> finite_only(const Matrix<Element>& m, Element* buffer) {
  using T = Compute<Element>;
  constexpr int64_t kWidth = kLanes<T>;
  if (all_finite(m)) return m;
  for (int64_t r = 0; r < m.rows; ++r) {
    const Element* from = m.data + r * m.row_stride;
    Element* to = buffer + r * m.columns;
    int64_t c = 0;
    for (; m.column_stride == 1 && c + kWidth <= m.columns; c += kWidth) {
      const Vec<T> x = load_compute(from + c);
      store_element(to + c, x - x == Vec<T>{} ? x : Vec<T>{});
    }
    for (; c < m.columns; ++c) to[c] = is_finite_at(m, r, c) ? from[c * m.column_stride] : Element{};
  }
  return {buffer, m.columns, 1, m.rows, m.columns};
}

// Columns [c, c + lanes) of a row: what is not finite, 0 in place of the rest and past the matrix.
template <typename Element>
ATTN_EXT_INLINE Vec<Compute<Element>> nonfinite_lanes(const Matrix<Element>& m, int64_t r, int64_t c) {
  using T = Compute<Element>;
  Element lanes[kLanes<T>];
  const Element* from = m.data + r * m.row_stride + c;
  if (m.column_stride != 1 || m.columns - c < kLanes<T>) {
    gather_block(m, r, 1, c, kLanes<T>, lanes);
    from = lanes;
  }
  const Vec<T> x = load_compute(from);
  return x - x == Vec<T>{} ? Vec<T>{} : x;
}

template <typename T>
ATTN_EXT_INLINE bool all_nan(Vec<T> v, int64_t count) {
  bool all = true;
  for (int64_t i = 0; i < count; ++i) all &= v[i] != v[i];
  return all;
}

// The rows of a factor that hold NaN or Inf.
constexpr int64_t kMaxBadRows = 1024;
struct BadRows {
  int64_t count;
  int16_t rows[kMaxBadRows];
};

// m: of kMaxBadRows rows at most.
template <typename Element>
void find_bad_rows(const Matrix<Element>& m, BadRows& bad) {
  bad.count = 0;
  for (int64_t i = 0; i < m.rows; ++i) {
    if (!all_finite(Matrix<Element>{m.data + i * m.row_stride, 0, m.column_stride, 1, m.columns}))
      bad.rows[bad.count++] = static_cast<int16_t>(i);
  }
}

// What the bad rows of m add to each of `outs` rows of a product that has left their NaN and Inf out:
//   add(o, c, v, n): v, of n columns from c on, sums factor(o, i) m (i, c) over the rows i that o sees(o, i)
// Some at a time, until all that they touch is NaN and nothing more would change. Where a factor is NaN, the
// product is already.
template <typename Element, typename Sees, typename Factor, typename Add>
void add_bad_rows(const Matrix<Element>& m, const BadRows& bad, int64_t outs, Sees sees, Factor factor,
                  Add add) {
  using T = Compute<Element>;
  constexpr int kStep = 4;
  for (int64_t o = 0; o < outs; ++o) {
    bool settled = false;
    for (int64_t next = 0; next < bad.count && !settled;) {
      int64_t rows[kStep], n = 0;
      T factors[kStep];
      for (; next < bad.count && n < kStep; ++next) {
        if (!sees(o, bad.rows[next])) continue;
        rows[n] = bad.rows[next];
        factors[n] = factor(o, rows[n]);
        settled |= factors[n] != factors[n];
        ++n;
      }
      if (settled || n == 0) break;
      settled = true;
      for (int64_t c = 0; c < m.columns; c += kLanes<T>) {
        Vec<T> sum = {};
        for (int64_t k = 0; k < n; ++k)
          sum = multiply_add(broadcast(factors[k]), nonfinite_lanes(m, rows[k], c), sum);
        const int64_t present = smaller(kLanes<T>, m.columns - c);
        add(o, c, sum, present);
        settled &= all_nan<T>(sum, present);
      }
    }
  }
}

// The same, the bad rows looked for first.
template <typename Element, typename Sees, typename Factor, typename Add>
void add_nonfinite(const Matrix<Element>& m, int64_t outs, Sees sees, Factor factor, Add add) {
  BadRows bad;
  find_bad_rows(m, bad);
  add_bad_rows(m, bad, outs, sees, factor, add);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
