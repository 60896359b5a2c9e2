// A few rows times rows that lie across memory, as values do that are stored as (..., Dv, L): squares of them
// are turned around in registers, and multiplied there.
#pragma once

#include "across.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr bool kMultipliesAcross = S::Product::kInRegisters&& kTurnsSquares<typename S::Element>;

// So many rows at most: squares are turned around for each four of them anew, and two bytes made floats,
// where a copy is read by all.
template <typename S>
constexpr int64_t kMostRowsAcross = sizeof(typename S::Element) * S::kDepth < sizeof(typename S::Operand) ? 4
                                                                                                          : 8;

// out (Rows, columns) (+)= left (Rows, depth) . right (depth, columns), a vector of columns at most, and of
// the depth whole squares. A number is one chain of sums along the depth, as it is where rows lie side by
// side.
template <typename S>
struct AcrossProduct {
  const typename S::Operand* left;
  int64_t left_stride;
  Across<typename S::Element> right;
  int64_t ahead;  // of each column what lies so many elements behind is asked for; 0: nothing
  typename S::Accum* out;
  int64_t out_stride;
  bool fresh;
};

// body(operands, k) for the k-th operands that a vector of a square holds: of one column in each lane.
template <typename S, typename Body>
ATTN_EXT_INLINE void each_operand_in(Vec<typename S::Accum> lanes, int i, Body body) {
  using Operand = typename S::Operand;
  using Element = typename S::Element;
  if constexpr (sizeof(Element) * S::kDepth == sizeof(Operand)) {
    body((Vec<Operand>)lanes, i);
  } else {  // two rows, the first in the low half
    const auto both = (Vec<uint32_t>)lanes;
    if constexpr (std::is_same_v<Element, BFloat16>) {
      body((Vec<Operand>)(both << 16), 2 * i);
      body((Vec<Operand>)(both & 0xffff0000u), 2 * i + 1);
    } else {
      constexpr const Element* kType = nullptr;
      body(from_half_bits(low_halves(both & 0xffffu), kType), 2 * i);
      body(from_half_bits(low_halves(both >> 16), kType), 2 * i + 1);
    }
  }
}

template <typename S, int Rows, bool Partial>
void multiply_across(const AcrossProduct<S>& args) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  using Element = typename S::Element;
  constexpr int kSide = kLanes<T>;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t stride = args.right.column_stride, columns = Partial ? args.right.columns : kSide;
  Vec<T> sums[Rows] = {};
  if (!args.fresh) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r] = load(args.out + r * args.out_stride);
  }
  const Operand* left = args.left;
  const Element* from = args.right.data;
  for (int64_t row = 0; row < args.right.rows; row += kSquareRows<Element>) {
    if (args.ahead != 0 && row % kLine == 0) {
      for (int64_t c = 0; c < columns; ++c) __builtin_prefetch(from + c * stride + args.ahead, 0, 2);
    }
    Vec<T> square[kSide] = {};
#pragma GCC unroll 16
    for (int c = 0; c < kSide; ++c) {
      if (c < columns) memcpy(&square[c], from + c * stride, sizeof(square[c]));
    }
    transpose_square<T>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      each_operand_in<S>(
          square[i], i, [&](Vec<Operand> right, int k) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
              sums[r] = S::Product::step(broadcast(left[r * args.left_stride + k]), right, sums[r]);
            }
          });
    }
    from += kSquareRows<Element>;
    left += kSquareRows<Element> / S::kDepth;
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) store(args.out + r * args.out_stride, sums[r]);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
