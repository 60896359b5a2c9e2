// AMX: registers of 16 rows x 64 bytes and their product of matrices of bfloat16. The system hands their state to a
// process that asks for it.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attn_ext::cpu {

// Whether this process may use them: asked of the processor and of the system once. Static, not inline: each file has
// a copy of its own, compiled for what the file is for.
[[maybe_unused]] static bool matrix_unit_is_there() {
#if defined(__x86_64__) && defined(__linux__)
  static const bool there = [] {
    constexpr unsigned int kTiles = 1u << 24, kBFloat16 = 1u << 22;  // of leaf 7's edx
    constexpr long kAskForState = 0x1023, kTileData = 18;            // ARCH_REQ_XCOMP_PERM, XTILEDATA
    unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    if ((edx & kTiles) == 0 || (edx & kBFloat16) == 0) return false;
    return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
  }();
  return there;
#else
  return false;
#endif
}

}  // namespace attn_ext::cpu
