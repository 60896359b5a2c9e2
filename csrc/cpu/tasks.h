// Rounds of independent tasks over the threads of ATen's pool.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

namespace attn_ext::cpu {

/// Memory for the time of a call, aligned for any vector.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (bytes > 0) {
      memory_ = c10::GetCPUAllocator()->allocate(static_cast<size_t>(bytes));
    }
  }
  char* data() const { return static_cast<char*>(memory_.get()); }

 private:
  at::DataPtr memory_;
};

/// function(task, slot) for every task; a slot is at work on one task at a time. Tasks are taken in order by
/// whichever slot is free, so that uneven ones balance.
template <class Function>
void run_tasks(int64_t tasks, int threads, Function function) {
  if (threads <= 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) {
      function(task, 0);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      for (int64_t task = next++; task < tasks; task = next++) {
        function(task, slot);
      }
    }
  });
}

}  // namespace attn_ext::cpu
