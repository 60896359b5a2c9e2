// How one dtype is computed with, and the sizes that follow from it.
#pragma once

#include "amx.h"
#include "product.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename ElementType, typename ProductType>
struct Scheme {
  using Element = ElementType;
  using Product = ProductType;
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  static constexpr int64_t kLane = kLanes<Accum>;
  static constexpr int64_t kPanel = kTileVectors * kLane;  // columns of a whole panel
  static constexpr int64_t kDepth = Product::kDepth;
  static constexpr int64_t kDepthStep = Product::kDepthStep;
  static constexpr int64_t kTileRows = Product::kTileRows;
  // Elements of a row that becomes a depth are made in whole multiples of this, zeros at the end.
  static constexpr int64_t kSpan = larger(kLane, kDepth* kDepthStep);
  static constexpr bool kPaired =
      kDepth == 2;  // operands are pairs: P and dS are rounded and paired on the way
  // Two bytes each, multiplied by vectors: in pairs, or as floats in vectors of 512 bits. To read or write
  // one more takes little beside its products.
  static constexpr bool kShortElements =
      Product::kInRegisters && (kPaired || (sizeof(Element) == 2 && kLane >= 16));
};

// The same elements, multiplied as numbers of the type of their sums.
template <typename S>
using WideScheme = Scheme<typename S::Element, PlainProduct<typename S::Accum>>;

// A dim in whole vectors, and the width of the panels of nearly equal width that it is cut into.
template <typename S>
ATTN_EXT_INLINE int64_t padded_dim(int64_t dim) {
  return round_up(dim, S::kLane);
}

template <typename S>
ATTN_EXT_INLINE int64_t panel_width_of(int64_t dim) {
  const int64_t vectors = padded_dim<S>(dim) / S::kLane;
  const int64_t panels = larger(1, ceil_div(vectors, kTileVectors));
  return larger(1, ceil_div(vectors, panels)) * S::kLane;
}

// Operands from one packed row to the next.
template <typename S>
ATTN_EXT_INLINE int64_t row_stride_of(int64_t dim) {
  return round_up(depth_of<typename S::Product>(dim), S::kLane);
}

// Operands of all row panels of `rows` rows.
template <typename S>
ATTN_EXT_INLINE int64_t row_panels_size(int64_t rows, int64_t dim) {
  const int64_t width = panel_width_of<S>(dim);
  return ceil_div(dim, width) * depth_of<typename S::Product>(rows) * width;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
