// A GPU for the kernels of csrc/cuda/device: blocks run one after the other, the threads of a block in turns,
// and what a warp does together waits for its lanes. What goes on by itself, copies and
// Hopper's products, is done at once or as late as waiting for it allows. The same words as
// csrc/cuda/device/primitives.cu.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "fibers.h"

namespace gpu {

constexpr int kLanes = 32, kMostWarps = 8;

/// What the lanes of a warp give each other.
struct Exchange {
  std::array<const void*, kLanes> addresses{};
  std::array<std::array<uint32_t, 6>, kLanes> numbers{};
  std::array<uint32_t, kLanes> words{};
};

struct Index {
  int x = 0, y = 0, z = 0;
};

/// What a thread has begun and that goes on by itself, in groups.
class Begun {
 public:
  explicit Begun(const bool& is_late) : is_late_(is_late) {}

  void begin(std::function<void()> work) {
    if (is_late_) {
      groups_.back().push_back(std::move(work));
    } else {
      work();
    }
  }
  void end_group() { groups_.emplace_back(); }
  /// Until no more than so many of the groups that have ended go on.
  void wait(size_t groups) {
    while (groups_.size() > groups + 1) {
      for (const auto& work : groups_.front()) {
        work();
      }
      groups_.erase(groups_.begin());
    }
  }

 private:
  const bool& is_late_;
  std::vector<std::vector<std::function<void()>>> groups_{1};
};

inline bool copies_are_late = false, products_are_late = false;

struct Thread {
  Index index;
  Begun copies{copies_are_late}, products{products_are_late};
  int turn = 0;
};

inline Fibers fibers;

struct Warp {
  Fibers::Barrier barrier{fibers, kLanes};
  std::array<Exchange, 2> exchanges;  // in turns: who is ahead by one leaves that of the others alone
};

struct Block {
  Block(int count, size_t shared_bytes)
      : threads(static_cast<size_t>(count)), barrier(fibers, count), shared(shared_bytes) {}

  Index index;
  std::vector<Thread> threads;
  std::array<Warp, kMostWarps> warps;
  Fibers::Barrier barrier;
  std::vector<unsigned char>
      shared;  // as large as a launch asks for, so that a sanitizer sees what is beyond
};

inline Block* running = nullptr;

inline Thread& self() {
  return running->threads[static_cast<size_t>(fibers.current())];
}
inline Warp& warp() {
  return running->warps[static_cast<size_t>(self().index.x / kLanes)];
}
inline int lane() {
  return self().index.x % kLanes;
}

/// When each lane has given its part.
template <class Give>
const Exchange& exchange(Give give) {
  Exchange& one = warp().exchanges[static_cast<size_t>(self().turn ^= 1)];
  give(one);
  warp().barrier.wait();
  return one;
}

/// Runs a kernel over a grid.
inline void launch(Index grid, int threads_of_block, size_t shared_bytes,
                   const std::function<void()>& kernel) {
  const auto state = std::make_unique<Block>(threads_of_block, shared_bytes);
  running = state.get();
  for (int i = 0; i < grid.x * grid.y * grid.z; ++i) {
    running->index = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
    fibers.run(threads_of_block, [&](int t) {
      self().index = {t, 0, 0};
      kernel();
    });
  }
}

inline float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const int64_t in_steps = exponent == 0 ? fraction : int64_t{1024 + fraction} << (exponent - 1);
  float size = 0x1p-24F * static_cast<float>(in_steps);
  if (exponent == 31) {
    size = fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  }
  return (bits & 0x8000) != 0 ? -size : size;
}

inline uint16_t to_half(float number) {
  const auto sign = static_cast<uint16_t>(std::signbit(number) ? 0x8000 : 0);
  const float size = std::fabs(number);
  if (std::isnan(number)) {
    return 0x7e00;
  }
  if (size >= 65520.0F) {
    return sign | 0x7c00;
  }
  int exponent = -13;
  if (size > 0.0F) {
    std::frexp(size, &exponent);
  }
  exponent = std::max(exponent, -13);  // of the last bit: exponent - 11
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  // steps 1024 ... 2048 with the exponent; a carry goes into it by itself
  return static_cast<uint16_t>(sign | (static_cast<uint32_t>(exponent + 13) * 1024 + steps));
}

inline float from_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t to_bfloat16(float number) {
  const auto bits = std::bit_cast<uint32_t>(number);
  return std::isnan(number) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace gpu

// The words of CUDA.

#define DEVICE inline
#define KERNEL(blocks) inline void
#define threadIdx ::gpu::self().index
#define blockIdx ::gpu::running->index
#define kInfinity std::numeric_limits<float>::infinity()

struct uint4 {
  uint32_t x, y, z, w;
};

inline void __syncthreads() {
  gpu::running->barrier.wait();
}

template <class Word>
Word __shfl_xor_sync(unsigned, Word word, int other) {
  const auto& given =
      gpu::exchange([&](gpu::Exchange& to) { to.words[gpu::lane()] = std::bit_cast<uint32_t>(word); });
  return std::bit_cast<Word>(given.words[gpu::lane() ^ other]);
}

using std::max;
using std::min;
