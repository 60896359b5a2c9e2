// Rounds of tasks over torch's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/interface/ways.h"
#include "openmp.h"
#include "scratch.h"
#include "task_queues.h"
#include "turns.h"

namespace attn_ext::cpu {

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
    static const Clock::duration kLook = time_of_a_look();  // at the clock, which is in every step's time
    const Clock::duration time = std::max(Clock::now() - start_ - kLook, Clock::duration::zero());
    round_.back().emplace_back(std::chrono::duration<double>(time).count(), waits, lane, number);
    start_ = Clock::now();
  }
  static Clock::duration time_of_a_look() {
    Clock::duration least = Clock::duration::max();
    for (int i = 0; i < 100; ++i) {
      const Clock::time_point start = Clock::now();
      least = std::min(least, Clock::now() - start);
    }
    return least;
  }

  std::vector<std::vector<TaskStep>>& round_;
  Clock::time_point start_;
};

/// Behind the queues there are: those of so many tasks that take turns, a chain each.
inline void add_chains(const TurnsPlan& turns, int64_t tasks, std::vector<TaskQueue>& queues) {
  int64_t first = queues.empty() ? 0 : queues.back().first + queues.back().count;
  for (int64_t i = 0; i < turns.chains; ++i, first += tasks / turns.chains) {
    queues.push_back({first, tasks / turns.chains, turns.chain_threads});
  }
}

/// All rounds of some work, which has
///
///   int64_t rounds()
///   int64_t tasks(round), lanes(round)
///   std::vector<TaskQueue> queues(round, threads)
///   void run(round, task, slot, turns)
///
/// Threads are called together once, not once a round: in between each waits for the others where they are,
/// which takes a quarter of that.
template <class Work>
void run_rounds(const Work& work, int threads) {
  const int64_t rounds = work.rounds();
  int64_t lanes = 0, most_tasks = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    lanes += work.lanes(round);
    most_tasks = std::max(most_tasks, work.tasks(round));
  }
  if (TaskTimes* const times = times_wanted.load(std::memory_order_relaxed)) {
    for (int64_t round = 0; round < rounds; ++round) {
      TaskTimer timer(*times, work.queues(round, threads));
      timer.run(work.tasks(round),
                [&](int64_t task, int64_t slot) { work.run(round, task, slot, timer.turns(0)); });
    }
    return;
  }
  const Scratch memory(lanes * static_cast<int64_t>(sizeof(Lanes::Lane)));
  const Lanes all_lanes(memory.data(), lanes);
  if (threads <= 1 || most_tasks <= 1) {
    for (int64_t round = 0, lane = 0; round < rounds; lane += work.lanes(round), ++round) {
      for (int64_t task = 0; task < work.tasks(round); ++task) {
        work.run(round, task, 0, all_lanes.turns(lane));
      }
    }
    return;
  }
  std::deque<TaskQueues> queues;
  for (int64_t round = 0; round < rounds; ++round) queues.emplace_back(work.queues(round, threads), threads);
  run_slots(threads, [&](int64_t slot) {
    const TaskQueues* before = nullptr;
    for (int64_t round = 0, lane = 0; round < rounds; lane += work.lanes(round), ++round) {
      if (work.tasks(round) == 0) continue;
      TaskQueues& its_queues = queues[static_cast<size_t>(round)];
      if (before != nullptr) before->wait();
      its_queues.work(slot, [&](int64_t task) { work.run(round, task, slot, all_lanes.turns(lane)); });
      before = &its_queues;
    }
  });
}

/// Rounds of so many tasks each, function(task). Tasks are taken in order by whoever is free, so that uneven
/// ones balance.
template <class Function>
struct EqualRounds {
  int64_t count, of_round;
  Function function;

  int64_t rounds() const { return count; }
  int64_t tasks(int64_t) const { return of_round; }
  int64_t lanes(int64_t) const { return 0; }
  std::vector<TaskQueue> queues(int64_t, int threads) const { return {{0, of_round, threads}}; }
  void run(int64_t, int64_t task, int64_t, const Turns&) const { function(task); }
};

/// A call in memory of its own.
template <class Call>
class CallWork {
 public:
  CallWork(const Call& call, int threads)
      : call_(call), shared_(call.plan.shared_bytes), own_(call.plan.thread_bytes * threads) {
    for (int slot = 0; slot < threads; ++slot) call.begin(own(slot));
  }

  int64_t rounds() const { return call_.plan.rounds; }
  int64_t tasks(int64_t round) const { return call_.tasks(round); }
  int64_t lanes(int64_t round) const { return call_.turns_of(round).lanes; }
  std::vector<TaskQueue> queues(int64_t round, int threads) const {
    std::vector<TaskQueue> queues;
    const TurnsPlan turns = call_.turns_of(round);
    add_chains(turns.lanes > 0 ? turns : TurnsPlan{0, 1, threads}, tasks(round), queues);
    return queues;
  }
  void run(int64_t round, int64_t task, int64_t slot, const Turns& turns) const {
    call_.run(round, task, shared_.data(), own(slot), turns);
  }

 private:
  char* own(int64_t slot) const { return own_.data() + slot * call_.plan.thread_bytes; }

  const Call& call_;
  const Scratch shared_, own_;
};

template <class Call>
void run_call(const Call& call, int threads) {
  run_rounds(CallWork<Call>(call, threads), threads);
}

}  // namespace attn_ext::cpu
