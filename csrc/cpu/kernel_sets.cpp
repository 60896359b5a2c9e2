#include "kernel_sets.h"

#include <iterator>
#include <string_view>
#include <utility>

#include "kernels/interface/matrix_unit.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "arm_cpu.h"

namespace attn_ext::cpu {

namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool supports_f16c() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

/// Of the processor, where the operating system keeps the registers that they need.
Features supported_features() {
  Features features = 0;
#define ATTN_EXT_ASK(name, macro, ask) features |= (ask) ? bits_of({Feature::k##name}) : 0u;
#if defined(__x86_64__)
  ATTN_EXT_X86_FEATURES(ATTN_EXT_ASK)
#elif defined(__aarch64__)
  ATTN_EXT_ARM_FEATURES(ATTN_EXT_ASK)
#endif
#undef ATTN_EXT_ASK
  return features;
}

/// Of bfloat16 alone, of which the set has kernels of its own; of other dtypes those of the set that it is
/// built on.
[[maybe_unused]] KernelTable with_bfloat16(KernelTable kernels, const DtypeKernels* bfloat16) {
  kernels.of[kBFloat16Kernels] = bfloat16;
  return kernels;
}

#ifdef ATTN_EXT_HAS_avx512_bf16
const KernelTable* avx512_bf16_kernels() {
  static const KernelTable table =
      with_bfloat16(avx512::kKernels, avx512_bf16::kKernels.of[kBFloat16Kernels]);
  return &table;
}
#endif

#ifdef ATTN_EXT_HAS_neon_bf16
const KernelTable* neon_bf16_kernels() {
  static const KernelTable table = with_bfloat16(neon::kKernels, neon_bf16::kKernels.of[kBFloat16Kernels]);
  return &table;
}
#endif

#ifdef ATTN_EXT_HAS_amx
/// Those that are there, in the place of others.
template <typename Ways>
void take_ways(Ways& to, const Ways& from) {
  to.path = from.path;
  for (std::size_t i = 0; i < std::size(to.of); ++i) {
    if (from.of[i].run != nullptr) {
      to.of[i] = from.of[i];
    }
  }
}

/// Of bfloat16 what multiplies blocks. A few rows are read as they come, which vectors of floats do fastest
/// on processors with AMX; all else has no products on it.
const KernelTable* amx_kernels() {
  static const DtypeKernels bfloat16 = [] {
    DtypeKernels kernels = *avx512::kKernels.of[kBFloat16Kernels];
    const DtypeKernels& own = *amx::kKernels.of[kBFloat16Kernels];
    take_ways(kernels.forward, own.forward);
    take_ways(kernels.backward, own.backward);
    kernels.saves_weights = own.saves_weights;
    return kernels;
  }();
  static const KernelTable table = with_bfloat16(avx512::kKernels, &bfloat16);
  return &table;
}
#endif

// In the order of cmake/capabilities.cmake, which defines ATTN_EXT_HAS_* for the sets in this build.
std::vector<KernelSet> built_kernel_sets() {
  return {
#ifdef ATTN_EXT_HAS_baseline
      {"baseline", &baseline::kKernels, baseline::kFeatures},
#endif
#ifdef ATTN_EXT_HAS_avx2
      {"avx2", &avx2::kKernels, avx2::kFeatures},
#endif
#ifdef ATTN_EXT_HAS_avx512
      {"avx512", &avx512::kKernels, avx512::kFeatures},
#endif
#ifdef ATTN_EXT_HAS_avx512_bf16
      {"avx512_bf16", avx512_bf16_kernels(), avx512_bf16::kFeatures},
#endif
#ifdef ATTN_EXT_HAS_amx
      {"amx", amx_kernels(), amx::kFeatures},
#endif
#ifdef ATTN_EXT_HAS_neon
      {"neon", &neon::kKernels, neon::kFeatures},
#endif
#ifdef ATTN_EXT_HAS_neon_bf16
      {"neon_bf16", neon_bf16_kernels(), neon_bf16::kFeatures},
#endif
  };
}

}  // namespace

std::vector<KernelSet> supported_kernel_sets() {
  const Features features = supported_features();
  std::vector<KernelSet> supported;
  for (const KernelSet& set : built_kernel_sets()) {
    if ((set.features & ~features) == 0) {
      supported.push_back(set);
    }
  }
  // Without a matrix unit its set does what the one before it does, with some detours.
  const std::size_t count = supported.size();
  if (count > 1 && std::string_view(supported[count - 1].name) == "amx" && !matrix_unit_is_there()) {
    std::swap(supported[count - 2], supported[count - 1]);
  }
  return supported;
}

}  // namespace attn_ext::cpu
