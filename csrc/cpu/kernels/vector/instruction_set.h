// Fails to compile where the compiler was told of other extensions than the set's own: as by
// CXXFLAGS=-march=native, which cmake/capabilities.cmake takes back. A processor that is asked for the set's
// extensions only would crash.
#pragma once

#include "../interface/features.h"

#ifndef ATTN_EXT_CPU_CAPABILITY
#error "kernels are compiled with -DATTN_EXT_CPU_CAPABILITY=<instruction set>: it names their namespace"
#endif

// What no set has, and a compiler would use unasked.
#if defined(__SSE4A__) || defined(__XOP__) || defined(__FMA4__) || defined(__TBM__) || defined(__BMI__) || \
    defined(__BMI2__) || defined(__LZCNT__) || defined(__MOVBE__) || defined(__GFNI__) ||                  \
    defined(__VAES__) || defined(__AVXVNNI__) || defined(__AVXIFMA__) || defined(__AVXNECONVERT__) ||      \
    defined(__APX_F__) || defined(__AVX10_1__) || defined(__AVX512IFMA__) || defined(__AVX512VBMI__) ||    \
    defined(__AVX512VBMI2__) || defined(__AVX512VNNI__) || defined(__AVX512BITALG__) ||                    \
    defined(__AVX512VPOPCNTDQ__) || defined(__AVX512VP2INTERSECT__) || defined(__AVX512FP16__) ||          \
    defined(__ARM_FEATURE_SVE) || defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_MATMUL_INT8) ||  \
    defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC) || defined(__ARM_FEATURE_FRINT) ||                       \
    defined(__ARM_FEATURE_SHA3)
#error "a foreign instruction set: the compiler's flags allow an extension that none of the kernels' sets has"
#endif

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// A macro that is defined is "1", any other its own name.
#define ATTN_EXT_TEXT(macro) #macro
#define ATTN_EXT_BIT(name, macro, ask) | (ATTN_EXT_TEXT(macro)[0] == '1' ? bits_of({Feature::k##name}) : 0u)
static_assert((0u ATTN_EXT_FEATURES(ATTN_EXT_BIT)) == kFeatures,
              "a foreign instruction set: the compiler's flags allow other extensions than "
              "interface/features.h names for this set");
#undef ATTN_EXT_BIT
#undef ATTN_EXT_TEXT

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
