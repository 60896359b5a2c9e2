// A call on its path, its plan made (kernels/interface/ways.h). Sees no torch: the kernel tests use it too.
#pragma once

#include <cstring>

#include "kernels/interface/ways.h"

namespace attn_ext::cpu {

constexpr size_t kNotesBytes = 64;

template <class Params, class Plan>
struct PlannedCall {
  const Params& params;
  const Way<Params, Plan>& way;
  Plan plan;

  // What a thread notes for its next tasks lies first in its memory, and is 0 when the call begins.
  void begin(void* thread_scratch) const {
    if (plan.thread_bytes > 0) std::memset(thread_scratch, 0, kNotesBytes);
  }
  int64_t tasks(int64_t round) const { return way.tasks(plan, round); }
  TurnsPlan turns_of(int64_t round) const {
    return way.turns == nullptr ? TurnsPlan{} : way.turns(plan, round);
  }
  void run(int64_t round, int64_t task, void* shared, void* thread_scratch, const Turns& turns) const {
    if (turns_of(round).lanes > 0) return way.run_in_turn(params, plan, task, shared, thread_scratch, turns);
    way.run(params, plan, round, task, shared, thread_scratch);
  }
};

template <class Params, class Plan, class Path, int Paths>
PlannedCall<Params, Plan> plan_call(const Ways<Params, Plan, Path, Paths>& ways, const Params& params,
                                    int threads) {
  const Path path = ways.path(params);
  PlannedCall<Params, Plan> call{params, ways.of[static_cast<int>(path)], {}};
  call.plan.path = path;
  call.way.plan(params, threads, call.plan);
  return call;
}

}  // namespace attn_ext::cpu
