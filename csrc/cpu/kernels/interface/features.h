// The extensions of the processor that the instruction sets are made of: one table for what a set is compiled
// for (vector/instruction_set.h holds it against what the compiler says) and for what the processor is asked
// at run time (kernel_sets.cpp). So no set can be compiled for what nobody asks about.
#pragma once

#include <cstdint>
#include <initializer_list>

// FEATURE(name, the compiler's macro, how the processor is asked). Clang's __builtin_cpu_supports knows no
// F16C before version 18.
#define ATTN_EXT_FEATURES(FEATURE)                                    \
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

}  // namespace attn_ext::cpu
