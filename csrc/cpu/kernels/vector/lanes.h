// What mixes the lanes of vectors: sums and maxima over them, transposes of squares.
#pragma once

#include <utility>

#include "simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Lanes of two vectors, chosen by index: 0..n-1 from a, n..2n-1 from b.
template <typename T>
ATTN_EXT_INLINE Vec<T> shuffle(Vec<T> a, Vec<T> b, Vec<Bits<T>> index) {
#if defined(__clang__)
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    return (Vec<T>)_mm512_permutex2var_epi16((__m512i)a, (__m512i)index, (__m512i)b);
  } else if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_permutex2var_epi32((__m512i)a, (__m512i)index, (__m512i)b);
  } else {
    return (Vec<T>)_mm512_permutex2var_epi64((__m512i)a, (__m512i)index, (__m512i)b);
  }
#else
  Vec<T> v;
  for (int i = 0; i < kLanes<T>; ++i) v[i] = index[i] < kLanes<T> ? a[index[i]] : b[index[i] - kLanes<T>];
  return v;
#endif
#else
  return __builtin_shuffle(a, b, index);
#endif
}

// Over the lanes, by halving: the order does not depend on where the vector came from.
template <typename T, typename Join>
ATTN_EXT_INLINE T join_lanes(Vec<T> v, Join join) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int n = kLanes<T> / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) lanes[i] = join(lanes[i], lanes[i + n]);
  }
  return lanes[0];
}

template <typename T>
ATTN_EXT_INLINE T lane_sum(Vec<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)v);
  if constexpr (sizeof(T) == 8) return _mm512_reduce_add_pd((__m512d)v);
#elif defined(ATTN_EXT_NEON)
  if constexpr (sizeof(T) == 8) return vaddvq_f64((float64x2_t)v);
  if constexpr (sizeof(T) == 4) {
    return vaddv_f32(vadd_f32(vget_low_f32((float32x4_t)v), vget_high_f32((float32x4_t)v)));
  }
#endif
  return join_lanes<T>(v, [](T a, T b) { return a + b; });
}

template <typename T>
ATTN_EXT_INLINE T lane_max(Vec<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_reduce_max_ps((__m512)v);
  if constexpr (sizeof(T) == 8) return _mm512_reduce_max_pd((__m512d)v);
#elif defined(ATTN_EXT_NEON)
  if constexpr (sizeof(T) == 4) {
    const float32x2_t a = vget_low_f32((float32x4_t)v), b = vget_high_f32((float32x4_t)v);
    const float32x2_t top = vbsl_f32(vcgt_f32(a, b), a, b);
    return top[0] > top[1] ? top[0] : top[1];
  }
#endif
  return join_lanes<T>(v, [](T a, T b) { return a > b ? a : b; });
}

// Whether all of `count` numbers, whole vectors, are finite.
template <typename T>
inline bool are_finite(const T* x, int64_t count) {
  constexpr int kChains = 4;
  constexpr int64_t kLane = kLanes<T>;
  Vec<T> residue[kChains] = {};  // x - x is 0, NaN for what is not finite
  int64_t i = 0;
  for (; i + kChains * kLane <= count; i += kChains * kLane) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) residue[c] += load(x + i + c * kLane) - load(x + i + c * kLane);
  }
  for (; i < count; i += kLane) residue[0] += load(x + i) - load(x + i);
  return lane_sum<T>((residue[0] + residue[1]) + (residue[2] + residue[3])) == 0;
}

// Lanes that lie Step apart added, of a in the lanes without that bit and of b in those with it.
template <typename T, int Step>
ATTN_EXT_INLINE Vec<T> add_lanes_apart(Vec<T> a, Vec<T> b) {
  constexpr int kWidth = kLanes<T>;
  const Vec<Bits<T>> lane = lane_index<Bits<T>>();
  const Vec<Bits<T>> upper = (lane & Step) != 0 ? Vec<Bits<T>>{} + 1 : Vec<Bits<T>>{};
  const Vec<Bits<T>> kept = lane + upper * kWidth;
  const Vec<Bits<T>> moved = lane + upper * (kWidth - 2 * Step) + Step;
  return shuffle<T>(a, b, kept) + shuffle<T>(a, b, moved);
}

// Sums the lanes of as many vectors as a vector has lanes: lane i of the result is the sum of sums[i], which
// does not depend on which vectors stand beside it. Neighbouring lanes first.
template <typename T, int Step = 1>
ATTN_EXT_INLINE Vec<T> lane_sums(Vec<T> (&sums)[kLanes<T>]) {
  constexpr int kWidth = kLanes<T>;
#if defined(ATTN_EXT_NEON)
  if constexpr (sizeof(T) == 8) {
    return (Vec<T>)vpaddq_f64((float64x2_t)sums[0], (float64x2_t)sums[1]);
  } else {
    return (Vec<T>)vpaddq_f32(vpaddq_f32((float32x4_t)sums[0], (float32x4_t)sums[1]),
                              vpaddq_f32((float32x4_t)sums[2], (float32x4_t)sums[3]));
  }
#endif
  if constexpr (Step < kWidth) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i += 2 * Step) sums[i] = add_lanes_apart<T, Step>(sums[i], sums[i + Step]);
    return lane_sums<T, 2 * Step>(sums);
  } else {
    return sums[0];
  }
}

// The same by halving, in the order of lane_sum(), whose bits it has.
template <typename T, int Step = kLanes<T> / 2>
ATTN_EXT_INLINE Vec<T> lane_sums_by_halving(Vec<T> (&sums)[kLanes<T>]) {
  if constexpr (Step > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < Step; ++i) sums[i] = add_lanes_apart<T, Step>(sums[i], sums[i + Step]);
    return lane_sums_by_halving<T, Step / 2>(sums);
  } else {
    return sums[0];
  }
}

// Lanes of two vectors, chosen by constants: 0..n-1 from a, n..2n-1 from b.
template <typename T, int... Lane>
ATTN_EXT_INLINE Vec<T> pick_lanes(Vec<T> a, Vec<T> b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Lane...);
#else
  return __builtin_shuffle(a, b, Vec<Bits<T>>{Lane...});
#endif
}

// Swaps the off-diagonal Side x Side blocks of all squares of twice that side.
template <typename T, int Side, int... Lane>
ATTN_EXT_INLINE void swap_blocks(Vec<T> (&v)[kLanes<T>], std::integer_sequence<int, Lane...>) {
  constexpr int kWidth = sizeof...(Lane);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if ((i & Side) != 0) continue;
    const Vec<T> a = v[i], b = v[i + Side];
    v[i] = pick_lanes<T, ((Lane & Side) != 0 ? kWidth + Lane - Side : Lane)...>(a, b);
    v[i + Side] = pick_lanes<T, ((Lane & Side) != 0 ? kWidth + Lane : Lane + Side)...>(a, b);
  }
}

// In-register transpose of a square of lanes by butterflies.
template <typename T>
ATTN_EXT_INLINE void transpose_square(Vec<T> (&v)[kLanes<T>]) {
  constexpr int kSide = kLanes<T>;
  constexpr std::make_integer_sequence<int, kSide> kAll{};
  swap_blocks<T, 1>(v, kAll);
  if constexpr (kSide > 2) swap_blocks<T, 2>(v, kAll);
  if constexpr (kSide > 4) swap_blocks<T, 4>(v, kAll);
  if constexpr (kSide > 8) swap_blocks<T, 8>(v, kAll);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
