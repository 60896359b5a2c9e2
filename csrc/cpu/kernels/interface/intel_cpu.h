// What is known of Intel's processors.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attn_ext::cpu {

struct SecondCache {
  unsigned int bytes, threads;  // that share it
};

/// 0 bytes for all other processors. Static, as in matrix_unit.h.
[[maybe_unused]] static SecondCache intel_second_cache() {
#if defined(__x86_64__)
  static const SecondCache second = [] {
    constexpr SecondCache kNone{0, 1};
    constexpr unsigned int kIntel = 0x756e6547;  // "Genu"
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != kIntel) return kNone;
    for (unsigned int cache = 0; cache < 16; ++cache) {
      if (__get_cpuid_count(4, cache, &eax, &ebx, &ecx, &edx) == 0) return kNone;
      const unsigned int type = eax & 0x1f, level = eax >> 5 & 7;  // type 0: there are no more
      if (type == 0) return kNone;
      const unsigned int threads = (eax >> 14 & 0xfff) + 1, ways = (ebx >> 22) + 1;
      const unsigned int line = ((ebx >> 12 & 0x3ff) + 1) * ((ebx & 0xfff) + 1);
      if (level == 2) return SecondCache{ways * line * (ecx + 1), threads};
    }
    return kNone;
  }();
  return second;
#else
  return {0, 1};
#endif
}

}  // namespace attn_ext::cpu
