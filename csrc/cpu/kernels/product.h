// The register-tile product that all the matrix work is made of:
//   out (Rows, n) = carry * out + left (Rows, depth) . right (depth, n)      n = Vectors * lanes
// `left` is read element by element along its rows, `right` vector by vector along its rows, and Rows x
// Vectors accumulators stay in registers. Every output element is one chain of fused multiply-adds along the
// depth, so its value depends neither on Rows nor on Vectors.
#pragma once

#include "convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// How one step along the depth is done: the packed type of an operand and its multiply-add.
template <typename T>
struct PlainProduct {
  using Operand = T;
  using Accum = T;
  static constexpr int kDepth = 1;  // elements in an operand
  static ATTN_EXT_INLINE Vec<T> step(Vec<T> a, Vec<T> b, Vec<T> c) { return multiply_add(a, b, c); }
};

#if defined(__AVX512BF16__)
// Operands are pairs of bfloat16, neighbours along the depth, the first in the low half.
struct BFloat16Product {
  using Operand = uint32_t;
  using Accum = float;
  static constexpr int kDepth = 2;
  static ATTN_EXT_INLINE Vec<float> step(Vec<uint32_t> a, Vec<uint32_t> b, Vec<float> c) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
#endif

template <typename Product>
struct TileArgs {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  int64_t depth;  // in operands
  const Operand* left;
  int64_t left_stride;
  const Operand* right;
  int64_t right_stride;
  Accum* out;
  int64_t out_stride;
  const Accum* carry;     // one factor a row, read only by products that carry; null: all 1
  int64_t left_step = 1;  // from one step along the depth to the next
};

template <typename Product>
using TileFunction = void (*)(const TileArgs<Product>&);

template <typename Product, int Rows, int Vectors, bool Carry>
void tile_product(const TileArgs<Product>& args) {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  constexpr int kWidth = kLanes<Accum>;
  Accum* out = args.out;
  const int64_t out_stride = args.out_stride;
  Vec<Accum> sums[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      if constexpr (Carry) {
        sums[r][v] = load(out + r * out_stride + v * kWidth);
        if (args.carry != nullptr) sums[r][v] *= broadcast(args.carry[r]);
      } else {
        sums[r][v] = Vec<Accum>{};
      }
    }
  }
  const Operand* left = args.left;
  const Operand* right = args.right;
  const int64_t left_stride = args.left_stride;
  const int64_t left_step = args.left_step;
  const int64_t right_stride = args.right_stride;
  for (int64_t k = args.depth; k > 0; --k) {
    Vec<Operand> row[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) row[v] = load(right + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec<Operand> element = broadcast(left[r * left_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = Product::step(element, row[v], sums[r][v]);
    }
    left += left_step;
    right += right_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + v * kWidth, sums[r][v]);
  }
}

template <typename Product, bool Carry, int Rows>
constexpr TileFunction<Product> kTileRow[4] = {
    tile_product<Product, Rows, 1, Carry>,
    tile_product<Product, Rows, 2, Carry>,
    tile_product<Product, Rows, kTileVectors >= 3 ? 3 : 1, Carry>,
    tile_product<Product, Rows, kTileVectors >= 4 ? 4 : 1, Carry>,
};

// The product for 1 <= rows <= kTileRows and 1 <= vectors <= kTileVectors.
template <typename Product, bool Carry>
ATTN_EXT_INLINE TileFunction<Product> tile_function(int64_t rows, int64_t vectors) {
  static constexpr const TileFunction<Product>* kTable[kTileRows] = {
      kTileRow<Product, Carry, 1>, kTileRow<Product, Carry, 2>, kTileRow<Product, Carry, 3>,
      kTileRow<Product, Carry, 4>, kTileRow<Product, Carry, 5>, kTileRow<Product, Carry, 6>};
  return kTable[rows - 1][vectors - 1];
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
