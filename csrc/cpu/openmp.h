// The OpenMP runtime that torch works with, called as GCC's code calls it, whichever compiler builds this:
// the pragmas of another compiler would bring a second runtime with threads of its own.
#pragma once

namespace attn_ext::cpu {

/// What GCC makes of a parallel region.
struct OpenMpRuntime {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
  int (*thread_num)();
  int (*num_threads)();
  int (*pause_resource_all)(int kind);  // null in an old one
};

/// Null where torch has no such runtime.
const OpenMpRuntime* openmp_runtime();

/// body(slot) for every slot in [0, slots), each on a thread of its own as far as there are threads.
template <class Body>
void run_slots(int slots, Body body) {
  const OpenMpRuntime* const openmp = openmp_runtime();
  if (openmp == nullptr) {
    for (int slot = 0; slot < slots; ++slot) {
      body(slot);
    }
    return;
  }
  struct Call {
    const OpenMpRuntime& openmp;
    Body& body;
    int slots;
  } call{*openmp, body, slots};
  const auto work = [](void* data) {
    const Call& mine = *static_cast<Call*>(data);
    for (int slot = mine.openmp.thread_num(); slot < mine.slots; slot += mine.openmp.num_threads()) {
      mine.body(slot);
    }
  };
  // As many threads as there are slots, whatever number the runtime would take by itself.
  openmp->parallel(work, &call, static_cast<unsigned>(slots), /*flags=*/0);
}

/// Ends the threads that wait for the calling thread's next parallel region; that one starts new ones. False
/// where that cannot be: inside a parallel region, or with a runtime that has no such call.
inline bool end_waiting_threads() {
  constexpr int kSoft = 1;  // omp_pause_soft: what the user has set stays
  const OpenMpRuntime* openmp = openmp_runtime();
  return openmp == nullptr ||
         (openmp->pause_resource_all != nullptr && openmp->pause_resource_all(kSoft) == 0);
}

}  // namespace attn_ext::cpu
