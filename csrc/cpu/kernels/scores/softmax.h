// The softmax of a row's span, in place: row max, then weights P = exp2(scale * s - max) and their sum; and
// the weights again where lse is known.
#pragma once

#include "../vector/convert.h"
#include "../vector/math.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Vectors that are worked on side by side, as one alone waits for itself.
constexpr int kSoftmaxVectors = 4;

template <typename T>
ATTN_EXT_INLINE Vec<T> max_span(const T* scores, int64_t begin, int64_t end, Vec<T> top) {
  constexpr int64_t kStep = kSoftmaxVectors * kLanes<T>;
  Vec<T> tops[kSoftmaxVectors] = {top, top, top, top};
  int64_t j = begin;
  for (; j + kStep <= end; j += kStep) {
#pragma GCC unroll 4
    for (int v = 0; v < kSoftmaxVectors; ++v) tops[v] = maximum(tops[v], load(scores + j + v * kLanes<T>));
  }
  for (; j < end; j += kLanes<T>) tops[0] = maximum(tops[0], load(scores + j));
  return maximum(maximum(tops[0], tops[1]), maximum(tops[2], tops[3]));
}

// Lane i always sums the columns i, i + lanes, ...: the sum does not depend on where a span begins.
template <typename T>
ATTN_EXT_INLINE Vec<T> exp_span(T* scores, int64_t begin, int64_t end, T scale, T row_max, Vec<T> sum) {
  constexpr int64_t kStep = kSoftmaxVectors * kLanes<T>;
  const Vec<T> factor = broadcast(scale);
  const Vec<T> shift = broadcast(-row_max);
  const auto weights = [&](int64_t j) { return exp2<T>(multiply_add(load(scores + j), factor, shift)); };
  int64_t j = begin;
  for (; j + kStep <= end; j += kStep) {
    Vec<T> p[kSoftmaxVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kSoftmaxVectors; ++v) p[v] = weights(j + v * kLanes<T>);
#pragma GCC unroll 4
    for (int v = 0; v < kSoftmaxVectors; ++v) {
      store(scores + j + v * kLanes<T>, p[v]);
      sum += p[v];
    }
  }
  for (; j < end; j += kLanes<T>) {
    const Vec<T> p = weights(j);
    store(scores + j, p);
    sum += p;
  }
  return sum;
}

#if defined(ATTN_EXT_HAS_PAIRS)
// Rounding in place: weight j moves to the j-th bfloat16 of the row, which only ever overwrites what has
// been read.
ATTN_EXT_INLINE void store_paired(float* row, int64_t j, Vec<float> p) {
  const HalfBits half = to_element(p, static_cast<const BFloat16*>(nullptr));
  memcpy(reinterpret_cast<uint16_t*>(row) + j, &half, sizeof(half));
}

ATTN_EXT_INLINE void store_paired(float* row, int64_t j, Vec<float> p0, Vec<float> p1) {
  const Vec<uint32_t> both = to_pairs(p0, p1);
  memcpy(reinterpret_cast<uint16_t*>(row) + j, &both, sizeof(both));
}

// As exp_span, for weights that go on in pairs of bfloat16.
inline Vec<float> exp_span_paired(float* scores, int64_t begin, int64_t end, float scale, float row_max,
                                  Vec<float> sum) {
  constexpr int64_t kWidth = kLanes<float>;
  constexpr int64_t kStep = kSoftmaxVectors * kWidth;
  const Vec<float> factor = broadcast(scale);
  const Vec<float> shift = broadcast(-row_max);
  const auto weights = [&](int64_t j) { return exp2<float>(multiply_add(load(scores + j), factor, shift)); };
  int64_t j = begin;
  for (; j + kStep <= end; j += kStep) {
    Vec<float> p[kSoftmaxVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kSoftmaxVectors; ++v) p[v] = weights(j + v * kWidth);
#pragma GCC unroll 4
    for (int v = 0; v < kSoftmaxVectors; v += 2) {
      store_paired(scores, j + v * kWidth, p[v], p[v + 1]);
      sum = (sum + p[v]) + p[v + 1];
    }
  }
  for (; j < end; j += kWidth) {
    const Vec<float> p = weights(j);
    store_paired(scores, j, p);
    sum += p;
  }
  return sum;
}

ATTN_EXT_INLINE void pair_span(float* scores, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kLanes<float>) store_paired(scores, j, load(scores + j));
}
#endif

// Where a weight is 0 because a key is masked or a query is dead, and not because it is small.
template <typename T>
ATTN_EXT_INLINE Vec<Bits<T>> is_hidden(Vec<T> s, Vec<T> lse) {
  return (s == -kInfinity<T>) | (lse == kInfinity<T>);
}

// P = 2^(scale s - lse); exactly 0 where hidden, whatever else is NaN there.
template <typename T, bool Select>
ATTN_EXT_INLINE Vec<T> weights_of(Vec<T> s, Vec<T> scale, Vec<T> lse) {
  const Vec<T> p = exp2<T>(multiply_add(s, scale, -lse));
  if constexpr (!Select) return p;
  return is_hidden<T>(s, lse) ? Vec<T>{} : p;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
