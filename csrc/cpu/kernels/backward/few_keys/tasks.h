// Heads with few keys: a task takes a chain, whole heads. Rounds: clearing the copies of the mask gradient
// but the caller's, the chains, and the sum of the copies.
#pragma once

#include "../chains.h"
#include "unit.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
struct FewKeys {
  using T = typename S::Accum;

  static void plan(const BackwardParams& params, int, BackwardPlan& plan) {
    plan_families(params.shape, params.grad_mask.data != nullptr ? &params.grad_mask : nullptr, plan.chains);
    plan_mask_copies(params, 1, plan.chains);
    plan.rounds = 3;
    plan.shared_bytes = MaskCopies<T>::bytes(plan.chains, params.grad_mask_size);
    Arena arena{nullptr, 0};
    take_few_keys_scratch<S>(arena, params);
    plan.thread_bytes = arena.used;
  }

  static int64_t tasks(const BackwardPlan& plan, int64_t round) {
    const int64_t counts[] = {plan.chains.mask_copies - 1, plan.chains.count,
                              MaskCopies<T>::sum_tasks(plan.chains)};
    return counts[round];
  }

  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    const MaskCopies<T> copies{static_cast<T*>(params.grad_mask.data), static_cast<T*>(shared),
                               params.grad_mask_size};
    if (round == 0) return copies.clear({task + 1, task + 2});
    if (round == 2) return copies.sum(plan.chains, task);
    run_chain(params, plan.chains, task, copies.of_chain(plan.chains, task), scratch);
  }

 private:
  static void run_chain(const BackwardParams& params, const ChainsPlan& chains, int64_t chain, T* grad_mask,
                        void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    const int64_t group = group_size(params.shape);
    Arena arena{static_cast<char*>(scratch), 0};
    const FewKeysScratch<S> s = take_few_keys_scratch<S>(arena, params);
    FewKeysUnit<S> work(params, s, grad_mask);
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
