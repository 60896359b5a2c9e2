// Heads with few keys: a task takes a chain, or several short ones, whole heads. Rounds: clearing the copies
// of the mask gradient but the caller's, the chains, and the sum of the copies.
#pragma once

#include "../chains.h"
#include "small_head.h"
#include "unit.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewKeysTaskWork = 1 << 18;  // multiply-adds of a product beside which a task costs nothing
constexpr int64_t kFewKeysThreadTasks = 16;    // a thread's at least, where there are several

template <typename S>
struct FewKeys {
  using T = typename S::Accum;

  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
    plan_families(params.shape, params.grad_mask.data != nullptr ? &params.grad_mask : nullptr, plan.chains);
    plan_mask_copies(params, 1, plan.chains);
    plan.task_chains = chains_of_task(params.shape, plan.chains, threads);
    plan.rounds = 3;
    plan.shared_bytes = MaskCopies<T>::bytes(plan.chains, params.grad_mask_size);
    Arena arena{nullptr, 0};
    take_few_keys_scratch<S>(arena, params);
    SmallHeads<S>(params, arena);
    plan.thread_bytes = arena.used;
  }

  static int64_t tasks(const BackwardPlan& plan, int64_t round) {
    const int64_t counts[] = {plan.chains.mask_copies - 1, ceil_div(plan.chains.count, plan.task_chains),
                              MaskCopies<T>::sum_tasks(plan.chains)};
    return counts[round];
  }

  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    const MaskCopies<T> copies{static_cast<T*>(params.grad_mask.data), static_cast<T*>(shared),
                               params.grad_mask_size};
    if (round == 0) return copies.clear({task + 1, task + 2});
    if (round == 2) return copies.sum(plan.chains, task);
    run_chains(params, plan, task, copies, scratch);
  }

 private:
  static int64_t chains_of_task(const AttentionShape& shape, const ChainsPlan& chains, int threads) {
    const int64_t units = larger(1, chains.family_units / chains.mask_copies);
    const int64_t work =
        units * group_size(shape) * shape.query_len * shape.key_len * (shape.head_dim + shape.value_dim);
    const int64_t most = threads > 1 ? chains.count / (kFewKeysThreadTasks * threads) : chains.count;
    return larger(1, smaller(kFewKeysTaskWork / larger(1, work), most));
  }

  static void run_chains(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                         const MaskCopies<T>& copies, void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    Arena arena{static_cast<char*>(scratch), 0};
    const FewKeysScratch<S> s = take_few_keys_scratch<S>(arena, params);
    const SmallHeads<S> small(params, arena);
    const int64_t first = task * plan.task_chains, end = smaller(plan.chains.count, first + plan.task_chains);
    for (int64_t chain = first; chain < end; ++chain) {
      if (small.run(chain_unit(params.shape, plan.chains, chain, 0))) continue;
      const MaskGrad<S> mask_grad(params.grad_mask, copies.of_chain(plan.chains, chain));
      run_chain(params, plan.chains, chain, FewKeysUnit<S>(params, s, mask_grad));
    }
  }

  static void run_chain(const BackwardParams& params, const ChainsPlan& chains, int64_t chain,
                        FewKeysUnit<S>&& work) {
    const int64_t group = group_size(params.shape);
    const Range members = chain_members(chains, chain);
    for (int64_t i = members.begin; i < members.end; ++i) {
      const Unit unit = chain_unit(params.shape, chains, chain, i);
      work.begin(unit);
      for (int64_t head = unit.key_head * group; head < (unit.key_head + 1) * group; ++head)
        work.add_head(head);
      work.store_keys();
    }
  }
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
