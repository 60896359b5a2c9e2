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

double time_of_rounds(int64_t rounds, int threads, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto busy = [&](int64_t) {
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (Clock::now() < end) {
    }
  };
  const auto begin = Clock::now();
  cpu::run_rounds(cpu::EqualRounds<decltype(busy)>{rounds, threads, busy}, threads);
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace attn_ext
