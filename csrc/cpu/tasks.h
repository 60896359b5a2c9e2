// Rounds of independent tasks over torch's threads, and the memory that they work in.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <vector>

#include "huge_pages.h"
#include "openmp.h"

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

using TaskTimes = std::vector<std::vector<double>>;  // seconds of each task of each round

/// Where tasks are timed, instead of being given to threads (../task_times.h); null: nowhere.
inline std::atomic<TaskTimes*> times_wanted = nullptr;

template <class Function>
void run_timed(int64_t tasks, Function function, TaskTimes& times) {
  using Clock = std::chrono::steady_clock;
  std::vector<double>& round = times.emplace_back();
  for (int64_t task = 0; task < tasks; ++task) {
    const auto start = Clock::now();
    function(task, 0);
    round.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
}

/// function(task, slot) for every task; a slot is at work on one task at a time. Tasks are taken in order by
/// whichever slot is free, so that uneven ones balance.
template <class Function>
void run_tasks(int64_t tasks, int threads, Function function) {
  if (TaskTimes* const times = times_wanted.load(std::memory_order_relaxed)) {
    return run_timed(tasks, function, *times);
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

/// All rounds of a call, in memory of their own.
template <class Call>
void run_rounds(const Call& call, int threads) {
  const Scratch shared(call.plan.shared_bytes), own(call.plan.thread_bytes * threads);
  for (int slot = 0; slot < threads; ++slot) {
    call.begin(own.data() + slot * call.plan.thread_bytes);
  }
  for (int64_t round = 0; round < call.plan.rounds; ++round) {
    run_tasks(call.tasks(round), threads, [&](int64_t task, int64_t slot) {
      call.run(round, task, shared.data(), own.data() + slot * call.plan.thread_bytes);
    });
  }
}

}  // namespace attn_ext::cpu
