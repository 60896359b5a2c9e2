// Tiles: how a call is cut, and the memory that needs.
#pragma once

#include "../plan.h"
#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void Tiles<S>::plan(const BackwardParams& params, const BackwardParams& given, int threads,
                    BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  TilesPlan& tiles = plan.tiles;
  plan.exact_delta = needs_exact_delta(params);
  plan.streamed = streams_key_gradients<S>(shape);
  plan.fills_mask_grad = tiles_fill_mask_grad(params);
  plan_blocks(params, tiles);
  tiles.blocks_apart = are_blocks_apart(params, given, plan);
  plan_families(shape, params.grad_mask.data != nullptr ? &params.grad_mask : nullptr, plan.chains);
  plan_segments(params, plan.chains, tiles);
  plan.rounds = 3;
  plan_parts(params, threads, plan);
  plan_chain_tasks(shape, threads, plan);
  tiles.in_turn = !tiles.blocks_apart && takes_turns(params, threads, plan);

  const BlockGrid<S> grid(params, tiles);
  const Meetings<S> meetings(shape, tiles, grid);
  UnitMemory<S> memory(shape, tiles);
  if (tiles.in_turn) {
    plan_chain_threads(memory.head_bytes(), plan);
    plan_order(meetings, threads, plan);
    plan_turns(params, given, meetings, plan);
  }
  plan.shared_bytes = mask_copies_offset(shape, plan, memory) + partial_bytes(shape, plan) +
                      MaskCopies<T>::bytes(plan.chains, params.grad_mask_size);
  Arena arena{nullptr, 0};
  take<Element>(arena, cleaned_size<S>(shape, tiles));
  Arena order = arena;
  if (tiles.order_tasks > 0) take_order_scratch(order, tiles, grid, meetings);
  take_key_query_scratch<S>(arena, params, tiles.block_keys, tiles.block_queries);
  if (!tiles.in_turn) memory.take_from(arena);
  if (tiles.blocks_apart) take<T>(arena, query_sums_size(shape, tiles));
  take_block_states(arena, tiles.query_blocks);
  take_block_states(arena, tiles.key_blocks);
  plan.thread_bytes = larger(arena.used, order.used);
}

template <typename S>
int64_t Tiles<S>::tasks(const BackwardPlan& plan, int64_t round) {
  if (round == 0) return plan.chains.mask_copies > 1 && !plan.fills_mask_grad ? 1 : 0;
  const TilesPlan& tiles = plan.tiles;
  if (round == 2) return tiles.chain_tasks > 1 ? tiles.sum_tasks : MaskCopies<T>::sum_tasks(plan.chains);
  return plan.chains.count * (tiles.in_turn ? turns_of_chain(tiles) : tiles.chain_tasks);
}

template <typename S>
TurnsPlan Tiles<S>::turns(const BackwardPlan& plan, int64_t round) {
  if (round != 1 || !plan.tiles.in_turn) return {};
  return {plan.tiles.lanes, plan.chains.count, plan.tiles.chain_threads};
}

// Blocks of nearly equal size, in whole cells and panels; in whole lines of a bias where its gradient might
// be written past the caches, were it large and wanted.
template <typename S>
void Tiles<S>::plan_blocks(const BackwardParams& params, TilesPlan& plan) {
  const AttentionShape& shape = params.shape;
  static_assert(kMostLineKeys<S> <= kMaxBackwardKeys && kMostLineKeys<S> % kLineKeys<S> == 0);
  static_assert(kLineKeys<S> % kCellRows<S> == 0 && kLineKeys<S> % kMaskCellRows<S> == 0);
  constexpr int64_t kLine = kLineBytes / static_cast<int64_t>(sizeof(Element));
  const bool in_lines = S::kPaired && is_biased(params.rule) && shape.key_len % kLine == 0;
  const int64_t key_step = in_lines ? kLineKeys<S> : kCellRows<S>;
  const int64_t most_keys = in_lines ? kMostLineKeys<S> : kBackwardKeys<S>;
  const int64_t most_queries = round_down(smaller(kBackwardQueries, kMaxBackwardQueries), S::kPanel);
  plan.key_blocks = ceil_div(shape.key_len, most_keys);
  plan.query_blocks = ceil_div(shape.query_len, most_queries);
  plan.block_keys = round_up(ceil_div(shape.key_len, larger(1, plan.key_blocks)), key_step);
  plan.block_queries = round_up(ceil_div(shape.query_len, larger(1, plan.query_blocks)),
                                plan.query_blocks > 1 ? S::kPanel : S::kSpan);
  plan.key_blocks = shape.key_len > 0 ? ceil_div(shape.key_len, plan.block_keys) : 0;
  plan.query_blocks = shape.query_len > 0 ? ceil_div(shape.query_len, plan.block_queries) : 0;
}

// Where a head's rows are one block, all blocks of keys would add to its dQ in turn, a fifth of their work,
// and no more threads than some ten would have any. Rows whose terms want all keys first are left to turns.
template <typename S>
bool Tiles<S>::are_blocks_apart(const BackwardParams& params, const BackwardParams& given,
                                const BackwardPlan& plan) {
  return group_size(params.shape) == 1 && plan.tiles.query_blocks == 1 &&
         plan.tiles.key_blocks >= kManyBlocks && params.grad_mask.data == nullptr && !plan.exact_delta &&
         !any_far<T>(given);
}

template <typename S>
void Tiles<S>::plan_segments(const BackwardParams& params, ChainsPlan& chains, TilesPlan& plan) {
  const AttentionShape& shape = params.shape;
  plan.segments = 1;
  if (unit_count(shape) == 0) return;
  const int64_t most = larger(1, smaller(shape.key_len / kSegmentLength, shape.query_len / kSegmentLength));
  plan_mask_copies(params, most, chains);
  if (shares_one_number(params)) return;
  plan.segments = smaller(ceil_div(kManyTasks, chains.count), most);
  plan.segments = larger(1, smaller(plan.segments, smaller(plan.key_blocks, plan.query_blocks)));
}

// Tasks that share a chain pack its queries each.
template <typename S>
void Tiles<S>::plan_chain_tasks(const AttentionShape& shape, int threads, BackwardPlan& plan) {
  constexpr int64_t kTasksOfThread = 2;
  TilesPlan& tiles = plan.tiles;
  tiles.chain_tasks = 1;
  if (!tiles.blocks_apart || !turns_save_time(plan.chains, tiles.key_blocks, threads)) return;
  const int64_t wanted = larger(2, ceil_div(kTasksOfThread * threads, plan.chains.count));
  tiles.chain_tasks = smaller(tiles.key_blocks, wanted);
  tiles.sum_tasks = plan.chains.count * sum_tasks(shape);
}

// Whole chains are the better tasks, their packs stay in the caches, but not if threads run out of them.
template <typename S>
bool Tiles<S>::takes_turns(const BackwardParams& params, int threads, const BackwardPlan& plan) {
  const ChainsPlan& chains = plan.chains;
  const TilesPlan& tiles = plan.tiles;
  // A mask's gradient whose numbers several parts or heads of a unit add to has another order in turns, a
  // part of all units of the chain before the next part: there the segments decide, not the threads.
  if (shares_mask(params) && (group_size(params.shape) > 1 || chains.family_units > chains.mask_copies)) {
    return tiles.segments > 1;
  }
  if (shares_one_number(params)) return false;
  const BlockGrid<S> grid(params, tiles);
  return turns_save_time(chains, Meetings<S>(params.shape, tiles, grid).places(), threads);
}

// More parts let more threads add at a time, but a product of fewer rows takes longer for each, above all in
// a matrix unit. No bit depends on them, except where units of a chain add to the same numbers of a mask's
// gradient.
template <typename S>
void Tiles<S>::plan_parts(const BackwardParams& params, int threads, BackwardPlan& plan) {
  TilesPlan& tiles = plan.tiles;
  const int64_t lanes = unit_count(params.shape) * tiles.key_blocks;
  tiles.key_parts = tiles.query_parts = 1;
  if (threads == 1) return;
  if (shares_mask(params) && plan.chains.family_units > plan.chains.mask_copies) return;
  if constexpr (S::Product::kInRegisters) {
    const BlockGrid<S> grid(params, tiles);
    const int64_t meetings = unit_count(params.shape) * Meetings<S>(params.shape, tiles, grid).count();
    const auto fewer_than = [&](int64_t of_a_thread) { return meetings < of_a_thread * threads; };
    const bool few_lanes = threads > 2 * lanes;
    if (threads > 2 && (few_lanes || fewer_than(6))) {
      tiles.key_parts = 3;  // a full block has nine cells, or six
    } else if (fewer_than(8) || (threads > 2 && 2 * threads > lanes)) {
      tiles.key_parts = 2;
    }
    tiles.query_parts = fewer_than(1) ? 4 : few_lanes || fewer_than(3) ? 2 : 1;
  } else {
    if (threads > 2 * lanes) tiles.key_parts = 2;
  }
}

// The fewer threads share a chain, the less they wait for each other; but all chains at work should fit into
// the last cache, with what is packed and summed of one query head at a time. In a phase each segment meets
// another one, a diagonal of their places at a time; twice as many places as threads are enough.
template <typename S>
void Tiles<S>::plan_chain_threads(int64_t head_bytes, BackwardPlan& plan) {
  constexpr int64_t kThreadBytes = int64_t{1} << 21;  // a thread's share of that cache
  TilesPlan& tiles = plan.tiles;
  const int64_t places = ceil_div(smaller(tiles.key_blocks, tiles.query_blocks), tiles.segments);
  const int64_t wanted = ceil_div(units_of_chain(plan.chains) * head_bytes, kThreadBytes);
  tiles.chain_threads = larger(1, smaller(wanted, tiles.segments * places / 2));
}

template <typename S>
void Tiles<S>::plan_turns(const BackwardParams& params, const BackwardParams& given,
                          const Meetings<S>& meetings, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  TilesPlan& tiles = plan.tiles;
  const int64_t units = units_of_chain(plan.chains);
  const int64_t query_blocks = units * group_size(shape) * tiles.query_blocks;
  const int64_t key_blocks = units * tiles.key_blocks;
  tiles.pack_tasks = query_blocks + key_blocks;
  tiles.row_tasks = plan.exact_delta || any_far<T>(given) ? query_blocks : 0;
  tiles.meeting_tasks = tiles.order_tasks > 0 ? meetings.count() : meetings.places();
  tiles.store_tasks = query_blocks + key_blocks;
  tiles.lanes = unit_count(shape) * meetings.lanes() + tiles.order_tasks * plan.chains.count;
}

// For as many threads as there will be at a chain. One has to wait for nobody.
template <typename S>
void Tiles<S>::plan_order(const Meetings<S>& meetings, int threads, BackwardPlan& plan) {
  TilesPlan& tiles = plan.tiles;
  const int64_t at_chain = larger(tiles.chain_threads, ceil_div(threads, plan.chains.count));
  tiles.order_threads = smaller(at_chain, smaller(threads, kMostOrderThreads));
  tiles.order_tasks = tiles.order_threads > 1 && meetings.places() <= kMostOrdered ? 1 : 0;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
