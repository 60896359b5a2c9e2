// Which path a forward call takes, and the height of its blocks of query rows.
#pragma once

#include "../interface/forward.h"
#include "../interface/matrix_unit.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kOnlineKeys = 512;
constexpr int64_t kWholeRowKeys = 2 * kOnlineKeys;  // whole rows up to here
constexpr int64_t kBlockRows = 96;
constexpr int64_t kSplitRows = 32;  // as few query rows as this and the keys are split
constexpr int64_t kFewRowsPieceKeys = 256;
constexpr int64_t kSplitPieceKeys = 512;
constexpr int64_t kForwardFewRows = 16;  // as few as this and nothing is packed

constexpr int64_t kSplitFromRows = 8;  // as many are worth a matrix unit and packs,
constexpr int64_t kLeastUnitElements =
    128;                             // of fewer rows, so many dims of all, against a piece of few rows' keys
constexpr int64_t kLatentDim = 256;  // and so is any row of more dims: many query heads share those,
constexpr int64_t kLatentUnitRows = 4;  // but for so few, which may read keys where they lie

ATTN_EXT_INLINE bool has_weights(const ForwardParams& params) {
  return params.weights.data != nullptr || params.key_mass != nullptr;
}

ATTN_EXT_INLINE int64_t most_unit_rows(const AttentionShape& shape) {
  return shape.head_dim > kLatentDim ? kLatentUnitRows : kSplitFromRows - 1;
}

// Whether a matrix unit makes the scores of a handful of rows. It takes keys where they lie, in whole steps
// of its depth. A row that has its keys to itself is what must not lose by it (docs/trials.md).
template <typename S>
ATTN_EXT_INLINE bool has_unit_rows(const ForwardParams& params) {
  if constexpr (S::Product::kInRegisters) return false;
  const AttentionShape& shape = params.shape;
  return matrix_unit_is_there() && shape.head_dim % (S::kDepth * S::kDepthStep) == 0 &&
         shape.query_len * shape.head_dim >= kLeastUnitElements && shape.key_len >= kFewRowsPieceKeys &&
         params.key_storage.kind == ScalarKind::kNone && params.value_storage.kind == ScalarKind::kNone;
}

// Whether values are no more than read where they lie: rows by vectors, or columns, a tile of them at a time.
template <typename S>
ATTN_EXT_INLINE bool unit_reads_in_place(const ForwardParams& params) {
  if (params.value.column_stride == 1) return true;
  return lies_across(params.value) && params.value_storage.pages == nullptr &&
         params.shape.value_dim >= S::kTileRows;
}

// Rows of many dims are merged for longer than they are worth more threads.
ATTN_EXT_INLINE int64_t piece_length(ForwardPath path, const AttentionShape& shape) {
  const bool few =
      path == ForwardPath::kFewRows || (path == ForwardPath::kUnitRows && shape.head_dim <= kLatentDim);
  return few ? kFewRowsPieceKeys : kSplitPieceKeys;
}

// Bits hang on the path, so neither the batch, nor the heads, nor the threads come into it.
template <typename S>
ATTN_EXT_INLINE ForwardPath forward_path(const ForwardParams& params) {
  const AttentionShape& shape = params.shape;
  const bool weights = has_weights(params);
  if (shape.query_len <= kForwardFewRows) {
    const bool by_unit = !S::Product::kInRegisters && !weights && shape.key_len >= S::kPanel;
    if (by_unit && shape.query_len <= most_unit_rows(shape) && has_unit_rows<S>(params)) {
      return ForwardPath::kUnitRows;
    }
    const bool packs = shape.query_len >= kSplitFromRows || shape.head_dim > kLatentDim;
    return by_unit && packs ? ForwardPath::kSplit : ForwardPath::kFewRows;
  }
  if (shape.query_len <= kSplitRows && shape.key_len > kWholeRowKeys && !weights) return ForwardPath::kSplit;
  return shape.key_len <= (weights ? kMaxBlockKeys : kWholeRowKeys) ? ForwardPath::kWholeRows
                                                                    : ForwardPath::kOnline;
}

// Whether the path that is taken without weights writes them for less than backward saves by them: as the
// softmax makes them, or, of a handful of rows, when pieces are merged, which only scores of many dims are
// worth.
ATTN_EXT_INLINE bool writes_weights_in_passing(const AttentionShape& shape) {
  if (shape.query_len <= kForwardFewRows) return shape.head_dim > kLatentDim;
  return shape.key_len <= kWholeRowKeys;
}

// Blocks of equal height, in whole tiles; at least `blocks` of them.
template <typename S>
ATTN_EXT_INLINE int64_t block_height(int64_t rows, int64_t blocks) {
  blocks = larger(larger(1, blocks), ceil_div(rows, kBlockRows));
  return larger(S::kTileRows, round_up(ceil_div(rows, blocks), S::kTileRows));
}

// Of blocks that take equally long, so high ones, or up to a third lower, that the last threads to get one
// leave the fewest idle meanwhile: for each of `units` heads.
template <typename S>
ATTN_EXT_INLINE int64_t height_of_full_waves(int64_t rows, int64_t units, int64_t threads, int64_t highest) {
  int64_t best = highest, best_rows = 0;
  for (int64_t height = highest; 3 * height >= 2 * highest && height >= 4 * S::kTileRows;
       height -= S::kTileRows) {
    // What a thread works through, and a row more for each block.
    const int64_t thread_rows = ceil_div(units * ceil_div(rows, height), threads) * (height + 1);
    if (best_rows == 0 || thread_rows < best_rows) {
      best = height;
      best_rows = thread_rows;
    }
  }
  return best;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
