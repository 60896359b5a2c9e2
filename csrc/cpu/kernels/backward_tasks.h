// The backward's plan and its rounds of tasks, for one scheme of computing.
#pragma once

#include "backward_small.h"
#include "backward_tile.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kBackwardKeys = 216;  // of a block, at most
constexpr int64_t kBackwardQueries = 256;
constexpr int64_t kManyTasks = 128;              // enough for the threads of any machine
constexpr int64_t kSegmentLength = 256;          // at least so many keys and queries
constexpr int64_t kFewTasks = 16;                // enough for most
constexpr int64_t kMaskTasks = 32;               // where each has a copy of a small mask gradient
constexpr int64_t kMaskCopyElements = 1 << 22;   // of all copies of the mask gradient, to get few tasks
constexpr int64_t kSmallMaskElements = 1 << 18;  // the same, to get many

template <typename S>
struct DecodeTasks;

template <typename S>
struct BackwardTasks {
  using T = typename S::Accum;
  using Element = typename S::Element;

  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan);
  static int64_t tasks(const BackwardPlan& plan, int64_t round);
  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch);

  struct Unit {
    int64_t batch, key_head;
  };

 private:
  friend struct DecodeTasks<S>;

  // backward_plan.h
  static void choose_blocks(const AttentionShape& shape, BackwardPlan& plan);
  static void choose_chains(const BackwardParams& params, BackwardPlan& plan);
  static void choose_memory(const BackwardParams& params, BackwardPlan& plan);
  static int64_t group_size(const AttentionShape& shape) {
    return shape.query_heads / larger(1, shape.key_heads);
  }
  static int64_t query_pack_bytes(const AttentionShape& shape, const BackwardPlan& plan);
  static int64_t key_pack_bytes(const AttentionShape& shape, const BackwardPlan& plan);
  static int64_t key_sums_size(const AttentionShape& shape, const BackwardPlan& plan);
  static int64_t packed_bytes(const BackwardParams& params, const BackwardPlan& plan);
  static Unit chain_unit(const BackwardParams& params, const BackwardPlan& plan, int64_t chain,
                         int64_t index);
  static bool wants_split(const BackwardParams& params, const BackwardPlan& plan, int64_t threads);
  static KeyRange chain_members(const BackwardParams& params, const BackwardPlan& plan, int64_t chain);
  static bool batches_share_mask(const BackwardParams& params);

  // Where the packs and sums of a unit lie, in shared memory or in a thread's.
  struct UnitMemory {
    char* queries;  // (query heads of the group, query blocks), or of one head
    char* keys;     // (key blocks), or one
    T* key_sums;    // (key blocks), or one: dK, then dV
    int64_t query_bytes, key_bytes, key_sums_size;
    bool one_head, one_key_block;
  };
  static UnitMemory shared_memory(const BackwardParams& params, const BackwardPlan& plan, Unit unit,
                                  void* shared);
  static UnitMemory thread_memory(const BackwardParams& params, const BackwardPlan& plan, Arena& arena);
  static QueryPack<S> query_pack(const BackwardParams& params, const BackwardPlan& plan,
                                 const UnitMemory& memory, int64_t group_head, int64_t block);
  static KeyPack<S> key_pack(const BackwardParams& params, const BackwardPlan& plan, const UnitMemory& memory,
                             int64_t block);
  static T* key_sums(const UnitMemory& memory, int64_t block) {
    return memory.key_sums + (memory.one_key_block ? 0 : block * memory.key_sums_size);
  }
  static T* mask_copy(const BackwardParams& params, const BackwardPlan& plan, int64_t chain, void* shared);

  static void pack_queries(const BackwardParams& params, const BackwardPlan& plan, const UnitMemory& memory,
                           Unit unit, int64_t group_head, int64_t block);
  static void pack_keys(const BackwardParams& params, const BackwardPlan& plan, const UnitMemory& memory,
                        Unit unit, int64_t block);
  static void prepare(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared);
  static void prepare_rows(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared,
                           void* scratch);
  static void make_rows(const BackwardParams& params, const BackwardPlan& plan, BackwardTile<S>& tile,
                        const UnitMemory& memory, Unit unit, int64_t group_head, KeyRange query_blocks);
  static void finish_far_rows(const BackwardParams& params, const BackwardPlan& plan, int64_t batch,
                              int64_t head, const QueryPack<S>& pack);
  static T sink_of(const BackwardParams& params, int64_t batch, int64_t head);
  static void run_chain(const BackwardParams& params, const BackwardPlan& plan, int64_t chain, void* shared,
                        void* scratch);
  static void run_unit(const BackwardParams& params, const BackwardPlan& plan, BackwardTile<S>& tile,
                       const UnitMemory& memory, Unit unit);
  static void run_small_chain(const BackwardParams& params, const BackwardPlan& plan, int64_t chain,
                              void* shared, void* scratch);
  static void run_phase(const BackwardParams& params, const BackwardPlan& plan, int64_t phase, int64_t task,
                        void* shared, void* scratch);
  static void run_key_block(const BackwardParams& params, const BackwardPlan& plan, BackwardTile<S>& tile,
                            const UnitMemory& memory, Unit unit, int64_t group_head, int64_t block,
                            KeyRange query_blocks);
  static KeyRange segment(const BackwardPlan& plan, int64_t blocks, int64_t index) {
    return {index * blocks / plan.segments, (index + 1) * blocks / plan.segments};
  }
  static void set_keys(const BackwardParams& params, const BackwardPlan& plan, BackwardTile<S>& tile,
                       const UnitMemory& memory, Unit unit, int64_t block);
  static void clear_key_block(const UnitMemory& memory, int64_t block);
  static void store_key_block(const BackwardParams& params, const BackwardPlan& plan,
                              const UnitMemory& memory, Unit unit, int64_t block);
  static void store_query_block(const BackwardParams& params, const BackwardPlan& plan,
                                const UnitMemory& memory, Unit unit, int64_t group_head, int64_t block);
  template <typename Out>
  static void store_query_block_as(const BackwardParams& params, const BackwardPlan& plan,
                                   const UnitMemory& memory, Unit unit, int64_t group_head, int64_t block);
  static void store_sink(const BackwardParams& params, const BackwardPlan& plan, const UnitMemory& memory,
                         Unit unit, int64_t group_head);
  static void finish(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared);
  static void sum_masks(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared);

  static int64_t block_count(int64_t len, int64_t size, int64_t block) {
    return smaller(size, len - block * size);
  }
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY

#include "backward_decode_tasks.h"
#include "backward_finish.h"
#include "backward_plan.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void BackwardTasks<S>::pack_queries(const BackwardParams& params, const BackwardPlan& plan,
                                    const UnitMemory& memory, Unit unit, int64_t group_head, int64_t block) {
  const AttentionShape& shape = params.shape;
  pack_query_block<S>(params, query_pack(params, plan, memory, group_head, block), unit.batch,
                      unit.key_head * group_size(shape) + group_head, block * plan.block_queries,
                      block_count(shape.query_len, plan.block_queries, block), plan.block_queries,
                      plan.exact_delta);
}

template <typename S>
void BackwardTasks<S>::pack_keys(const BackwardParams& params, const BackwardPlan& plan,
                                 const UnitMemory& memory, Unit unit, int64_t block) {
  pack_key_block<S>(params, key_pack(params, plan, memory, block), unit.batch, unit.key_head,
                    block * plan.block_keys, block_count(params.shape.key_len, plan.block_keys, block));
}

template <typename S>
void BackwardTasks<S>::set_keys(const BackwardParams& params, const BackwardPlan& plan, BackwardTile<S>& tile,
                                const UnitMemory& memory, Unit unit, int64_t block) {
  T* sums = key_sums(memory, block);
  tile.set_keys(unit.batch, unit.key_head, block * plan.block_keys,
                block_count(params.shape.key_len, plan.block_keys, block),
                key_pack(params, plan, memory, block), sums,
                sums + plan.block_keys * padded_value_dim<S>(params.shape.head_dim));
}

// A key block against some query blocks of one head of its group.
template <typename S>
void BackwardTasks<S>::run_key_block(const BackwardParams& params, const BackwardPlan& plan,
                                     BackwardTile<S>& tile, const UnitMemory& memory, Unit unit,
                                     int64_t group_head, int64_t block, KeyRange query_blocks) {
  set_keys(params, plan, tile, memory, unit, block);
  for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) {
    tile.add_queries(unit.key_head * group_size(params.shape) + group_head, i * plan.block_queries,
                     block_count(params.shape.query_len, plan.block_queries, i),
                     query_pack(params, plan, memory, group_head, i));
  }
}

template <typename S>
void BackwardTasks<S>::clear_key_block(const UnitMemory& memory, int64_t block) {
  memset(key_sums(memory, block), 0, static_cast<size_t>(memory.key_sums_size) * sizeof(T));
}

// A unit from packing to the gradients, in a thread's own memory.
template <typename S>
void BackwardTasks<S>::run_unit(const BackwardParams& params, const BackwardPlan& plan, BackwardTile<S>& tile,
                                const UnitMemory& memory, Unit unit) {
  const auto begin_keys = [&](int64_t block) {
    pack_keys(params, plan, memory, unit, block);
    clear_key_block(memory, block);
  };
  for (int64_t block = 0; !memory.one_key_block && block < plan.key_blocks; ++block) begin_keys(block);
  for (int64_t head = 0; head < group_size(params.shape); ++head) {
    for (int64_t i = 0; i < plan.query_blocks; ++i) pack_queries(params, plan, memory, unit, head, i);
    make_rows(params, plan, tile, memory, unit, head, {0, plan.query_blocks});
    for (int64_t t = 0; t < plan.segments * plan.segments; ++t) {
      const KeyRange keys = segment(plan, plan.key_blocks, t % plan.segments);
      const KeyRange queries =
          segment(plan, plan.query_blocks, (t % plan.segments + t / plan.segments) % plan.segments);
      for (int64_t block = keys.begin; block < keys.end; ++block) {
        if (memory.one_key_block) begin_keys(block);
        run_key_block(params, plan, tile, memory, unit, head, block, queries);
        if (memory.one_key_block) store_key_block(params, plan, memory, unit, block);
      }
    }
    for (int64_t i = 0; i < plan.query_blocks; ++i) store_query_block(params, plan, memory, unit, head, i);
    store_sink(params, plan, memory, unit, head);
  }
  for (int64_t block = 0; !memory.one_key_block && block < plan.key_blocks; ++block) {
    store_key_block(params, plan, memory, unit, block);
  }
}

// A chain of units with few keys.
template <typename S>
void BackwardTasks<S>::run_small_chain(const BackwardParams& params, const BackwardPlan& plan, int64_t chain,
                                       void* shared, void* scratch) {
  const int64_t group = group_size(params.shape);
  Arena arena{static_cast<char*>(scratch), 0};
  const SmallScratch<S> small = take_small_scratch<S>(arena, params);
  SmallUnit<S> block(params, small, mask_copy(params, plan, chain, shared));
  const KeyRange members = chain_members(params, plan, chain);
  for (int64_t index = members.begin; index < members.end; ++index) {
    const Unit unit = chain_unit(params, plan, chain, index);
    block.begin(unit.batch, unit.key_head);
    for (int64_t head = unit.key_head * group; head < (unit.key_head + 1) * group; ++head) {
      block.add_head(head, sink_of(params, unit.batch, head));
    }
    block.store_keys();
  }
}

template <typename S>
void BackwardTasks<S>::run_chain(const BackwardParams& params, const BackwardPlan& plan, int64_t chain,
                                 void* shared, void* scratch) {
  if (plan.few_keys) return run_small_chain(params, plan, chain, shared, scratch);
  Arena arena{static_cast<char*>(scratch), 0};
  const TileScratch<S> tile_scratch =
      take_tile_scratch<S>(arena, params, plan.block_keys, plan.block_queries);
  const UnitMemory memory = thread_memory(params, plan, arena);
  BackwardTile<S> tile(params, plan, tile_scratch);
  tile.set_grad_mask(mask_copy(params, plan, chain, shared));
  const KeyRange members = chain_members(params, plan, chain);
  for (int64_t index = members.begin; index < members.end; ++index) {
    run_unit(params, plan, tile, memory, chain_unit(params, plan, chain, index));
  }
}

// Key segment i of a chain's units meets query segment (i + phase) mod segments of one head of the group.
template <typename S>
void BackwardTasks<S>::run_phase(const BackwardParams& params, const BackwardPlan& plan, int64_t phase,
                                 int64_t task, void* shared, void* scratch) {
  const int64_t chain = task / plan.segments, i = task % plan.segments;
  const int64_t last = group_size(params.shape) * plan.segments - 1;
  Arena arena{static_cast<char*>(scratch), 0};
  const TileScratch<S> tile_scratch =
      take_tile_scratch<S>(arena, params, plan.block_keys, plan.block_queries);
  BackwardTile<S> tile(params, plan, tile_scratch);
  tile.set_grad_mask(mask_copy(params, plan, chain, shared));
  const KeyRange members = chain_members(params, plan, chain);
  const KeyRange keys = segment(plan, plan.key_blocks, i);
  const KeyRange queries = segment(plan, plan.query_blocks, (i + phase) % plan.segments);
  for (int64_t index = members.begin; index < members.end; ++index) {
    const Unit unit = chain_unit(params, plan, chain, index);
    const UnitMemory memory = shared_memory(params, plan, unit, shared);
    for (int64_t block = keys.begin; block < keys.end; ++block) {
      if (phase == 0) clear_key_block(memory, block);
      run_key_block(params, plan, tile, memory, unit, phase / plan.segments, block, queries);
      if (phase == last) store_key_block(params, plan, memory, unit, block);
    }
  }
}

// Tasks: the query blocks of every query head, then the key blocks of every key head; or, where a task packs
// for itself, nothing but the clearing of the mask gradient's copies, which is the last task either way.
template <typename S>
void BackwardTasks<S>::prepare(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                               void* shared) {
  const AttentionShape& shape = params.shape;
  if (task == plan.prepare_tasks - 1) {
    T* copies = reinterpret_cast<T*>(static_cast<char*>(shared) + packed_bytes(params, plan));
    memset(copies, 0, static_cast<size_t>((plan.mask_copies - 1) * params.grad_mask_size) * sizeof(T));
    return;
  }
  const int64_t group = group_size(shape);
  const int64_t query_tasks = shape.batch * shape.query_heads * plan.query_blocks;
  if (task < query_tasks) {
    const int64_t head = task / plan.query_blocks % shape.query_heads;
    const Unit unit{task / plan.query_blocks / shape.query_heads, head / group};
    pack_queries(params, plan, shared_memory(params, plan, unit, shared), unit, head % group,
                 task % plan.query_blocks);
  } else {
    const int64_t index = (task - query_tasks) / plan.key_blocks;
    const Unit unit{index / shape.key_heads, index % shape.key_heads};
    pack_keys(params, plan, shared_memory(params, plan, unit, shared), unit,
              (task - query_tasks) % plan.key_blocks);
  }
}

// What make_rows makes for one query block of one head.
template <typename S>
void BackwardTasks<S>::prepare_rows(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                                    void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t group = group_size(shape);
  const int64_t query_block = task % plan.query_blocks, head = task / plan.query_blocks % shape.query_heads;
  const Unit unit{task / plan.query_blocks / shape.query_heads, head / group};
  Arena arena{static_cast<char*>(scratch), 0};
  const TileScratch<S> tile_scratch =
      take_tile_scratch<S>(arena, params, plan.block_keys, plan.block_queries);
  const UnitMemory memory = shared_memory(params, plan, unit, shared);
  BackwardTile<S> tile(params, plan, tile_scratch);
  make_rows(params, plan, tile, memory, unit, head % group, {query_block, query_block + 1});
}

// What has to be known of whole rows before the gradients can begin, and neither lse nor the output tells:
// the maxima and sums of far rows, and delta where the weights or the key mass have gradients.
template <typename S>
void BackwardTasks<S>::make_rows(const BackwardParams& params, const BackwardPlan& plan,
                                 BackwardTile<S>& tile, const UnitMemory& memory, Unit unit,
                                 int64_t group_head, KeyRange query_blocks) {
  const AttentionShape& shape = params.shape;
  const int64_t head = unit.key_head * group_size(shape) + group_head;
  const auto pack_of = [&](int64_t i) { return query_pack(params, plan, memory, group_head, i); };
  bool far = false;
  for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) far |= *pack_of(i).has_far_rows != 0;
  constexpr TilePass kPasses[] = {TilePass::kRowMax, TilePass::kRowSum, TilePass::kDelta};
  for (const TilePass pass : kPasses) {
    if (pass == TilePass::kDelta ? !plan.exact_delta : !far) continue;
    for (int64_t block = 0; block < plan.key_blocks; ++block) {
      if (memory.one_key_block) pack_keys(params, plan, memory, unit, block);
      set_keys(params, plan, tile, memory, unit, block);
      for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) {
        const QueryPack<S> pack = pack_of(i);
        if (pass != TilePass::kDelta && *pack.has_far_rows == 0) continue;
        tile.add_to_rows(pass, head, i * plan.block_queries,
                         block_count(shape.query_len, plan.block_queries, i), pack);
      }
    }
    for (int64_t i = query_blocks.begin; pass == TilePass::kRowSum && i < query_blocks.end; ++i) {
      finish_far_rows(params, plan, unit.batch, head, pack_of(i));
    }
  }
}

// A sink takes part in the sum, but is never far from what sets the maximum: where it could, the row is not
// far.
template <typename S>
void BackwardTasks<S>::finish_far_rows(const BackwardParams& params, const BackwardPlan& plan, int64_t batch,
                                       int64_t head, const QueryPack<S>& pack) {
  if (*pack.has_far_rows == 0) return;
  const T sink = sink_of(params, batch, head) * static_cast<T>(kLog2E);
  for (int64_t r = 0; r < plan.block_queries; ++r) {
    if (!is_far(pack.lse[r]) || pack.row_max[r] == -kInfinity<T>) continue;
    const T share = sink == -kInfinity<T> ? 0 : exp2<T>(broadcast(sink - pack.row_max[r]))[0];
    pack.lse[r] = pack.row_max[r];
    pack.row_scale[r] = 1 / (pack.row_sum[r] + share);
  }
}

template <typename S>
void BackwardTasks<S>::run(const BackwardParams& params, const BackwardPlan& plan, int64_t round,
                           int64_t task, void* shared, void* scratch) {
  if (plan.few_rows) return DecodeTasks<S>::run(params, plan, round, task, shared, scratch);
  if (round == 0 && plan.few_keys) {
    memset(mask_copy(params, plan, task + 1, shared), 0,
           static_cast<size_t>(params.grad_mask_size) * sizeof(T));
  } else if (round == 0) {
    prepare(params, plan, task, shared);
  } else if (round == 1) {
    prepare_rows(params, plan, task, shared, scratch);
  } else if (round == plan.rounds - 2) {
    finish(params, plan, task, shared);
  } else if (round == plan.rounds - 1) {
    sum_masks(params, plan, task, shared);
  } else if (!plan.split) {
    run_chain(params, plan, task, shared, scratch);
  } else {
    run_phase(params, plan, round - 2, task, shared, scratch);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
