// Elements in memory to vectors of the type that is computed with, and back.
#pragma once

#include <type_traits>

#include "simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename Element>
struct ComputeOf {
  using Type = float;
};
template <>
struct ComputeOf<double> {
  using Type = double;
};
template <typename Element>
using Compute = typename ComputeOf<Element>::Type;

typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));
typedef uint16_t HalfBitsUnaligned __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

ATTN_EXT_INLINE HalfBits load_half_bits(const uint16_t* p) {
  return *reinterpret_cast<const HalfBitsUnaligned*>(p);
}

// GCC goes through memory for these conversions of whole registers, hence the instructions by name.
ATTN_EXT_INLINE Vec<uint32_t> widen(HalfBits bits) {
#if defined(__AVX512F__)
  return (Vec<uint32_t>)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
  return (Vec<uint32_t>)_mm256_cvtepu16_epi32((__m128i)bits);
#elif defined(__SSE2__)
  int64_t four;
  memcpy(&four, &bits, sizeof(four));
  return (Vec<uint32_t>)_mm_unpacklo_epi16(_mm_cvtsi64_si128(four), _mm_setzero_si128());
#elif defined(ATTN_EXT_NEON)
  return (Vec<uint32_t>)vmovl_u16((uint16x4_t)bits);
#else
  return __builtin_convertvector(bits, Vec<uint32_t>);
#endif
}

ATTN_EXT_INLINE HalfBits low_halves(Vec<uint32_t> v) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  return (HalfBits)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#elif defined(ATTN_EXT_NEON)
  return (HalfBits)vmovn_u32((uint32x4_t)v);
#else
  return __builtin_convertvector(v, HalfBits);
#endif
}

ATTN_EXT_INLINE float to_compute(float x) {
  return x;
}
ATTN_EXT_INLINE double to_compute(double x) {
  return x;
}

ATTN_EXT_INLINE float to_compute(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}

ATTN_EXT_INLINE float to_compute(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 h;
  memcpy(&h, &x.bits, sizeof(h));
  return h;
#else
  // Moves exponent and mantissa to their float places; the product repairs the exponent bias, subnormals
  // included.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  float y;
  memcpy(&y, &magnitude, sizeof(y));
  y *= 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &y, sizeof(bits));
  if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000u;
  bits |= sign;
  memcpy(&y, &bits, sizeof(y));
  return y;
#endif
}

ATTN_EXT_INLINE Vec<float> load_compute(const float* p) {
  return load(p);
}
ATTN_EXT_INLINE Vec<double> load_compute(const double* p) {
  return load(p);
}

// Floats from a vector as it lies in memory, of the type that the pointer names.
ATTN_EXT_INLINE Vec<float> from_half_bits(HalfBits bits, const BFloat16*) {
  return (Vec<float>)(widen(bits) << 16);
}
ATTN_EXT_INLINE Vec<float> from_half_bits(HalfBits bits, const Float16*) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
#elif defined(ATTN_EXT_NEON)
  return (Vec<float>)vcvt_f32_f16((float16x4_t)bits);
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_compute(Float16{bits[i]});
  return v;
#endif
}

ATTN_EXT_INLINE Vec<float> load_compute(const BFloat16* p) {
  return from_half_bits(load_half_bits(&p->bits), p);
}
ATTN_EXT_INLINE Vec<float> load_compute(const Float16* p) {
  return from_half_bits(load_half_bits(&p->bits), p);
}

ATTN_EXT_INLINE float to_compute(int8_t x) {
  return static_cast<float>(x);
}

// Exponent and mantissa at their places in a float16, whose exponent counts from 8 more. No infinity: what
// would be the largest number is NaN.
ATTN_EXT_INLINE float to_compute(Float8E4m3 x) {
  const auto magnitude = static_cast<uint16_t>(x.bits & 0x7f);
  const auto sign = static_cast<uint16_t>((x.bits & 0x80) << 8);
  if (magnitude == 0x7f) return __builtin_nanf("");
  return to_compute(Float16{static_cast<uint16_t>(sign | magnitude << 7)}) * 256;
}

#if defined(ATTN_EXT_NEON)
// A vector's worth of bytes, in the lower half.
template <typename Byte>
ATTN_EXT_INLINE uint8x8_t load_bytes(const Byte* p) {
  uint32_t bytes;
  memcpy(&bytes, p, sizeof(bytes));
  return vcreate_u8(bytes);
}
#endif

ATTN_EXT_INLINE Vec<float> load_compute(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (Vec<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return (Vec<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#elif defined(ATTN_EXT_NEON)
  const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(load_bytes(p)));
  return (Vec<float>)vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_compute(p[i]);
  return v;
#endif
}

ATTN_EXT_INLINE Vec<float> load_compute(const Float8E4m3* p) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi16(0x80)), 8);
  const __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));
  const Vec<float> v = (Vec<float>)_mm512_cvtph_ps(half) * 256.0f;
  const Vec<uint32_t> wide = widen((HalfBits)magnitude);
  return wide == 0x7fu ? broadcast(__builtin_nanf("")) : v;
#elif defined(ATTN_EXT_NEON)
  const uint16x4_t bits = vget_low_u16(vmovl_u8(load_bytes(p)));
  const uint16x4_t magnitude = vand_u16(bits, vdup_n_u16(0x7f));
  const uint16x4_t sign = vshl_n_u16(vand_u16(bits, vdup_n_u16(0x80)), 8);
  const uint16x4_t half = vorr_u16(sign, vshl_n_u16(magnitude, 7));
  const Vec<float> v = (Vec<float>)vcvt_f32_f16(vreinterpret_f16_u16(half)) * 256.0f;
  const Vec<uint32_t> wide = widen((HalfBits)magnitude);
  return wide == 0x7fu ? broadcast(__builtin_nanf("")) : v;
#else
  Vec<float> v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_compute(p[i]);
  return v;
#endif
}

// Copies `count` elements, fewer than a vector of what is computed with (of bytes, than two), to where as
// many have room.
template <typename Element>
ATTN_EXT_INLINE void copy_partial(Element* to, const Element* from, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (sizeof(Element) >= 4) {
    store_partial(to, load_partial(from, count), count);
    return;
  }
  if constexpr (sizeof(Element) == 1) {
    const auto lanes = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    _mm256_mask_storeu_epi8(to, lanes, _mm256_maskz_loadu_epi8(lanes, from));
    return;
  }
  if constexpr (sizeof(Element) == 2) {
    _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1),
                             _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), from));
    return;
  }
#endif
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

// The first `count`, 0 in the other lanes.
ATTN_EXT_INLINE HalfBits load_half_bits_partial(const uint16_t* p, int64_t count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return (HalfBits)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), p);
#elif defined(__AVX2__)
  // In registers: a load of what was just stored in part would wait for the store.
  if (count == kLanes<float>) return load_half_bits(p);
  uint64_t four = 0, rest = 0;
  const uint16_t* last = p + count / 4 * 4;
  if (count >= 4) memcpy(&four, p, sizeof(four));
  if (count % 4 >= 2) memcpy(&rest, last, sizeof(uint32_t));
  if (count % 2 == 1) rest |= static_cast<uint64_t>(p[count - 1]) << (count % 4 - 1) * 16;
  return (HalfBits)(count >= 4 ? _mm_set_epi64x(static_cast<int64_t>(rest), static_cast<int64_t>(four))
                               : _mm_cvtsi64_si128(static_cast<int64_t>(rest)));
#else
  uint16_t padded[kLanes<float>] = {};  // as Clang takes a vector through memory for each lane
  copy_partial(padded, p, count);
  return load_half_bits(padded);
#endif
}

// The first `count` elements, zero in the other lanes.
template <typename Element>
ATTN_EXT_INLINE Vec<Compute<Element>> load_compute_partial(const Element* p, int64_t count) {
  if constexpr (sizeof(Element) >= 4) {
    return load_partial(p, count);
  } else {
    return from_half_bits(load_half_bits_partial(&p->bits, count), p);
  }
}

// float to bfloat16, to nearest even, a NaN stays one: the upper halves of the lanes.
ATTN_EXT_INLINE Vec<uint32_t> bfloat16_bits(Vec<float> v) {
  const Vec<uint32_t> bits = (Vec<uint32_t>)v;
  const Vec<uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (v != v) ? Vec<uint32_t>{} + 0x7fc0u : rounded;
}

// A vector as it lies in memory, of the type that the pointer names.
ATTN_EXT_INLINE Vec<float> to_element(Vec<float> v, const float*) {
  return v;
}
ATTN_EXT_INLINE Vec<double> to_element(Vec<double> v, const double*) {
  return v;
}
ATTN_EXT_INLINE HalfBits to_element(Vec<float> v, const BFloat16*) {
#if defined(__AVX512BF16__)
  return (HalfBits)_mm512_cvtneps_pbh((__m512)v);  // subnormals become 0, as in the products of this set
#elif defined(ATTN_EXT_NEON) && defined(ATTN_EXT_HAS_PAIRS)
  return (HalfBits)vcvt_bf16_f32((float32x4_t)v);
#else
  return low_halves(bfloat16_bits(v));
#endif
}

#if !defined(__F16C__) && !defined(__aarch64__)
ATTN_EXT_INLINE uint16_t float16_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past the largest float16
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded mantissa in the low bits
    float y;
    memcpy(&y, &bits, sizeof(y));
    y += 0.5f;
    memcpy(&bits, &y, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xc8000fffu + ((bits >> 13) & 1u);  // rebias the exponent by -112 and round to nearest even
  return static_cast<uint16_t>(sign | (bits >> 13));
}
#endif

ATTN_EXT_INLINE HalfBits to_element(Vec<float> v, const Float16*) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(ATTN_EXT_NEON)
  return (HalfBits)vcvt_f16_f32((float32x4_t)v);
#else
  HalfBits bits;
  for (int i = 0; i < kLanes<float>; ++i) {
#if defined(__aarch64__)
    const __fp16 h = static_cast<__fp16>(v[i]);
    memcpy(reinterpret_cast<char*>(&bits) + 2 * i, &h, sizeof(h));
#else
    bits[i] = float16_bits(v[i]);
#endif
  }
  return bits;
#endif
}

#if defined(ATTN_EXT_HAS_PAIRS)
// Two vectors as bfloat16, beside each other: pairs of the lanes of `low`, then of `high`.
ATTN_EXT_INLINE Vec<uint32_t> to_pairs(Vec<float> low, Vec<float> high) {
#if defined(__AVX512BF16__)
  return (Vec<uint32_t>)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
  return (Vec<uint32_t>)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)low), (float32x4_t)high);
#endif
}

// From two rows of bfloat16, each in pairs of neighbours, to pairs of one of each row: of the first half of
// them, or of the second.
ATTN_EXT_INLINE Vec<uint32_t> pair_first_half(Vec<uint32_t> a, Vec<uint32_t> b) {
#if defined(__AVX512BF16__)
  const Vec<int32_t> words = lane_index<int32_t>() * 0x10001 + (32 << 16);  // words 0, 32, 1, 33, ...
  return (Vec<uint32_t>)_mm512_permutex2var_epi16((__m512i)a, (__m512i)words, (__m512i)b);
#else
  return (Vec<uint32_t>)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
}
ATTN_EXT_INLINE Vec<uint32_t> pair_second_half(Vec<uint32_t> a, Vec<uint32_t> b) {
#if defined(__AVX512BF16__)
  const Vec<int32_t> words = lane_index<int32_t>() * 0x10001 + (32 << 16) + 0x00100010;
  return (Vec<uint32_t>)_mm512_permutex2var_epi16((__m512i)a, (__m512i)words, (__m512i)b);
#else
  return (Vec<uint32_t>)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
#endif
}
#endif

template <typename Element>
ATTN_EXT_INLINE void store_element(Element* p, Vec<Compute<Element>> v) {
  const auto lanes = to_element(v, p);
  memcpy(p, &lanes, sizeof(lanes));
}

template <typename Element>
ATTN_EXT_INLINE void store_element_partial(Element* p, Vec<Compute<Element>> v, int64_t count) {
  if constexpr (sizeof(Element) >= 4) {
    store_partial(p, v, count);
  } else {
    Element padded[kLanes<float>];
    store_element(padded, v);
    copy_partial(p, padded, count);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
