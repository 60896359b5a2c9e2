// Keys and values of one head, packed for the register tile.
#pragma once

#include <type_traits>

#include "../interface/forward.h"
#include "../matrix/arena.h"
#include "../matrix/pack.h"
#include "../matrix/shared_dots.h"
#include "../matrix/stored_rows.h"
#include "../scores/visible_keys.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// From `first_key` on (the values perhaps in place):
//   keys    (key panels, depth of D, width), of kPanel keys, or of kSharedPanel where few rows share them
//   values  (value panels, depth of keys, value panel width)
template <typename S>
struct PackedHead {
  const typename S::Operand* keys;
  Operands<typename S::Operand> values;
  int64_t first_key;
};

// Every few lines of a panel of rows so far apart lie on another page: worth a copy for so many query rows,
// and for these where other heads' rows lie between them.
constexpr int64_t kFarRowBytes = 1024, kRowsWorthACopy = 256, kRowsWorthACopyOfRowsApart = 48;
// Rows a multiple of this apart put one another out of the nearest cache: for so many pairs of row and key.
constexpr int64_t kCollidingRowBytes = 2048, kPairsWorthACopy = 16384;

// Whether values that could be read where they lie are read faster from a copy. Where each row sees but some
// of the keys a copy is of many that few rows read: of rows that lie one after the other none is made.
template <typename S>
bool values_are_worth_packing(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const int64_t rows = shape.query_len * group_size(shape);
  const bool lie_apart = params.value.row_stride != shape.value_dim;
  if (lie_apart && rows >= kRowsWorthACopyOfRowsApart) return true;
  if (rows == 0 || params.rule.window_left >= 0) return lie_apart;
  if (2 * window_keys(params.rule, shape.key_len, shape.query_len - 1).end < shape.key_len) return lie_apart;
  const int64_t bytes = params.value.row_stride * static_cast<int64_t>(sizeof(typename S::Element));
  if (bytes < kFarRowBytes) return false;
  if (bytes % kCollidingRowBytes == 0 && rows * shape.key_len >= kPairsWorthACopy) return true;
  return rows >= kRowsWorthACopy;
}

// Whether values are multiplied where they lie: whole vectors, the first on a cache line, and not too far
// apart.
template <typename S>
bool values_stay_in_place(const ForwardParams& params) {
  if (!std::is_same_v<typename S::Element, typename S::Operand>) return false;
  if (!is_plain(params.value_storage)) return false;
  const TensorView& value = params.value;
  const int64_t dim = params.shape.value_dim;
  bool aligned = reinterpret_cast<uintptr_t>(value.data) % 64 == 0 && dim % S::kLane == 0 &&
                 value.batch_stride % S::kLane == 0 && value.head_stride % S::kLane == 0;
  for (int64_t b = 0; value.batch_offsets != nullptr && b < params.shape.batch; ++b) {
    aligned = aligned && value.batch_offsets[b] % S::kLane == 0;
  }
  return aligned && value.column_stride == 1 && value.row_stride % S::kLane == 0 &&
         !values_are_worth_packing<S>(params);
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

// Packs `keys`, a range that begins where a panel begins. Rows that cannot be read where they lie are copied
// to `buffer`, a panel of them at a time.
template <typename S>
void pack_keys(const ForwardParams& params, const ForwardPlan& plan, const PackedHead<S>& packed,
               int64_t batch, int64_t key_head, Range keys, typename S::Element* buffer) {
  using Element = typename S::Element;
  using Product = typename S::Product;
  const int64_t first = packed.first_key, begin = keys.begin - first, end = keys.end - first;
  const int64_t dim = params.shape.head_dim;
  const StoredRows<Element> key(params.key, params.key_storage, batch, key_head, 0, dim);
  const int64_t width = plan.path == ForwardPath::kFewRows ? kSharedPanel<S> : S::kPanel;
  int64_t j = begin;
  if (key.lie_across() && j < end && key.lie_in_place(keys.begin, end - begin)) {
    j += round_down(end - begin, width);
    pack_panels_across<Product>(
        key.in_place(keys.begin, j - begin), width,
        const_cast<typename S::Operand*>(packed.keys) + begin * depth_of<Product>(dim));
  }
  for (; j < end; j += width) {
    const Matrix<Element> rows = key.rows(first + j, smaller(width, end - j), buffer);
    pack_column_panel<Product>(rows, 0, width,
                               const_cast<typename S::Operand*>(packed.keys) + j * depth_of<Product>(dim));
  }
}

// The same of values, which may lie in place.
template <typename S>
void pack_values(const ForwardParams& params, const ForwardPlan& plan, const PackedHead<S>& packed,
                 int64_t batch, int64_t key_head, Range keys, typename S::Element* buffer) {
  using Element = typename S::Element;
  using Product = typename S::Product;
  if (plan.value_in_place) return;
  const int64_t first = packed.first_key, begin = keys.begin - first, end = keys.end - first;
  const StoredRows<Element> value(params.value, params.value_storage, batch, key_head, 0,
                                  params.shape.value_dim);
  const int64_t width = packed.values.row_stride;
  constexpr bool kAsksAhead = true;
  for (int64_t j = begin; j < end; j += S::kPanel) {
    const Matrix<Element> rows = value.rows(first + j, smaller(S::kPanel, end - j), buffer);
    pack_row_panels<Product>(rows, width,
                             const_cast<typename S::Operand*>(packed.values.data) + j / S::kDepth * width,
                             packed.values.panel_stride, kAsksAhead);
  }
}

template <typename S>
void pack_head(const ForwardParams& params, const ForwardPlan& plan, const PackedHead<S>& packed,
               int64_t batch, int64_t key_head, Range keys, typename S::Element* buffer) {
  pack_keys(params, plan, packed, batch, key_head, keys, buffer);
  pack_values(params, plan, packed, batch, key_head, keys, buffer);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
