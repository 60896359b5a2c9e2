// Rounds of independent tasks over torch's threads, and the memory that they work in.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "huge_pages.h"
#include "kernels/interface/ways.h"
#include "openmp.h"
#include "task_queues.h"
#include "turns.h"

namespace attn_ext::cpu {

/// Memory for the time of a call, aligned for any vector. The blocks given back last are kept for the next
/// calls, since to touch fresh pages takes as long as a good part of a short call's work.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (bytes <= 0) {
      return;
    }
    const auto size = static_cast<size_t>(bytes) + kHeaderBytes;
    for (auto& slot : kept_) {
      Block* block = slot.exchange(nullptr);
      if (block != nullptr && block->size >= size) {
        block_ = block;
        return;
      }
      release(block);
    }
    block_ = allocate(size);
  }
  ~Scratch() {
    if (block_ == nullptr || block_->size > kKeptBytes) {
      release(block_);
      return;
    }
    for (auto& slot : kept_) {
      block_ = slot.exchange(block_);
    }
    release(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return block_ == nullptr ? nullptr : reinterpret_cast<char*>(block_) + kHeaderBytes; }

 private:
  struct Block {
    size_t size;  // with this header
    std::align_val_t alignment;
  };
  static constexpr size_t kHeaderBytes = 64;
  static constexpr size_t kKeptBytes = size_t{1} << 25;  // of a block, at most

  static Block* allocate(size_t size) {
    const bool huge = size >= kHugePage;
    const std::align_val_t alignment{huge ? kHugePage : kHeaderBytes};
    size = huge ? (size + kHugePage - 1) / kHugePage * kHugePage : size;
    void* memory = ::operator new(size, alignment);
    if (huge) {
      ask_for_huge_pages(memory, size);
    }
    return new (memory) Block{size, alignment};
  }
  static void release(Block* block) {
    if (block != nullptr) {
      ::operator delete(block, block->alignment);
    }
  }

  static inline std::atomic<Block*> kept_[2] = {};
  Block* block_ = nullptr;
};

/// Of a task: the seconds of some of its work, then the lane that it waits for, or (wait is false) sets, and
/// the number; lane -1 at its end.
using TaskStep = std::tuple<double, bool, int64_t, int64_t>;
/// Of a round: its queues, as (tasks, threads that they keep at work), and each task's steps.
using RoundTimes = std::pair<std::vector<std::pair<int64_t, int64_t>>, std::vector<std::vector<TaskStep>>>;
using TaskTimes = std::vector<RoundTimes>;

/// Where tasks are timed, instead of being given to threads (../task_times.h); null: nowhere.
inline std::atomic<TaskTimes*> times_wanted = nullptr;

/// The steps of one task after the other, which has to wait for nothing then.
class TaskTimer {
 public:
  TaskTimer(TaskTimes& times, const std::vector<TaskQueue>& queues) : round_(times.emplace_back().second) {
    for (const TaskQueue& queue : queues) times.back().first.emplace_back(queue.count, queue.threads);
  }
  template <class Function>
  void run(int64_t tasks, Function function) {
    for (int64_t task = 0; task < tasks; ++task) {
      round_.emplace_back();
      start_ = Clock::now();
      function(task, 0);
      note(false, -1, 0);
    }
  }
  Turns turns(int64_t first_lane) {
    return {this, first_lane,
            [](void* self, int64_t lane, int64_t number) {
              static_cast<TaskTimer*>(self)->note(true, lane, number);
            },
            [](void* self, int64_t lane, int64_t number) {
              static_cast<TaskTimer*>(self)->note(false, lane, number);
            }};
  }

 private:
  using Clock = std::chrono::steady_clock;

  void note(bool waits, int64_t lane, int64_t number) {
    const std::chrono::duration<double> seconds = Clock::now() - start_;
    round_.back().emplace_back(seconds.count(), waits, lane, number);
    start_ = Clock::now();
  }

  std::vector<std::vector<TaskStep>>& round_;
  Clock::time_point start_;
};

/// function(task, slot) for every task; a slot is at work on one task at a time. Tasks are taken in order by
/// whichever slot is free, so that uneven ones balance.
template <class Function>
void run_tasks(int64_t tasks, int threads, Function function) {
  if (TaskTimes* const times = times_wanted.load(std::memory_order_relaxed)) {
    return TaskTimer(*times, {{0, tasks, threads}}).run(tasks, function);
  }
  if (threads <= 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) {
      function(task, 0);
    }
    return;
  }
  std::atomic<int64_t> next{0};
  run_slots(threads, [&](int64_t slot) {
    for (int64_t task = next++; task < tasks; task = next++) {
      function(task, slot);
    }
  });
}

/// Behind the queues there are: those of so many tasks that take turns, a chain each.
inline void add_chains(const TurnsPlan& turns, int64_t tasks, std::vector<TaskQueue>& queues) {
  int64_t first = queues.empty() ? 0 : queues.back().first + queues.back().count;
  for (int64_t i = 0; i < turns.chains; ++i, first += tasks / turns.chains) {
    queues.push_back({first, tasks / turns.chains, turns.chain_threads});
  }
}

/// function(task, slot, turns) for every task of the queues of a round with so many lanes.
template <class Function>
void run_in_turn(const std::vector<TaskQueue>& queues, int64_t lanes, int threads, Function function) {
  const int64_t tasks = queues.empty() ? 0 : queues.back().first + queues.back().count;
  if (TaskTimes* const times = times_wanted.load(std::memory_order_relaxed)) {
    TaskTimer timer(*times, queues);
    return timer.run(tasks, [&](int64_t task, int64_t slot) { function(task, slot, timer.turns(0)); });
  }
  const Scratch memory(lanes * static_cast<int64_t>(sizeof(Lanes::Lane)));
  const Turns turns = Lanes(memory.data(), lanes).turns(0);
  if (threads <= 1 || queues.size() <= 1) {
    return run_tasks(tasks, threads, [&](int64_t task, int64_t slot) { function(task, slot, turns); });
  }
  TaskQueues work(queues, threads);
  run_slots(threads,
            [&](int64_t slot) { work.work(slot, [&](int64_t task) { function(task, slot, turns); }); });
}

/// All rounds of a call, in memory of their own.
template <class Call>
void run_rounds(const Call& call, int threads) {
  const Scratch shared(call.plan.shared_bytes), own(call.plan.thread_bytes * threads);
  for (int slot = 0; slot < threads; ++slot) {
    call.begin(own.data() + slot * call.plan.thread_bytes);
  }
  for (int64_t round = 0; round < call.plan.rounds; ++round) {
    const TurnsPlan turns = call.turns_of(round);
    const auto run = [&](int64_t task, int64_t slot, const Turns& its_turns) {
      call.run(round, task, shared.data(), own.data() + slot * call.plan.thread_bytes, its_turns);
    };
    if (turns.lanes == 0) {
      run_tasks(call.tasks(round), threads, [&](int64_t task, int64_t slot) { run(task, slot, {}); });
      continue;
    }
    std::vector<TaskQueue> queues;
    add_chains(turns, call.tasks(round), queues);
    run_in_turn(queues, turns.lanes, threads, run);
  }
}

}  // namespace attn_ext::cpu
