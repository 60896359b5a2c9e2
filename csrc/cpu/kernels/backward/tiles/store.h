// Tiles: from sums to what the caller gets, rounded once.
#pragma once

#include "../../vector/lanes.h"
#include "../store_rows.h"
#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void Tiles<S>::store_key_block(Unit unit, int64_t block) const {
  const Range keys = key_rows(block);
  const auto store_side = [&](const ResultView& grad, const T* sums, int64_t dim, double scale) {
    for (int64_t j = keys.begin; grad.data != nullptr && j < keys.end; ++j) {
      write_gradient_row<S>(sums + (j - keys.begin) * padded_dim<S>(dim), grad, unit.batch, unit.key_head, j,
                            dim, static_cast<T>(scale));
    }
  };
  store_side(params_.grad_key, memory_.grad_key(block), shape_.head_dim, params_.rule.scale);
  store_side(params_.grad_value, memory_.grad_value(block), shape_.value_dim, 1);
}

template <typename S>
void Tiles<S>::store_query_block(Unit unit, int64_t group_head, int64_t block) const {
  if (params_.grad_query.data == nullptr) return;
  params_.grad_query.wide ? store_query_block_as<T>(unit, group_head, block)
                          : store_query_block_as<Element>(unit, group_head, block);
}

// dQ = scale (dQ^T)^T, a square of lanes at a time.
template <typename S>
template <typename Out>
void Tiles<S>::store_query_block_as(Unit unit, int64_t group_head, int64_t block) const {
  const int64_t dim = shape_.head_dim, row_stride = params_.grad_query.row_stride;
  const Range rows = query_rows(block);
  const int64_t count = rows.end - rows.begin;
  const T* sums = memory_.query_pack(group_head, block).grad_query;
  const Vec<T> scale = broadcast(static_cast<T>(params_.rule.scale));
  for (int64_t q = 0; q < count; q += S::kLane) {
    const int64_t panel = round_down(q, S::kPanel);
    const int64_t width = smaller(S::kPanel, round_up(count, S::kSpan) - panel);
    Out* row = row_pointer<Out>(params_.grad_query, unit.batch, head_of(unit, group_head), rows.begin + q);
    for (int64_t d = 0; d < dim; d += S::kLane) {
      const T* from = sums + panel * dim + d * width + q - panel;
      Out* to = row + d;
      Vec<T> square[kLanes<T>];
      if (dim - d >= S::kLane && count - q >= S::kLane) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) square[i] = load(from + i * width) * scale;
        transpose_square<T>(square);
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) store_element(to + i * row_stride, square[i]);
        continue;
      }
      for (int64_t i = 0; i < S::kLane; ++i)
        square[i] = d + i < dim ? load(from + i * width) * scale : Vec<T>{};
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
    return memory_.query_pack(group_head, row / plan_.block_queries).terms.delta[row % plan_.block_queries];
  });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
