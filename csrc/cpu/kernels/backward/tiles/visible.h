// KeyQueryBlock: which queries see its keys.
#pragma once

#include "block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
Range KeyQueryBlock<S>::window_of_key(int64_t r) const {
  const Range queries = window_queries(params_.rule, params_.shape.query_len, key_first_ + r);
  return {queries.begin - query_first_, queries.end - query_first_};
}

template <typename S>
Range KeyQueryBlock<S>::queries_of_key(int64_t r) const {
  const TensorView& mask = params_.rule.mask;
  if (mask_hides_keys_ &&
      row_pointer<const uint8_t>(mask, batch_, head_, 0)[(key_first_ + r) * mask.column_stride] == 0) {
    return {0, 0};
  }
  return intersect(window_of_key(r), {0, query_count_});
}

// What the queries of a tile's keys have in common, and all that see any.
template <typename S>
void KeyQueryBlock<S>::see_tile(int64_t tile, Range& common, Range& hull) const {
  const int64_t last = tile + tile_rows(tile) - 1;
  if (!mask_hides_keys_) {  // the window moves with the keys
    const Range of_first = window_of_key(tile), of_last = window_of_key(last);
    common = intersect(common, {of_last.begin, of_first.end});
    hull = intersect({of_first.begin, of_last.end}, {0, query_count_});
    return;
  }
  hull = {query_count_, 0};
  for (int64_t r = tile; r <= last; ++r) {
    const Range span = queries_of_key(r);
    common = intersect(common, span);
    if (!is_empty(span)) hull = {smaller(hull.begin, span.begin), larger(hull.end, span.end)};
  }
}

// False: none of the part's queries sees any of its keys.
template <typename S>
bool KeyQueryBlock<S>::set_block(int64_t head, Range rows, const QueryPack<S>& pack, const BlockPart& part) {
  const ScoreRule& rule = params_.rule;
  const int64_t first = rows.begin, count = rows.end - rows.begin;
  head_ = head;
  query_first_ = first;
  query_count_ = count;
  padded_queries_ = round_up(count, S::kSpan);
  part_ = {part.keys, {part.queries.begin, round_up(part.queries.end, S::kSpan)}};
  queries_ = pack;
  // What a bool mask says of all keys of a query or of all queries of a key is in lse and in the rows' spans.
  mask_by_key_ =
      rule.mask_kind != ScalarKind::kNone &&
      (rule.mask_kind != ScalarKind::kBool || (rule.mask.row_stride != 0 && rule.mask.column_stride != 0));
  select_all_ = *pack.terms.has_dead_rows != 0 || *keys_.has_bad_values != 0 || *keys_.has_bad_keys != 0;
  // With NaN or Inf about, a weight of 0 does not tell what is hidden from what is small.
  reads_weights_ = kReadsWeights<S> && params_.weights.data != nullptr && !full_ &&
                   !needs_exact_delta(params_) && *pack.terms.has_far_rows == 0 &&
                   *keys_.has_bad_values == 0 && *keys_.has_bad_keys == 0 && *pack.has_bad_queries == 0 &&
                   *pack.has_bad_grads == 0 && has_finite_delta();
  mask_hides_keys_ =
      rule.mask_kind == ScalarKind::kBool && rule.mask.row_stride == 0 && rule.mask.column_stride != 0;
  for (int64_t tile = part_.keys.begin; tile < part_.keys.end; tile += S::kTileRows) {
    Range& common = cell_common_[tile / cell_size_];
    if (tile % cell_size_ == 0) common = {0, count};
    Range hull{};
    see_tile(tile, common, hull);
    tile_span_[tile / S::kTileRows] = is_empty(hull) ? Range{0, 0} : in_steps<S::kSpan>(hull);
  }
  bool any = false;
  for (int64_t cell = part_.keys.begin; cell < part_.keys.end; cell += cell_size_) {
    for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
      live(cell, panel) = cell_is_live(cell, panel);
      any |= live(cell, panel) != 0;
    }
  }
  return any;
}

template <typename S>
bool KeyQueryBlock<S>::cell_is_live(int64_t cell, int64_t panel) const {
  bool seen = false;
  for (int64_t tile = cell; tile < cell + cell_rows(cell); tile += S::kTileRows) {
    seen |= !is_empty(panel_span(tile, panel));
  }
  if (!seen || !mask_by_key_) return seen;
  const int64_t queries = params_.rule.mask.row_stride == 0 ? 1 : smaller(S::kPanel, query_count_ - panel);
  const Range keys{key_first_ + cell, key_first_ + cell + cell_rows(cell)};
  for (int64_t i = query_first_ + panel; i < query_first_ + panel + queries; ++i) {
    if (any_let_through<Element>(params_.rule, batch_, head_, i, keys)) return true;
  }
  return false;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
