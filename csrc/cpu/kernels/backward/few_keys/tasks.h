// Heads with few keys. Rounds: clearing the copies of the mask gradient but the caller's, the chains or their
// blocks of rows in turn (FewKeysPlan), and the sum of the copies.
#pragma once

#include "../chains.h"
#include "small_head.h"
#include "unit.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewKeysSharedBytes = 1 << 26;  // of all units' packs and sums, where threads take turns
template <typename S>
constexpr int64_t kFewKeysPart = round_up(16, S::kTileRows);  // keys of a part, about

template <typename S>
struct FewKeys {
  using T = typename S::Accum;

  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
    const AttentionShape& shape = params.shape;
    plan_families(shape, params.grad_mask.data != nullptr ? &params.grad_mask : nullptr, plan.chains);
    plan_mask_copies(params, 1, plan.chains);
    plan.rounds = 3;
    Arena arena{nullptr, 0};
    const int64_t block_rows = take_few_keys_scratch<S>(arena, params).block_rows;
    FewKeysPlan& few_keys = plan.few_keys;
    few_keys.task_chains = chains_of_task(shape, plan.chains, threads);
    few_keys.row_blocks = ceil_div(shape.query_len, larger(1, block_rows));
    few_keys.in_turn = takes_turns(params, threads, plan);
    if (few_keys.in_turn) {
      few_keys.pack_tasks = unit_count(shape);
      few_keys.key_parts = key_parts(shape, threads, plan.chains);
      few_keys.turn_tasks = plan.chains.count * turns_of_unit(shape, few_keys);
    } else {
      take_few_keys_memory<S>(arena, shape);
      SmallHeads<S>(params, arena);
    }
    plan.shared_bytes =
        units_bytes(shape, few_keys) + MaskCopies<T>::bytes(plan.chains, params.grad_mask_size);
    plan.thread_bytes = arena.used;
  }

  static int64_t tasks(const BackwardPlan& plan, int64_t round) {
    const FewKeysPlan& few_keys = plan.few_keys;
    if (round == 0) return plan.chains.mask_copies - 1;
    if (round == 2) return MaskCopies<T>::sum_tasks(plan.chains);
    return few_keys.in_turn ? few_keys.pack_tasks + few_keys.turn_tasks
                            : ceil_div(plan.chains.count, few_keys.task_chains);
  }

  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    const MaskCopies<T> copies = copies_of(params, plan, shared);
    if (round == 0) return copies.clear({task + 1, task + 2});
    if (round == 2) return copies.sum(plan.chains, task);
    run_chains(params, plan, task, copies, scratch);
    finish_streams();
  }

  // In one chain for all units: nothing but their keys is met twice.
  static TurnsPlan turns(const BackwardPlan& plan, int64_t round) {
    const FewKeysPlan& few_keys = plan.few_keys;
    if (round != 1 || !few_keys.in_turn) return {};
    return {few_keys.pack_tasks * kSides * few_keys.key_parts, 1, kManyTasks};
  }

  // First the keys of every unit are packed, then all chains take the first block of rows, then the second.
  static void run_in_turn(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared,
                          void* scratch, const Turns& turns) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    Arena arena{static_cast<char*>(scratch), 0};
    const FewKeysScratch<S> s = take_few_keys_scratch<S>(arena, params);
    if (task < plan.few_keys.pack_tasks) {
      const Unit unit = unit_at(params.shape, task);
      FewKeysUnit<S>(params, s, {}).begin_for_all(unit, memory_of(params.shape, shared, unit));
      for (int64_t i = 0; i < kSides * plan.few_keys.key_parts; ++i) {
        turns.set(first_lane(params.shape, plan.few_keys, unit) + i, kPacked);
      }
      return;
    }
    task -= plan.few_keys.pack_tasks;
    const int64_t chain = task % plan.chains.count;
    const MaskGrad<S> mask_grad(params.grad_mask,
                                copies_of(params, plan, shared).of_chain(plan.chains, chain));
    FewKeysUnit<S> work(params, s, mask_grad);
    const Range members = chain_members(plan.chains, chain);
    for (int64_t i = members.begin; i < members.end; ++i) {
      const Unit unit = chain_unit(params.shape, plan.chains, chain, i);
      take_turn(params.shape, plan.few_keys, task / plan.chains.count, unit, shared, work, turns);
    }
  }

 private:
  // A unit has a lane for each part of dV, then for each of dK: kPacked, and how many of its blocks of rows
  // have been added.
  static constexpr int64_t kSides = 2;
  static constexpr int64_t kPacked = 1;

  static int64_t turns_of_unit(const AttentionShape& shape, const FewKeysPlan& plan) {
    return group_size(shape) * plan.row_blocks;
  }
  // Not where several rows, or heads of a group, add to the same numbers of the mask's gradient, nor where
  // the few chains of a shared mask have so many units that their packs would fill the memory.
  static bool takes_turns(const BackwardParams& params, int threads, const BackwardPlan& plan) {
    const AttentionShape& shape = params.shape;
    const TensorView& mask = params.grad_mask;
    const bool rows_share = mask.row_stride == 0 && shape.query_len > 1;
    const bool heads_share = mask.head_stride == 0 && group_size(shape) > 1;
    return !(mask.data != nullptr && (rows_share || heads_share)) &&
           turns_save_time(plan.chains, turns_of_unit(shape, plan.few_keys), threads) &&
           unit_count(shape) * unit_bytes(shape) <= kFewKeysSharedBytes;
  }
  // dV and dK are two of five products: where one thread at a time adds to the whole of each, no more than
  // five threads find work in a unit.
  static int64_t key_parts(const AttentionShape& shape, int threads, const ChainsPlan& chains) {
    const int64_t most = ceil_div(shape.key_len, kFewKeysPart<S>);
    return larger(1, smaller(ceil_div(threads, 4 * chains.count), most));
  }
  static int64_t unit_bytes(const AttentionShape& shape) {
    Arena arena{nullptr, 0};
    take_few_keys_memory<S>(arena, shape);
    return arena.used;
  }
  static int64_t units_bytes(const AttentionShape& shape, const FewKeysPlan& plan) {
    return plan.in_turn ? unit_count(shape) * unit_bytes(shape) : 0;
  }
  static FewKeysMemory<S> memory_of(const AttentionShape& shape, void* shared, Unit unit) {
    Arena arena{static_cast<char*>(shared) + unit_index(shape, unit) * unit_bytes(shape), 0};
    return take_few_keys_memory<S>(arena, shape);
  }
  static MaskCopies<T> copies_of(const BackwardParams& params, const BackwardPlan& plan, void* shared) {
    char* const others = static_cast<char*>(shared) + units_bytes(params.shape, plan.few_keys);
    return {static_cast<T*>(params.grad_mask.data), reinterpret_cast<T*>(others), params.grad_mask_size};
  }
  static int64_t first_lane(const AttentionShape& shape, const FewKeysPlan& plan, Unit unit) {
    return unit_index(shape, unit) * kSides * plan.key_parts;
  }

  static void take_turn(const AttentionShape& shape, const FewKeysPlan& plan, int64_t turn, Unit unit,
                        void* shared, FewKeysUnit<S>& work, const Turns& turns) {
    const int64_t values = first_lane(shape, plan, unit), keys = values + plan.key_parts;
    const auto in_turn = [&](int64_t lane, auto add) {
      turns.wait(lane, kPacked + turn);
      add();
      turns.set(lane, kPacked + turn + 1);
    };
    turns.wait(values, kPacked);
    work.resume(unit, memory_of(shape, shared, unit));
    work.make_rows(turn / plan.row_blocks, turn % plan.row_blocks);
    for (int64_t i = 0; i < plan.key_parts; ++i) {
      in_turn(values + i, [&] { work.add_to_values(work.part_of_keys(plan.key_parts, i)); });
    }
    for (int64_t i = 0; i < plan.key_parts; ++i) {
      in_turn(keys + i, [&] {
        work.add_to_keys(work.part_of_keys(plan.key_parts, i));
        if (i == 0) work.add_to_sink();
      });
    }
    if (turn + 1 < turns_of_unit(shape, plan)) return;
    work.store_keys();
    finish_streams();
  }

  static void run_chains(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                         const MaskCopies<T>& copies, void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    Arena arena{static_cast<char*>(scratch), 0};
    const FewKeysScratch<S> s = take_few_keys_scratch<S>(arena, params);
    const FewKeysMemory<S> memory = take_few_keys_memory<S>(arena, params.shape);
    const SmallHeads<S> small(params, arena);
    const int64_t first = task * plan.few_keys.task_chains;
    const int64_t end = smaller(plan.chains.count, first + plan.few_keys.task_chains);
    for (int64_t chain = first; chain < end; ++chain) {
      if (small.run(chain_unit(params.shape, plan.chains, chain, 0))) continue;
      const MaskGrad<S> mask_grad(params.grad_mask, copies.of_chain(plan.chains, chain));
      run_chain(params, plan, chain, memory, FewKeysUnit<S>(params, s, mask_grad));
    }
  }

  static void run_chain(const BackwardParams& params, const BackwardPlan& plan, int64_t chain,
                        const FewKeysMemory<S>& memory, FewKeysUnit<S>&& work) {
    const int64_t turns = turns_of_unit(params.shape, plan.few_keys);
    const Range members = chain_members(plan.chains, chain);
    for (int64_t i = members.begin; i < members.end; ++i) {
      work.begin(chain_unit(params.shape, plan.chains, chain, i), memory);
      for (int64_t turn = 0; turn < turns; ++turn) {
        work.make_rows(turn / plan.few_keys.row_blocks, turn % plan.few_keys.row_blocks);
        work.add_to_values(work.part_of_keys(1, 0));
        work.add_to_keys(work.part_of_keys(1, 0));
        work.add_to_sink();
      }
      work.store_keys();
    }
  }
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
