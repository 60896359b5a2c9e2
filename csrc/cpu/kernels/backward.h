// The backward kernels as the tensor side sees them: a plan, then rounds of independent tasks.
//
//   plan(params, threads, plan)
//   allocate plan.shared_bytes once and plan.thread_bytes a thread, both aligned to 64 bytes
//   for every round in [0, plan.rounds): run(...) for every task in [0, tasks(plan, round))
//
// Tasks of one round may run in any order, on any thread: no bit of the result depends on it. A round may
// begin once all tasks of the one before are done.
#pragma once

#include "params.h"

namespace attn_ext::cpu {

// Batches and key heads are the units of work. Units whose gradients meet in the same mask gradient make a
// chain. Where there are few chains, keys and queries are cut into `segments` segments, and for each query
// head of a group key segment i meets query segment (i + t) mod segments in phase t. That order of the sums
// follows from the shapes alone. Who works is up to the threads: a task takes a whole chain with packs of its
// own, or, where the chains would leave threads idle, one key segment in one phase (`split`): no two tasks of
// a phase add to the same gradient.
struct BackwardPlan {
  int64_t block_keys, block_queries;  // of a tile
  int64_t key_blocks, query_blocks;   // of a head
  int64_t segments;                   // of keys and of queries
  bool split;                         // segments of a phase are tasks of their own; packs are shared
  int64_t chains, units_per_chain;
  int64_t mask_copies;  // of the mask gradient, the caller's own the first
  bool few_keys;        // the path of few keys: a task takes whole heads
  bool few_rows;        // the path of a few query rows: a task takes a piece of the keys
  bool streamed;        // there, the gradients of key and value are written past the caches
  bool heads_share_mask, batches_share_mask;
  bool exact_delta;  // delta from the tiles rather than from the output
  int64_t rounds;
  int64_t prepare_tasks, row_tasks, run_tasks, finish_tasks, sum_tasks;
  int64_t shared_bytes, thread_bytes;
};

struct BackwardKernels {
  void (*plan)(const BackwardParams&, int threads, BackwardPlan&);
  int64_t (*tasks)(const BackwardPlan&, int64_t round);
  void (*run)(const BackwardParams&, const BackwardPlan&, int64_t round, int64_t task, void* shared,
              void* thread_scratch);
};

}  // namespace attn_ext::cpu
