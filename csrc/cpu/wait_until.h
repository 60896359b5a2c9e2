// Waiting for another thread, which is at work on it. Sees no torch.
#pragma once

#include <thread>

namespace attn_ext::cpu {

inline void pause_thread() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// Until ready() is true.
template <class Ready>
void wait_until(Ready ready) {
  // The other may have to be given this thread's core first.
  constexpr int kSpins = 4000;
  for (int spins = 0; !ready(); ++spins) {
    spins < kSpins ? pause_thread() : std::this_thread::yield();
  }
}

}  // namespace attn_ext::cpu
