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
#pragma once

#include <cstdint>

namespace attn_ext::cpu {

template <typename Params, typename Plan>
struct Way {
  void (*plan)(const Params&, int threads, Plan&);
  int64_t (*tasks)(const Plan&, int64_t round);
  void (*run)(const Params&, const Plan&, int64_t round, int64_t task, void* shared, void* thread_scratch);
};

template <typename Params, typename Plan, typename Path, int Paths>
struct Ways {
  Path (*path)(const Params&);
  Way<Params, Plan> of[Paths];  // by path
};

}  // namespace attn_ext::cpu
