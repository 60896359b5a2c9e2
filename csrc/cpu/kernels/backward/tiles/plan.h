// Tiles: how a call is cut, and the memory that needs.
#pragma once

#include "../plan.h"
#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void Tiles<S>::plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  TilesPlan& tiles = plan.tiles;
  plan.exact_delta = needs_exact_delta(params);
  plan_blocks(shape, tiles);
  plan_families(shape, params.grad_mask.data != nullptr ? &params.grad_mask : nullptr, plan.chains);
  plan_segments(params, threads, plan.chains, tiles);
  plan.rounds = 4 + (tiles.in_phases ? group_size(shape) * tiles.segments : 1);
  const int64_t query_tasks = tiles.in_phases ? shape.batch * shape.query_heads * tiles.query_blocks : 0;
  const int64_t key_tasks = tiles.in_phases ? unit_count(shape) * tiles.key_blocks : 0;
  tiles.prepare_tasks = query_tasks + key_tasks + 1;
  tiles.row_tasks = plan.exact_delta || any_far<T>(params) ? query_tasks : 0;
  tiles.run_tasks = plan.chains.count * (tiles.in_phases ? tiles.segments : 1);
  tiles.finish_tasks = query_tasks;

  UnitMemory<S> memory(shape, tiles);
  plan.shared_bytes =
      packed_bytes(shape, tiles, memory) + MaskCopies<T>::bytes(plan.chains, params.grad_mask_size);
  Arena arena{nullptr, 0};
  take<Element>(arena, cleaned_size<S>(shape, tiles));
  take_key_query_scratch<S>(arena, params, tiles.block_keys, tiles.block_queries);
  if (!tiles.in_phases) memory.take_from(arena);
  plan.thread_bytes = arena.used;
}

template <typename S>
int64_t Tiles<S>::tasks(const BackwardPlan& plan, int64_t round) {
  if (round == 0) return plan.tiles.prepare_tasks;
  if (round == 1) return plan.tiles.row_tasks;
  if (round == plan.rounds - 2) return plan.tiles.finish_tasks;
  return round == plan.rounds - 1 ? MaskCopies<T>::sum_tasks(plan.chains) : plan.tiles.run_tasks;
}

// Blocks of nearly equal size, in whole cells and panels.
template <typename S>
void Tiles<S>::plan_blocks(const AttentionShape& shape, TilesPlan& plan) {
  const int64_t most_queries = round_down(smaller(kBackwardQueries, kMaxBackwardQueries), S::kPanel);
  plan.key_blocks = ceil_div(shape.key_len, kBackwardKeys<S>);
  plan.query_blocks = ceil_div(shape.query_len, most_queries);
  plan.block_keys = round_up(ceil_div(shape.key_len, larger(1, plan.key_blocks)), kCellRows<S>);
  plan.block_queries = round_up(ceil_div(shape.query_len, larger(1, plan.query_blocks)),
                                plan.query_blocks > 1 ? S::kPanel : S::kSpan);
  plan.key_blocks = shape.key_len > 0 ? ceil_div(shape.key_len, plan.block_keys) : 0;
  plan.query_blocks = shape.query_len > 0 ? ceil_div(shape.query_len, plan.block_queries) : 0;
}

template <typename S>
void Tiles<S>::plan_segments(const BackwardParams& params, int threads, ChainsPlan& chains, TilesPlan& plan) {
  const AttentionShape& shape = params.shape;
  const TensorView& grad_mask = params.grad_mask;
  plan.segments = 1;
  if (unit_count(shape) == 0) return;
  const int64_t most = larger(1, smaller(shape.key_len / kSegmentLength, shape.query_len / kSegmentLength));
  plan_mask_copies(params, most, chains);
  // All blocks add to the one number of a mask that broadcasts over rows and keys.
  const bool one_number =
      grad_mask.data != nullptr && grad_mask.row_stride == 0 && grad_mask.column_stride == 0;
  if (!one_number) {
    plan.segments = smaller(ceil_div(kManyTasks, chains.count), most);
    plan.segments = larger(1, smaller(plan.segments, smaller(plan.key_blocks, plan.query_blocks)));
  }
  if (plan.segments == 1) return;
  // Whole chains are the better tasks, their packs stay in the caches, but not if threads run out of them.
  // With several query heads a group, a mask's gradient has another order then: all units of one head before
  // the next.
  const int64_t turns = ceil_div(chains.count, threads);
  plan.in_phases =
      (grad_mask.data != nullptr && group_size(shape) > 1) || chains.count * 10 < turns * threads * 9;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
