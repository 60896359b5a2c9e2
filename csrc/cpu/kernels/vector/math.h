// exp2, log and tanh on vectors. Accurate to about an ulp; NaN in, NaN out.
#pragma once

#include "simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr double kLog2E = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

template <typename T>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr int32_t kBias = 127;
  static constexpr float kLargest = 3.402823466e+38f;
  static constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
};
template <>
struct FloatFormat<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr int64_t kBias = 1023;
  static constexpr double kLargest = 1.7976931348623157e+308;
  static constexpr double kRounder = 6755399441055744.0;
};

// Minimax polynomials (relative error) for 2^r: on [0, 1) where the hardware splits off the floor, else on
// [-1/2, 1/2]. The constant is held at 1, so that 2^0 is exactly 1.
template <typename T>
struct Exp2Coefficients;
template <>
struct Exp2Coefficients<float> {
  static constexpr double kFloor[] = {
      1.0, 0.693151311805, 0.240164450155, 0.0557999131051, 0.00901703032103, 0.00186713007038};
  static constexpr double kNearest[] = {
      1.0, 0.693146977599, 0.240222420854, 0.0555073374325, 0.00967151263965, 0.00132647271974};
};
template <>
struct Exp2Coefficients<double> {
  static constexpr double kFloor[] = {1.0,
                                      0.6931471805599462346,
                                      0.24022650695905471359,
                                      0.05550410866571114055,
                                      0.00961812909879262171,
                                      0.0013333558661575757352,
                                      0.00015403511446490552452,
                                      0.000015253190248831243385,
                                      1.3208193495747121518e-6,
                                      1.0254457379014550223e-7,
                                      6.5544571626548391491e-9,
                                      6.2724344648028895648e-10};
  static constexpr double kNearest[] = {1.0,
                                        0.69314718055994533046,
                                        0.24022650695910156205,
                                        0.055504108664819921483,
                                        0.0096181291075883350833,
                                        0.0013333558146789950323,
                                        0.00015403530462514613026,
                                        0.0000152527334899608046,
                                        1.3215433089594629037e-6,
                                        1.0178198033328527662e-7,
                                        7.0741056262456593708e-9,
                                        4.4352809446103361611e-10};
};

template <typename T, int Terms>
ATTN_EXT_INLINE Vec<T> polynomial(const double (&coefficients)[Terms], Vec<T> x) {
  Vec<T> y = broadcast(static_cast<T>(coefficients[Terms - 1]));
#pragma GCC unroll 16
  for (int i = Terms - 2; i >= 0; --i) y = multiply_add(y, x, broadcast(static_cast<T>(coefficients[i])));
  return y;
}

// 2^x for x up to the largest exponent; exactly 0 for -inf and where the result is far below the smallest
// normal.
template <typename T>
ATTN_EXT_INLINE Vec<T> exp2(Vec<T> x) {
#if defined(__AVX512DQ__)
  // x - floor(x) is 0 for -inf, and scaling by 2^-inf gives 0: no clamp is needed.
  if constexpr (sizeof(T) == 4) {
    const Vec<T> r = (Vec<T>)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const Vec<T> y = polynomial<T>(Exp2Coefficients<T>::kFloor, r);
    return (Vec<T>)_mm512_scalef_ps((__m512)y, (__m512)x);
  } else {
    const Vec<T> r = (Vec<T>)_mm512_reduce_pd((__m512d)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const Vec<T> y = polynomial<T>(Exp2Coefficients<T>::kFloor, r);
    return (Vec<T>)_mm512_scalef_pd((__m512d)y, (__m512d)x);
  }
#else
  // At the lower bound r is 0, the polynomial is 1, and taking the bias from its exponent leaves the bits of
  // 0.
  using Format = FloatFormat<T>;
  x = maximum(broadcast(static_cast<T>(-Format::kBias)), x);
  const Vec<T> shifted = x + Format::kRounder;
  const Vec<T> r = x - (shifted - Format::kRounder);
  const Vec<T> y = polynomial<T>(Exp2Coefficients<T>::kNearest, r);
  const Vec<T> scaled = (Vec<T>)((Vec<Bits<T>>)y + ((Vec<Bits<T>>)shifted << Format::kMantissaBits));
  return x != x ? x : scaled;
#endif
}

// Where finite biases and sinks end in units of log2: so far from the lowest number that this, which stands
// for a visible score of -inf (keep_seen), weighs nothing beside them.
template <typename T>
constexpr T kFarthest = FloatFormat<T>::kLargest / 2;

// Beyond it, in units of log2, a score's rounding tells.
constexpr double kFarScore = 256;

// Biases or sinks in units of log2: NaN and Inf as they are, finite numbers up to kFarthest.
template <typename T>
ATTN_EXT_INLINE Vec<T> in_log2(Vec<T> x) {
  const Vec<T> y = x * static_cast<T>(kLog2E);
  const Vec<T> farthest = broadcast(kFarthest<T>);
#if defined(__AVX512DQ__)
  constexpr int kSmallerSize = 0x2;  // with the sign of the first
  constexpr int kSecondIfNonfinite = 0x00110011;
  if constexpr (sizeof(T) == 4) {
    const __m512 clamped = _mm512_range_ps((__m512)y, (__m512)farthest, kSmallerSize);
    return (Vec<T>)_mm512_fixupimm_ps(clamped, (__m512)x, _mm512_set1_epi32(kSecondIfNonfinite), 0);
  } else {
    const __m512d clamped = _mm512_range_pd((__m512d)y, (__m512d)farthest, kSmallerSize);
    return (Vec<T>)_mm512_fixupimm_pd(clamped, (__m512d)x, _mm512_set1_epi64(kSecondIfNonfinite), 0);
  }
#else
  return x - x == Vec<T>{} ? minimum(farthest, maximum(-farthest, y)) : x;
#endif
}

// -inf where `bias` is so, x elsewhere.
template <typename T>
ATTN_EXT_INLINE Vec<T> hide_where_minus_inf(Vec<T> bias, Vec<T> x) {
#if defined(__AVX512DQ__)
  constexpr int kSecondIfMinusInf = 0x00010000;
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_fixupimm_ps((__m512)x, (__m512)bias, _mm512_set1_epi32(kSecondIfMinusInf), 0);
  } else {
    return (Vec<T>)_mm512_fixupimm_pd((__m512d)x, (__m512d)bias, _mm512_set1_epi64(kSecondIfMinusInf), 0);
  }
#else
  return bias == -kInfinity<T> ? bias : x;
#endif
}

// The same of one.
template <typename T>
ATTN_EXT_INLINE T in_log2(T x) {
  constexpr T kMost = kFarthest<T>;
  const T y = x * static_cast<T>(kLog2E);
  if (!(x - x == 0)) return y;
  return y > kMost ? kMost : y < -kMost ? -kMost : y;
}

// A sink: rounded once by the caller, but where biases as far from 0 are not.
template <typename T>
ATTN_EXT_INLINE double sink_in_log2(T sink) {
  const double exact = static_cast<double>(sink) * kLog2E;
  return exact >= -kFarScore && exact <= kFarScore ? exact : static_cast<double>(in_log2<T>(sink));
}

// log x = n ln 2 + 2 atanh((m - 1) / (m + 1)), x = 2^n m with m in [sqrt(1/2), sqrt(2)), for normal x > 0.
template <typename T>
ATTN_EXT_INLINE Vec<T> log_normal(Vec<T> x) {
  using Format = FloatFormat<T>;
  constexpr int kTerms = sizeof(T) == 4 ? 5 : 11;
  const Vec<Bits<T>> offset = (Vec<Bits<T>>)broadcast(static_cast<T>(0.70710678118654752));
  const Vec<Bits<T>> exponent = ((Vec<Bits<T>>)x - offset) >> Format::kMantissaBits;
  const Vec<T> m = (Vec<T>)((Vec<Bits<T>>)x - (exponent << Format::kMantissaBits));
  const Vec<T> n = __builtin_convertvector(exponent, Vec<T>);
  const Vec<T> s = (m - static_cast<T>(1)) / (m + static_cast<T>(1));
  const Vec<T> square = s * s;
  Vec<T> series = broadcast(static_cast<T>(1.0 / (2 * kTerms + 1)));
  for (int i = kTerms - 1; i >= 0; --i) {
    series = multiply_add(series, square, broadcast(static_cast<T>(1.0 / (2 * i + 1))));
  }
  const Vec<T> y = multiply_add(n, broadcast(static_cast<T>(kLn2)), (s + s) * series);
  return x != x ? x : y;
}

// tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1, which keeps the relative error small near 0.
template <typename T>
ATTN_EXT_INLINE Vec<T> tanh(Vec<T> x) {
  using Format = FloatFormat<T>;
  constexpr int kTerms = sizeof(T) == 4 ? 8 : 15;
  constexpr double kLn2High = sizeof(T) == 4 ? 0.693359375 : 0.693147180369123816490;
  constexpr double kLn2Low = sizeof(T) == 4 ? -2.12194440e-4 : 1.90821492927058770002e-10;
  constexpr T kBound = sizeof(T) == 4 ? 20 : 44;  // tanh is 1 to the last bit long before
  const Vec<T> zero = {};
  Vec<T> y = x < zero ? -x - x : x + x;
  y = y > broadcast(kBound) ? broadcast(kBound) : y;
  const Vec<T> shifted = multiply_add(y, broadcast(static_cast<T>(kLog2E)), broadcast(Format::kRounder));
  const Vec<T> n = shifted - Format::kRounder;
  Vec<T> r = multiply_add(n, broadcast(static_cast<T>(-kLn2High)), y);
  r = multiply_add(n, broadcast(static_cast<T>(-kLn2Low)), r);
  Vec<T> series = broadcast(static_cast<T>(1.0 / kTerms));
  for (int i = kTerms - 1; i >= 1; --i) {  // r + r^2/2 (1 + r/3 (1 + r/4 (...)))
    series = multiply_add(series, r, broadcast(static_cast<T>(1)));
    if (i > 1) series *= broadcast(static_cast<T>(1.0 / i));
  }
  const Vec<T> expm1_r = series * r;
  const Vec<T> power =
      (Vec<T>)((Vec<Bits<T>>)broadcast(static_cast<T>(1)) + ((Vec<Bits<T>>)shifted << Format::kMantissaBits));
  const Vec<T> e = multiply_add(power, expm1_r, power - static_cast<T>(1));
  const Vec<T> magnitude = e / (e + static_cast<T>(2));
  return x != x ? x : (x < zero ? -magnitude : magnitude);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
