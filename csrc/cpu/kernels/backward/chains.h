// Who adds to which copy of the mask's gradient (ChainsPlan), for every path.
#pragma once

#include "../interface/backward.h"
#include "../scores/visible_keys.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewTasks = 16;       // enough for most
constexpr int64_t kMaskTasks = 32;      // where each has a copy of a small mask gradient
constexpr int64_t kManyTasks = 128;     // enough for the threads of any machine
constexpr int64_t kTaskWork = 1 << 18;  // multiply-adds of a product beside which a task costs nothing
constexpr int64_t kThreadTasks = 16;    // a thread's at least, where there are several
constexpr int64_t kMaskCopyElements = 1 << 22;   // of all copies of the mask gradient, to get few tasks
constexpr int64_t kSmallMaskElements = 1 << 18;  // the same, to get many

struct Unit {
  int64_t batch, key_head;
};

ATTN_EXT_INLINE int64_t unit_count(const AttentionShape& shape) {
  return shape.batch * shape.key_heads;
}

ATTN_EXT_INLINE Unit unit_at(const AttentionShape& shape, int64_t index) {
  return {index / shape.key_heads, index % shape.key_heads};
}

ATTN_EXT_INLINE int64_t unit_index(const AttentionShape& shape, Unit unit) {
  return unit.batch * shape.key_heads + unit.key_head;
}

// The families of a mask gradient that units add to as they go (null: each unit is its own), one chain each.
ATTN_EXT_INLINE void plan_families(const AttentionShape& shape, const TensorView* grad_mask,
                                   ChainsPlan& plan) {
  plan.heads_share_mask = grad_mask != nullptr && grad_mask->head_stride == 0 && shape.key_heads > 1;
  plan.batches_share_mask = grad_mask != nullptr && shape.batch > 1 &&
                            (grad_mask->batch_offsets != nullptr || grad_mask->batch_stride == 0);
  const int64_t families =
      (plan.heads_share_mask ? 1 : shape.key_heads) * (plan.batches_share_mask ? 1 : shape.batch);
  plan.mask_copies = 1;
  plan.count = families;
  plan.family_units = families == 0 ? 0 : unit_count(shape) / families;
}

// As many copies of the mask gradient as make for enough tasks: they cost a clearing and a summing, so as
// many as there are tasks only of a small mask, else just a few. `segments`: that a chain is cut into anyway.
ATTN_EXT_INLINE void plan_mask_copies(const BackwardParams& params, int64_t segments, ChainsPlan& plan) {
  if (params.grad_mask.data == nullptr || plan.count == 0) return;
  const int64_t families = plan.count, size = larger(1, params.grad_mask_size);
  const int64_t few = smaller(ceil_div(kFewTasks, families * segments), kMaskCopyElements / size);
  const int64_t many = smaller(ceil_div(kMaskTasks, families), kSmallMaskElements / size);
  plan.mask_copies = larger(1, smaller(larger(few, many), plan.family_units));
  plan.count = families * plan.mask_copies;
}

// Short chains that a task takes, whole.
ATTN_EXT_INLINE int64_t chains_of_task(const AttentionShape& shape, const ChainsPlan& chains, int threads) {
  const int64_t units = larger(1, chains.family_units / chains.mask_copies);
  const int64_t work =
      units * group_size(shape) * shape.query_len * shape.key_len * (shape.head_dim + shape.value_dim);
  const int64_t most = threads > 1 ? chains.count / (kThreadTasks * threads) : chains.count;
  return larger(1, smaller(kTaskWork / larger(1, work), most));
}

// Whether the last thread ends a tenth earlier or more if a chain is `turns` tasks rather than one.
ATTN_EXT_INLINE bool turns_save_time(const ChainsPlan& plan, int64_t turns, int threads) {
  return ceil_div(plan.count * turns, threads) * 10 < ceil_div(plan.count, threads) * turns * 9;
}

// Of the units of its family, those that a chain takes.
ATTN_EXT_INLINE Range chain_members(const ChainsPlan& plan, int64_t chain) {
  const int64_t copy = chain % plan.mask_copies;
  return {copy * plan.family_units / plan.mask_copies, (copy + 1) * plan.family_units / plan.mask_copies};
}

ATTN_EXT_INLINE Unit chain_unit(const AttentionShape& shape, const ChainsPlan& plan, int64_t chain,
                                int64_t member) {
  const int64_t heads = shape.key_heads, family = chain / plan.mask_copies;
  const int64_t inner = plan.heads_share_mask ? heads : 1;  // heads that a chain goes through
  const int64_t outer = plan.heads_share_mask ? 1 : heads;  // heads with a family of their own
  return {plan.batches_share_mask ? member / inner : family / outer,
          plan.heads_share_mask ? member % inner : family % outer};
}

// The copies of the mask gradient beside the caller's own.
template <typename T>
struct MaskCopies {
  T* first;      // the caller's; of another type where it is not wide, and then the only one
  T* others;     // one behind the other
  int64_t size;  // of each

  T* of_chain(const ChainsPlan& plan, int64_t chain) const { return copy(chain % plan.mask_copies); }
  T* copy(int64_t index) const { return index == 0 ? first : others + (index - 1) * size; }
  void clear(Range copies) const {
    for (int64_t i = copies.begin; i < copies.end; ++i) {
      memset(copy(i), 0, static_cast<size_t>(size) * sizeof(T));
    }
  }
  // Adds the others to the first, in their order: a task's part.
  void sum(const ChainsPlan& plan, int64_t task) const {
    const int64_t begin = task * size / kManyTasks, end = (task + 1) * size / kManyTasks;
    for (int64_t i = 1; i < plan.mask_copies; ++i) {
      const T* from = copy(i);
      for (int64_t j = begin; j < end; ++j) first[j] += from[j];
    }
  }
  static int64_t bytes(const ChainsPlan& plan, int64_t size) {
    return (plan.mask_copies - 1) * size * static_cast<int64_t>(sizeof(T));
  }
  static int64_t sum_tasks(const ChainsPlan& plan) { return plan.mask_copies > 1 ? kManyTasks : 0; }
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
