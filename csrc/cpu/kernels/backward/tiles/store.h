// Tiles: from sums to what the caller gets, rounded once.
#pragma once

#include "../../vector/lanes.h"
#include "../store_rows.h"
#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void Tiles<S>::store_key_block(Unit unit, int64_t block) const {
  const Range keys = grid_.key_rows(block);
  if (begins_sums(memory_.key_pack(block).has_sums)) {
    memory_.clear_key_sums(block, {0, keys.end - keys.begin});
  }
  const auto store_side = [&](const ResultView& grad, const T* sums, int64_t dim, double scale) {
    if (grad.data == nullptr) return;
    const HeadGradient<S> to{grad, unit.batch, unit.key_head, dim, scale, streamed_};
    to.write(sums, padded_dim<S>(dim), keys);
  };
  store_side(params_.grad_key, memory_.grad_key(block), shape_.head_dim, params_.rule.scale);
  store_side(params_.grad_value, memory_.grad_value(block), shape_.value_dim, 1);
}

template <typename S>
void Tiles<S>::store_query_block(Unit unit, int64_t group_head, int64_t block) const {
  if (params_.grad_query.data == nullptr) return;
  if (begins_sums(memory_.query_pack(group_head, block).has_sums)) {
    const Range rows = grid_.query_rows(block);
    memory_.clear_query_sums(group_head, block, {0, rows.end - rows.begin});
  }
  params_.grad_query.wide ? store_query_block_as<T>(unit, group_head, block)
                          : store_query_block_as<Element>(unit, group_head, block);
}

template <typename S>
template <typename Out>
void Tiles<S>::store_query_block_as(Unit unit, int64_t group_head, int64_t block) const {
  const Range rows = grid_.query_rows(block);
  const T* sums = memory_.query_pack(group_head, block).grad_query;
  store_query_sums<Out>(
      unit, group_head, rows, {0, rows.end - rows.begin},
      {0, shape_.head_dim}, [&](int64_t at) __attribute__((always_inline)) { return load(sums + at); });
}

// dQ = scale (dQ^T)^T for some queries of a block, from a whole vector on, and some dims, a square of lanes
// at a time; sums_at(place) is a vector of dQ^T, whose panels (D, queries) lie one behind the other.
template <typename S>
template <typename Out, typename SumsAt>
ATTN_EXT_INLINE void Tiles<S>::store_query_sums(Unit unit, int64_t group_head, Range rows, Range queries,
                                                Range dims, SumsAt sums_at) const {
  const int64_t dim = shape_.head_dim, row_stride = params_.grad_query.row_stride;
  const int64_t count = rows.end - rows.begin;
  const Vec<T> scale = broadcast(static_cast<T>(params_.rule.scale));
  for (int64_t q = queries.begin; q < queries.end; q += S::kLane) {
    const int64_t panel = round_down(q, S::kPanel);
    const int64_t width = smaller(S::kPanel, round_up(count, S::kSpan) - panel);
    Out* row = row_pointer<Out>(params_.grad_query, unit.batch, head_of(unit, group_head), rows.begin + q);
    for (int64_t d = dims.begin; d < dims.end; d += S::kLane) {
      const int64_t from = panel * dim + d * width + q - panel;
      Out* to = row + d;
      Vec<T> square[kLanes<T>];
      if (dim - d >= S::kLane && count - q >= S::kLane) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) square[i] = sums_at(from + i * width) * scale;
        transpose_square<T>(square);
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) store_element(to + i * row_stride, square[i]);
        continue;
      }
      for (int64_t i = 0; i < S::kLane; ++i) {
        square[i] = d + i < dim ? sums_at(from + i * width) * scale : Vec<T>{};
      }
      transpose_square<T>(square);
      for (int64_t i = 0; i < smaller(S::kLane, count - q); ++i) {
        store_element_partial(to + i * row_stride, square[i], smaller(S::kLane, dim - d));
      }
    }
  }
}

template <typename S>
void Tiles<S>::store_sink_of(Unit unit, int64_t group_head) const {
  store_sink<S>(params_, unit.batch, head_of(unit, group_head), [&](int64_t row) {
    return memory_.query_pack(group_head, row / plan_.block_queries).terms.from(row % plan_.block_queries);
  });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
