#include "task_times.h"

#include <chrono>

#include "cpu/tasks.h"

namespace attn_ext {

cpu::TaskTimes task_times(const std::function<void()>& call) {
  cpu::TaskTimes times;
  cpu::times_wanted = &times;
  struct Reset {
    ~Reset() { cpu::times_wanted = nullptr; }
  } reset;
  call();
  return times;
}

namespace {

using Clock = std::chrono::steady_clock;

struct BusyRounds {
  int64_t count, of_round;
  double seconds;

  int64_t rounds() const { return count; }
  int64_t tasks(int64_t) const { return of_round; }
  int64_t lanes(int64_t) const { return 0; }
  std::vector<cpu::TaskQueue> queues(int64_t, int threads) const { return {{0, of_round, threads}}; }
  void run(int64_t, int64_t, int64_t, const cpu::Turns&) const {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
    }
  }
};

}  // namespace

double time_of_rounds(int64_t rounds, int threads, double seconds) {
  const auto begin = Clock::now();
  cpu::run_rounds(BusyRounds{rounds, threads, seconds}, threads);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace attn_ext
