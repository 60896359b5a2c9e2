// What is known of Intel's processors.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attn_ext::cpu {

/// Bytes of the second cache for each thread that shares it; 0 for all other processors. Static, as in
/// matrix_unit.h.
[[maybe_unused]] static unsigned int intel_second_cache() {
#if defined(__x86_64__)
  static const unsigned int bytes = [] {
    constexpr unsigned int kIntel = 0x756e6547;  // "Genu"
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != kIntel) return 0u;
    for (unsigned int cache = 0; cache < 16; ++cache) {
      if (__get_cpuid_count(4, cache, &eax, &ebx, &ecx, &edx) == 0) return 0u;
      const unsigned int type = eax & 0x1f, level = eax >> 5 & 7;  // type 0: there are no more
      if (type == 0) return 0u;
      const unsigned int threads = (eax >> 14 & 0xfff) + 1, ways = (ebx >> 22) + 1;
      const unsigned int line = ((ebx >> 12 & 0x3ff) + 1) * ((ebx & 0xfff) + 1);
      if (level == 2) return ways * line * (ecx + 1) / threads;
    }
    return 0u;
  }();
  return bytes;
#else
  return 0;
#endif
}

}  // namespace attn_ext::cpu
