// Tiles: a unit from packing to the gradients by one thread, in its own memory.
#pragma once

#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Each block is packed when it is first met, and stored after its last meeting, while the caches have it.
template <typename S>
void Tiles<S>::run_unit(KeyQueryBlock<S>& scores, Unit unit, UnitStates& states) const {
  states.keys.reset(plan_.key_blocks);
  for (int64_t block = 0; block < plan_.key_blocks; ++block) {
    const Range queries = grid_.seen_blocks(grid_.key_rows(block), {0, plan_.query_blocks});
    states.keys.of[block].meetings = group_ * (queries.end - queries.begin);
  }
  for (int64_t head = 0; head < group_; ++head) run_head(scores, unit, head, states);
  for (int64_t block = 0; block < plan_.key_blocks; ++block) {
    const BlockState& key = states.keys.of[block];
    if (key.stored) continue;
    if (!key.packed) states.keys.take_place(block);
    store_unseen_keys(unit, block);
    states.keys.free_place(block);
  }
}

template <typename S>
void Tiles<S>::run_head(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, UnitStates& states) const {
  const int64_t segments = plan_.segments, query_blocks = plan_.query_blocks;
  const T* lse = lse_rows<S>(params_, unit.batch, head_of(unit, group_head));
  states.queries.reset(query_blocks);
  if (exact_delta_ || any_far(lse, shape_.query_len)) {
    for (int64_t i = 0; i < query_blocks; ++i) meet_query_block(unit, group_head, i, states);
    for (int64_t i = 0; memory_.keeps_keys() && i < plan_.key_blocks; ++i) meet_key_block(unit, i, states);
    make_rows(scores, unit, group_head, {0, query_blocks});
  }
  for (int64_t block = 0; block < plan_.key_blocks; ++block) {
    const Range queries = grid_.seen_blocks(grid_.key_rows(block), {0, query_blocks});
    for (int64_t i = queries.begin; i < queries.end; ++i) ++states.queries.of[i].meetings;
  }
  // A query segment meets those of the keys from its own backwards, around the end.
  for (int64_t last = 0; last < 2 * segments - 1; ++last) {
    const Range queries = grid_.query_segment(last % segments);
    for (int64_t i = smaller(last, segments - 1); i > last - segments && i >= 0; --i) {
      const Range keys = grid_.key_segment(i);
      for (int64_t block = keys.begin; block < keys.end; ++block) {
        visit_key_block(scores, unit, group_head, block, queries, states);
      }
    }
  }
  for (int64_t i = 0; i < query_blocks; ++i) {
    if (states.queries.of[i].stored) continue;
    meet_query_block(unit, group_head, i, states);
    leave_query_block(unit, group_head, i, states);
  }
  store_sink_of(unit, group_head);
}

template <typename S>
void Tiles<S>::meet_query_block(Unit unit, int64_t group_head, int64_t block, UnitStates& states) const {
  if (states.queries.of[block].packed) return;
  states.queries.of[block].packed = true;
  states.queries.take_place(block);
  pack_queries(unit, group_head, block);
}

template <typename S>
void Tiles<S>::meet_key_block(Unit unit, int64_t block, UnitStates& states) const {
  if (states.keys.of[block].packed) return;
  states.keys.of[block].packed = true;
  states.keys.take_place(block);
  pack_keys(unit, block);
}

// A sink's gradient asks for the terms of all rows at the end.
template <typename S>
void Tiles<S>::leave_query_block(Unit unit, int64_t group_head, int64_t block, UnitStates& states) const {
  store_query_block(unit, group_head, block);
  states.queries.of[block].stored = true;
  if (params_.grad_sinks == nullptr) states.queries.free_place(block);
}

// A key block against those of some query blocks of a head that see it.
template <typename S>
void Tiles<S>::visit_key_block(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, int64_t block,
                               Range query_blocks, UnitStates& states) const {
  const Range queries = grid_.seen_blocks(grid_.key_rows(block), query_blocks);
  if (is_empty(queries)) return;
  for (int64_t i = queries.begin; i < queries.end; ++i) meet_query_block(unit, group_head, i, states);
  meet_key_block(unit, block, states);
  set_keys(scores, unit, block);
  BlockState& key = states.keys.of[block];
  key.meetings -= queries.end - queries.begin;
  key.stored = key.meetings == 0;
  run_key_block(scores, unit, group_head, {queries.begin, queries.end - (key.stored ? 1 : 0)});
  if (key.stored) {
    finish_key_block(scores, unit, group_head, block, queries.end - 1);
    states.keys.free_place(block);
  }
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    if (--states.queries.of[i].meetings == 0) leave_query_block(unit, group_head, i, states);
  }
}

// A key block against the last query block that it meets: its gradients go out a cell of keys at a time,
// while their sums are in the nearest cache.
template <typename S>
void Tiles<S>::finish_key_block(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, int64_t block,
                                int64_t query_block) const {
  const Range keys = grid_.key_rows(block), rows = grid_.query_rows(query_block);
  const int64_t count = keys.end - keys.begin, cell = cell_rows_of<S>(params_);
  const QueryPack<S> queries = memory_.query_pack(group_head, query_block);
  const bool any =
      scores.make_grads(head_of(unit, group_head), rows, queries, {{0, count}, {0, rows.end - rows.begin}});
  const bool fresh = *memory_.key_pack(block).has_sums == 0;
  const auto finish = [&](const ResultView& grad, T* sums, int64_t dim, double scale, auto add) {
    const int64_t stride = padded_dim<S>(dim);
    const HeadGradient<S> result{grad, unit.batch, unit.key_head, dim, scale, streamed_};
    for (int64_t first = 0; grad.data != nullptr && first < count; first += cell) {
      const Range some{first, smaller(first + cell, count)};
      T* to = fresh ? sums : sums + first * stride;
      if (any) {
        add(some, to);
      } else if (fresh) {
        fill_span(to, 0, (some.end - first) * stride, static_cast<T>(0));
      }
      result.write(to, stride, {keys.begin + first, keys.begin + some.end});
    }
  };
  finish(params_.grad_value, memory_.grad_value(block), shape_.value_dim, 1,
         [&](Range some, T* to) { scores.add_to_values(some, to, fresh); });
  finish(params_.grad_key, memory_.grad_key(block), shape_.head_dim, params_.rule.scale,
         [&](Range some, T* to) { scores.add_to_keys(some, to, fresh); });
  if (any) scores.add_to_queries(begins_sums(queries.has_sums));
}

// What has to be known of whole rows before the gradients can begin, and neither lse nor the output tells:
// the maxima and sums of far rows, and delta where the weights or the key mass have gradients.
template <typename S>
void Tiles<S>::make_rows(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, Range query_blocks) const {
  const int64_t head = head_of(unit, group_head);
  bool far = false;
  for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) {
    far |= *memory_.query_pack(group_head, i).terms.has_far_rows != 0;
  }
  for (const Pass pass : {Pass::kRowMax, Pass::kRowSum, Pass::kDelta}) {
    if (pass == Pass::kDelta ? !exact_delta_ : !far) continue;
    for (int64_t block = 0; block < plan_.key_blocks; ++block) {
      if (!memory_.keeps_keys()) pack_keys(unit, block);
      set_keys(scores, unit, block);
      for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) {
        const QueryPack<S> pack = memory_.query_pack(group_head, i);
        if (pass == Pass::kDelta || *pack.terms.has_far_rows != 0) {
          scores.add_to_rows(pass, head, grid_.query_rows(i), pack);
        }
      }
    }
    for (int64_t i = query_blocks.begin; pass == Pass::kRowSum && i < query_blocks.end; ++i) {
      const RowTerms<S> terms = memory_.query_pack(group_head, i).terms;
      if (*terms.has_far_rows == 0) continue;
      finish_far_rows(params_, terms, unit.batch, head, grid_.query_rows(i));
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
