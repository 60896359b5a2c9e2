// The forward kernels as the tensor side sees them: a plan, then up to three rounds of independent tasks.
//
//   plan(params, threads, plan)
//   allocate plan.shared_bytes once and plan.thread_bytes a thread, both aligned to 64 bytes
//   pack(...)   for every task in [0, plan.pack_tasks)
//   run(...)    for every task in [0, plan.run_tasks), once all of pack is done
//   finish(...) for every task in [0, plan.finish_tasks), once all of run is done
//
// Tasks of one round may run in any order, on any thread: no bit of the result depends on it.
#pragma once

#include "params.h"

namespace attn_ext::cpu {

enum class ForwardPath : int8_t {
  kRows,    // all keys in one block: whole-row softmax
  kOnline,  // softmax over key blocks with a running maximum and sum
  kSplit,   // few query rows, many keys: pieces of the keys apart, then merged
  kDecode,  // a handful of query rows: keys and values read once, unpacked, in pieces
};

// What decides bits (path, block_keys, split_keys) follows from Lq, Lk, D, Dv, the dtype and the side outputs
// alone.
struct ForwardPlan {
  ForwardPath path;
  bool pack_once;       // keys and values packed by a round of its own, or by each task for itself
  bool value_in_place;  // values already lie as a packed panel would
  int64_t block_rows;   // query rows of a block
  int64_t block_keys;   // keys of a block
  int64_t splits;       // pieces of the keys, each of split_keys; 0: not split
  int64_t split_keys;
  int64_t task_splits;  // pieces that a task takes
  int64_t segments;     // runs of query blocks that a task takes
  int64_t pack_tasks, run_tasks, finish_tasks;
  int64_t shared_bytes, thread_bytes;
};

struct ForwardKernels {
  void (*plan)(const ForwardParams&, int threads, ForwardPlan&);
  void (*pack)(const ForwardParams&, const ForwardPlan&, int64_t task, void* shared);
  void (*run)(const ForwardParams&, const ForwardPlan&, int64_t task, void* shared, void* thread_scratch);
  void (*finish)(const ForwardParams&, const ForwardPlan&, int64_t task, void* shared, void* thread_scratch);
};

}  // namespace attn_ext::cpu
