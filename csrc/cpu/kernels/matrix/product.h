// The register-tile product that all the matrix work is made of:
//   out (Rows, n) = carry * out + left (Rows, depth) . right (depth, n)      n = Vectors * lanes
// `left` is read element by element along its rows, `right` vector by vector along its rows, and Rows x
// Vectors accumulators stay in registers. Every output element is one chain of fused multiply-adds along the
// depth, so its value depends neither on Rows nor on Vectors.
#pragma once

#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// How one step along the depth is done: the packed type of an operand and its multiply-add.
template <typename T>
struct PlainProduct {
  using Operand = T;
  using Accum = T;
  static constexpr int kDepth = 1;  // elements in an operand
  template <typename V>
  static ATTN_EXT_INLINE V step(V a, V b, V c) {
    return multiply_add(a, b, c);
  }
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
  static ATTN_EXT_INLINE HalfVec<float> step(HalfVec<uint32_t> a, HalfVec<uint32_t> b, HalfVec<float> c) {
    return (HalfVec<float>)_mm256_dpbf16_ps((__m256)c, (__m256bh)a, (__m256bh)b);
  }
};
#endif

// Operands that so many columns take along the depth.
template <typename Product>
ATTN_EXT_INLINE int64_t depth_of(int64_t columns) {
  return (columns + Product::kDepth - 1) / Product::kDepth;
}

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

// sums += left . right
template <typename Product, int Rows, int Vectors>
ATTN_EXT_INLINE void multiply_tile(const TileArgs<Product>& args,
                                   Vec<typename Product::Accum> (&sums)[Rows][Vectors]) {
  using Operand = typename Product::Operand;
  constexpr int kWidth = kLanes<Operand>;
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
}

template <typename Product, int Rows, int Vectors, bool Carry>
void tile_product(const TileArgs<Product>& args) {
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
  multiply_tile(args, sums);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + v * kWidth, sums[r][v]);
  }
}

#if defined(__AVX512F__)
// tile_product for n = (Vectors + 1/2) lanes; the upper half of the last vector of `out` becomes 0.
template <typename Product, int Rows, int Vectors, bool Carry>
void half_tile_product(const TileArgs<Product>& args) {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  constexpr int kWidth = kLanes<Accum>;
  constexpr int kWhole = Vectors * kWidth;
  Accum* out = args.out;
  const int64_t out_stride = args.out_stride;
  Vec<Accum> sums[Rows][Vectors + 1];  // the last one is not used
  HalfVec<Accum> halves[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    Accum* row = out + r * out_stride;
    const Accum carry = Carry && args.carry != nullptr ? args.carry[r] : static_cast<Accum>(1);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = Carry ? load(row + v * kWidth) * carry : Vec<Accum>{};
    halves[r] = Carry ? load_half(row + kWhole) * carry : HalfVec<Accum>{};
  }
  const Operand* left = args.left;
  const Operand* right = args.right;
  const int64_t left_stride = args.left_stride;
  const int64_t left_step = args.left_step;
  const int64_t right_stride = args.right_stride;
  for (int64_t k = args.depth; k > 0; --k) {
    Vec<Operand> whole[Vectors + 1];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) whole[v] = load(right + v * kWidth);
    const HalfVec<Operand> half = load_half(right + kWhole);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec<Operand> element = broadcast(left[r * left_stride]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = Product::step(element, whole[v], sums[r][v]);
      halves[r] = Product::step(lower_half<Operand>(element), half, halves[r]);
    }
    left += left_step;
    right += right_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + v * kWidth, sums[r][v]);
    store(out + r * out_stride + kWhole, with_zeros(halves[r]));
  }
}
#endif

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

// Columns of a product are counted in these.
template <typename Accum>
constexpr int kColumnUnit = kLanes<Accum> / (kHasHalfVectors ? 2 : 1);

#if defined(__AVX512F__)
template <typename Product, bool Carry, int Rows>
constexpr TileFunction<Product> kHalfTileRow[4] = {
    half_tile_product<Product, Rows, 0, Carry>,
    half_tile_product<Product, Rows, 1, Carry>,
    half_tile_product<Product, Rows, 2, Carry>,
    half_tile_product<Product, Rows, 3, Carry>,
};
#endif

// The product for so many columns, in whole units.
template <typename Product, bool Carry>
ATTN_EXT_INLINE TileFunction<Product> tile_function_of_columns(int64_t rows, int64_t columns) {
  constexpr int64_t kWidth = kLanes<typename Product::Accum>;
#if defined(__AVX512F__)
  if (columns % kWidth != 0) {
    static constexpr const TileFunction<Product>* kTable[kTileRows] = {
        kHalfTileRow<Product, Carry, 1>, kHalfTileRow<Product, Carry, 2>, kHalfTileRow<Product, Carry, 3>,
        kHalfTileRow<Product, Carry, 4>, kHalfTileRow<Product, Carry, 5>, kHalfTileRow<Product, Carry, 6>};
    return kTable[rows - 1][columns / kWidth];
  }
#endif
  return tile_function<Product, Carry>(rows, columns / kWidth);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
