// What is known of AMD's processors.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attn_ext::cpu {

/// Family 26 and later. Static, as in matrix_unit.h.
[[maybe_unused]] static bool is_zen5_or_later() {
#if defined(__x86_64__)
  static const bool is_so = [] {
    constexpr unsigned int kAmd = 0x68747541;  // "Auth"
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != kAmd) return false;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
    return (eax >> 8 & 0xf) + (eax >> 20 & 0xff) >= 26;
  }();
  return is_so;
#else
  return false;
#endif
}

}  // namespace attn_ext::cpu
