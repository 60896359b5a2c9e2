// Dot products of many rows with the same packed keys.
#pragma once

#include "product.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Keys of a panel: as many as are multiplied at a time, so that a panel of them is one piece of memory, which
// the nearest cache keeps.
template <typename S>
constexpr int64_t kSharedPanel = 2 * S::kLane;

// out (rows, keys) = left (rows, depth) . panel (depth, kSharedPanel), in the order of dot_rows(), to the
// bit: there a product has a sum for each lane of the depth, and then neighbours are added, then pairs of
// them, and so on. Here the keys are the lanes, so that these sums follow one another in registers, and
// nothing is shuffled.
template <typename S>
struct SharedDotsArgs {
  int64_t depth;  // in whole vectors of operands
  const typename S::Operand* left;
  int64_t left_stride;
  const typename S::Operand* panel;
  typename S::Accum* out;
  int64_t out_stride;
};

// The sum over `Lanes` lanes from `lane` on.
template <typename S, int Rows, int Vectors, int Lanes>
ATTN_EXT_INLINE void sum_lanes(const SharedDotsArgs<S>& args, int64_t lane,
                               Vec<typename S::Accum> (&sums)[Rows][Vectors]) {
  if constexpr (Lanes > 1) {
    Vec<typename S::Accum> others[Rows][Vectors];
    sum_lanes<S, Rows, Vectors, Lanes / 2>(args, lane, sums);
    sum_lanes<S, Rows, Vectors, Lanes / 2>(args, lane + Lanes / 2, others);
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
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) keys[v] = load(args.panel + k * kSharedPanel<S> + v * S::kLane);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const auto element = broadcast(args.left[r * args.left_stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[r][v] = S::Product::step(element, keys[v], sums[r][v]);
      }
    }
  }
}

template <typename S, int Rows, int Vectors>
void shared_dots(const SharedDotsArgs<S>& args) {
  Vec<typename S::Accum> sums[Rows][Vectors];
  sum_lanes<S, Rows, Vectors, static_cast<int>(S::kLane)>(args, 0, sums);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(args.out + r * args.out_stride + v * S::kLane, sums[r][v]);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
