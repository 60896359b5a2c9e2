// How one dtype is computed with, and the layouts that follow from it.
#pragma once

#include "pack.h"
#include "params.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename ElementType, typename ProductType, int Degree>
struct Scheme {
  using Element = ElementType;
  using Product = ProductType;
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  static constexpr int64_t kLane = kLanes<Accum>;
  static constexpr int64_t kPanel = kTileVectors * kLane;  // keys of a packed panel
  static constexpr int64_t kDepth = Product::kDepth;
  static constexpr bool kNarrow = kDepth == 2;  // weights are narrowed to pairs before they meet the values
  static constexpr int kExpDegree = Degree;     // of the polynomial: enough for the precision of the element
};

// Widths of the value side: Dv in whole vectors, cut into panels of nearly equal width.
template <typename S>
ATTN_EXT_INLINE int64_t padded_value_dim(int64_t value_dim) {
  return round_up(value_dim, S::kLane);
}

template <typename S>
ATTN_EXT_INLINE int64_t value_panel_width(int64_t value_dim) {
  const int64_t vectors = padded_value_dim<S>(value_dim) / S::kLane;
  const int64_t panels = larger(1, (vectors + kTileVectors - 1) / kTileVectors);
  return larger(1, (vectors + panels - 1) / panels) * S::kLane;
}

// Keys and values of one head from `first_key` on, packed (the values perhaps in place).
//   keys    (key panels, depth of D, kPanel)
//   values  (value panels, depth of keys, value panel width)
template <typename S>
struct PackedHead {
  const typename S::Operand* keys;
  const typename S::Operand* values;
  int64_t value_row_stride;
  int64_t value_panel_stride;
  int64_t first_key;
};

// Sizes, in operands, of what `keys` keys take when packed.
template <typename S>
ATTN_EXT_INLINE int64_t packed_keys_size(const AttentionShape& shape, int64_t keys) {
  return round_up(keys, S::kPanel) * depth_of<typename S::Product>(shape.head_dim);
}

template <typename S>
ATTN_EXT_INLINE int64_t packed_value_panel_size(const AttentionShape& shape, int64_t keys) {
  return depth_of<typename S::Product>(keys) * value_panel_width<S>(shape.value_dim);
}

template <typename S>
ATTN_EXT_INLINE int64_t packed_values_size(const AttentionShape& shape, int64_t keys) {
  const int64_t width = value_panel_width<S>(shape.value_dim);
  return packed_value_panel_size<S>(shape, keys) * (round_up(shape.value_dim, width) / width);
}

// Memory handed out piece by piece, each aligned to a cache line. Over a null base it only counts.
struct Arena {
  char* base;
  int64_t used;
};

template <typename T>
ATTN_EXT_INLINE T* take(Arena& arena, int64_t count) {
  char* piece = arena.base + arena.used;
  arena.used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  return reinterpret_cast<T*>(piece);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
