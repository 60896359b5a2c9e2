// Threads at queues of tasks: each task is taken once, those of a queue in their order; neighbours begin at
// the same queue, as many as it keeps at work; nobody rests while there are tasks; tasks that wait for tasks
// before them in their queue come to an end, however few threads there are; a round begins when the one
// before it is done.
#include "task_queues.h"

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <memory>
#include <thread>

namespace {

using attn_ext::cpu::TaskQueue;
using attn_ext::cpu::TaskQueues;

int failures = 0;

void check(bool holds, const char* what) {
  if (!holds && ++failures <= 10) std::printf("%s\n", what);
}

std::vector<TaskQueue> queues_of(const std::vector<int64_t>& counts, int64_t threads) {
  std::vector<TaskQueue> queues;
  int64_t first = 0;
  for (const int64_t count : counts) {
    queues.push_back({first, count, threads});
    first += count;
  }
  return queues;
}

// On so many slots, `together` of them at a time: the others follow.
void run(const std::vector<TaskQueue>& queues, int slots, int together) {
  const int64_t tasks = queues.back().first + queues.back().count;
  std::vector<std::atomic<int>> taken(static_cast<size_t>(tasks)), done(static_cast<size_t>(tasks));
  TaskQueues work(queues, slots);
  const auto begins_queue = [&](int64_t task) {
    for (const TaskQueue& queue : queues) {
      if (queue.first == task) return true;
    }
    return false;
  };
  std::atomic<bool> in_order = true;
  std::barrier begin(together);  // or the first would find all tasks before the others have begun
  std::vector<std::thread> team;
  for (int thread = 0; thread < together; ++thread) {
    team.emplace_back([&, thread] {
      begin.arrive_and_wait();
      for (int slot = thread; slot < slots; slot += together) {
        work.work(slot, [&](int64_t task) {
          const auto i = static_cast<size_t>(task);
          ++taken[i];
          std::this_thread::yield();
          if (!begins_queue(task)) {
            while (done[i - 1] == 0) std::this_thread::yield();  // ends only if that one was begun
            if (taken[i - 1] != 1) in_order = false;
          }
          done[i] = 1;
        });
      }
    });
  }
  for (std::thread& thread : team) thread.join();
  for (const auto& count : taken) check(count == 1, "a task was not taken once");
  check(in_order, "a task was begun before the one before it");
}

// Rounds of tasks, a thread waiting for the one before: what its tasks wrote is there, and all of it.
void run_rounds(int64_t tasks, int slots, int together) {
  constexpr int kRounds = 20;
  std::vector<std::unique_ptr<TaskQueues>> rounds;
  for (int round = 0; round < kRounds; ++round) {
    rounds.push_back(std::make_unique<TaskQueues>(queues_of({tasks, 1, 0, tasks}, 2), slots));
  }
  const auto all = static_cast<size_t>(2 * tasks + 1);
  std::vector<std::vector<int>> written(kRounds,
                                        std::vector<int>(all, 0));  // no atomics: only wait() orders them
  std::atomic<bool> complete = true;
  std::vector<std::thread> team;
  for (int thread = 0; thread < together; ++thread) {
    team.emplace_back([&, thread] {
      for (int slot = thread; slot < slots; slot += together) {
        for (size_t round = 0; round < kRounds; ++round) {
          if (round > 0) rounds[round - 1]->wait();
          rounds[round]->work(slot, [&](int64_t task) {
            if (round > 0 && std::ranges::count(written[round - 1], 1) != std::ssize(written[round])) {
              complete = false;
            }
            written[round][static_cast<size_t>(task)] = 1;
          });
        }
      }
    });
  }
  for (std::thread& thread : team) thread.join();
  check(complete, "a round was begun before the one before it was done");
}

// The queue that each slot's first task is of, all slots beginning at the same time.
std::vector<int64_t> first_queues(const std::vector<TaskQueue>& queues, int slots) {
  std::vector<int64_t> found(static_cast<size_t>(slots), -1);
  std::vector<std::thread> team;
  std::atomic<int> begun = 0;
  TaskQueues work(queues, slots);
  for (int slot = 0; slot < slots; ++slot) {
    team.emplace_back([&, slot] {
      work.work(slot, [&](int64_t task) {
        if (found[static_cast<size_t>(slot)] >= 0) return;
        int64_t queue = 0;
        while (task >= queues[static_cast<size_t>(queue)].first + queues[static_cast<size_t>(queue)].count) {
          ++queue;
        }
        found[static_cast<size_t>(slot)] = queue;
        ++begun;
        while (begun < slots) std::this_thread::yield();
      });
    });
  }
  for (std::thread& thread : team) thread.join();
  return found;
}

}  // namespace

int main() {
  for (const int slots : {1, 2, 3, 8, 17}) {
    for (const int64_t threads : {1, 2, 5, 100}) {
      for (int together = 1; together <= slots; together = together * 2 + 1) {
        run(queues_of({100, 100, 100}, threads), slots, together);
        run(queues_of({1, 0, 40, 7, 0, 300, 2, 2}, threads), slots, together);
        run(queues_of({5}, threads), slots, together);
      }
    }
    for (int together = 1; together <= slots; together = together * 2 + 1) {
      run_rounds(1, slots, together);
      run_rounds(30, slots, together);
    }
  }
  using Places = std::vector<int64_t>;
  check(first_queues(queues_of({50, 50, 50, 50}, 2), 5) == Places{0, 0, 1, 1, 2}, "fewer than are wanted");
  check(first_queues(queues_of({50, 50}, 2), 8) == Places{0, 0, 0, 0, 1, 1, 1, 1}, "more than are wanted");
  check(first_queues(queues_of({50, 50, 50}, 1), 4) == Places{0, 0, 1, 2}, "one more than are wanted");
  std::printf("%d failures\n", failures);
  return failures != 0;
}
