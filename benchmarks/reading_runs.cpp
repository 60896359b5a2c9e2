// What it costs to read a cache in pages: memory read in runs that lie in random order, while computing as
// long as a core takes to read it, with memory asked for ahead into the first cache, the second, or not at
// all.
//
//     g++ -O3 -march=native -std=c++20 -pthread benchmarks/reading_runs.cpp -o reading_runs
//     ./reading_runs 1 2
//
// The arguments are numbers of threads, which share the memory. A run of the longest length is memory in one
// piece; a page of 16 rows of 128 bfloat16 is a run of 4096 bytes for each head.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace {

using Vector = float __attribute__((vector_size(64)));

constexpr size_t kMemory = size_t{1} << 28, kBlock = 512, kLine = 64, kTimes = 7;
constexpr size_t kRuns[] = {kMemory / 16, 65536, 8192, 4096, 2048, 512};

enum class Into { kNothing, kFirstCache, kSecondCache };

// The runs of one thread, in the order in which it reads them.
struct Reading {
  const char* memory;
  const uint32_t* order;
  size_t runs, run_bytes, ahead;  // bytes of the reading's own order
};

// Inlined: of a function that only asks for memory, GCC drops the calls.
template <Into Cache>
__attribute__((always_inline)) inline void ask_for(const Reading& reading, size_t run, size_t byte) {
  const size_t later = byte + reading.ahead;
  const size_t next = std::min(run + later / reading.run_bytes, reading.runs - 1);
  const char* block = reading.memory + reading.order[next] * reading.run_bytes + later % reading.run_bytes;
  for (size_t line = 0; line < kBlock; line += kLine) {
    if (Cache == Into::kFirstCache) __builtin_prefetch(block + line, 0, 3);
    if (Cache == Into::kSecondCache) __builtin_prefetch(block + line, 0, 2);
  }
}

// Each vector is added to a sum and multiplied into eight others, which do not wait for each other.
template <Into Cache>
__attribute__((noinline)) float read(const Reading& reading) {
  Vector sums[8] = {}, squares[8] = {};
  for (int v = 0; v < 8; ++v)
    squares[v] += static_cast<float>(v);  // of equal ones only one would be computed
  for (size_t run = 0; run < reading.runs; ++run) {
    const char* from = reading.memory + reading.order[run] * reading.run_bytes;
    for (size_t byte = 0; byte < reading.run_bytes; byte += kBlock) {
      if (Cache != Into::kNothing) ask_for<Cache>(reading, run, byte);
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v) {
        const Vector x = *reinterpret_cast<const Vector*>(from + byte + static_cast<size_t>(v) * kLine);
        sums[v] += x;
#pragma GCC unroll 8
        for (Vector& square : squares) square += x * x;
      }
    }
  }
  for (int v = 0; v < 8; ++v) sums[0] += sums[v] + squares[v];
  return sums[0][0];
}

// GB/s of the fastest of some times.
template <Into Cache>
double rate(const char* memory, size_t run_bytes, size_t ahead, int threads) {
  std::vector<uint32_t> order(kMemory / run_bytes);
  std::iota(order.begin(), order.end(), 0u);
  if (run_bytes < kRuns[0]) std::shuffle(order.begin(), order.end(), std::mt19937(1));
  const size_t share = order.size() / static_cast<size_t>(threads);
  double least = std::numeric_limits<double>::infinity();
  for (size_t time = 0; time < kTimes; ++time) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> team;
    for (int t = 0; t < threads; ++t) {
      const Reading part{memory, order.data() + static_cast<size_t>(t) * share, share, run_bytes, ahead};
      team.emplace_back([part] {
        volatile float kept = read<Cache>(part);
        (void)kept;
      });
    }
    for (std::thread& one : team) one.join();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return static_cast<double>(share * static_cast<size_t>(threads) * run_bytes) / least / 1e9;
}

}  // namespace

int main(int count, char** arguments) {
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(4096, kMemory)), &std::free);
  if (memory == nullptr) return 1;
  std::fill_n(reinterpret_cast<float*>(memory.get()), kMemory / sizeof(float), 1.0f);
  std::printf(
      "GB/s\n\n| threads | bytes in a run | nothing asked for | second cache, 8 KB | 16 KB | first, 4 KB "
      "| 8 KB | 16 KB |\n|--:|--:|--:|--:|--:|--:|--:|--:|\n");
  for (int i = 1; i < std::max(count, 2); ++i) {
    const int threads = i < count ? std::max(std::atoi(arguments[i]), 1) : 1;
    for (const size_t run : kRuns) {
      const char* from = memory.get();
      std::printf("| %d | %zu | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", threads, run,
                  rate<Into::kNothing>(from, run, 0, threads),
                  rate<Into::kSecondCache>(from, run, 8192, threads),
                  rate<Into::kSecondCache>(from, run, 16384, threads),
                  rate<Into::kFirstCache>(from, run, 4096, threads),
                  rate<Into::kFirstCache>(from, run, 8192, threads),
                  rate<Into::kFirstCache>(from, run, 16384, threads));
      std::fflush(stdout);
    }
  }
}
