// The OpenMP runtime that torch has loaded, called as GCC's code calls it, whichever compiler builds this:
// the pragmas of another compiler would bring a second runtime with threads of its own. Weak: where torch has
// no such runtime, all is null and works on one thread.
#pragma once

extern "C" {
[[gnu::weak]] void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
[[gnu::weak]] int omp_get_thread_num() noexcept;
[[gnu::weak]] int omp_get_num_threads() noexcept;
}

namespace attn_ext::cpu {

/// body(slot) for every slot in [0, slots), each on a thread of its own as far as there are threads.
template <class Body>
void run_slots(int slots, Body body) {
  struct Call {
    Body& body;
    int slots;
  } call{body, slots};
  const auto work = [](void* data) {
    const Call& mine = *static_cast<Call*>(data);
    for (int slot = omp_get_thread_num(); slot < mine.slots; slot += omp_get_num_threads()) {
      mine.body(slot);
    }
  };
  if (GOMP_parallel != nullptr) {
    return GOMP_parallel(work, &call, /*threads=*/0, /*flags=*/0);
  }
  for (int slot = 0; slot < slots; ++slot) {
    body(slot);
  }
}

}  // namespace attn_ext::cpu
