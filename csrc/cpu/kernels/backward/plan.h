// Which path a backward call takes: by the shape of one group of heads, since bits hang on it, and by what
// the call has beside.
#pragma once

#include "../interface/backward.h"
#include "../matrix/scheme.h"
#include "chains.h"
#include "store_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewKeys = 128;
// A head of at most so many rows, keys and features has too few products for those of pairs, or of a matrix
// unit, to be worth what it takes to bring its operands there.
constexpr int64_t kSmallRows = 16;
constexpr int64_t kSmallKeys = 16;
constexpr int64_t kSmallDim = 64;

// As few query rows as this take their own path: of a tile with many columns they would leave most idle. A
// matrix unit makes up for that from a handful on, and so do products of pairs, the more the narrower the
// heads are, but both where several heads read the same keys, each with tiles of its own, later. With small
// dims all else that is done to a row tells.
template <typename S>
ATTN_EXT_INLINE int64_t backward_few_rows(const AttentionShape& shape) {
  if (!S::Product::kInRegisters) return group_size(shape) > 2 ? 8 : 4;
  if (S::kPanel < 64) return 8;
  const int64_t dims = shape.head_dim + shape.value_dim;
  if (S::kPaired) return group_size(shape) > 1 ? 8 : larger(4, dims / 40);
  return dims < 64 ? 8 : dims < 128 ? 12 : 20;
}

// Among few keys, of which one row needs more than half a step and several more of it, a few rows go the way
// of few rows as long as rows and sums stay in registers (few_rows/in_registers.h), and the rows are long
// enough to fill vectors: the way of few keys turns keys and values around, for tiles that would be idle for
// the most part.
constexpr int64_t kStepKeys = 16;     // that few rows meet at once
constexpr int64_t kRegisterRows = 4;  // of a group
template <typename S>
ATTN_EXT_INLINE bool few_rows_of_few_keys(const AttentionShape& shape) {
  constexpr int64_t kDims = 32;  // for a row
  const int64_t rows = group_size(shape) * shape.query_len;
  return rows > 0 && rows <= kRegisterRows && shape.key_len > kStepKeys - kStepKeys / 2 / rows &&
         rows * kDims <= shape.head_dim + shape.value_dim;
}

// From these bytes on, gradients of key and value would push out of the caches what else is at work, and be
// out of them before they are read. Where the rows that make them are few, it tells that lines have to be
// read before they are written there.
constexpr int64_t kStreamedBytes = 1 << 22;
constexpr int64_t kStreamedRows = 128;  // of a group

template <typename S>
ATTN_EXT_INLINE bool streams_key_gradients(const AttentionShape& shape) {
  constexpr int64_t kSize = sizeof(typename S::Element);
  const int64_t rows = unit_count(shape) * shape.key_len;
  return group_size(shape) * shape.query_len <= kStreamedRows &&
         rows * (shape.head_dim + shape.value_dim) * kSize >= kStreamedBytes;
}

// Weights of two bytes are written in forward, and read here, for less than what a product of five and the
// exponentials take by vectors; not so weights of floats, nor where a matrix unit makes the products
// (docs/trials.md).
template <typename S>
constexpr bool kReadsWeights = S::kShortElements;

// Rows of heads that would leave many columns of a panel idle, each head by itself, share them: a few, fewer
// than a panel has, or hardly more. Whole wide panels are worth the copies to a matrix unit alone, of many
// keys.
template <typename S>
ATTN_EXT_INLINE bool leaves_columns_idle(int64_t query_len, int64_t key_len) {
  constexpr int64_t kFewColumns = 32, kManyKeys = 512;
  if (query_len == S::kPanel && query_len > kFewColumns) {
    return !S::Product::kInRegisters && key_len >= kManyKeys;
  }
  return query_len <= larger(kFewColumns, S::kPanel + S::kPanel / 8);
}

ATTN_EXT_INLINE AttentionShape joined_shape(AttentionShape shape) {
  shape.query_len *= group_size(shape);
  shape.query_heads = shape.key_heads;
  return shape;
}

template <typename S>
ATTN_EXT_INLINE bool joins_heads(const AttentionShape& shape) {
  if (group_size(shape) == 1 || !leaves_columns_idle<S>(shape.query_len, shape.key_len)) return false;
  const AttentionShape joined = joined_shape(shape);
  return joined.query_len > backward_few_rows<S>(joined);
}

// Whether nothing tells the rows of a group's heads apart.
ATTN_EXT_INLINE bool can_join_heads(const BackwardParams& params) {
  const ScoreRule& rule = params.rule;
  const bool same_mask =
      rule.mask_kind == ScalarKind::kNone ||
      (rule.mask.head_stride == 0 && (rule.mask.row_stride == 0 || params.shape.query_len == 1));
  return same_mask && rule.window_left < 0 && rule.window_right < 0 && rule.sinks_kind == ScalarKind::kNone &&
         !params.dropout.enabled && params.delta == nullptr && params.grad_mask.data == nullptr &&
         params.grad_weights.data == nullptr && params.grad_key_mass.data == nullptr;
}

template <typename S>
BackwardPath path_of_shape(const AttentionShape& shape, bool can_join = true, bool grads_mask = false) {
  if (shape.key_len > 0 && shape.key_len <= kFewKeys) {
    // The gradient of a mask that few chains add to has copies only on the way of few keys.
    if (!grads_mask && few_rows_of_few_keys<S>(shape)) return BackwardPath::kFewRows;
    const bool small = shape.query_len <= kSmallRows && shape.key_len <= kSmallKeys &&
                       shape.head_dim <= kSmallDim && shape.value_dim <= kSmallDim;
    return small ? BackwardPath::kSmallHeads : BackwardPath::kFewKeys;
  }
  if (can_join && shape.key_len > 0 && joins_heads<S>(shape)) return BackwardPath::kJoinedHeads;
  return shape.query_len <= backward_few_rows<S>(shape) ? BackwardPath::kFewRows : BackwardPath::kTiles;
}

template <typename S>
BackwardPath backward_path(const BackwardParams& params) {
  return path_of_shape<S>(params.shape, can_join_heads(params), params.grad_mask.data != nullptr);
}

// Whether the mask's gradient is dS as dQ reads it: rounded, in pairs of neighbouring keys.
template <typename S>
ATTN_EXT_INLINE bool mask_grad_in_pairs(const BackwardParams& params) {
  const ResultView& grad = params.grad_mask;
  return S::kPaired && grad.data != nullptr && !grad.wide && grad.column_stride == 1 &&
         params.rule.softcap == 0;
}

// Whether tiles write all of a gradient, 0 for what nobody sees: of one number for each score, or of sums
// over heads and batches, which the first of these sets. Windows leave out whole blocks.
ATTN_EXT_INLINE bool tiles_fill_mask_grad(const BackwardParams& params) {
  const ResultView& grad = params.grad_mask;
  if (grad.data == nullptr || params.rule.window_left >= 0 || params.rule.window_right >= 0) return false;
  if (!grad.wide) return true;
  return grad.column_stride == 1 && grad.row_stride != 0 && grad.batch_offsets == nullptr &&
         group_size(params.shape) == 1 && unit_count(params.shape) > 0 && !params.adds_to_mask_grad;
}

// Whether one in pairs goes past the caches, which it would fill.
template <typename S>
ATTN_EXT_INLINE bool streams_mask_grad(const BackwardParams& params) {
  constexpr int64_t kSize = sizeof(typename S::Element);
  const AttentionShape& shape = params.shape;
  const ResultView& grad = params.grad_mask;
  return mask_grad_in_pairs<S>(params) && tiles_fill_mask_grad(params) &&
         grad.row_stride * kSize % kLineBytes == 0 &&
         shape.batch * shape.query_heads * shape.query_len * shape.key_len * kSize >= kStreamedBytes;
}

// dS sums to 0 along a row only with the very delta that P dP gives: a bias that is the same for all keys has
// nothing but such sums as its gradient.
ATTN_EXT_INLINE bool needs_exact_delta(const BackwardParams& params) {
  if (params.delta != nullptr) return false;
  const bool sums_rows =
      params.grad_mask.data != nullptr && params.grad_mask.column_stride == 0 && params.shape.key_len > 1;
  return params.grad_weights.data != nullptr || params.grad_key_mass.data != nullptr || sums_rows;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
