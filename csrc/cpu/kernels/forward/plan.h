// Which path a forward call takes, and the height of its blocks of query rows.
#pragma once

#include "../interface/forward.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kOnlineKeys = 512;
constexpr int64_t kWholeRowKeys = 2 * kOnlineKeys;  // whole rows up to here
constexpr int64_t kBlockRows = 96;
constexpr int64_t kSplitRows = 32;       // as few query rows as this and the keys are split
constexpr int64_t kForwardFewRows = 16;  // as few as this and nothing is packed

ATTN_EXT_INLINE bool has_weights(const ForwardParams& params) {
  return params.weights.data != nullptr || params.key_mass != nullptr;
}

// Rows of all query heads of a group that are worth packing their keys for: blocks cost a matrix unit so much
// less than rows cost vectors that a few will do, if there is a panel of keys.
template <typename S>
constexpr int64_t kGroupRows = S::Product::kInRegisters ? int64_t{1} << 62 : 8;

// Bits hang on the path, so neither the batch, nor the threads, nor how many heads there are come into it.
template <typename S>
ATTN_EXT_INLINE ForwardPath forward_path(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const bool weights = has_weights(params);
  const bool split_group =
      !weights && shape.key_len >= S::kPanel && shape.query_len * group_size(shape) >= kGroupRows<S>;
  if (shape.query_len <= kForwardFewRows) return split_group ? ForwardPath::kSplit : ForwardPath::kFewRows;
  if (shape.query_len <= kSplitRows && shape.key_len > kWholeRowKeys && !weights) return ForwardPath::kSplit;
  return shape.key_len <= (weights ? kMaxBlockKeys : kWholeRowKeys) ? ForwardPath::kWholeRows
                                                                    : ForwardPath::kOnline;
}

// Blocks of equal height, in whole tiles; at least `blocks` of them.
template <typename S>
ATTN_EXT_INLINE int64_t block_height(int64_t rows, int64_t blocks) {
  blocks = larger(larger(1, blocks), ceil_div(rows, kBlockRows));
  return larger(S::kTileRows, round_up(ceil_div(rows, blocks), S::kTileRows));
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
