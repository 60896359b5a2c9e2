// What is known of AMD's processors.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attn_ext::cpu {

/// The family of an AMD processor; 0 for all other processors. Static, as in matrix_unit.h.
[[maybe_unused]] static unsigned int amd_family() {
#if defined(__x86_64__)
  static const unsigned int family = [] {
    constexpr unsigned int kAmd = 0x68747541;  // "Auth"
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != kAmd) return 0u;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return 0u;
    return (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
  }();
  return family;
#else
  return 0;
#endif
}

/// Family 26 and later.
[[maybe_unused]] static bool is_zen5_or_later() {
  return amd_family() >= 26;
}

/// Of family 25 those with AVX-512: the others are of Zen 3.
[[maybe_unused]] static bool is_zen4() {
#if defined(__x86_64__)
  static const bool is_so = [] {
    constexpr unsigned int kAvx512F = 1u << 16;
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    return amd_family() == 25 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
           (ebx & kAvx512F) != 0;
  }();
  return is_so;
#else
  return false;
#endif
}

}  // namespace attn_ext::cpu
