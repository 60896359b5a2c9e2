// Dot products of rows as they lie in memory.
#pragma once

#include "product.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Sums the lanes of as many vectors as a vector has lanes: lane i of the result is the sum of sums[i]. Every
// step adds lanes that lie Step apart, of one vector in the lanes without that bit and of another in those
// with it, so that a sum does not depend on which vectors stand beside it.
template <typename T, int Step = 1>
ATTN_EXT_INLINE Vec<T> lane_sums(Vec<T> (&sums)[kLanes<T>]) {
  constexpr int kWidth = kLanes<T>;
  if constexpr (Step < kWidth) {
    const Vec<Bits<T>> lane = lane_index<Bits<T>>();
    const Vec<Bits<T>> upper = (lane & Step) != 0 ? Vec<Bits<T>>{} + 1 : Vec<Bits<T>>{};
    const Vec<Bits<T>> kept = lane + upper * kWidth;
    const Vec<Bits<T>> moved = lane + upper * (kWidth - 2 * Step) + Step;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; i += 2 * Step) {
      const Vec<T> a = sums[i], b = sums[i + Step];
      sums[i] = shuffle<T>(a, b, kept) + shuffle<T>(a, b, moved);
    }
    return lane_sums<T, 2 * Step>(sums);
  } else {
    return sums[0];
  }
}

// One query row (depth) against as many key rows as a vector has lanes. The rows `ahead` operands further on
// are asked for meanwhile: short pieces of many rows are not what a processor guesses by itself.
template <typename Product>
inline void dot_rows(const typename Product::Operand* query, const typename Product::Operand* keys,
                     int64_t key_stride, int64_t depth, int64_t ahead, typename Product::Accum* out) {
  using Accum = typename Product::Accum;
  using Operand = typename Product::Operand;
  constexpr int kWidth = kLanes<Accum>;
  Vec<Accum> sums[kWidth] = {};
  for (int64_t k = 0; k < depth; k += kWidth) {
    const Vec<Operand> q = load(query + k);
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) {
      Vec<Operand> key;
      memcpy(&key, keys + j * key_stride + k, sizeof(key));
      if (ahead != 0) __builtin_prefetch(keys + j * key_stride + k + ahead);
      sums[j] = Product::step(q, key, sums[j]);
    }
  }
  store(out, lane_sums<Accum>(sums));
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
