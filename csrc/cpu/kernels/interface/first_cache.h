// Into which cache memory is asked for that is read soon, once, and in order.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attn_ext::cpu {

// AMD's processors from family 26 (Zen 5) on: requests into the second cache come to nothing there in one
// process of two, where rows lie in pages; docs/trials.md has the figures. Static, as in matrix_unit.h.
[[maybe_unused]] static bool asks_into_first_cache() {
#if defined(__x86_64__)
  static const bool asks = [] {
    constexpr unsigned int kAmd = 0x68747541;  // "Auth"
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != kAmd) return false;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
    return (eax >> 8 & 0xf) + (eax >> 20 & 0xff) >= 26;
  }();
  return asks;
#else
  return false;
#endif
}

}  // namespace attn_ext::cpu
