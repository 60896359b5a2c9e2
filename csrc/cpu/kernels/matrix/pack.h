// Packing into the layouts that the register tile reads. An operand is an element, converted to the type that
// is computed with, or (bfloat16 dot product) a pair of elements that are neighbours along the depth.
//   left rows      (rows, depth)               row stride kept by the caller
//   column panels  (panels, depth, width)      columns of the right operand = rows of the source, transposed
//   row panels     (panels, depth, width)      columns of the right operand = columns of the source
// Whatever lies past the source's end is zero: of a column panel all, of rows and row panels up to whole
// vectors, and vectors wholly past it are not written.
// Of a source that lies across memory, the transposed one lies along it, and each way is another's of that:
// rows of the one are columns of the other.
#pragma once

#include <type_traits>

#include "../vector/convert.h"
#include "../vector/lanes.h"
#include "gather.h"
#include "matrix.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Operands in panels of columns: those of one step along the depth lie row_stride apart from the next's.
template <typename Operand>
struct Operands {
  const Operand* data;
  int64_t row_stride;
  int64_t panel_stride;
};

// A full vector of operands from consecutive elements of a row.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_operands(const Element* p) {
  if constexpr (Product::kDepth == 1) {
    return load_compute(p);
#if defined(ATTN_EXT_HAS_PAIRS)
  } else if constexpr (sizeof(Element) == 1) {
    return to_pairs(load_compute(p), load_compute(p + kLanes<float>));
#endif
  } else {
    Vec<typename Product::Operand> pairs;  // a pair need not be aligned as one
    memcpy(&pairs, p, sizeof(pairs));
    return pairs;
  }
}

// As load_operands, of the first `count` elements; zero in the others, and nothing past them is read.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_operands_partial(const Element* p, int64_t count) {
  if constexpr (sizeof(Element) >= 4) {
    return load_partial(p, count);
  } else if constexpr (sizeof(Element) == 1) {
    Element padded[kLanes<float> * Product::kDepth] = {};
    copy_partial(padded, p, count);
    return load_operands<Product>(padded);
  } else {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const auto lanes = static_cast<uint32_t>((uint64_t{1} << count) - 1);
    if constexpr (Product::kDepth == 2) {
      return (Vec<typename Product::Operand>)_mm512_maskz_loadu_epi16(lanes, p);
    } else if constexpr (std::is_same_v<Element, Float16>) {
      return (Vec<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(lanes), p));
    } else {
      const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(lanes), p);
      return (Vec<float>)(widen((HalfBits)bits) << 16);
    }
#else
    if constexpr (Product::kDepth == 2) {
      Element padded[2 * kLanes<float>] = {};
      for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
      return load_operands<Product>(padded);
    } else {
      return load_compute_partial(p, count);
    }
#endif
  }
}

template <typename Product, typename Element>
void pack_columns_as_rows(const Matrix<Element>& m, typename Product::Operand* out, int64_t stride);
template <typename Product, typename Element>
void pack_row_panels(const Matrix<Element>& m, int64_t width, typename Product::Operand* out,
                     int64_t panel_stride, bool asks_ahead = false);

// A row along memory.
template <typename Product, typename Element>
ATTN_EXT_INLINE void pack_row(const Element* from, int64_t columns, typename Product::Operand* out) {
  constexpr int64_t kCount = kLanes<typename Product::Operand>, kElements = kCount * Product::kDepth;
  for (int64_t c = 0; c < columns; c += kElements, out += kCount) {
    const bool whole = c + kElements <= columns;
    store(out,
          whole ? load_operands<Product>(from + c) : load_operands_partial<Product>(from + c, columns - c));
  }
}

// A row of columns that are no neighbours, some of them at a time.
template <typename Product, typename Element>
void pack_gathered_row(const Matrix<Element>& m, int64_t r, typename Product::Operand* out) {
  constexpr int64_t kColumns = 2 * kLanes<typename Product::Operand> * Product::kDepth;
  Element block[kColumns];
  for (int64_t c = 0; c < m.columns; c += kColumns, out += kColumns / Product::kDepth) {
    gather_block(m, r, 1, c, kColumns, block);
    pack_row<Product, Element>(block, smaller(kColumns, m.columns - c), out);
  }
}

// Whether some of its rows are worth asking for ahead: others' lie between them.
template <typename Element>
ATTN_EXT_INLINE bool lies_apart(const Matrix<Element>& m, int64_t rows) {
  return rows >= kRowsAhead && m.row_stride != m.columns;
}

// rows [first, first + count) of the source, `stride` operands apart; each row is written to a whole vector.
template <typename Product, typename Element>
void pack_rows(const Matrix<Element>& m, int64_t first, int64_t count, typename Product::Operand* out,
               int64_t stride) {
  if (lies_across(m) && 2 * count >= kLanes<typename Product::Operand>) {  // fewer: squares take longer
    return pack_columns_as_rows<Product>(
        Matrix<Element>{m.data + first, m.column_stride, 1, m.columns, count}, out, stride);
  }
  const bool asks = lies_apart(m, count);
  for (int64_t r = first; r < first + count; ++r, out += stride) {
    const Element* from = m.data + r * m.row_stride;
    if (m.column_stride == 1) {
      if (asks) prefetch_row(from + kRowsAhead * m.row_stride, 1, m.columns);
      pack_row<Product>(from, m.columns, out);
    } else {
      pack_gathered_row<Product>(m, r, out);
    }
  }
}

// The same columns of the rows that come after these: short runs of a row are nothing that the processor
// foresees by itself.
template <typename Element>
ATTN_EXT_INLINE void prefetch_rows(const Element* from, int64_t stride, int64_t count) {
  for (int64_t i = count; i < 2 * count; ++i) __builtin_prefetch(from + i * stride);
}

// Column panels of rows that lie across memory, whole panels of them: neighbouring columns have only
// to be paired. A step along the depth at a time, in the order of memory, the next being asked for.
template <typename Product, typename Element>
void pack_panels_across(const Matrix<Element>& m, int64_t width, typename Product::Operand* out) {
  using Operand = typename Product::Operand;
  constexpr int64_t kWidth = kLanes<Operand>;
  const int64_t depth = depth_of<Product>(m.columns), stride = Product::kDepth * m.column_stride;
  for (int64_t k = 0; k < depth; ++k, out += width) {
    const int64_t column = k * Product::kDepth;
    const Element* low = m.data + k * stride;
    const int64_t next = column + 2 * Product::kDepth <= m.columns ? stride : 0;
    Product::stay_awake();
    for (int64_t c = 0; c < m.rows; c += width) {
      Operand* to = out + c * depth;
      if constexpr (Product::kDepth == 1) {
        for (int64_t i = c; i < c + width; i += kWidth, to += kWidth) {
          __builtin_prefetch(low + next + i);
          store(to, column < m.columns ? load_compute(low + i) : Vec<Operand>{});
        }
      } else {
#if defined(ATTN_EXT_HAS_PAIRS)
        const Element* high = low + m.column_stride;
        const bool has_low = column < m.columns, has_high = column + 1 < m.columns;
        for (int64_t i = c; i < c + width; i += 2 * kWidth, to += 2 * kWidth) {
          __builtin_prefetch(low + next + i);
          __builtin_prefetch(high + next + i);
          const auto a = has_low ? load_operands<Product>(low + i) : Vec<Operand>{};
          const auto b = has_high ? load_operands<Product>(high + i) : Vec<Operand>{};
          store(to, pair_first_half(a, b));
          store(to + kWidth, pair_second_half(a, b));
        }
#endif
      }
    }
  }
}

// Rows that lie along memory: `width` of them from `first` on, vectors of them, become columns of out (depth,
// `stride` apart).
template <typename Product, typename Element>
void pack_as_columns(const Matrix<Element>& m, int64_t first, int64_t width, typename Product::Operand* out,
                     int64_t stride) {
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
      int64_t from_stride = m.row_stride, rows = smaller(kSide, m.rows - first - c);
      if (m.column_stride != 1 || column + kElements > m.columns) {
        gather_block(m, first + c, kSide, column, kElements, block);
        from = block;
        from_stride = kElements;
        rows = kSide;
      }
      Vec<Accum> square[kSide];
      if (rows == kSide) {
        prefetch_rows(from, from_stride, kSide);
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) {
          square[i] = (Vec<Accum>)load_operands<Product>(from + i * from_stride);
        }
      } else {
        for (int i = 0; i < kSide; ++i) {
          square[i] = i < rows ? (Vec<Accum>)load_operands<Product>(from + i * from_stride) : Vec<Accum>{};
        }
      }
      transpose_square<Accum>(square);
      const int64_t steps = smaller(kSide, depth - k);
      if (steps == kSide) {
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) store(out + (k + i) * stride + c, (Vec<Operand>)square[i]);
      } else {
        for (int i = 0; i < steps; ++i) store(out + (k + i) * stride + c, (Vec<Operand>)square[i]);
      }
    }
  }
}

// One panel: `width` source rows from `first` on become the columns of out (depth, width).
template <typename Product, typename Element>
void pack_column_panel(const Matrix<Element>& m, int64_t first, int64_t width,
                       typename Product::Operand* out) {
  using Operand = typename Product::Operand;
  constexpr int64_t kSide = kLanes<Operand>;
  if (!lies_across(m)) return pack_as_columns<Product>(m, first, width, out, width);
  const int64_t depth = depth_of<Product>(m.columns), present = larger(0, smaller(m.rows - first, width));
  for (int64_t c = round_up(present, kSide); c < width; c += kSide) {
    for (int64_t k = 0; k < depth; ++k) store(out + k * width + c, Vec<Operand>{});
  }
  pack_row_panels<Product>(Matrix<Element>{m.data + first, m.column_stride, 1, m.columns, present}, width,
                           out, 0);
}

// One vector of operand row k of a row panel: elements of a source row, or of a pair of them interleaved.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_row_operands(const Element* p, int64_t row_stride) {
  using Operand = typename Product::Operand;
  if constexpr (Product::kDepth == 1) {
    return load_compute(p);
  } else if constexpr (sizeof(Element) == 1) {  // their floats are bfloat16 in the upper halves
    return ((Vec<Operand>)load_compute(p) >> 16) | (Vec<Operand>)load_compute(p + row_stride);
  } else {
    const Vec<Operand> low = widen(load_half_bits(&p->bits));
    const Vec<Operand> high = widen(load_half_bits(&p[row_stride].bits));
    return low | (high << 16);
  }
}

// The first `count` lanes of an operand row.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_row_operands_partial(const Element* p, int64_t row_stride,
                                                                         int64_t count) {
  if constexpr (Product::kDepth == 1) {
    return load_operands_partial<Product>(p, count);
  } else {
    using Plain = PlainProduct<float>;  // bfloat16 are the upper halves of its floats
    const Vec<uint32_t> low = (Vec<uint32_t>)load_operands_partial<Plain>(p, count);
    const Vec<uint32_t> high = (Vec<uint32_t>)load_operands_partial<Plain>(p + row_stride, count);
    return (low >> 16) | high;
  }
}

// Panels of `width` columns, panel_stride operands apart. `asks_ahead`: for rows that lie apart.
template <typename Product, typename Element>
void pack_row_panels(const Matrix<Element>& m, int64_t width, typename Product::Operand* out,
                     int64_t panel_stride, bool asks_ahead) {
  constexpr int64_t kWidth = kLanes<typename Product::Operand>;
  if (lies_across(m)) {
    for (int64_t c = 0; c < m.columns; c += width, out += panel_stride) {
      pack_as_columns<Product>(transposed(m), c, round_up(smaller(width, m.columns - c), kWidth), out, width);
    }
    return;
  }
  const int64_t depth = depth_of<Product>(m.rows);
  const bool asks = asks_ahead && m.column_stride == 1 && lies_apart(m, m.rows);
  for (int64_t k = 0; k < depth; ++k) {
    const int64_t row = k * Product::kDepth;
    const Element* from = m.data + row * m.row_stride;
    const bool in_rows = m.column_stride == 1 && row + Product::kDepth <= m.rows;
    for (int64_t i = 0; asks && i < Product::kDepth; ++i) {
      prefetch_row(from + (kRowsAhead + i) * m.row_stride, 1, m.columns);
    }
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

// Whether the rows of m are rows of operands as they lie.
template <typename Product, typename Element>
ATTN_EXT_INLINE bool are_operands(const Matrix<Element>& m) {
  using Operand = typename Product::Operand;
  return sizeof(Element) * Product::kDepth == sizeof(Operand) && m.column_stride == 1 &&
         m.columns % (Product::kDepth * Product::kDepthStep) == 0 && m.row_stride % Product::kDepth == 0 &&
         reinterpret_cast<uintptr_t>(m.data) % sizeof(Operand) == 0;
}

// Some rows, in pairs, of two vectors of columns, which become rows of `out`. Where vectors are a line of
// memory each is read once, as rows a power of two apart share the few places of a set of the cache.
template <typename Product, typename Element>
ATTN_EXT_INLINE void turn_pairs(const Element* from, int64_t row_stride, typename Product::Operand* out,
                                int64_t stride) {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  constexpr int64_t kSide = kLanes<Operand>, kLine = 64 / static_cast<int64_t>(sizeof(Element));
  Vec<Accum> even[kSide], odd[kSide];  // of two columns that are a pair in memory
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSide; ++i) {
    const Element *first = from + 2 * i * row_stride, *second = first + row_stride;
    Vec<Operand> a, b;
    memcpy(&a, first, sizeof(a));
    memcpy(&b, second, sizeof(b));
    __builtin_prefetch(first + kLine, 0, 2);
    __builtin_prefetch(second + kLine, 0, 2);
    even[i] = (Vec<Accum>)((a & 0xffffu) | (b << 16));
    odd[i] = (Vec<Accum>)((a >> 16) | (b & 0xffff0000u));
  }
  transpose_square<Accum>(even);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSide; ++i) store(out + 2 * i * stride, (Vec<Operand>)even[i]);
  transpose_square<Accum>(odd);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kSide; ++i) store(out + (2 * i + 1) * stride, (Vec<Operand>)odd[i]);
}

// The columns of m as left operand, each a row of its own along m's rows, `stride` operands apart; zeros past
// m's last row, up to whole vectors.
template <typename Product, typename Element>
void pack_columns_as_rows(const Matrix<Element>& m, typename Product::Operand* out, int64_t stride) {
  using Accum = typename Product::Accum;
  constexpr int64_t kSide = kLanes<typename Product::Operand>;
  constexpr int64_t kElements = kSide * Product::kDepth;
  if (lies_across(m)) return pack_rows<Product>(transposed(m), 0, m.columns, out, stride);
  for (int64_t row = 0; row < m.rows; row += kElements) {
    int64_t column = 0;
    if constexpr (Product::kDepth == 2 && sizeof(Element) == 2) {
      const bool whole = m.column_stride == 1 && row + kElements <= m.rows;
      for (; whole && column + 2 * kSide <= m.columns; column += 2 * kSide) {
        turn_pairs<Product>(m.data + row * m.row_stride + column, m.row_stride,
                            out + column * stride + row / Product::kDepth, stride);
      }
    }
    for (; column < m.columns; column += kSide) {
      Element block[kElements * kSide];
      const Element* from = m.data + row * m.row_stride + column;
      int64_t row_stride = m.row_stride;
      if (m.column_stride != 1 || row + kElements > m.rows || column + kSide > m.columns) {
        gather_block(m, row, kElements, column, kSide, block);
        from = block;
        row_stride = kSide;
      }
      Vec<Accum> square[kSide];
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) {
        square[i] =
            (Vec<Accum>)load_row_operands<Product>(from + i * Product::kDepth * row_stride, row_stride);
      }
      transpose_square<Accum>(square);
      for (int64_t i = 0; i < smaller(kSide, m.columns - column); ++i) {
        store(out + (column + i) * stride + row / Product::kDepth, (Vec<typename Product::Operand>)square[i]);
      }
    }
  }
}

// to (columns, rows) = the transpose of from (rows, columns), both in whole squares of lanes.
template <typename Product>
void transpose_operands(const typename Product::Operand* from, int64_t from_stride, int64_t rows,
                        int64_t columns, typename Product::Operand* to, int64_t to_stride) {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  constexpr int64_t kSide = kLanes<Operand>;
  for (int64_t row = 0; row < rows; row += kSide) {
    for (int64_t column = 0; column < columns; column += kSide) {
      Vec<Accum> square[kSide];
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) {
        square[i] = (Vec<Accum>)load(from + (row + i) * from_stride + column);
      }
      transpose_square<Accum>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) store(to + (column + i) * to_stride + row, (Vec<Operand>)square[i]);
    }
  }
}

// The rows of m as left operand: where they lie if they are operands and `in_place`, else packed into
// `buffer`.
template <typename S>
Operands<typename S::Operand> left_operands(const Matrix<typename S::Element>& m, typename S::Operand* buffer,
                                            bool in_place = true) {
  using Product = typename S::Product;
  if (in_place && are_operands<Product>(m)) {
    return {reinterpret_cast<const typename S::Operand*>(m.data), m.row_stride / S::kDepth, 0};
  }
  const int64_t stride = row_stride_of<S>(m.columns);
  pack_rows<Product>(m, 0, m.rows, buffer, stride);
  return {buffer, stride, 0};
}

// m as right operand, its rows along the depth: where it lies if it is operands in whole vectors and
// `in_place`, else packed into `buffer`, which has room for the row panels of `most_rows` rows.
template <typename S>
Operands<typename S::Operand> right_operands(const Matrix<typename S::Element>& m,
                                             typename S::Operand* buffer, int64_t most_rows,
                                             bool in_place = true) {
  using Product = typename S::Product;
  const int64_t width = panel_width_of<S>(m.columns);
  if constexpr (std::is_same_v<typename S::Element, typename S::Operand>) {
    if (in_place && m.column_stride == 1 && m.columns % S::kLane == 0) return {m.data, m.row_stride, width};
  }
  const int64_t panel_stride = depth_of<Product>(most_rows) * width;
  pack_row_panels<Product>(m, width, buffer, panel_stride);
  return {buffer, width, panel_stride};
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
