#include "kernel_sets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace attn_ext::cpu {

namespace {

#if defined(__x86_64__)
/// Not every compiler's __builtin_cpu_supports knows it.
[[maybe_unused]] bool supports_f16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// In the order of cmake/capabilities.cmake, which defines ATTN_EXT_HAS_* for the sets in this build.
const KernelSet kSets[] = {
    {"baseline", &baseline::kKernels, [] { return true; }},
#ifdef ATTN_EXT_HAS_avx2
    {"avx2", &avx2::kKernels,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c(); }},
#endif
#ifdef ATTN_EXT_HAS_avx512
    {"avx512", &avx512::kKernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512cd");
     }},
#endif
#ifdef ATTN_EXT_HAS_avx512_bf16
    {"avx512_bf16", &avx512_bf16::kKernels,
     [] {
       return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
     }},
#endif
};

}  // namespace

std::vector<KernelSet> supported_kernel_sets() {
  std::vector<KernelSet> supported;
  for (const KernelSet& set : kSets) {
    if (set.is_supported()) {
      supported.push_back(set);
    }
  }
  return supported;
}

}  // namespace attn_ext::cpu
