// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the draws of 64
// columns of a row at a time. The 32-bit words live in 64-bit lanes, of which only the low half counts: the
// multiplication needs that, and all else can ignore the upper half.
#pragma once

#include <type_traits>

#include "../interface/params.h"
#include "../vector/simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int kDropoutColumns = 64;

// The keys of all rounds, and the word of the counter that is the same for a batch; where the others begin.
struct PhiloxBatch {
  uint64_t key0[10];
  uint64_t key1[10];
  uint32_t batch;
  int64_t first_head, first_row, first_chunk;
};

ATTN_EXT_INLINE PhiloxBatch philox_batch(const DropoutRule& rule, int64_t batch) {
  batch = batch * rule.batch_step + rule.first_batch;
  const auto seed = static_cast<uint64_t>(rule.seeds[batch / rule.batches_per_seed]);
  PhiloxBatch state;
  for (uint32_t i = 0; i < 10; ++i) {
    state.key0[i] = static_cast<uint32_t>(seed) + i * 0x9E3779B9u;
    state.key1[i] = static_cast<uint32_t>(seed >> 32) + i * 0xBB67AE85u;
  }
  state.batch = static_cast<uint32_t>(batch % rule.batches_per_seed + rule.batch_origin);
  state.first_head = rule.head_origin;
  state.first_row = rule.row_origin;
  state.first_chunk = rule.chunk_origin;
  return state;
}

ATTN_EXT_INLINE Vec<uint64_t> multiply_low_halves(Vec<uint64_t> a, uint32_t b) {
#if defined(__AVX512F__)
  return (Vec<uint64_t>)_mm512_mul_epu32((__m512i)a, (__m512i)broadcast<uint64_t>(b));
#elif defined(__AVX2__)
  return (Vec<uint64_t>)_mm256_mul_epu32((__m256i)a, (__m256i)broadcast<uint64_t>(b));
#elif defined(__SSE2__)
  return (Vec<uint64_t>)_mm_mul_epu32((__m128i)a, (__m128i)broadcast<uint64_t>(b));
#elif defined(ATTN_EXT_NEON)
  return (Vec<uint64_t>)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(b));
#else
  return (a & 0xffffffffu) * broadcast<uint64_t>(b);
#endif
}

ATTN_EXT_INLINE uint64_t multiply_low_halves(uint64_t a, uint32_t b) {
  return (a & 0xffffffffu) * b;
}

// The four words of a counter, each a vector or, as long as it is the same in all lanes, one number.
template <typename W0, typename W1, typename W2, typename W3>
struct PhiloxCounter {
  W0 w0;
  W1 w1;
  W2 w2;
  W3 w3;
};
template <typename W0, typename W1, typename W2, typename W3>
ATTN_EXT_INLINE auto philox_round(const PhiloxBatch& state, int round,
                                  const PhiloxCounter<W0, W1, W2, W3>& c) {
  const uint64_t key0 = state.key0[round], key1 = state.key1[round];
  const auto product0 = multiply_low_halves(c.w0, 0xD2511F53u);
  const auto product1 = multiply_low_halves(c.w2, 0xCD9E8D57u);
  const auto word0 = (product1 >> 32) ^ c.w1 ^ key0;
  const auto word2 = (product0 >> 32) ^ c.w3 ^ key1;
  using Next = PhiloxCounter<std::decay_t<decltype(word0)>, std::decay_t<decltype(product1)>,
                             std::decay_t<decltype(word2)>, std::decay_t<decltype(product0)>>;
  return Next{word0, product1, word2, product0};
}

// Counters that go through the rounds side by side, since each round waits for the one before.
template <typename Counter, int N>
struct PhiloxCounters {
  Counter c[N];
};

template <typename Counter, int N>
ATTN_EXT_INLINE auto philox_round(const PhiloxBatch& state, int round,
                                  const PhiloxCounters<Counter, N>& counters) {
  PhiloxCounters<decltype(philox_round(state, round, counters.c[0])), N> next;
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) next.c[i] = philox_round(state, round, counters.c[i]);
  return next;
}

// The ten rounds; what differs from lane to lane in one word does so in all after four of them.
template <typename Counter, int N>
ATTN_EXT_INLINE auto philox_rounds(const PhiloxBatch& state, const PhiloxCounters<Counter, N>& start) {
  auto c =
      philox_round(state, 3, philox_round(state, 2, philox_round(state, 1, philox_round(state, 0, start))));
#pragma GCC unroll 6
  for (int round = 4; round < 10; ++round) c = philox_round(state, round, c);
  return c;
}

ATTN_EXT_INLINE void store_interleaved(uint32_t* words, Vec<uint64_t> even, Vec<uint64_t> odd) {
#if defined(ATTN_EXT_NEON)
  store(words, (Vec<uint32_t>)vtrn1q_u32((uint32x4_t)even, (uint32x4_t)odd));
#else
  store(words, (Vec<uint32_t>)((even & 0xffffffffu) | (odd << 32)));
#endif
}

// The four words of counters in even and odd lanes, `stride` apart.
template <typename Counter>
ATTN_EXT_INLINE void store_words(uint32_t* words, int64_t stride, const Counter& even, const Counter& odd) {
  store_interleaved(words, even.w0, odd.w0);
  store_interleaved(words + stride, even.w1, odd.w1);
  store_interleaved(words + 2 * stride, even.w2, odd.w2);
  store_interleaved(words + 3 * stride, even.w3, odd.w3);
}

// words[w][l] is the draw of row `row` + l of `head` and of word w of counter c0.
inline void philox_rows(const PhiloxBatch& state, uint64_t c0, int64_t row, int64_t head,
                        uint32_t (&words)[4][kLanes<uint32_t>]) {
  using Lanes = Vec<uint64_t>;
  using Counter = PhiloxCounter<uint64_t, Lanes, uint64_t, uint64_t>;
  const uint64_t low_head = static_cast<uint32_t>(head + state.first_head), batch = state.batch;
  const auto low_row = static_cast<uint32_t>(row + state.first_row);
  const Lanes even = 2 * lane_index<uint64_t>() + static_cast<uint64_t>(low_row);
  c0 += static_cast<uint64_t>(state.first_chunk) * 16;
  const auto drawn = philox_rounds(
      state, PhiloxCounters<Counter, 2>{{{c0, even, low_head, batch}, {c0, even + 1, low_head, batch}}});
  store_words(words[0], kLanes<uint32_t>, drawn.c[0], drawn.c[1]);
}

// words[i][j] is the draw of row rows[i] of heads[i] and of column 64 * chunk + j.
template <int N>
inline void philox_words(const PhiloxBatch& state, int64_t chunk, const int64_t (&rows)[N],
                         const int64_t (&heads)[N], uint32_t (&words)[N][kDropoutColumns]) {
  using Counter = PhiloxCounter<Vec<uint64_t>, uint64_t, uint64_t, uint64_t>;
  const uint64_t batch = state.batch;
  chunk += state.first_chunk;
  for (uint64_t first = 0; first < 16; first += kLanes<uint32_t>) {
    const Vec<uint64_t> c0 = 2 * lane_index<uint64_t>() + (static_cast<uint64_t>(chunk) * 16 + first);
    PhiloxCounters<Counter, 2 * N> start;
    for (int i = 0; i < 2 * N; ++i) {
      const uint64_t row = static_cast<uint32_t>(rows[i / 2] + state.first_row);
      const uint64_t head = static_cast<uint32_t>(heads[i / 2] + state.first_head);
      start.c[i] = {i % 2 == 0 ? c0 : c0 + 1, row, head, batch};
    }
    const auto drawn = philox_rounds(state, start);
#pragma GCC unroll 2
    for (int i = 0; i < N; ++i) store_words(words[i] + first, 16, drawn.c[2 * i], drawn.c[2 * i + 1]);
  }
}

// keep(j, p) for every vector p of weights [begin, end), zero where they are dropped; words[0] is the draw of
// column `begin`.
template <typename T, typename Keep>
ATTN_EXT_INLINE void drop_span(const T* weights, int64_t begin, int64_t end, const uint32_t* words,
                               uint32_t threshold, Keep keep) {
  using Unsigned = std::make_unsigned_t<Bits<T>>;
  typedef uint32_t Words __attribute__((vector_size(kLanes<T> * sizeof(uint32_t))));
  for (int64_t j = begin; j < end; j += kLanes<T>) {
    Words drawn;
    memcpy(&drawn, words + (j - begin), sizeof(drawn));
    const Vec<T> p = load(weights + j);
    keep(j, __builtin_convertvector(drawn, Vec<Unsigned>) >= static_cast<Unsigned>(threshold) ? p : Vec<T>{});
  }
}

// keep[j] = the factor of the weight of column 64 * chunk + j of a row.
template <typename T>
inline void dropout_factors(const PhiloxBatch& state, const DropoutRule& rule, int64_t head, int64_t row,
                            int64_t chunk, T* keep) {
  const T scale = static_cast<T>(rule.keep_scale);
  uint32_t words[1][kDropoutColumns];
  philox_words<1>(state, chunk, {row}, {head}, words);
  for (int64_t j = 0; j < kDropoutColumns; ++j) keep[j] = words[0][j] >= rule.threshold ? scale : 0;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
