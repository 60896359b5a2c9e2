// The products of small heads: tiles of up to kSmallTileRows rows x two vectors, which cost little to begin,
// and which write their sums where they belong.
#pragma once

#include "../../matrix/pack.h"
#include "../../matrix/product.h"
#include "../store_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Of one vector, as many sums in the making as two multiply-adds a cycle want.
constexpr int kSmallTileRows = kTileVectors == 4 ? 8 : kRegisterTileRows;
constexpr int kSmallTileVectors = 2;

// to (rows, columns) = scale left (rows, depth) . right (depth, columns). Left rows lie left_stride apart,
// and its steps along the depth left_step; whole vectors of right can be read, and of `to` nothing is written
// past its columns.
template <typename T, typename Out>
struct SmallProduct {
  int64_t rows, columns, depth;
  const T* left;
  int64_t left_stride, left_step;
  const T* right = nullptr;
  int64_t right_stride = 0;
  Out* to = nullptr;
  int64_t to_stride = 0;
  T scale = 1;
  bool streamed = false;  // past the caches, by whole lines
};

// Whether rows of so many columns can be written by whole lines.
template <typename T, typename Out>
ATTN_EXT_INLINE bool streams_small(const Out* to, int64_t to_stride, int64_t columns) {
  constexpr int64_t kSize = sizeof(Out);
  return kSmallTileVectors * kLanes<T> * kSize >= kLineBytes && columns * kSize % kLineBytes == 0 &&
         to_stride * kSize % kLineBytes == 0 && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0;
}

// A tile: rows `row` and on, vectors from `column` on, of which the last has `last` columns.
template <typename T, typename Out, int Rows, int Vectors, bool Half>
void small_tile(const SmallProduct<T, Out>& m, int64_t row, int64_t column, int64_t last) {
  using Product = PlainProduct<T>;
  constexpr int64_t kLane = kLanes<T>;
  TileArgs<Product> args{};
  args.depth = m.depth;
  args.left = m.left + row * m.left_stride;
  args.left_stride = m.left_stride;
  args.left_step = m.left_step;
  args.right = m.right + column;
  args.right_stride = m.right_stride;
  Vec<T> sums[Rows][Vectors + Half] = {};
  HalfVec<T> halves[Rows] = {};
  multiply_tile<Product, Rows, Vectors, Half>(args, sums, halves);
  const Vec<T> scale = broadcast(m.scale);
  Out* to = m.to + row * m.to_stride + column;
  if constexpr (!Half) {
    if (m.streamed) {
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r, to += m.to_stride) {
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) stream(to + v * kLane, to_element(sums[r][v] * scale, to));
      }
      return;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r, to += m.to_stride) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      const Vec<T> sum = sums[r][v] * scale;
      if (v + 1 < Vectors || last == kLane) {
        store_element(to + v * kLane, sum);
      } else {
        store_element_partial(to + v * kLane, sum, last);
      }
    }
    if constexpr (Half) store(to, with_zeros(halves[r] * lower_half<T>(scale)));
  }
}

template <typename T, typename Out>
using SmallTile = void (*)(const SmallProduct<T, Out>&, int64_t row, int64_t column, int64_t last);

// By rows and vectors.
template <typename T, typename Out>
struct SmallTileTable {
  SmallTile<T, Out> of[kSmallTileRows][kSmallTileVectors] = {};

  template <int... Row>
  constexpr explicit SmallTileTable(std::integer_sequence<int, Row...>) {
    ((of[Row][0] = small_tile<T, Out, Row + 1, 1, false>, of[Row][1] = small_tile<T, Out, Row + 1, 2, false>),
     ...);
  }
};
template <typename T, typename Out>
constexpr SmallTileTable<T, Out> kSmallTiles{std::make_integer_sequence<int, kSmallTileRows>{}};

#if defined(__AVX512F__)
// Of half a vector, the upper half of which becomes 0.
template <typename T>
struct HalfTileTable {
  SmallTile<T, T> of[kSmallTileRows] = {};

  template <int... Row>
  constexpr explicit HalfTileTable(std::integer_sequence<int, Row...>)
      : of{small_tile<T, T, Row + 1, 0, true>...} {}
};
template <typename T>
constexpr HalfTileTable<T> kHalfTiles{std::make_integer_sequence<int, kSmallTileRows>{}};
#endif

// Of a tile, where all are nearly equal.
ATTN_EXT_INLINE int64_t small_tile_height(int64_t rows) {
  const auto all = static_cast<uint32_t>(rows), tiles = (all + kSmallTileRows - 1) / kSmallTileRows;
  return (all + tiles - 1) / tiles;
}

template <typename T, typename Out>
ATTN_EXT_INLINE void multiply_small(const SmallProduct<T, Out>& m) {
  constexpr int64_t kLane = kLanes<T>, kWidth = kSmallTileVectors * kLane;
  const int64_t height = small_tile_height(m.rows);
  for (int64_t column = 0; column < m.columns; column += kWidth) {
    const int64_t columns = smaller(kWidth, m.columns - column), vectors = ceil_div(columns, kLane);
    for (int64_t row = 0; row < m.rows; row += height) {
      const int64_t rows = smaller(height, m.rows - row);
      kSmallTiles<T, Out>.of[rows - 1][vectors - 1](m, row, column, columns - (vectors - 1) * kLane);
    }
  }
}

// The same into rows of whole vectors, of which those lanes that are no columns become what `right` makes
// them.
template <typename T>
ATTN_EXT_INLINE void multiply_small_rows(SmallProduct<T, T> m) {
#if defined(__AVX512F__)
  if (m.columns <= kLanes<T> / 2) {
    const int64_t height = small_tile_height(m.rows);
    for (int64_t row = 0; row < m.rows; row += height) {
      kHalfTiles<T>.of[smaller(height, m.rows - row) - 1](m, row, 0, 0);
    }
    return;
  }
#endif
  m.columns = round_up(m.columns, kLanes<T>);
  multiply_small(m);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
