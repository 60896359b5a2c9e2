// Where the packs, sums and scores of few keys lie: a unit's, in shared memory or in a thread's, and those of
// a block of rows.
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/arena.h"
#include "../../matrix/multiply.h"
#include "../../scores/dropout_draw.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewKeysScores = 8192;  // of a block
constexpr int64_t kFewKeysRows = 96;

template <typename S>
struct FewKeysScratch {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  using Element = typename S::Element;
  Operand *query_left, *query_right, *grad_left, *grad_right;
  Element *finite_query, *finite_grad;  // copies, where there is something to leave out
  T *scores, *grads;                    // (rows, stride): S, then P; dP, then dS
  T *cap_slope, *keep;                  // (stride): of a row
  Operand *weight_pairs,
      *grad_pairs;     // (pairs of rows, stride), paired only: left operands along the columns
  Operand* grad_rows;  // (rows, left_stride), paired only: dS as a left operand
  Operand *weight_columns,
      *grad_columns;  // (stride, rows / 2), the pairs turned around: outside of registers only
  T* grad_query;
  int64_t block_rows, stride, left_stride;
};

// Rows of a block: of nearly equal blocks, in whole tiles, and whole steps of a product along them.
template <typename S>
int64_t few_keys_block_rows(const AttentionShape& shape) {
  const int64_t unit = S::Product::kInRegisters ? S::kTileRows : S::kSpan;
  const int64_t scores = round_down(kFewKeysScores / padded_dim<S>(shape.key_len), unit);
  const int64_t most = larger(unit, smaller(kFewKeysRows, scores));
  return round_up(ceil_div(shape.query_len, larger(1, ceil_div(shape.query_len, most))), unit);
}

template <typename S>
FewKeysScratch<S> take_few_keys_scratch(Arena& arena, const BackwardParams& params) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  const AttentionShape& shape = params.shape;
  FewKeysScratch<S> s{};
  s.stride = padded_dim<S>(shape.key_len);
  s.left_stride = round_up(shape.key_len, S::kSpan) / S::kDepth;
  s.block_rows = few_keys_block_rows<S>(shape);
  const int64_t rows = s.block_rows;
  s.query_left = take<Operand>(arena, rows * row_stride_of<S>(shape.head_dim));
  s.query_right = take<Operand>(arena, row_panels_size<S>(rows, shape.head_dim));
  s.grad_left = take<Operand>(arena, rows * row_stride_of<S>(shape.value_dim));
  s.grad_right = take<Operand>(arena, row_panels_size<S>(rows, shape.value_dim));
  s.finite_query = take<typename S::Element>(arena, rows * shape.head_dim);
  s.finite_grad = take<typename S::Element>(arena, rows * shape.value_dim);
  s.scores = take<T>(arena, rows * s.stride);
  s.grads = take<T>(arena, rows * s.stride);
  if (params.rule.softcap > 0) s.cap_slope = take<T>(arena, s.stride);
  if (params.dropout.enabled) s.keep = take<T>(arena, round_up(s.stride, kDropoutColumns));
  if constexpr (S::kPaired) {
    s.weight_pairs = take<Operand>(arena, rows / 2 * s.stride);
    s.grad_pairs = take<Operand>(arena, rows / 2 * s.stride);
    s.grad_rows = take<Operand>(arena, rows * s.left_stride);
  }
  if constexpr (!S::Product::kInRegisters) {
    s.weight_columns = take<Operand>(arena, rows / 2 * s.stride);
    s.grad_columns = take<Operand>(arena, rows / 2 * s.stride);
  }
  s.grad_query = take<T>(arena, rows * padded_dim<S>(shape.head_dim));
  return s;
}

// The keys of a unit as they are computed with.
template <typename S>
struct FewKeysPack {
  using Operand = typename S::Operand;
  int64_t count;  // without those at the end that padding hides
  Matrix<typename S::Element> key;
  Operands<Operand> key_columns, value_columns;  // K^T, V^T in panels
  Operands<Operand> key_rows;                    // K as a right operand
  bool bad_keys;                                 // some are not finite
  bool bad_values;                               // the same; looked for where weights are read
};

// What all blocks of a unit have in common, in a thread's memory or in what threads share.
template <typename S>
struct FewKeysMemory {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  FewKeysPack<S>* pack;
  Operand *key_columns, *value_columns, *key_rows;
  typename S::Element* finite_key;
  T *grad_key, *grad_value;  // sums, in whole tiles of keys
};

template <typename S>
FewKeysMemory<S> take_few_keys_memory(Arena& arena, const AttentionShape& shape) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  const int64_t keys = shape.key_len, key_tiles = round_up(keys, S::kTileRows);
  const int64_t columns = round_up(keys, panel_width_of<S>(keys));
  FewKeysMemory<S> m{};
  m.pack = take<FewKeysPack<S>>(arena, 1);
  m.key_columns = take<Operand>(arena, columns * depth_of<typename S::Product>(shape.head_dim));
  m.value_columns = take<Operand>(arena, columns * depth_of<typename S::Product>(shape.value_dim));
  m.key_rows = take<Operand>(arena, row_panels_size<S>(keys, shape.head_dim));
  m.finite_key = take<typename S::Element>(arena, keys * shape.head_dim);
  m.grad_key = take<T>(arena, key_tiles * padded_dim<S>(shape.head_dim));
  m.grad_value = take<T>(arena, key_tiles * padded_dim<S>(shape.value_dim));
  return m;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
