// Queues of tasks, and which of them a thread works at. Sees no torch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "wait_until.h"

namespace attn_ext::cpu {

/// Tasks [first, first + count), to be taken in their order; more threads than `threads` find less to do
/// there.
struct TaskQueue {
  int64_t first, count, threads;
};

/// Threads stay at a queue until it is empty: neighbours, which may share a cache, work on the same things,
/// and what all of them have at work at a time is little. Then they go where there are too few, else to the
/// queue with the fewest threads for what it could use.
class TaskQueues {
 public:
  TaskQueues(std::vector<TaskQueue> queues, int threads)
      : queues_(std::move(queues)), states_(queues_.size()), threads_(threads) {
    for (const TaskQueue& queue : queues_) left_ += queue.count;
  }

  /// function(task) for the tasks that this thread gets.
  template <class Function>
  void work(int64_t slot, Function function) {
    int64_t done = 0;
    for (int64_t i = first_queue(slot); i >= 0; i = next_queue()) {
      const TaskQueue& queue = queues_[static_cast<size_t>(i)];
      State& state = states_[static_cast<size_t>(i)];
      ++state.threads;
      for (int64_t task = state.next++; task < queue.count; task = state.next++) {
        function(queue.first + task);
        ++done;
      }
      --state.threads;
    }
    if (done > 0) left_.fetch_sub(done, std::memory_order_release);
  }
  /// Until all tasks are done; what they wrote can be read then.
  void wait() const {
    wait_until([this] { return left_.load(std::memory_order_acquire) == 0; });
  }

 private:
  struct alignas(64) State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> threads{0};
  };

  // The first threads at the first queue, as many as it has use for; more where there are more of them.
  int64_t first_queue(int64_t slot) const {
    int64_t wanted = 0;
    for (const TaskQueue& queue : queues_) wanted += std::min<int64_t>(queue.threads, threads_);
    int64_t place = wanted < threads_ ? slot * wanted / threads_ : slot;
    for (size_t i = 0; i < queues_.size(); ++i) {
      place -= std::min<int64_t>(queues_[i].threads, threads_);
      if (place < 0) return static_cast<int64_t>(i);
    }
    return next_queue();
  }

  // -1: all are empty.
  int64_t next_queue() const {
    int64_t best = -1;
    int64_t at_best = 0;
    for (size_t i = 0; i < queues_.size(); ++i) {
      if (states_[i].next.load(std::memory_order_relaxed) >= queues_[i].count) continue;
      const int64_t at_work = states_[i].threads.load(std::memory_order_relaxed);
      if (at_work < queues_[i].threads) return static_cast<int64_t>(i);
      if (best < 0 || at_work * queues_[static_cast<size_t>(best)].threads < at_best * queues_[i].threads) {
        best = static_cast<int64_t>(i);
        at_best = at_work;
      }
    }
    return best;
  }

  const std::vector<TaskQueue> queues_;
  std::vector<State> states_;
  const int64_t threads_;
  alignas(64) std::atomic<int64_t> left_{0};  // not yet done
};

}  // namespace attn_ext::cpu
