// The extensions of the processor that the instruction sets are made of: one table for what a set is compiled
// for (vector/instruction_set.h holds it against what the compiler says) and for what the processor is asked
// at run time (kernel_sets.cpp). So no set can be compiled for what nobody asks about.
#pragma once

#include <cstdint>
#include <initializer_list>

// FEATURE(name, the compiler's macro, how the processor is asked). Clang's __builtin_cpu_supports knows no
// F16C before version 18.
#define ATTN_EXT_X86_FEATURES(FEATURE)                                \
  FEATURE(Sse3, __SSE3__, __builtin_cpu_supports("sse3"))             \
  FEATURE(Ssse3, __SSSE3__, __builtin_cpu_supports("ssse3"))          \
  FEATURE(Sse41, __SSE4_1__, __builtin_cpu_supports("sse4.1"))        \
  FEATURE(Sse42, __SSE4_2__, __builtin_cpu_supports("sse4.2"))        \
  FEATURE(Popcnt, __POPCNT__, __builtin_cpu_supports("popcnt"))       \
  FEATURE(Avx, __AVX__, __builtin_cpu_supports("avx"))                \
  FEATURE(Avx2, __AVX2__, __builtin_cpu_supports("avx2"))             \
  FEATURE(Fma, __FMA__, __builtin_cpu_supports("fma"))                \
  FEATURE(F16c, __F16C__, supports_f16c())                            \
  FEATURE(Avx512f, __AVX512F__, __builtin_cpu_supports("avx512f"))    \
  FEATURE(Avx512cd, __AVX512CD__, __builtin_cpu_supports("avx512cd")) \
  FEATURE(Avx512bw, __AVX512BW__, __builtin_cpu_supports("avx512bw")) \
  FEATURE(Avx512dq, __AVX512DQ__, __builtin_cpu_supports("avx512dq")) \
  FEATURE(Avx512vl, __AVX512VL__, __builtin_cpu_supports("avx512vl")) \
  FEATURE(Avx512bf16, __AVX512BF16__, __builtin_cpu_supports("avx512bf16"))

// Every processor of armv8-a has NEON, and compilers use it unasked, for the plain vectors of `baseline` as
// well: the macro is that of cmake/capabilities.cmake.
#define ATTN_EXT_ARM_FEATURES(FEATURE)                                               \
  FEATURE(Neon, ATTN_EXT_NEON, true)                                                 \
  FEATURE(Crc32, __ARM_FEATURE_CRC32, arm_cpu_has(1, 7, "armv8_crc32"))              \
  FEATURE(Atomics, __ARM_FEATURE_ATOMICS, arm_cpu_has(1, 8, "arm.FEAT_LSE"))         \
  FEATURE(RoundingDoubling, __ARM_FEATURE_QRDMX, arm_cpu_has(1, 12, "arm.FEAT_RDM")) \
  FEATURE(NeonBf16, __ARM_FEATURE_BF16_VECTOR_ARITHMETIC, arm_cpu_has(2, 14, "arm.FEAT_BF16"))

#define ATTN_EXT_FEATURES(FEATURE) ATTN_EXT_X86_FEATURES(FEATURE) ATTN_EXT_ARM_FEATURES(FEATURE)

namespace attn_ext::cpu {

enum class Feature {
#define ATTN_EXT_NAME(name, macro, ask) k##name,
  ATTN_EXT_FEATURES(ATTN_EXT_NAME)
#undef ATTN_EXT_NAME
};

using Features = uint32_t;  // a bit each

constexpr Features bits_of(std::initializer_list<Feature> list) {
  Features bits = 0;
  for (const Feature feature : list) bits |= 1u << static_cast<int>(feature);
  return bits;
}

// What each set is compiled for, and needs.
namespace baseline {
constexpr Features kFeatures = 0;
}
namespace avx2 {
constexpr Features kFeatures =
    bits_of({Feature::kSse3, Feature::kSsse3, Feature::kSse41, Feature::kSse42, Feature::kPopcnt,
             Feature::kAvx, Feature::kAvx2, Feature::kFma, Feature::kF16c});
}
namespace avx512 {
constexpr Features kFeatures =
    avx2::kFeatures | bits_of({Feature::kAvx512f, Feature::kAvx512cd, Feature::kAvx512bw, Feature::kAvx512dq,
                               Feature::kAvx512vl});
}
namespace avx512_bf16 {
constexpr Features kFeatures = avx512::kFeatures | bits_of({Feature::kAvx512bf16});
}
namespace amx {  // AMX itself is asked for by interface/matrix_unit.h, and done without where it is not there
constexpr Features kFeatures = avx512_bf16::kFeatures;
}
namespace neon {
constexpr Features kFeatures = bits_of({Feature::kNeon});
}
namespace neon_bf16 {
// GCC has bfloat16 from armv8.2-a on only, with which the other three come.
constexpr Features kFeatures = neon::kFeatures | bits_of({Feature::kCrc32, Feature::kAtomics,
                                                          Feature::kRoundingDoubling, Feature::kNeonBf16});
}  // namespace neon_bf16

}  // namespace attn_ext::cpu
