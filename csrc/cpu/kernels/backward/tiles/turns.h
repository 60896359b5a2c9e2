// Tiles, where chains are too few for the threads: one round of tasks that take turns (interface/ways.h).
// Tasks of each chain, in this order: the packing of every query block and of every key block, what has to be
// known of whole rows, parts of key blocks against parts of query blocks, and the storing of what they add up
// to.
//
// Each part of a key block has a lane, and each part of a head's query block: what was done last to its sums.
// A task makes P and dS when its packs are there, and adds them to a gradient when those before it have. In
// phase t of a head key segment i meets query segment (i + t) mod segments, in it the blocks and parts of
// keys and queries meet in ascending order: the order of the sums in run_unit().
#pragma once

#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// What a lane says: packed, known of whole rows where that is wanted, then 1 + the turn of the last task.
constexpr int64_t kPacked = 1;
constexpr int64_t kReady = 2;

// What meets what: the places of a phase are (key blocks of a segment x parts) x (query blocks x parts).
template <typename S>
struct Tiles<S>::Meeting {
  int64_t chain, group_head, phase;  // of the head
  int64_t key_segment, key_place;
  int64_t query_segment, query_place;
};

// Segments may differ by a block.
template <typename S>
BlockPlace Tiles<S>::place_in(Range blocks, int64_t parts, int64_t place) {
  const int64_t block = blocks.begin + place / parts;
  return {block < blocks.end ? block : -1, place % parts};
}

template <typename S>
Range Tiles<S>::part_of_keys(int64_t block, int64_t part) const {
  const Range rows = key_rows(block);
  return part_in_steps(rows.end - rows.begin, cell_rows_of<S>(params_), plan_.key_parts, part);
}
template <typename S>
Range Tiles<S>::part_of_queries(int64_t block, int64_t part) const {
  const Range rows = query_rows(block);
  return part_in_steps(rows.end - rows.begin, S::kPanel, plan_.query_parts, part);
}

// Whether any key of the one sees any query of the other, as far as the window goes.
template <typename S>
bool Tiles<S>::meet(BlockPlace key, BlockPlace query) const {
  if (key.block < 0 || query.block < 0) return false;
  const int64_t key_first = key_rows(key.block).begin, query_first = query_rows(query.block).begin;
  const Range keys = part_of_keys(key.block, key.part), queries = part_of_queries(query.block, query.part);
  if (is_empty(keys) || is_empty(queries)) return false;
  const Range first = window_queries(params_.rule, shape_.query_len, key_first + keys.begin);
  const Range last = window_queries(params_.rule, shape_.query_len, key_first + keys.end - 1);
  return !is_empty(
      intersect({first.begin, last.end}, {query_first + queries.begin, query_first + queries.end}));
}

// The number of a key's lane before turn `turn` of it: (head, phase, query place) in their order.
template <typename S>
int64_t Tiles<S>::key_lane_before(int64_t segment, int64_t place, int64_t turn) const {
  const BlockPlace key = place_in(key_segment(segment), plan_.key_parts, place);
  while (--turn >= 0) {
    const int64_t other = (segment + turn / query_places(plan_)) % plan_.segments;
    if (meet(key, place_in(query_segment(other), plan_.query_parts, turn % query_places(plan_)))) break;
  }
  return kReady + 1 + turn;
}
// The same of a query's lane: (phase, key place).
template <typename S>
int64_t Tiles<S>::query_lane_before(int64_t segment, int64_t place, int64_t turn) const {
  const BlockPlace query = place_in(query_segment(segment), plan_.query_parts, place);
  while (--turn >= 0) {
    const int64_t other = (segment - turn / key_places(plan_) + plan_.segments) % plan_.segments;
    if (meet(place_in(key_segment(other), plan_.key_parts, turn % key_places(plan_)), query)) break;
  }
  return kReady + 1 + turn;
}

// Lanes: of a unit the key parts, then the query parts of each head of the group.
template <typename S>
int64_t Tiles<S>::key_lane(Unit unit, int64_t block, int64_t part) const {
  return unit_index(shape_, unit) * unit_lanes(shape_, plan_) + block * plan_.key_parts + part;
}
template <typename S>
int64_t Tiles<S>::query_lane(Unit unit, int64_t group_head, int64_t block, int64_t part) const {
  return key_lane(unit, plan_.key_blocks, 0) + (group_head * plan_.query_blocks + block) * plan_.query_parts +
         part;
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
  if (task < plan_.part_tasks) return meet_in_turn(meeting_at(chain, task), turns);
  task -= plan_.part_tasks;
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
  memory_.clear_query_sums(group_head, block);
  for (int64_t i = 0; i < plan_.query_parts; ++i) {
    turns.set(query_lane(unit, group_head, block, i), plan_.row_tasks > 0 ? kPacked : kReady);
  }
}

template <typename S>
void Tiles<S>::pack_keys_in_turn(Unit unit, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  pack_keys(unit, block);
  memory_.clear_key_sums(block);
  for (int64_t i = 0; i < plan_.key_parts; ++i) turns.set(key_lane(unit, block, i), kReady);
}

// make_rows() for one query block of one head.
template <typename S>
void Tiles<S>::make_rows_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns) {
  const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
  memory_.take_from_shared(shared_, unit);
  KeyQueryBlock<S> scores(params_, plan_, scratch);
  turns.wait(query_lane(unit, group_head, block, 0), kPacked);
  for (int64_t i = 0; i < plan_.key_blocks; ++i) turns.wait(key_lane(unit, i, 0), kReady);
  make_rows(scores, unit, group_head, {block, block + 1});
  for (int64_t i = 0; i < plan_.query_parts; ++i) turns.set(query_lane(unit, group_head, block, i), kReady);
}

// In each phase those that wait for nothing in it come first: diagonal after diagonal of the places.
template <typename S>
typename Tiles<S>::Meeting Tiles<S>::meeting_at(int64_t chain, int64_t task) const {
  const int64_t of_phase = plan_.segments * key_places(plan_) * query_places(plan_);
  int64_t place = task % of_phase / plan_.segments;
  int64_t diagonal = 0, first = 0;  // key place of the diagonal's first
  for (;; ++diagonal) {
    first = larger(0, diagonal - query_places(plan_) + 1);
    const int64_t count = smaller(diagonal, key_places(plan_) - 1) - first + 1;
    if (place < count) break;
    place -= count;
  }
  Meeting at{};
  at.group_head = task / of_phase / plan_.segments;
  at.phase = task / of_phase % plan_.segments;
  at.chain = chain;
  at.key_segment = task % plan_.segments;
  at.query_segment = (at.key_segment + at.phase) % plan_.segments;
  at.key_place = first + place;
  at.query_place = diagonal - at.key_place;
  return at;
}

template <typename S>
void Tiles<S>::meet_in_turn(const Meeting& at, const Turns& turns) {
  const BlockPlace key = place_in(key_segment(at.key_segment), plan_.key_parts, at.key_place);
  const BlockPlace query = place_in(query_segment(at.query_segment), plan_.query_parts, at.query_place);
  if (!meet(key, query)) return;
  const int64_t key_turn = (at.group_head * plan_.segments + at.phase) * query_places(plan_) + at.query_place;
  const int64_t query_turn = at.phase * key_places(plan_) + at.key_place;
  const int64_t key_number = key_lane_before(at.key_segment, at.key_place, key_turn);
  const int64_t query_number = query_lane_before(at.query_segment, at.query_place, query_turn);
  const BlockPart part{part_of_keys(key.block, key.part), part_of_queries(query.block, query.part)};
  const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
  KeyQueryBlock<S> scores(params_, plan_, scratch);
  scores.set_mask_grad({params_.grad_mask, mask_copies_.of_chain(chains_, at.chain)});
  const Range members = chain_members(chains_, at.chain);
  const auto lanes_of = [&](Unit unit) {
    return Range{key_lane(unit, key.block, key.part),
                 query_lane(unit, at.group_head, query.block, query.part)};
  };
  for (int64_t index = members.begin; shares_mask(params_) && index < members.end; ++index) {
    const auto [keys_at, queries_at] = lanes_of(chain_unit(shape_, chains_, at.chain, index));
    turns.wait(keys_at, key_number);
    turns.wait(queries_at, query_number);
  }
  for (int64_t index = members.begin; index < members.end; ++index) {
    const Unit unit = chain_unit(shape_, chains_, at.chain, index);
    const auto [keys_at, queries_at] = lanes_of(unit);
    memory_.take_from_shared(shared_, unit);
    turns.wait(keys_at, kReady);
    turns.wait(queries_at, kReady);
    set_keys(scores, unit, key.block);
    const bool any = scores.make_grads(head_of(unit, at.group_head), query_rows(query.block),
                                       memory_.query_pack(at.group_head, query.block), part);
    turns.wait(keys_at, key_number);
    if (any) scores.add_to_block_keys();
    turns.set(keys_at, kReady + 1 + key_turn);
    turns.wait(queries_at, query_number);
    if (any) scores.add_to_queries();
    turns.set(queries_at, kReady + 1 + query_turn);
  }
  if (streams_mask_) finish_streams();
}

template <typename S>
void Tiles<S>::store_queries_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  const int64_t segment = segment_of(plan_.query_blocks, block);
  const int64_t first = (block - query_segment(segment).begin) * plan_.query_parts;
  for (int64_t i = 0; i < plan_.query_parts; ++i) {
    turns.wait(query_lane(unit, group_head, block, i),
               query_lane_before(segment, first + i, plan_.segments * key_places(plan_)));
  }
  store_query_block(unit, group_head, block);
  if (block > 0 || params_.grad_sinks == nullptr) return;
  for (int64_t i = 0; i < plan_.query_blocks; ++i) turns.wait(query_lane(unit, group_head, i, 0), kReady);
  store_sink_of(unit, group_head);
}

template <typename S>
void Tiles<S>::store_keys_in_turn(Unit unit, int64_t block, const Turns& turns) {
  memory_.take_from_shared(shared_, unit);
  const int64_t segment = segment_of(plan_.key_blocks, block);
  const int64_t first = (block - key_segment(segment).begin) * plan_.key_parts;
  for (int64_t i = 0; i < plan_.key_parts; ++i) {
    turns.wait(key_lane(unit, block, i),
               key_lane_before(segment, first + i, group_ * plan_.segments * query_places(plan_)));
  }
  store_key_block(unit, block);
  if (streamed_) finish_streams();
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
