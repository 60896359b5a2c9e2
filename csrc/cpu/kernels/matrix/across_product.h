// A few rows times rows that lie across memory, as values do that are stored as (..., Dv, L): squares of them
// are turned around in registers, and multiplied there.
#pragma once

#include "across.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Whether elements of two bytes become floats on the way: in short vectors for less by a copy, read in order.
template <typename S>
constexpr bool kWidensAcross = sizeof(typename S::Element) * S::kDepth < sizeof(typename S::Operand);
template <typename S>
constexpr bool kMultipliesAcross = S::Product::kInRegisters&& kTurnsSquares<typename S::Element> &&
                                   (!kWidensAcross<S> || S::kLane >= 16);

// So many rows at most: squares are turned around for each four of them anew, where a copy is read by all.
template <typename S>
constexpr int64_t kMostRowsAcross = kWidensAcross<S> ? 4 : 8;

// out (Rows, columns) (+)= left (Rows, depth) . right (depth, columns), a vector of columns at most. A number
// is one chain of sums along the depth, as it is where rows lie side by side. Of an odd depth left has pairs
// up to the next even one, finite.
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
  if constexpr (!kWidensAcross<S>) {
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

// Of the columns that are left where Partial. A last square that is not whole is filled up with zeros.
template <typename S, int Rows, bool Partial>
void multiply_across(const AcrossProduct<S>& args) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  using Element = typename S::Element;
  constexpr int kSide = kLanes<T>;
  constexpr int64_t kRows = kSquareRows<Element>, kOperands = kRows / S::kDepth;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t stride = args.right.column_stride, columns = Partial ? args.right.columns : kSide;
  const int64_t whole = round_down(args.right.rows, kRows), rest = args.right.rows - whole;
  Vec<T> sums[Rows] = {};
  if (!args.fresh) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) sums[r] = load(args.out + r * args.out_stride);
  }
  const auto multiply_square = [&](auto load_column, const Operand* left, int64_t left_stride)
      __attribute__((always_inline)) {
    Vec<T> square[kSide] = {};
#pragma GCC unroll 16
    for (int c = 0; c < kSide; ++c) {
      if (c < columns) load_column(c, square[c]);
    }
    transpose_square<T>(square);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      each_operand_in<S>(
          square[i], i, [&](Vec<Operand> right, int k) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int r = 0; r < Rows; ++r) {
              sums[r] = S::Product::step(broadcast(left[r * left_stride + k]), right, sums[r]);
            }
          });
    }
  };
  const Operand* left = args.left;
  const Element* from = args.right.data;
  for (int64_t row = 0; row < whole; row += kRows, from += kRows, left += kOperands) {
    if (args.ahead != 0 && row % kLine == 0) {
      for (int64_t c = 0; c < columns; ++c) __builtin_prefetch(from + c * stride + args.ahead, 0, 2);
    }
    multiply_square([&](int c, Vec<T>& column) { memcpy(&column, from + c * stride, sizeof(column)); }, left,
                    args.left_stride);
  }
  if (rest > 0) {
    Operand padded[Rows * kOperands] = {};
    for (int r = 0; r < Rows; ++r) {
      memcpy(padded + r * kOperands, left + r * args.left_stride,
             static_cast<size_t>(ceil_div(rest, S::kDepth)) * sizeof(Operand));
    }
    multiply_square([&](int c, Vec<T>& column) { column = load_first(from + c * stride, rest); }, padded,
                    kOperands);
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) store(args.out + r * args.out_stride, sums[r]);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
