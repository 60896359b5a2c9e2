// What this machine can do at best: the limits that `attn-ext bench` holds a measured time against. A library
// of its own, which needs neither torch nor Python; attn_ext/benchmark/machine.py loads it.
//
// The loops carry their instruction set as an attribute instead of being compiled once for each: there is
// nothing in them but registers.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "../cpu/arm_cpu.h"
#include "../cpu/kernels/interface/matrix_unit.h"

namespace {

using Clock = std::chrono::steady_clock;

/// A loop over multiply-adds that do not wait for each other.
struct Loop {
  float (*run)(int64_t rounds);
  double flops_per_round;
};

/// sum = sum / 2 + 1 stays a small normal number for ever. The sums start apart: of equal ones a compiler
/// would compute a single one. Unrolled, each has its own register.
constexpr float kFactor = 0.5f, kTerm = 1.0f;

using Vector4 = float __attribute__((vector_size(16)));

float plain_loop(int64_t rounds) {
  const Vector4 factor = Vector4{} + kFactor, term = Vector4{} + kTerm;
  Vector4 sums[12];
  for (int i = 0; i < 12; ++i) {
    sums[i] = Vector4{} + static_cast<float>(i);
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (Vector4& sum : sums) {
      sum = sum * factor + term;
    }
  }
  for (int i = 1; i < 12; ++i) {
    sums[0] += sums[i];
  }
  return sums[0][0];
}

constexpr Loop kPlain = {plain_loop, 12 * 4 * 2};

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) float avx2_loop(int64_t rounds) {
  const __m256 factor = _mm256_set1_ps(kFactor), term = _mm256_set1_ps(kTerm);
  __m256 sums[12];
  for (int i = 0; i < 12; ++i) {
    sums[i] = _mm256_set1_ps(i);
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (__m256& sum : sums) {
      sum = _mm256_fmadd_ps(sum, factor, term);
    }
  }
  for (int i = 1; i < 12; ++i) {
    sums[0] = _mm256_add_ps(sums[0], sums[i]);
  }
  return _mm256_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f"))) float avx512_loop(int64_t rounds) {
  const __m512 factor = _mm512_set1_ps(kFactor), term = _mm512_set1_ps(kTerm);
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) {
    sums[i] = _mm512_set1_ps(i);
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (__m512& sum : sums) {
      sum = _mm512_fmadd_ps(sum, factor, term);
    }
  }
  for (int i = 1; i < 24; ++i) {
    sums[0] = _mm512_add_ps(sums[0], sums[i]);
  }
  return _mm512_cvtss_f32(sums[0]);
}

__attribute__((target("avx512f,avx512bf16"))) float bfloat16_loop(int64_t rounds) {
  const __m512bh factor = _mm512_cvtne2ps_pbh(_mm512_set1_ps(kFactor), _mm512_set1_ps(kTerm));
  __m512 sums[24];
  for (int i = 0; i < 24; ++i) {
    sums[i] = _mm512_set1_ps(i);
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (__m512& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, factor, factor);
    }
  }
  for (int i = 1; i < 24; ++i) {
    sums[0] = _mm512_add_ps(sums[0], sums[i]);
  }
  return _mm512_cvtss_f32(sums[0]);
}

/// Six tile registers of sums, two of operands.
float matrix_unit_loop(int64_t rounds) {
  struct alignas(64) {
    uint8_t palette = 1;
    uint8_t zero[15] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } const configuration;
  asm volatile("ldtilecfg %0" ::"m"(configuration));
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile(
        "tdpbf16ps %tmm7, %tmm6, %tmm0\n\ttdpbf16ps %tmm7, %tmm6, %tmm1\n\ttdpbf16ps %tmm7, %tmm6, %tmm2\n\t"
        "tdpbf16ps %tmm7, %tmm6, %tmm3\n\ttdpbf16ps %tmm7, %tmm6, %tmm4\n\ttdpbf16ps %tmm7, %tmm6, %tmm5");
  }
  asm volatile("tilerelease");
  return 0;
}

Loop choose_loop(std::string_view capability, bool bfloat16) {
  const bool any = capability == "aten";
  if (bfloat16 && (any || capability == "amx") && attn_ext::cpu::matrix_unit_is_there()) {
    return {matrix_unit_loop, 6 * 16 * 16 * 32 * 2};
  }
  const bool avx512_bf16 =
      (any && __builtin_cpu_supports("avx512bf16")) || capability == "avx512_bf16" || capability == "amx";
  if (avx512_bf16 && bfloat16) {
    return {bfloat16_loop, 24 * 32 * 2};
  }
  if (avx512_bf16 || capability == "avx512" || (any && __builtin_cpu_supports("avx512f"))) {
    return {avx512_loop, 24 * 16 * 2};
  }
  if (capability == "avx2" || (any && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
    return {avx2_loop, 12 * 8 * 2};
  }
  return kPlain;
}

#elif defined(__aarch64__)

/// As plain_loop, and as many sums as registers hold: four units of four cycles each are to be had.
float neon_loop(int64_t rounds) {
  const Vector4 factor = Vector4{} + kFactor, term = Vector4{} + kTerm;
  Vector4 sums[24];
  for (int i = 0; i < 24; ++i) {
    sums[i] = Vector4{} + static_cast<float>(i);
  }
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (Vector4& sum : sums) {
      __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(factor), "w"(term));
    }
  }
  for (int i = 1; i < 24; ++i) {
    sums[0] += sums[i];
  }
  return sums[0][0];
}

#if defined(__clang__)
#define ATTN_EXT_TARGET_BF16 __attribute__((target("bf16")))
#else
#define ATTN_EXT_TARGET_BF16 __attribute__((target("+bf16")))
#endif

/// The same of pairs of bfloat16, all of them zero.
ATTN_EXT_TARGET_BF16 float bfloat16_loop(int64_t rounds) {
  const Vector4 factor = {};
  Vector4 sums[24] = {};
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (Vector4& sum : sums) {
      __asm__("bfdot %0.4s, %1.8h, %1.8h" : "+w"(sum) : "w"(factor));
    }
  }
  for (int i = 1; i < 24; ++i) {
    sums[0] += sums[i];
  }
  return sums[0][0];
}

Loop choose_loop(std::string_view capability, bool bfloat16) {
  const bool any = capability == "aten";
  const bool has_bfloat16 = attn_ext::cpu::arm_cpu_has(2, 14, "arm.FEAT_BF16");
  if (bfloat16 && (capability == "neon_bf16" || (any && has_bfloat16))) {
    return {bfloat16_loop, 24 * 8 * 2};
  }
  return capability == "baseline" ? kPlain : Loop{neon_loop, 24 * 4 * 2};
}

#else

Loop choose_loop(std::string_view, bool) {
  return kPlain;
}

#endif

/// The threads start together, round after round, until `seconds` have passed; returns the shortest round,
/// from the first thread's start to the last one's end. `work(thread)` is one round of one thread; the first
/// one warms up and does not count.
template <typename Work>
double shortest_round(int threads, double seconds, const Work& work) {
  std::vector<Clock::time_point> starts(threads), ends(threads);
  double shortest = std::numeric_limits<double>::infinity();
  int rounds = 0;
  bool go_on = true;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  std::barrier start(threads);
  std::barrier finish(threads, [&]() noexcept {
    const std::chrono::duration<double> round =
        *std::max_element(ends.begin(), ends.end()) - *std::min_element(starts.begin(), starts.end());
    if (rounds++ > 0) {
      shortest = std::min(shortest, round.count());
    }
    go_on = rounds < 2 || Clock::now() < deadline;
  });
  const auto run = [&](int thread) {
    while (go_on) {
      start.arrive_and_wait();
      starts[thread] = Clock::now();
      work(thread);
      ends[thread] = Clock::now();
      finish.arrive_and_wait();
    }
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) {
    others.emplace_back(run, thread);
  }
  run(0);
  for (std::thread& other : others) {
    other.join();
  }
  return shortest;
}

using Words = uint64_t __attribute__((vector_size(16)));

/// Adds up the words, which nothing in a cache can be faster than.
uint64_t read_words(const Words* words, int64_t count) {
  Words sums[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    for (int64_t j = 0; j < 8; ++j) {
      sums[j] += words[i + j];
    }
  }
  for (int j = 1; j < 8; ++j) {
    sums[0] += sums[j];
  }
  return sums[0][0] + sums[0][1];
}

}  // namespace

extern "C" {

/// Floating-point operations a second of multiply-adds from registers, the best of `seconds` of trying on so
/// many threads. With `bfloat16` the dot products of the instruction set, or its float32 multiply-adds where
/// it has none. `capability` names the set as ATTN_EXT_CPU_CAPABILITY does; "aten" stands for the best of the
/// machine.
__attribute__((visibility("default"))) double multiply_add_peak(const char* capability, bool bfloat16,
                                                                int threads, double seconds) {
  const Loop loop = choose_loop(capability, bfloat16);
  // Some milliseconds: long beside the start of a thread, short enough for some rounds to go undisturbed.
  constexpr int64_t kRounds = 1 << 19;
  const auto results = std::make_unique<volatile float[]>(threads);
  const double time =
      shortest_round(threads, seconds, [&](int thread) { results[thread] = loop.run(kRounds); });
  return threads * kRounds * loop.flops_per_round / time;
}

/// Bytes a second that so many threads together read from memory, the best of `seconds` of trying.
__attribute__((visibility("default"))) double read_rate(int threads, double seconds) {
  constexpr int64_t kBytes = int64_t{256} << 20;  // far more than any cache holds
  const int64_t share = kBytes / threads / static_cast<int64_t>(sizeof(Words));
  std::vector<std::unique_ptr<Words[]>> shares(threads);
  const auto results = std::make_unique<volatile uint64_t[]>(threads);
  const double time = shortest_round(threads, seconds, [&](int thread) {
    if (!shares[thread]) {  // each thread touches its own first, which puts it into the memory beside it
      shares[thread] = std::make_unique<Words[]>(share);
    }
    results[thread] = read_words(shares[thread].get(), share);
  });
  return static_cast<double>(threads * share) * sizeof(Words) / time;
}

}  // extern "C"
