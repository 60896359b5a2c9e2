// BackwardTasks: how a call is cut, and the memory that needs. Included by backward_tasks.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void BackwardTasks<S>::plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
  plan = {};
  const AttentionShape& shape = params.shape;
  // dS sums to 0 along a row only with the very delta that its tiles give: a bias that is the same for all
  // keys has nothing but such sums as its gradient.
  const bool sums_rows =
      params.grad_mask.data != nullptr && params.grad_mask.column_stride == 0 && shape.key_len > 1;
  plan.exact_delta = params.grad_weights.data != nullptr || params.grad_key_mass.data != nullptr || sums_rows;
  if (DecodeTasks<S>::suits(shape)) return DecodeTasks<S>::plan(params, plan);
  choose_blocks(shape, plan);
  choose_chains(params, plan);
  plan.split = plan.segments > 1 && wants_split(params, plan, threads);
  plan.rounds = 4 + (plan.split ? group_size(shape) * plan.segments : 1);
  const int64_t query_tasks = plan.split ? shape.batch * shape.query_heads * plan.query_blocks : 0;
  const int64_t key_tasks = plan.split ? shape.batch * shape.key_heads * plan.key_blocks : 0;
  plan.prepare_tasks = query_tasks + key_tasks + 1;
  plan.row_tasks = plan.exact_delta || is_biased(params.rule) ? query_tasks : 0;
  plan.run_tasks = plan.chains * (plan.split ? plan.segments : 1);
  plan.finish_tasks = query_tasks;
  plan.sum_tasks = plan.mask_copies > 1 ? smaller(kManyTasks, params.grad_mask_size) : 0;
  choose_memory(params, plan);
  plan.few_keys = shape.key_len > 0 && shape.key_len <= kSmallKeys;
  if (plan.few_keys) {
    Arena arena{nullptr, 0};
    take_small_scratch<S>(arena, params);
    plan.thread_bytes = arena.used;
    plan.prepare_tasks = plan.mask_copies - 1;  // each clears one
  }
}

template <typename S>
int64_t BackwardTasks<S>::tasks(const BackwardPlan& plan, int64_t round) {
  if (plan.few_rows) return DecodeTasks<S>::tasks(plan, round);
  if (round == 0) return plan.prepare_tasks;
  if (round == 1) return plan.row_tasks;
  if (round == plan.rounds - 2) return plan.finish_tasks;
  if (round == plan.rounds - 1) return plan.sum_tasks;
  return plan.run_tasks;
}

// Blocks of nearly equal size, in whole cells and panels.
template <typename S>
void BackwardTasks<S>::choose_blocks(const AttentionShape& shape, BackwardPlan& plan) {
  const int64_t most_queries = round_down(smaller(kBackwardQueries, kMaxTileQueries), S::kPanel);
  plan.key_blocks = pieces(shape.key_len, kBackwardKeys);
  plan.query_blocks = pieces(shape.query_len, most_queries);
  plan.block_keys = round_up(pieces(shape.key_len, larger(1, plan.key_blocks)), kCellRows);
  plan.block_queries = round_up(pieces(shape.query_len, larger(1, plan.query_blocks)),
                                plan.query_blocks > 1 ? S::kPanel : S::kLane);
  plan.key_blocks = shape.key_len > 0 ? pieces(shape.key_len, plan.block_keys) : 0;
  plan.query_blocks = shape.query_len > 0 ? pieces(shape.query_len, plan.block_queries) : 0;
}

template <typename S>
bool BackwardTasks<S>::batches_share_mask(const BackwardParams& params) {
  const TensorView& view = params.grad_mask;
  return view.data != nullptr && params.shape.batch > 1 &&
         (view.batch_offsets != nullptr || view.batch_stride == 0);
}

template <typename S>
void BackwardTasks<S>::choose_chains(const BackwardParams& params, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const TensorView& view = params.grad_mask;
  plan.heads_share_mask = view.data != nullptr && view.head_stride == 0 && shape.key_heads > 1;
  const int64_t units = shape.batch * shape.key_heads;
  const int64_t groups =
      (plan.heads_share_mask ? 1 : shape.key_heads) * (batches_share_mask(params) ? 1 : shape.batch);
  plan.mask_copies = 1;
  plan.segments = 1;
  if (units == 0) return;
  const int64_t longest =
      larger(1, smaller(shape.key_len / kSegmentLength, shape.query_len / kSegmentLength));
  if (view.data != nullptr) {
    // Copies cost a clearing and a summing: as many as there are tasks only of a small mask, else just a few.
    const int64_t size = larger(1, params.grad_mask_size);
    const int64_t few = smaller(pieces(kFewTasks, groups * longest), kMaskCopyElements / size);
    const int64_t many = smaller(pieces(kMaskTasks, groups), kSmallMaskElements / size);
    plan.mask_copies = larger(1, smaller(larger(few, many), units / groups));
  }
  plan.chains = groups * plan.mask_copies;
  plan.units_per_chain = units / groups;
  if (view.data != nullptr && view.row_stride == 0 && view.column_stride == 0) return;
  plan.segments = smaller(pieces(kManyTasks, plan.chains), longest);
  plan.segments = larger(1, smaller(plan.segments, smaller(plan.key_blocks, plan.query_blocks)));
}

// Whole chains are the better tasks, their packs stay in the caches, but not if threads run out of them.
template <typename S>
bool BackwardTasks<S>::wants_split(const BackwardParams& params, const BackwardPlan& plan, int64_t threads) {
  // Then a mask's gradient has another order: all units of one query head before the next.
  if (params.grad_mask.data != nullptr && group_size(params.shape) > 1) return true;
  const int64_t turns = pieces(plan.chains, threads);
  return plan.chains * 10 < turns * threads * 9;
}

template <typename S>
typename BackwardTasks<S>::Unit BackwardTasks<S>::chain_unit(const BackwardParams& params,
                                                             const BackwardPlan& plan, int64_t chain,
                                                             int64_t index) {
  const int64_t heads = params.shape.key_heads;
  const int64_t group = chain / plan.mask_copies;
  const bool by_batch = batches_share_mask(params);
  if (plan.heads_share_mask) return by_batch ? Unit{index / heads, index % heads} : Unit{group, index};
  return by_batch ? Unit{index, group} : Unit{group / heads, group % heads};
}

// Of the units of its group, those that a chain takes.
template <typename S>
KeyRange BackwardTasks<S>::chain_members(const BackwardParams&, const BackwardPlan& plan, int64_t chain) {
  const int64_t copy = chain % plan.mask_copies;
  return {copy * plan.units_per_chain / plan.mask_copies,
          (copy + 1) * plan.units_per_chain / plan.mask_copies};
}

template <typename S>
int64_t BackwardTasks<S>::query_pack_bytes(const AttentionShape& shape, const BackwardPlan& plan) {
  Arena arena{nullptr, 0};
  take_query_pack<S>(arena, shape, plan.block_queries);
  return arena.used;
}

template <typename S>
int64_t BackwardTasks<S>::key_pack_bytes(const AttentionShape& shape, const BackwardPlan& plan) {
  Arena arena{nullptr, 0};
  take_key_pack<S>(arena, shape, plan.block_keys);
  return arena.used;
}

template <typename S>
int64_t BackwardTasks<S>::key_sums_size(const AttentionShape& shape, const BackwardPlan& plan) {
  return plan.block_keys * (padded_value_dim<S>(shape.head_dim) + padded_value_dim<S>(shape.value_dim));
}

template <typename S>
int64_t BackwardTasks<S>::packed_bytes(const BackwardParams& params, const BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  if (!plan.split) return 0;
  const int64_t key_bytes = key_pack_bytes(shape, plan) +
                            round_up(key_sums_size(shape, plan) * static_cast<int64_t>(sizeof(T)), 64);
  return shape.batch * (shape.query_heads * plan.query_blocks * query_pack_bytes(shape, plan) +
                        shape.key_heads * plan.key_blocks * key_bytes);
}

template <typename S>
void BackwardTasks<S>::choose_memory(const BackwardParams& params, BackwardPlan& plan) {
  plan.shared_bytes = packed_bytes(params, plan) +
                      (plan.mask_copies - 1) * params.grad_mask_size * static_cast<int64_t>(sizeof(T));
  Arena arena{nullptr, 0};
  take_tile_scratch<S>(arena, params, plan.block_keys, plan.block_queries);
  if (!plan.split) thread_memory(params, plan, arena);
  plan.thread_bytes = arena.used;
}

template <typename S>
typename BackwardTasks<S>::UnitMemory BackwardTasks<S>::shared_memory(const BackwardParams& params,
                                                                      const BackwardPlan& plan, Unit unit,
                                                                      void* shared) {
  const AttentionShape& shape = params.shape;
  UnitMemory memory{};
  memory.query_bytes = query_pack_bytes(shape, plan);
  memory.key_bytes = key_pack_bytes(shape, plan);
  memory.key_sums_size = round_up(key_sums_size(shape, plan), 64 / static_cast<int64_t>(sizeof(T)));
  const int64_t unit_bytes =
      group_size(shape) * plan.query_blocks * memory.query_bytes +
      plan.key_blocks * (memory.key_bytes + memory.key_sums_size * static_cast<int64_t>(sizeof(T)));
  memory.queries = static_cast<char*>(shared) + (unit.batch * shape.key_heads + unit.key_head) * unit_bytes;
  memory.keys = memory.queries + group_size(shape) * plan.query_blocks * memory.query_bytes;
  memory.key_sums = reinterpret_cast<T*>(memory.keys + plan.key_blocks * memory.key_bytes);
  return memory;
}

template <typename S>
typename BackwardTasks<S>::UnitMemory BackwardTasks<S>::thread_memory(const BackwardParams& params,
                                                                      const BackwardPlan& plan,
                                                                      Arena& arena) {
  const AttentionShape& shape = params.shape;
  UnitMemory memory{};
  memory.query_bytes = query_pack_bytes(shape, plan);
  memory.key_bytes = key_pack_bytes(shape, plan);
  memory.key_sums_size = key_sums_size(shape, plan);
  memory.one_head = true;
  memory.one_key_block = plan.segments == 1 && group_size(shape) == 1;
  const int64_t key_blocks = memory.one_key_block ? 1 : plan.key_blocks;
  memory.queries = take<char>(arena, plan.query_blocks * memory.query_bytes);
  memory.keys = take<char>(arena, key_blocks * memory.key_bytes);
  memory.key_sums = take<T>(arena, key_blocks * memory.key_sums_size);
  return memory;
}

template <typename S>
QueryPack<S> BackwardTasks<S>::query_pack(const BackwardParams& params, const BackwardPlan& plan,
                                          const UnitMemory& memory, int64_t group_head, int64_t block) {
  const int64_t index = (memory.one_head ? 0 : group_head * plan.query_blocks) + block;
  Arena arena{memory.queries + index * memory.query_bytes, 0};
  return take_query_pack<S>(arena, params.shape, plan.block_queries);
}

template <typename S>
KeyPack<S> BackwardTasks<S>::key_pack(const BackwardParams& params, const BackwardPlan& plan,
                                      const UnitMemory& memory, int64_t block) {
  Arena arena{memory.keys + (memory.one_key_block ? 0 : block * memory.key_bytes), 0};
  return take_key_pack<S>(arena, params.shape, plan.block_keys);
}

// The chain's own copy of the mask gradient; the first is the caller's, the others lie behind the packs.
template <typename S>
typename S::Accum* BackwardTasks<S>::mask_copy(const BackwardParams& params, const BackwardPlan& plan,
                                               int64_t chain, void* shared) {
  const int64_t copy = chain % plan.mask_copies;
  if (copy == 0) return static_cast<T*>(params.grad_mask.data);
  return reinterpret_cast<T*>(static_cast<char*>(shared) + packed_bytes(params, plan)) +
         (copy - 1) * params.grad_mask_size;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
