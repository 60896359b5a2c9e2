// QueryBlock: what a cache's storage adds to scores and weights.
#pragma once

#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// The factors of the block's keys.
template <typename S>
void QueryBlock<S>::read_factors() {
  if (params_.key_storage.scale.data != nullptr) {
    row_factors(params_.key_storage, key_head_, block_key_, block_count_, s_.key_factors);
    fill_span(s_.key_factors, block_count_, s_.score_stride, static_cast<T>(0));
  }
  if (values_have_factors()) {
    row_factors(params_.value_storage, key_head_, block_key_, block_count_, s_.value_factors);
    fill_span(s_.value_factors, block_count_, s_.score_stride, static_cast<T>(0));
  }
}

// Multiplies scores or weights by the factors of their keys. What is 0 stays so: a key that is not seen has
// no say, whatever its factor is.
template <typename S>
void QueryBlock<S>::multiply_factors(int64_t band, const Storage& storage, const T* factors) {
  if (storage.scale.data == nullptr) return;
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    T* row = score_row(band, r);
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; j += S::kLane) {
        const Vec<T> x = load(row + j);
        store(row + j, x == Vec<T>{} ? x : x * load(factors + j));
      }
    });
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
