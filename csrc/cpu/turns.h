// The lanes of a round whose tasks take turns (kernels/interface/ways.h). Sees no torch: the kernel tests use
// it too.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#include "kernels/interface/ways.h"
#include "wait_until.h"

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
    wait_until([&] { return now.load(std::memory_order_acquire) >= number; });
  }
  static void set(void* self, int64_t lane, int64_t number) {
    static_cast<Lane*>(self)[lane].number.store(number, std::memory_order_release);
  }

  Lane* lanes_;
};

}  // namespace attn_ext::cpu
