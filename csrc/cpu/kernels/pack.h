// Packing into the layouts that the register tile reads. An operand is an element, converted to the type that
// is computed with, or (bfloat16 dot product) a pair of elements that are neighbours along the depth.
//   left rows      (rows, depth)               row stride kept by the caller
//   column panels  (panels, depth, width)      columns of the right operand = rows of the source, transposed
//   row panels     (panels, depth, width)      columns of the right operand = columns of the source
// Whatever lies past the source's end is zero, up to whole vectors; vectors wholly past it are not written.
#pragma once

#include <utility>

#include "params.h"
#include "product.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// A matrix of elements somewhere in memory.
template <typename Element>
struct Matrix {
  const Element* data;
  int64_t row_stride;
  int64_t column_stride;
  int64_t rows;
  int64_t columns;
};

template <typename Product>
ATTN_EXT_INLINE int64_t depth_of(int64_t columns) {
  return (columns + Product::kDepth - 1) / Product::kDepth;
}

// Copies rows [row, row + rows) x columns [column, column + columns) into a dense block, zero past the
// matrix: the way of whatever a full vector cannot be loaded from, kept out of line to keep the packing loops
// small.
template <typename Element>
__attribute__((noinline)) void gather_block(const Matrix<Element>& m, int64_t row, int64_t rows,
                                            int64_t column, int64_t columns, Element* out) {
  const int64_t present = smaller(columns, m.columns - column);
  for (int64_t r = 0; r < rows; ++r, out += columns) {
    const Element* p = m.data + (row + r) * m.row_stride + column * m.column_stride;
    memset(out, 0, static_cast<size_t>(columns) * sizeof(Element));
    if (row + r >= m.rows) continue;
    if (m.column_stride == 1) {
      memcpy(out, p, static_cast<size_t>(present) * sizeof(Element));
    } else {
      for (int64_t c = 0; c < present; ++c) out[c] = p[c * m.column_stride];
    }
  }
}

// A full vector of operands from consecutive elements of a row.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_operands(const Element* p) {
  if constexpr (Product::kDepth == 1) {
    return load_compute(p);
  } else {
    Vec<typename Product::Operand> pairs;  // a pair need not be aligned as one
    memcpy(&pairs, p, sizeof(pairs));
    return pairs;
  }
}

// rows [first, first + count) of the source, `stride` operands apart; each row is written to a whole vector.
template <typename Product, typename Element>
void pack_rows(const Matrix<Element>& m, int64_t first, int64_t count, typename Product::Operand* out,
               int64_t stride) {
  using Operand = typename Product::Operand;
  constexpr int64_t kElements = kLanes<Operand> * Product::kDepth;
  for (int64_t r = first; r < first + count; ++r, out += stride) {
    Operand* to = out;
    for (int64_t c = 0; c < m.columns; c += kElements, to += kLanes<Operand>) {
      Element block[kElements];
      const Element* from = m.data + r * m.row_stride + c;
      if (m.column_stride != 1 || c + kElements > m.columns) {
        gather_block(m, r, 1, c, kElements, block);
        from = block;
      }
      store(to, load_operands<Product>(from));
    }
  }
}

// Lanes of two vectors, chosen by constants: 0..n-1 from a, n..2n-1 from b.
template <typename T, int... Lane>
ATTN_EXT_INLINE Vec<T> pick_lanes(Vec<T> a, Vec<T> b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Lane...);
#else
  return __builtin_shuffle(a, b, Vec<Bits<T> >{Lane...});
#endif
}

// Swaps the off-diagonal Side x Side blocks of all squares of twice that side.
template <typename T, int Side, int... Lane>
ATTN_EXT_INLINE void swap_blocks(Vec<T> (&v)[kLanes<T>], std::integer_sequence<int, Lane...>) {
  constexpr int kWidth = sizeof...(Lane);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if ((i & Side) != 0) continue;
    const Vec<T> a = v[i], b = v[i + Side];
    v[i] = pick_lanes<T, ((Lane & Side) != 0 ? kWidth + Lane - Side : Lane)...>(a, b);
    v[i + Side] = pick_lanes<T, ((Lane & Side) != 0 ? kWidth + Lane : Lane + Side)...>(a, b);
  }
}

// In-register transpose of a square of lanes by butterflies.
template <typename T>
ATTN_EXT_INLINE void transpose_square(Vec<T> (&v)[kLanes<T>]) {
  constexpr int kSide = kLanes<T>;
  constexpr std::make_integer_sequence<int, kSide> kAll{};
  swap_blocks<T, 1>(v, kAll);
  if constexpr (kSide > 2) swap_blocks<T, 2>(v, kAll);
  if constexpr (kSide > 4) swap_blocks<T, 4>(v, kAll);
  if constexpr (kSide > 8) swap_blocks<T, 8>(v, kAll);
}

// The same columns of the rows that come after these: short runs of a row are nothing that the processor
// foresees by itself.
template <typename Element>
ATTN_EXT_INLINE void prefetch_rows(const Element* from, int64_t stride, int64_t count) {
  for (int64_t i = count; i < 2 * count; ++i) __builtin_prefetch(from + i * stride);
}

// One panel: `width` source rows from `first` on become the columns of out (depth, width).
template <typename Product, typename Element>
void pack_column_panel(const Matrix<Element>& m, int64_t first, int64_t width,
                       typename Product::Operand* out) {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;  // as wide as an operand, and a type that vectors are shuffled in
  constexpr int64_t kSide = kLanes<Operand>;
  constexpr int64_t kElements = kSide * Product::kDepth;
  const int64_t depth = depth_of<Product>(m.columns);
  for (int64_t c = 0; c < width; c += kSide) {
    for (int64_t k = 0; k < depth; k += kSide) {
      const int64_t column = k * Product::kDepth;
      Element block[kSide * kElements];
      const Element* from = m.data + (first + c) * m.row_stride + column;
      int64_t stride = m.row_stride, rows = smaller(kSide, m.rows - first - c);
      if (m.column_stride != 1 || column + kElements > m.columns) {
        gather_block(m, first + c, kSide, column, kElements, block);
        from = block;
        stride = kElements;
        rows = kSide;
      }
      Vec<Accum> square[kSide];
      if (rows == kSide) {
        prefetch_rows(from, stride, kSide);
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) square[i] = (Vec<Accum>)load_operands<Product>(from + i * stride);
      } else {
        for (int i = 0; i < kSide; ++i)
          square[i] = i < rows ? (Vec<Accum>)load_operands<Product>(from + i * stride) : Vec<Accum>{};
      }
      transpose_square<Accum>(square);
      const int64_t steps = smaller(kSide, depth - k);
      if (steps == kSide) {
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) store(out + (k + i) * width + c, (Vec<Operand>)square[i]);
      } else {
        for (int i = 0; i < steps; ++i) store(out + (k + i) * width + c, (Vec<Operand>)square[i]);
      }
    }
  }
}

// One vector of operand row k of a row panel: elements of a source row, or of a pair of them interleaved.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_row_operands(const Element* p, int64_t row_stride) {
  using Operand = typename Product::Operand;
  if constexpr (Product::kDepth == 1) {
    return load_compute(p);
  } else {
    const Vec<Operand> low = widen(load_half_bits(&p->bits));
    const Vec<Operand> high = widen(load_half_bits(&p[row_stride].bits));
    return low | (high << 16);
  }
}

// Operand rows [begin, end) of every panel of `width` columns; panels lie panel_stride operands apart.
template <typename Product, typename Element>
void pack_row_panels(const Matrix<Element>& m, int64_t begin, int64_t end, int64_t width,
                     typename Product::Operand* out, int64_t panel_stride) {
  constexpr int64_t kWidth = kLanes<typename Product::Operand>;
  for (int64_t k = begin; k < end; ++k) {
    const int64_t row = k * Product::kDepth;
    const Element* from = m.data + row * m.row_stride;
    const bool in_rows = m.column_stride == 1 && row + Product::kDepth <= m.rows;
    typename Product::Operand* to = out + k * width;
    int64_t column = 0;
    for (int64_t panel_end = width; column < m.columns; panel_end += width, to += panel_stride) {
      for (int64_t c = 0; column < smaller(panel_end, m.columns); column += kWidth, c += kWidth) {
        if (in_rows && column + kWidth <= m.columns) {
          store(to + c, load_row_operands<Product>(from + column, m.row_stride));
        } else {
          Element block[Product::kDepth * kWidth];
          gather_block(m, row, Product::kDepth, column, kWidth, block);
          store(to + c, load_row_operands<Product>(block, kWidth));
        }
      }
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
