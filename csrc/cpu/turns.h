// The lanes of a round whose tasks take turns (kernels/interface/ways.h). Sees no torch: the kernel tests use
// it too.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>
#include <thread>

#include "kernels/interface/ways.h"

namespace attn_ext::cpu {

class Lanes {
 public:
  struct alignas(64) Lane {
    std::atomic<int64_t> number{0};
  };

  /// In memory for `count` lanes.
  Lanes(char* memory, int64_t count) : lanes_(reinterpret_cast<Lane*>(memory)) {
    for (int64_t i = 0; i < count; ++i) new (lanes_ + i) Lane;
  }

  Turns turns(int64_t first_lane) const { return {lanes_, first_lane, wait, set}; }

 private:
  static void wait(void* self, int64_t lane, int64_t number) {
    const auto& now = static_cast<Lane*>(self)[lane].number;
    // Others may have to be given this thread's core before they can set the lane.
    constexpr int kSpins = 4000;
    for (int spins = 0; now.load(std::memory_order_acquire) < number; ++spins) {
      spins < kSpins ? pause() : std::this_thread::yield();
    }
  }
  static void set(void* self, int64_t lane, int64_t number) {
    static_cast<Lane*>(self)[lane].number.store(number, std::memory_order_release);
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  Lane* lanes_;
};

}  // namespace attn_ext::cpu
