// QueryBlock: scores of a handful of query rows a head where so many heads read the same keys that these are
// worth packing. No bit changes by that: the products add up as those of streamed.h do.
#pragma once

#include "../matrix/row_dots.h"
#include "../matrix/shared_dots.h"
#include "piece_ahead.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// So many rows of the next piece are asked for before each product: it is over before these have come.
constexpr int64_t kAskedRows = 4;

// Inlined: GCC leaves out calls of what does nothing but ask for memory.
template <typename S>
ATTN_EXT_INLINE void QueryBlock<S>::ask_for_next_rows(const StoredRows<Element>& rows) const {
  const int64_t count = next_keys_.end - next_keys_.begin, first = next_keys_.begin + asked_keys_;
  RowsAhead ahead = rows.ahead(first, next_keys_.end);
  ahead.bytes = rows.columns() * static_cast<int64_t>(sizeof(Element));
  if (ahead.next == nullptr || count * ahead.bytes > kPieceAheadBytes) return;
  ahead.rows = count - asked_keys_;
  prefetch_some(ahead, kAskedRows);
}

// Keys and values are packed a piece at a time, as fast as they are read: so those of the next piece are
// asked for during this one's products.
template <typename S>
ATTN_EXT_INLINE void QueryBlock<S>::ask_for_next_pack() {
  if (asked_keys_ >= next_keys_.end - next_keys_.begin) return;
  ask_for_next_rows(stored_keys(next_head_));
  ask_for_next_rows({params_.value, params_.value_storage, batch_, next_head_, 0, params_.shape.value_dim});
  asked_keys_ += kAskedRows;
}

// S (rows, keys) = Q . K^T, some rows with a panel of keys at a time.
template <typename S>
void QueryBlock<S>::shared_scores(int64_t band) {
  SharedDotsArgs<S> args{};
  args.depth = depth_of<Product>(params_.shape.head_dim);
  args.left_stride = s_.query_stride;
  args.out_stride = s_.score_stride;
  const int64_t first = block_key_ - packed_.first_key;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t j = runs_[i].begin, end = runs_[i].end, keys = 0; j < end; j += keys) {
      const int64_t column = (first + j) % kSharedPanel<S>;
      keys = column == 0 && j + kSharedPanel<S> <= end ? kSharedPanel<S> : S::kLane;
      const PackedKeys<S> panel{packed_.keys + (first + j - column) * args.depth + column};
      each_few_rows<S>(band, band + band_rows(band), [&](auto count, int64_t r) {
        constexpr int kRows = decltype(count)::value;
        args.left = s_.query + r * s_.query_stride;
        args.out = score_row(band, r) + j;
        ask_for_next_pack();
        keys > S::kLane ? shared_dots<S, kRows, 2>(args, panel) : shared_dots<S, kRows, 1>(args, panel);
      });
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
