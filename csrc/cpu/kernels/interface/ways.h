// How the tensor side drives the kernels of a pass. A call takes one path; the way of that path makes a plan,
// then does its work in rounds of independent tasks:
//
//   Plan plan{};  plan.path = ways.path(params);  way = ways.of[plan.path];  way.plan(params, threads, plan)
//   allocate plan.shared_bytes once and plan.thread_bytes a thread, both aligned to 64 bytes; clear the first
//   64 bytes of each thread's, which it takes notes in
//   for every round in [0, plan.rounds): way.run(...) for every task in [0, way.tasks(plan, round))
//
// Tasks of one round may run in any order, on any thread: no bit of the result depends on it. A round may
// begin once all tasks of the one before are done.
//
// Or the tasks of a round take turns: way.turns(plan, round).lanes > 0. Each lane holds a number, at first 0,
// which only grows; way.run_in_turn(...) waits for lanes and sets others. The tasks are chains of the same
// length, one behind the other. Every number that a task waits for is set by tasks before it in its chain:
// those of each chain begun in their order, each by a thread that ends one before it takes the next, tasks on
// any number of threads come to an end.
#pragma once

#include <cstdint>

namespace attn_ext::cpu {

/// The lanes of a round, as a task sees them.
struct Turns {
  /// Until the lane's number is `number` or more; what was written before it was set can be read then.
  void wait(int64_t lane, int64_t number) const { wait_for(self, first_lane + lane, number); }
  void set(int64_t lane, int64_t number) const { set_to(self, first_lane + lane, number); }

  void* self;
  int64_t first_lane;
  void (*wait_for)(void* self, int64_t lane, int64_t number);
  void (*set_to)(void* self, int64_t lane, int64_t number);
};

/// How the tasks of a round take turns.
struct TurnsPlan {
  int64_t lanes = 0;  // 0: they do not
  int64_t chains = 1;
  int64_t chain_threads = 0;  // more threads than these find less to do in one chain
};

template <typename Params, typename Plan>
struct Way {
  void (*plan)(const Params&, int threads, Plan&);
  int64_t (*tasks)(const Plan&, int64_t round);
  void (*run)(const Params&, const Plan&, int64_t round, int64_t task, void* shared, void* thread_scratch);
  TurnsPlan (*turns)(const Plan&, int64_t round) = nullptr;  // null: in no round
  void (*run_in_turn)(const Params&, const Plan&, int64_t task, void* shared, void* thread_scratch,
                      const Turns&) = nullptr;
};

template <typename Params, typename Plan, typename Path, int Paths>
struct Ways {
  Path (*path)(const Params&);
  Way<Params, Plan> of[Paths];  // by path
};

}  // namespace attn_ext::cpu
