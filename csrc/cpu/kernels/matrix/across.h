// Rows that lie across memory: neighbours are elements of one column, as where keys are stored as (..., D,
// L). They are copied in squares that are turned around in registers.
#pragma once

#include "../vector/convert.h"
#include "../vector/lanes.h"
#include "matrix.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// What is turned around at once: a vector of each of some columns.
template <typename Element>
constexpr int64_t kSquareRows = kVectorBytes / static_cast<int64_t>(sizeof(Element));
template <typename Element>
constexpr int64_t kSquareColumns = sizeof(Element) == 2 ? kLanes<float> : kSquareRows<Element>;

template <typename Element>
constexpr bool kTurnsSquares = sizeof(Element) >= 2;

// The upper half by a mask: to move it down would be one shuffle more.
template <typename Element>
ATTN_EXT_INLINE void store_halves(Vec<float> v, Element* lower, Element* upper) {
  constexpr size_t kBytes = kVectorBytes / 2;
#if defined(__AVX512F__)
  const HalfVec<float> half = lower_half<float>(v);
  memcpy(lower, &half, kBytes);
  _mm512_mask_storeu_epi32(reinterpret_cast<char*>(upper) - kBytes, 0xff00, (__m512i)v);
#else
  memcpy(lower, &v, kBytes);
  memcpy(upper, reinterpret_cast<const char*>(&v) + kBytes, kBytes);
#endif
}

// The first `count` elements, fewer than a vector has, as they are, and zeros.
template <typename Element>
ATTN_EXT_INLINE Vec<Compute<Element>> load_first(const Element* p, int64_t count) {
  if constexpr (sizeof(Element) >= 4) {
    return load_partial(p, count);
  } else {
#if defined(__AVX512BW__)
    return (Vec<float>)_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << count) - 1), p);
#else
    constexpr int64_t kHalf = kLanes<float>;
    HalfBits halves[2] = {load_half_bits_partial(&p->bits, smaller(count, kHalf)), {}};
    if (count > kHalf) halves[1] = load_half_bits_partial(&p[kHalf].bits, count - kHalf);
    Vec<float> both;
    memcpy(&both, halves, sizeof(both));
    return both;
#endif
  }
}

// to (kSquareRows, kSquareColumns) = columns, of which load_column(i) is a vector.
template <typename Element, typename LoadColumn>
ATTN_EXT_INLINE void turn_columns(LoadColumn load_column, Element* to, int64_t to_stride) {
  if constexpr (sizeof(Element) == 2) {
    // A lane is two rows of a column; with that of the next column it makes a pair of each row.
    constexpr int kSide = kLanes<uint32_t>, kHalf = kSide / 2;
    Vec<float> square[kSide];
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      const auto a = (Vec<uint32_t>)load_column(2 * i), b = (Vec<uint32_t>)load_column(2 * i + 1);
      square[i] = (Vec<float>)((a & 0xffffu) | (b << 16));
      square[kHalf + i] = (Vec<float>)((a >> 16) | (b & 0xffff0000u));
    }
    transpose_square<float>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      store_halves(square[i], to + 2 * i * to_stride, to + (2 * i + 1) * to_stride);
    }
  } else {
    constexpr int kSide = kLanes<Element>;
    Vec<Element> square[kSide];
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) square[i] = load_column(i);
    transpose_square<Element>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) store(to + i * to_stride, square[i]);
  }
}

// The same of columns that lie column_stride apart.
template <typename Element>
ATTN_EXT_INLINE void turn_square(const Element* from, int64_t column_stride, Element* to, int64_t to_stride) {
  turn_columns<Element>(
      [&](int i) __attribute__((always_inline)) {
        Vec<Compute<Element>> column;
        memcpy(&column, from + i * column_stride, sizeof(column));
        return column;
      },
      to, to_stride);
}

// Of fewer rows than a square has.
template <typename Element>
void turn_few_rows(const Element* from, int64_t column_stride, int64_t rows, Element* to, int64_t to_stride) {
  constexpr int64_t kColumns = kSquareColumns<Element>;
  Element square[kSquareRows<Element> * kColumns];
  turn_columns<Element>([&](int i) { return load_first(from + i * column_stride, rows); }, square, kColumns);
  for (int64_t r = 0; r < rows; ++r) {
    memcpy(to + r * to_stride, square + r * kColumns, kColumns * sizeof(Element));
  }
}

// Rows of columns that lie `column_stride` apart. So many of them at a time are some lines of each column,
// which their squares use whole: columns a power of two apart share the few places of a set of the cache.
template <typename Element>
constexpr int64_t kAcrossRows = 256 / static_cast<int64_t>(sizeof(Element));

ATTN_EXT_INLINE bool lies_across(const TensorView& view) {
  return view.row_stride == 1 && view.column_stride != 1;
}

template <typename Element>
struct Across {
  const Element* data;
  int64_t column_stride;
  int64_t rows, columns;
};

// So many squares of columns ahead memory is asked for: of the same rows, then of those that follow.
template <typename Element>
constexpr int64_t kSquaresAhead = sizeof(Element) == 2 ? 2 : 1;

// Dense in `to`. The last squares overlap those before them. Asks: for the memory of what is copied next.
template <typename Element>
__attribute__((noinline)) void copy_across(const Across<Element>& from, Element* to, bool asks) {
  constexpr int64_t kRows = kSquareRows<Element>, kColumns = kSquareColumns<Element>;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t stride = from.column_stride, columns = from.columns, rows = from.rows;
  if constexpr (kTurnsSquares<Element>) {
    if (columns >= kColumns && rows < kRows) {
      for (int64_t c = 0; c < columns; c += kColumns) {
        const int64_t column = smaller(c, columns - kColumns);
        turn_few_rows(from.data + column * stride, stride, rows, to + column, columns);
      }
      return;
    }
    if (columns >= kColumns) {
      for (int64_t c = 0; c < columns; c += kColumns) {
        const int64_t column = smaller(c, columns - kColumns);
        const int64_t later = column + kSquaresAhead<Element> * kColumns, over = later / columns;
        const Element* ahead = from.data + later % columns * stride + over * rows;
        for (int64_t r = 0; r < rows; r += kRows) {
          if (asks && r % kLine == 0) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < kColumns; ++i) __builtin_prefetch(ahead + i * stride + r, 0, 2);
          }
          const int64_t row = smaller(r, rows - kRows);
          turn_square(from.data + column * stride + row, stride, to + row * columns + column, columns);
        }
      }
      return;
    }
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) to[r * columns + c] = from.data[c * stride + r];
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
