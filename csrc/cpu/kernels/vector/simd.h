// Vectors of the instruction set that this file is compiled for, over the compiler's own vector types:
// arithmetic, comparison and selection (mask ? a : b) are operators; only what has no operator is a function
// here.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(ATTN_EXT_NEON)
#include <arm_neon.h>
#endif

#include "instruction_set.h"

#define ATTN_EXT_INLINE inline __attribute__((always_inline))

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Pairs of bfloat16 are multiplied as they are.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define ATTN_EXT_HAS_PAIRS
#endif

// 32 vector registers hold a 6x4 tile of accumulators with its operands, 16 hold a 6x2 one.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif
constexpr int kRegisterTileRows = 6;

// A tile of so few vectors waits for its own sums, and costs as many calls as a whole one: it is twice as
// high where there are rows enough. (Arm's tiles hold a register for each row beside the sums.)
#if defined(__x86_64__)
constexpr int kTallTileVectors = kTileVectors / 2;
#else
constexpr int kTallTileVectors = 0;
#endif
constexpr int kTallTileRows = 2 * kRegisterTileRows;

// Processors that do a 512-bit operation in two halves do half a vector in half the time.
#if defined(__AVX512F__)
constexpr bool kHasHalfVectors = true;
#else
constexpr bool kHasHalfVectors = false;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4m3 {
  uint8_t bits;
};

template <typename T>
struct VectorOf;
#define ATTN_EXT_VECTOR_OF(T)                                                                              \
  template <>                                                                                              \
  struct VectorOf<T> {                                                                                     \
    typedef T Type __attribute__((vector_size(kVectorBytes)));                                             \
    typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));         \
    typedef T Half __attribute__((vector_size(kVectorBytes / 2)));                                         \
    typedef T HalfUnaligned __attribute__((vector_size(kVectorBytes / 2), aligned(sizeof(T)), may_alias)); \
  }
ATTN_EXT_VECTOR_OF(float);
ATTN_EXT_VECTOR_OF(double);
ATTN_EXT_VECTOR_OF(int16_t);
ATTN_EXT_VECTOR_OF(uint16_t);
ATTN_EXT_VECTOR_OF(int32_t);
ATTN_EXT_VECTOR_OF(uint32_t);
ATTN_EXT_VECTOR_OF(int64_t);
ATTN_EXT_VECTOR_OF(uint64_t);
#undef ATTN_EXT_VECTOR_OF

template <typename T>
using Vec = typename VectorOf<T>::Type;
template <typename T>
using HalfVec = typename VectorOf<T>::Half;
template <typename T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

// The integer with the bits of T.
template <typename T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Signed = int32_t;
};
template <>
struct BitsOf<double> {
  using Signed = int64_t;
};
template <>
struct BitsOf<uint16_t> {
  using Signed = int16_t;
};
template <typename T>
using Bits = typename BitsOf<T>::Signed;

template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

ATTN_EXT_INLINE constexpr int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
ATTN_EXT_INLINE constexpr int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}
ATTN_EXT_INLINE constexpr int64_t ceil_div(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}
ATTN_EXT_INLINE constexpr int64_t round_down(int64_t n, int64_t unit) {
  return n / unit * unit;
}
ATTN_EXT_INLINE constexpr int64_t round_up(int64_t n, int64_t unit) {
  return ceil_div(n, unit) * unit;
}

template <typename T>
ATTN_EXT_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::Unaligned*>(p);
}

template <typename T>
ATTN_EXT_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<typename VectorOf<T>::Unaligned*>(p) = v;
}

template <typename T>
ATTN_EXT_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

template <typename T>
ATTN_EXT_INLINE Vec<T> lane_index() {
  Vec<T> v;
  for (int i = 0; i < kLanes<T>; ++i) v[i] = static_cast<T>(i);
  return v;
}

// The first `count` lanes from memory, zero in the others; nothing past them is read.
template <typename T>
ATTN_EXT_INLINE Vec<T> load_partial(const T* p, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), p);
  } else {
    return (Vec<T>)_mm512_maskz_loadu_epi64(static_cast<__mmask8>((1u << count) - 1), p);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    const auto there = lane_index<int32_t>() < broadcast(static_cast<int32_t>(count));
    return (Vec<T>)_mm256_maskload_epi32(reinterpret_cast<const int*>(p), (__m256i)there);
  } else {
    const auto there = lane_index<int64_t>() < broadcast(count);
    return (Vec<T>)_mm256_maskload_epi64(reinterpret_cast<const long long*>(p), (__m256i)there);
  }
#else
  Vec<T> v = {};
  for (int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
#endif
}

template <typename T>
ATTN_EXT_INLINE void store_partial(T* p, Vec<T> v, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << count) - 1), (__m512i)v);
  } else {
    _mm512_mask_storeu_epi64(p, static_cast<__mmask8>((1u << count) - 1), (__m512i)v);
  }
#elif defined(__AVX2__)
  // Half, quarter and eighth, whichever the count is made of: some processors store slowly by a mask.
  if (count == kLanes<T>) return store(p, v);
  __m128i rest = _mm256_castsi256_si128((__m256i)v);
  if (count >= kLanes<T> / 2) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), rest);
    rest = _mm256_extracti128_si256((__m256i)v, 1);
    p += kLanes<T> / 2;
    count -= kLanes<T> / 2;
  }
  if constexpr (sizeof(T) == 4) {
    if (count >= 2) {
      _mm_storel_epi64(reinterpret_cast<__m128i*>(p), rest);
      rest = _mm_unpackhi_epi64(rest, rest);
      p += 2;
      count -= 2;
    }
  }
  if (count > 0) memcpy(p, &rest, sizeof(T));
#else
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
#endif
}

// a * b + c, fused wherever the instruction set can.
ATTN_EXT_INLINE Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(ATTN_EXT_NEON)
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

ATTN_EXT_INLINE Vec<double> multiply_add(Vec<double> a, Vec<double> b, Vec<double> c) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(ATTN_EXT_NEON)
  return (Vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

// A product that no compiler may fuse into a sum on its own: so its bits hang on no compiler.
template <typename V>
ATTN_EXT_INLINE V rounded(V product) {
#if defined(__x86_64__)
  __asm__("" : "+v"(product));
#elif defined(__aarch64__)
  __asm__("" : "+w"(product));
#endif
  return product;
}

#if defined(__AVX512F__)
ATTN_EXT_INLINE HalfVec<float> multiply_add(HalfVec<float> a, HalfVec<float> b, HalfVec<float> c) {
  return (HalfVec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ATTN_EXT_INLINE HalfVec<double> multiply_add(HalfVec<double> a, HalfVec<double> b, HalfVec<double> c) {
  return (HalfVec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}

// A half in the lower lanes, 0 in the upper ones.
ATTN_EXT_INLINE Vec<float> with_zeros(HalfVec<float> v) {
  return (Vec<float>)_mm512_zextps256_ps512((__m256)v);
}
ATTN_EXT_INLINE Vec<double> with_zeros(HalfVec<double> v) {
  return (Vec<double>)_mm512_zextpd256_pd512((__m256d)v);
}
#endif

template <typename T>
ATTN_EXT_INLINE HalfVec<T> lower_half(Vec<T> v) {
#if defined(__AVX512F__)
  return (HalfVec<T>)_mm512_castsi512_si256((__m512i)v);
#else
  HalfVec<T> half;
  memcpy(&half, &v, sizeof(half));
  return half;
#endif
}

// A vector of two halves that lie apart.
template <typename T>
ATTN_EXT_INLINE Vec<T> load_halves(const void* lower, const void* upper) {
#if defined(__AVX512F__)
  const __m512i half = _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(lower)));
  return (Vec<T>)_mm512_inserti64x4(half, _mm256_loadu_si256(static_cast<const __m256i*>(upper)), 1);
#else
  Vec<T> v;
  memcpy(&v, lower, sizeof(v) / 2);
  memcpy(reinterpret_cast<char*>(&v) + sizeof(v) / 2, upper, sizeof(v) / 2);
  return v;
#endif
}

template <typename T>
ATTN_EXT_INLINE HalfVec<T> load_half(const T* p) {
  return *reinterpret_cast<const typename VectorOf<T>::HalfUnaligned*>(p);
}

// The larger; b where either is NaN, so keep the operand whose NaN must show in b.
ATTN_EXT_INLINE Vec<float> maximum(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

ATTN_EXT_INLINE Vec<double> maximum(Vec<double> a, Vec<double> b) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  return (Vec<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  return a > b ? a : b;
#endif
}

// The smaller; b where either is NaN.
ATTN_EXT_INLINE Vec<float> minimum(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

ATTN_EXT_INLINE Vec<double> minimum(Vec<double> a, Vec<double> b) {
#if defined(__AVX512F__)
  return (Vec<double>)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  return (Vec<double>)_mm256_min_pd((__m256d)a, (__m256d)b);
#else
  return a < b ? a : b;
#endif
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
