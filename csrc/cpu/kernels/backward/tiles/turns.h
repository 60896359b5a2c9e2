// Tiles, where chains are too few for the threads: one round of tasks that take turns (interface/ways.h).
// Tasks of each chain, in this order: the order of its meetings (order.h), the packing of every query block
// and of every key block, what has to be known of whole rows, the meetings, which are parts of key blocks
// against parts of query blocks, and the storing of what they add up to.
//
// Each part of a key block has a lane, and each part of a head's query block: what was done last to its sums.
// The first to add there finds nothing worth reading. A task makes P and dS when its packs are there, and
// adds them to a gradient when those before it have; where several add to the same numbers of a mask's
// gradient, it waits for these before P and dS, as dS goes there at once.
#pragma once

#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
typename Tiles<S>::OrderScratch Tiles<S>::take_order_scratch(Arena& arena, const TilesPlan& plan,
                                                             const BlockGrid<S>& grid,
                                                             const Meetings<S>& meetings) {
  return {take_list_scratch(arena, plan, grid), take<LaneAhead>(arena, meetings.lanes()),
          take<int64_t>(arena, plan.order_threads)};
}

// Handed on as it is made.
template <typename S>
void Tiles<S>::order_in_turn(int64_t chain, const Turns& turns) {
  constexpr int64_t kAtATime = 8;
  const OrderScratch scratch = take_order_scratch(arena_, plan_, grid_, meetings_);
  const Order order = order_of(chain);
  const int64_t count = plan_.meeting_tasks;
  list_meetings(plan_, grid_, meetings_, scratch.list, order.list);
  MeetingOrder ahead(order.list, count, scratch.lanes, meetings_.lanes(), meetings_.key_lanes(),
                     scratch.thread_ends, plan_.order_threads);
  for (int64_t i = 0; i < count; ++i) {
    order.of[i] = static_cast<int32_t>(ahead.next());
    if ((i + 1) % kAtATime == 0 || i + 1 == count) turns.set(order_lane(chain), i + 1);
  }
}

// A chain after the other: what it has at work at a time is as little as its threads need.
template <typename S>
void Tiles<S>::run_in_turn(int64_t task, const Turns& turns) {
  const int64_t chain = task / turns_of_chain(plan_);
  const Range members = chain_members(chains_, chain);
  const int64_t units = members.end - members.begin, heads = units * group_;
  const int64_t query_blocks = heads * plan_.query_blocks, key_blocks = units * plan_.key_blocks;
  const auto unit_of = [&](int64_t index) {
    return chain_unit(shape_, chains_, chain, members.begin + index);
  };
  task %= turns_of_chain(plan_);
  if (task < plan_.order_tasks) return order_in_turn(chain, turns);
  task -= plan_.order_tasks;
  if (task < plan_.pack_tasks) {
    if (task < query_blocks) {
      const int64_t head = task / plan_.query_blocks;
      return pack_queries_in_turn(unit_of(head / group_), head % group_, task % plan_.query_blocks, turns);
    }
    task -= query_blocks;
    if (task < key_blocks) {
      pack_keys_in_turn(unit_of(task / plan_.key_blocks), task % plan_.key_blocks, turns);
    }
    return;
  }
  task -= plan_.pack_tasks;
  if (task < plan_.row_tasks) {
    if (task < query_blocks) {
      const int64_t head = task / plan_.query_blocks;
      make_rows_in_turn(unit_of(head / group_), head % group_, task % plan_.query_blocks, turns);
    }
    return;
  }
  task -= plan_.row_tasks;
  if (task < plan_.meeting_tasks) {
    if (plan_.order_tasks == 0) return meet_in_turn(chain, meetings_.at(task), turns);
    turns.wait(order_lane(chain), task + 1);
    const Order order = order_of(chain);
    return meet_in_turn(chain, order.list[order.of[task]].meeting, turns);
  }
  task -= plan_.meeting_tasks;
  // Those that are done first come first: query blocks from the first on, key blocks from the last.
  if (task < query_blocks) {
    const int64_t head = task % heads;
    return store_queries_in_turn(unit_of(head / group_), head % group_, task / heads, turns);
  }
  task -= query_blocks;
  if (task < key_blocks) {
    store_keys_in_turn(unit_of(task % units), plan_.key_blocks - 1 - task / units, turns);
  }
}

template <typename S>
void Tiles<S>::pack_queries_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  pack_queries(unit, group_head, block);
  *memory_.query_pack(group_head, block).has_sums = 1;
  for (int64_t i = 0; i < plan_.query_parts; ++i) {
    turns.set(query_lane(unit, group_head, {block, i}), plan_.row_tasks > 0 ? kPacked : kReady);
  }
}

template <typename S>
void Tiles<S>::pack_keys_in_turn(Unit unit, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  pack_keys(unit, block);
  *memory_.key_pack(block).has_sums = 1;
  for (int64_t i = 0; i < plan_.key_parts; ++i) turns.set(key_lane(unit, {block, i}), kReady);
}

// make_rows() for one query block of one head.
template <typename S>
void Tiles<S>::make_rows_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns) {
  const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
  memory_.take_from_shared(shared_, unit);
  KeyQueryBlock<S> scores(params_, plan_, scratch);
  turns.wait(query_lane(unit, group_head, {block, plan_.query_parts - 1}), kPacked);  // set last
  for (int64_t i = 0; i < plan_.key_blocks; ++i) turns.wait(key_lane(unit, {i, 0}), kReady);
  make_rows(scores, unit, group_head, {block, block + 1});
  for (int64_t i = 0; i < plan_.query_parts; ++i) turns.set(query_lane(unit, group_head, {block, i}), kReady);
}

template <typename S>
void Tiles<S>::meet_in_turn(int64_t chain, const Meeting& meeting, const Turns& turns) {
  const BlockPlace key = meeting.key, query = meeting.query;
  if (key.block < 0) return;
  const BlockPart part{grid_.part_of_keys(key), grid_.part_of_queries(query)};
  const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
  KeyQueryBlock<S> scores(params_, plan_, scratch);
  const Range members = chain_members(chains_, chain);
  const auto lanes_of = [&](Unit unit) {
    return Range{key_lane(unit, key), query_lane(unit, meeting.group_head, query)};
  };
  for (int64_t index = members.begin; shares_mask(params_) && index < members.end; ++index) {
    const Unit unit = chain_unit(shape_, chains_, chain, index);
    const auto [keys_at, queries_at] = lanes_of(unit);
    turns.wait(keys_at, meeting.key_before);
    turns.wait(queries_at, meeting.query_before);
    if (heads_share_rows(params_) && meeting.group_head > 0 && meeting.query_before == kReady) {
      turns.wait(query_lane(unit, meeting.group_head - 1, query), meetings_.last_query_number(query));
    }
  }
  for (int64_t index = members.begin; index < members.end; ++index) {
    const Unit unit = chain_unit(shape_, chains_, chain, index);
    const auto [keys_at, queries_at] = lanes_of(unit);
    memory_.take_from_shared(shared_, unit);
    turns.wait(keys_at, kReady);
    turns.wait(queries_at, kReady);
    set_keys(scores, unit, key.block);
    scores.set_mask_grad(mask_grad(chain, index == members.begin));
    const bool any = scores.make_grads(head_of(unit, meeting.group_head), grid_.query_rows(query.block),
                                       memory_.query_pack(meeting.group_head, query.block), part);
    turns.wait(keys_at, meeting.key_before);
    if (any) {
      scores.add_to_block_keys(meeting.key_before == kReady);
    } else if (meeting.key_before == kReady) {
      memory_.clear_key_sums(key.block, part.keys);
    }
    turns.set(keys_at, meeting.key_after);
    turns.wait(queries_at, meeting.query_before);
    if (any) {
      scores.add_to_queries(meeting.query_before == kReady);
    } else if (meeting.query_before == kReady) {
      memory_.clear_query_sums(meeting.group_head, query.block, part.queries);
    }
    turns.set(queries_at, meeting.query_after);
  }
  if (streams_mask_) finish_streams();
}

template <typename S>
void Tiles<S>::store_queries_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  for (int64_t i = 0; i < plan_.query_parts; ++i) {
    const int64_t number = meetings_.last_query_number({block, i});
    turns.wait(query_lane(unit, group_head, {block, i}), number);
    if (number == kReady) memory_.clear_query_sums(group_head, block, grid_.part_of_queries({block, i}));
  }
  store_query_block(unit, group_head, block);
  if (block > 0 || params_.grad_sinks == nullptr) return;
  for (int64_t i = 0; i < plan_.query_blocks; ++i) turns.wait(query_lane(unit, group_head, {i, 0}), kReady);
  store_sink_of(unit, group_head);
}

template <typename S>
void Tiles<S>::store_keys_in_turn(Unit unit, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  for (int64_t i = 0; i < plan_.key_parts; ++i) {
    const int64_t number = meetings_.last_key_number({block, i});
    turns.wait(key_lane(unit, {block, i}), number);
    if (number == kReady) memory_.clear_key_sums(block, grid_.part_of_keys({block, i}));
  }
  store_key_block(unit, block);
  if (streamed_) finish_streams();
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
