// Dot products of rows with a panel of keys in the lanes.
#pragma once

#include "pack.h"
#include "product.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Keys of a panel: as many as are multiplied at a time, so that a panel of them is one piece of memory, which
// the nearest cache keeps.
template <typename S>
constexpr int64_t kSharedPanel = 2 * S::kLane;

// out (rows, keys) = left (rows, depth) . panel (depth, keys), in the order of dot_rows(), to the bit: there
// a product has a sum for each lane of the depth, and then neighbours are added, then pairs of them, and so
// on. Here the keys are the lanes, so that these sums follow one another in registers, and nothing is
// shuffled.
template <typename S>
struct SharedDotsArgs {
  int64_t depth;  // in operands
  const typename S::Operand* left;
  int64_t left_stride;
  typename S::Accum* out;
  int64_t out_stride;
};

// Packed keys (depth, kSharedPanel).
template <typename S>
struct PackedKeys {
  const typename S::Operand* data;

  template <int Vectors>
  ATTN_EXT_INLINE void load_keys(int64_t k, Vec<typename S::Operand> (&keys)[Vectors]) const {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) keys[v] = load(data + k * kSharedPanel<S> + v * S::kLane);
  }
};

// Keys that lie across memory, (D, keys) with columns `stride` apart. Memory is asked for `ahead` keys ahead.
template <typename S>
struct KeysAcross {
  const typename S::Element* data;
  int64_t stride, dim, ahead;
  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(typename S::Element));

  template <int Vectors>
  ATTN_EXT_INLINE void load_keys(int64_t k, Vec<typename S::Operand> (&keys)[Vectors]) const {
    const typename S::Element* column = data + k * S::kDepth * stride;
    if (ahead > 0) {
#pragma GCC unroll 2
      for (int i = 0; i < S::kDepth; ++i) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < kSharedPanel<S>; j += kLine) {
          __builtin_prefetch(column + i * stride + ahead + j, 0, 2);
        }
      }
    }
#if defined(ATTN_EXT_HAS_PAIRS)
    if constexpr (S::kDepth == 2) {
      static_assert(Vectors == 2);
      const auto a = load_operands<typename S::Product>(column);
      const bool has_two = 2 * k + 1 < dim;
      const auto b = has_two ? load_operands<typename S::Product>(column + stride) : decltype(a){};
      keys[0] = pair_first_half(a, b);
      keys[1] = pair_second_half(a, b);
      return;
    }
#endif
    if constexpr (S::kDepth == 1) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) keys[v] = load_compute(column + v * S::kLane);
    }
  }
};

// The sum over `Lanes` lanes from `lane` on.
template <typename S, int Rows, int Vectors, int Lanes, typename Keys>
ATTN_EXT_INLINE void sum_lanes(const SharedDotsArgs<S>& args, const Keys& panel, int64_t lane,
                               Vec<typename S::Accum> (&sums)[Rows][Vectors]) {
  if constexpr (Lanes > 1) {
    Vec<typename S::Accum> others[Rows][Vectors];
    sum_lanes<S, Rows, Vectors, Lanes / 2>(args, panel, lane, sums);
    sum_lanes<S, Rows, Vectors, Lanes / 2>(args, panel, lane + Lanes / 2, others);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] += others[r][v];
    }
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = Vec<typename S::Accum>{};
    }
    for (int64_t k = lane; k < args.depth; k += S::kLane) {
      Vec<typename S::Operand> keys[Vectors];
      panel.load_keys(k, keys);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const auto element = broadcast(args.left[r * args.left_stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[r][v] = S::Product::step(element, keys[v], sums[r][v]);
      }
    }
  }
}

template <typename S, int Rows, int Vectors, typename Keys>
void shared_dots(const SharedDotsArgs<S>& args, const Keys& panel) {
  Vec<typename S::Accum> sums[Rows][Vectors];
  sum_lanes<S, Rows, Vectors, static_cast<int>(S::kLane)>(args, panel, 0, sums);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(args.out + r * args.out_stride + v * S::kLane, sums[r][v]);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
