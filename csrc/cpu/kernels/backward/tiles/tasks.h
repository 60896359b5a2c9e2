// Blocks of keys against blocks of queries. Rounds: packing for all (or each task packs for itself), what has
// to be known of whole rows, the chains or the phases (TilesPlan), the gradients of the queries, and the sum
// of the mask gradient's copies.
#pragma once

#include "block.h"
#include "memory.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr int64_t kBackwardKeys = S::Product::kInRegisters ? 216 : 256;  // of a block, at most
constexpr int64_t kBackwardQueries = 256;
constexpr int64_t kSegmentLength = 256;  // at least so many keys and queries

template <typename S>
class Tiles {
 public:
  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan);
  static int64_t tasks(const BackwardPlan& plan, int64_t round);
  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    Tiles<S> call(params, plan, shared, scratch);
    if (round == 0) return call.prepare(task);
    if (round == 1) return call.prepare_rows(task);
    if (round == plan.rounds - 2) return call.finish(task);
    if (round == plan.rounds - 1) return call.mask_copies_.sum(plan.chains, task);
    plan.tiles.in_phases ? call.run_phase(round - 2, task) : call.run_chain(task);
  }

 private:
  using T = typename S::Accum;
  using Element = typename S::Element;

  Tiles(const BackwardParams& params, const BackwardPlan& plan, void* shared, void* scratch)
      : params_(params),
        plan_(plan.tiles),
        chains_(plan.chains),
        exact_delta_(plan.exact_delta),
        shape_(params.shape),
        group_(group_size(params.shape)),
        memory_(params.shape, plan.tiles),
        shared_(shared),
        arena_{static_cast<char*>(scratch), 0},
        cleaned_(take<Element>(arena_, cleaned_size<S>(params.shape, plan.tiles))),
        mask_copies_{static_cast<T*>(params.grad_mask.data),
                     reinterpret_cast<T*>(static_cast<char*>(shared) + packed_bytes(shape_, plan_, memory_)),
                     params.grad_mask_size} {}

  // plan.h
  static void plan_blocks(const AttentionShape& shape, TilesPlan& plan);
  static void plan_segments(const BackwardParams& params, int threads, ChainsPlan& chains, TilesPlan& plan);
  static int64_t packed_bytes(const AttentionShape& shape, const TilesPlan& plan,
                              const UnitMemory<S>& memory) {
    return plan.in_phases ? unit_count(shape) * memory.shared_bytes() : 0;
  }

  Range segment(int64_t blocks, int64_t index) const {
    return {index * blocks / plan_.segments, (index + 1) * blocks / plan_.segments};
  }
  Range block_rows(int64_t len, int64_t size, int64_t block) const {
    return {block * size, smaller((block + 1) * size, len)};
  }
  Range query_rows(int64_t block) const { return block_rows(shape_.query_len, plan_.block_queries, block); }
  Range key_rows(int64_t block) const { return block_rows(shape_.key_len, plan_.block_keys, block); }
  int64_t head_of(Unit unit, int64_t group_head) const { return unit.key_head * group_ + group_head; }

  void pack_queries(Unit unit, int64_t group_head, int64_t block) const {
    pack_query_block<S>(params_, plan_, memory_.query_pack(group_head, block), unit.batch,
                        head_of(unit, group_head), query_rows(block), exact_delta_, cleaned_);
  }
  void pack_keys(Unit unit, int64_t block) const {
    pack_key_block<S>(params_, memory_.key_pack(block), unit.batch, unit.key_head, key_rows(block), cleaned_);
  }
  void prepare(int64_t task);
  // What make_rows makes for one query block of one head.
  void prepare_rows(int64_t task) {
    const int64_t block = task % plan_.query_blocks, head = task / plan_.query_blocks % shape_.query_heads;
    const Unit unit{task / plan_.query_blocks / shape_.query_heads, head / group_};
    const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
    memory_.take_from_shared(shared_, unit);
    KeyQueryBlock<S> scores(params_, plan_, scratch);
    make_rows(scores, unit, head % group_, {block, block + 1});
  }
  void make_rows(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, Range query_blocks) const;
  void run_chain(int64_t chain) {
    const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
    memory_.take_from(arena_);
    KeyQueryBlock<S> scores(params_, plan_, scratch);
    scores.set_grad_mask(mask_copies_.of_chain(chains_, chain));
    const Range members = chain_members(chains_, chain);
    for (int64_t i = members.begin; i < members.end; ++i)
      run_unit(scores, chain_unit(shape_, chains_, chain, i));
  }
  void run_unit(KeyQueryBlock<S>& scores, Unit unit) const;
  void run_phase(int64_t phase, int64_t task);
  void set_keys(KeyQueryBlock<S>& scores, Unit unit, int64_t block) const {
    scores.set_keys(unit.batch, unit.key_head, key_rows(block), memory_.key_pack(block),
                    memory_.grad_key(block), memory_.grad_value(block));
  }
  // A key block against some query blocks of one head of its group.
  void run_key_block(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, int64_t block,
                     Range query_blocks) const {
    set_keys(scores, unit, block);
    for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) {
      scores.add_queries(head_of(unit, group_head), query_rows(i), memory_.query_pack(group_head, i));
    }
  }
  // store.h
  void finish(int64_t task);
  void store_key_block(Unit unit, int64_t block) const;
  void store_query_block(Unit unit, int64_t group_head, int64_t block) const;
  template <typename Out>
  void store_query_block_as(Unit unit, int64_t group_head, int64_t block) const;
  void store_sink_of(Unit unit, int64_t group_head) const;

  const BackwardParams& params_;
  const TilesPlan& plan_;
  const ChainsPlan& chains_;
  const bool exact_delta_;
  const AttentionShape& shape_;
  const int64_t group_;
  UnitMemory<S> memory_;  // of the unit that is worked on
  void* const shared_;
  Arena arena_;
  Element* const cleaned_;
  const MaskCopies<T> mask_copies_;
};

// A unit from packing to the gradients, in a thread's own memory.
template <typename S>
void Tiles<S>::run_unit(KeyQueryBlock<S>& scores, Unit unit) const {
  const bool keeps = memory_.keeps_keys();
  const auto begin_keys = [&](int64_t block) {
    pack_keys(unit, block);
    memory_.clear_key_sums(block);
  };
  for (int64_t block = 0; keeps && block < plan_.key_blocks; ++block) begin_keys(block);
  for (int64_t head = 0; head < group_; ++head) {
    for (int64_t i = 0; i < plan_.query_blocks; ++i) pack_queries(unit, head, i);
    make_rows(scores, unit, head, {0, plan_.query_blocks});
    for (int64_t t = 0; t < plan_.segments * plan_.segments; ++t) {
      const int64_t i = t % plan_.segments, phase = t / plan_.segments;
      const Range keys = segment(plan_.key_blocks, i);
      const Range queries = segment(plan_.query_blocks, (i + phase) % plan_.segments);
      for (int64_t block = keys.begin; block < keys.end; ++block) {
        if (!keeps) begin_keys(block);
        run_key_block(scores, unit, head, block, queries);
        if (!keeps) store_key_block(unit, block);
      }
    }
    for (int64_t i = 0; i < plan_.query_blocks; ++i) store_query_block(unit, head, i);
    store_sink_of(unit, head);
  }
  for (int64_t block = 0; keeps && block < plan_.key_blocks; ++block) store_key_block(unit, block);
}

// Key segment i of a chain's units meets query segment (i + phase) mod segments of one head of the group.
template <typename S>
void Tiles<S>::run_phase(int64_t phase, int64_t task) {
  const int64_t chain = task / plan_.segments, i = task % plan_.segments;
  const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
  KeyQueryBlock<S> scores(params_, plan_, scratch);
  scores.set_grad_mask(mask_copies_.of_chain(chains_, chain));
  const Range members = chain_members(chains_, chain);
  const Range keys = segment(plan_.key_blocks, i);
  const Range queries = segment(plan_.query_blocks, (i + phase) % plan_.segments);
  for (int64_t index = members.begin; index < members.end; ++index) {
    const Unit unit = chain_unit(shape_, chains_, chain, index);
    memory_.take_from_shared(shared_, unit);
    for (int64_t block = keys.begin; block < keys.end; ++block) {
      if (phase == 0) memory_.clear_key_sums(block);
      run_key_block(scores, unit, phase / plan_.segments, block, queries);
      if (phase == group_ * plan_.segments - 1) store_key_block(unit, block);
    }
  }
}

// Tasks: the query blocks of every query head, then the key blocks of every key head; or, where a task packs
// for itself, nothing but the clearing of the mask gradient's copies, which is the last task either way.
template <typename S>
void Tiles<S>::prepare(int64_t task) {
  if (task == plan_.prepare_tasks - 1) return mask_copies_.clear({1, chains_.mask_copies});
  const int64_t query_tasks = shape_.batch * shape_.query_heads * plan_.query_blocks;
  if (task < query_tasks) {
    const int64_t head = task / plan_.query_blocks % shape_.query_heads;
    const Unit unit{task / plan_.query_blocks / shape_.query_heads, head / group_};
    memory_.take_from_shared(shared_, unit);
    pack_queries(unit, head % group_, task % plan_.query_blocks);
  } else {
    const Unit unit = unit_at(shape_, (task - query_tasks) / plan_.key_blocks);
    memory_.take_from_shared(shared_, unit);
    pack_keys(unit, (task - query_tasks) % plan_.key_blocks);
  }
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
          scores.add_to_rows(pass, head, query_rows(i), pack);
        }
      }
    }
    for (int64_t i = query_blocks.begin; pass == Pass::kRowSum && i < query_blocks.end; ++i) {
      const RowTerms<S> terms = memory_.query_pack(group_head, i).terms;
      if (*terms.has_far_rows == 0) continue;
      finish_far_rows(params_, terms, unit.batch, head, query_rows(i));
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
