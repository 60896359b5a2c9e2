// QueryBlock: scores of a handful of query rows a head where so many heads read the same keys that these are
// worth packing. No bit changes by that: the products add up as those of streamed.h do.
#pragma once

#include "../matrix/row_dots.h"
#include "../matrix/shared_dots.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

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
        keys > S::kLane ? shared_dots<S, kRows, 2>(args, panel) : shared_dots<S, kRows, 1>(args, panel);
      });
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
