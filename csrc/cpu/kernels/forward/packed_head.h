// Keys and values of one head, packed for the register tile.
#pragma once

#include <type_traits>

#include "../interface/forward.h"
#include "../matrix/arena.h"
#include "../matrix/pack.h"
#include "../scores/visible_keys.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// From `first_key` on (the values perhaps in place):
//   keys    (key panels, depth of D, kPanel)
//   values  (value panels, depth of keys, value panel width)
template <typename S>
struct PackedHead {
  const typename S::Operand* keys;
  Operands<typename S::Operand> values;
  int64_t first_key;
};

// Whole cache lines from the first value on, so that reading them is as good as reading a packed copy.
template <typename S>
bool values_lie_packed(const ForwardParams& params) {
  if (!std::is_same_v<typename S::Element, typename S::Operand>) return false;
  const TensorView& value = params.value;
  const int64_t dim = params.shape.value_dim;
  bool aligned = reinterpret_cast<uintptr_t>(value.data) % 64 == 0 && dim % S::kLane == 0 &&
                 value.batch_stride % S::kLane == 0 && value.head_stride % S::kLane == 0;
  for (int64_t b = 0; value.batch_offsets != nullptr && b < params.shape.batch; ++b) {
    aligned = aligned && value.batch_offsets[b] % S::kLane == 0;
  }
  return aligned && value.column_stride == 1 && value.row_stride == dim;
}

// The place of `keys` keys of a head.
template <typename S>
PackedHead<S> take_packed_head(const ForwardParams& params, const ForwardPlan& plan, Arena& arena,
                               int64_t keys) {
  using Operand = typename S::Operand;
  using Product = typename S::Product;
  const AttentionShape& shape = params.shape;
  const int64_t width = panel_width_of<S>(shape.value_dim);
  PackedHead<S> packed{};
  packed.keys = take<Operand>(arena, round_up(keys, S::kPanel) * depth_of<Product>(shape.head_dim));
  packed.values = {nullptr, width, depth_of<Product>(keys) * width};
  if (!plan.value_in_place) {
    packed.values.data = take<Operand>(arena, row_panels_size<S>(keys, shape.value_dim));
  }
  return packed;
}

// Which head, and which of its keys: where the values are read if they lie in place.
template <typename S>
void set_head(const ForwardParams& params, const ForwardPlan& plan, PackedHead<S>& packed, int64_t batch,
              int64_t key_head, int64_t first_key) {
  packed.first_key = first_key;
  if (!plan.value_in_place) return;
  if constexpr (std::is_same_v<typename S::Element, typename S::Operand>) {
    packed.values = {row_pointer<const typename S::Operand>(params.value, batch, key_head, first_key),
                     params.value.row_stride, panel_width_of<S>(params.shape.value_dim)};
  }
}

// Packs `keys`, a range that begins where a panel begins.
template <typename S>
void pack_head(const ForwardParams& params, const ForwardPlan& plan, const PackedHead<S>& packed,
               int64_t batch, int64_t key_head, Range keys) {
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;
  const AttentionShape& shape = params.shape;
  const int64_t first = packed.first_key, begin = keys.begin - first, end = keys.end - first;
  const Matrix<Element> key = rows_of<Element>(params.key, batch, key_head, first, end, shape.head_dim);
  for (int64_t j = begin; j < end; j += S::kPanel) {
    pack_column_panel<Product>(key, j, S::kPanel,
                               const_cast<Operand*>(packed.keys) + j * depth_of<Product>(shape.head_dim));
  }
  if (plan.value_in_place) return;
  const Matrix<Element> value = rows_of<Element>(params.value, batch, key_head, first, end, shape.value_dim);
  pack_row_panels<Product>(value, begin / S::kDepth, depth_of<Product>(end), packed.values.row_stride,
                           const_cast<Operand*>(packed.values.data), packed.values.panel_stride);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
