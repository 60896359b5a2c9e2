// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the draws of 64
// columns of a row at a time. The 32-bit words live in 64-bit lanes, of which only the low half counts: the
// multiplication needs that, and all else can ignore the upper half.
#pragma once

#include <type_traits>

#include "simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int kDropoutColumns = 64;

struct PhiloxRow {
  uint32_t key0[10];
  uint32_t key1[10];
  uint32_t row, head, batch;
};

ATTN_EXT_INLINE void set_philox_seed(PhiloxRow& state, uint64_t seed) {
  for (uint32_t i = 0; i < 10; ++i) {
    state.key0[i] = static_cast<uint32_t>(seed) + i * 0x9E3779B9u;
    state.key1[i] = static_cast<uint32_t>(seed >> 32) + i * 0xBB67AE85u;
  }
}

ATTN_EXT_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, uint32_t b) {
#if defined(__AVX512F__)
  return (Vec<uint64_t>)_mm512_mul_epu32((__m512i)a, (__m512i)broadcast<uint64_t>(b));
#elif defined(__AVX2__)
  return (Vec<uint64_t>)_mm256_mul_epu32((__m256i)a, (__m256i)broadcast<uint64_t>(b));
#elif defined(__SSE2__)
  return (Vec<uint64_t>)_mm_mul_epu32((__m128i)a, (__m128i)broadcast<uint64_t>(b));
#else
  return (a & 0xffffffffu) * broadcast<uint64_t>(b);
#endif
}

// The ten rounds on the counters of even and of odd lanes.
ATTN_EXT_INLINE void philox_rounds(const PhiloxRow& state, Vec<uint64_t> (&c)[2][4]) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Vec<uint64_t> key0 = broadcast<uint64_t>(state.key0[round]);
    const Vec<uint64_t> key1 = broadcast<uint64_t>(state.key1[round]);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      const Vec<uint64_t> product0 = multiply_low_halves(c[odd][0], 0xD2511F53u);
      const Vec<uint64_t> product1 = multiply_low_halves(c[odd][2], 0xCD9E8D57u);
      c[odd][0] = (product1 >> 32) ^ c[odd][1] ^ key0;
      c[odd][1] = product1;
      c[odd][2] = (product0 >> 32) ^ c[odd][3] ^ key1;
      c[odd][3] = product0;
    }
  }
}

// words[w][l] is the draw of row state.row + l and of word w of counter c0.
inline void philox_rows(const PhiloxRow& state, uint32_t c0, uint32_t (&words)[4][kLanes<uint32_t>]) {
  Vec<uint64_t> c[2][4];  // even rows, odd rows
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    c[odd][0] = broadcast<uint64_t>(c0);
    c[odd][1] = 2 * lane_index<uint64_t>() + static_cast<uint64_t>(state.row + static_cast<uint32_t>(odd));
    c[odd][2] = broadcast<uint64_t>(state.head);
    c[odd][3] = broadcast<uint64_t>(state.batch);
  }
  philox_rounds(state, c);
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) store(words[w], (Vec<uint32_t>)((c[0][w] & 0xffffffffu) | (c[1][w] << 32)));
}

// words[j] is the draw of column 64 * chunk + j.
inline void philox_words(const PhiloxRow& state, uint32_t chunk, uint32_t (&words)[kDropoutColumns]) {
  constexpr int kCounters = kLanes<uint32_t>;
  for (int first = 0; first < 16; first += kCounters) {
    Vec<uint64_t> c[2][4];  // even counters, odd counters
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      c[odd][0] = 2 * lane_index<uint64_t>() +
                  static_cast<uint64_t>(chunk * 16u + static_cast<uint32_t>(first + odd));
      c[odd][1] = broadcast<uint64_t>(state.row);
      c[odd][2] = broadcast<uint64_t>(state.head);
      c[odd][3] = broadcast<uint64_t>(state.batch);
    }
    philox_rounds(state, c);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      store(words + 16 * w + first, (Vec<uint32_t>)((c[0][w] & 0xffffffffu) | (c[1][w] << 32)));
    }
  }
}

// Zeroes the weights [begin, end) that are dropped; words[0] is the draw of column `begin`.
template <typename T>
ATTN_EXT_INLINE void drop_span(T* weights, int64_t begin, int64_t end, const uint32_t* words,
                               uint32_t threshold) {
  using Unsigned = std::make_unsigned_t<Bits<T>>;
  typedef uint32_t Words __attribute__((vector_size(kLanes<T> * sizeof(uint32_t))));
  for (int64_t j = begin; j < end; j += kLanes<T>) {
    Words drawn;
    memcpy(&drawn, words + (j - begin), sizeof(drawn));
    const Vec<T> p = load(weights + j);
    store(weights + j,
          __builtin_convertvector(drawn, Vec<Unsigned>) >= static_cast<Unsigned>(threshold) ? p : Vec<T>{});
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
