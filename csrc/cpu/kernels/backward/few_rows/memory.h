// The memory of a task of few query rows.
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/across.h"
#include "../../matrix/arena.h"
#include "../../scores/dropout_draw.h"
#include "../plan.h"
#include "../row_terms.h"
#include "../store_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// rows: all of a group, head by head.
template <typename S>
struct FewRowsScratch {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  RowTerms<S> terms;
  Operand* query;        // (rows, query_stride), as the dot products want them
  Operand* grad_output;  // (rows, value_stride)
  T* query_rows;         // (rows, padded D): 0 in place of NaN and Inf
  T* grad_rows;          // (rows, padded Dv): the same
  T* grad_query;         // (rows, padded D), to be scaled
  T* grad_sums;          // (rows, lanes): sums of dS, or of P dP
  T* weight_sums;        // (rows, lanes): sums of P
  T *weights, *grads;    // (steps that are kept, rows, kStepKeys): S, then P after dropout; dP, then dS
  T* cap_slope;          // the same: 1 - tanh^2
  T* keep;               // (rows, kDropoutColumns): dropout factors
  Element* gathered;     // (kStepKeys, D or Dv): what cannot be read in place; (Lq, D or Dv): what is cleaned
  Element *keys, *values;  // (kAcrossRows, D or Dv): copies, where they lie across memory
  T* key_rows;             // (kStepKeys, padded D): keys as float
  T* out;                  // (kStepKeys, padded dim): dK or dV
  Element* stage;          // (kStepKeys, D or Dv) and a line: the same on its way past the caches
  int64_t query_stride, value_stride;
};

// So few keys that all products with them are kept, from when delta is made of them until they become dS.
ATTN_EXT_INLINE bool keeps_products(const AttentionShape& shape) {
  return shape.key_len <= kFewKeys;
}

template <typename S>
FewRowsScratch<S> take_few_rows_scratch(Arena& arena, const BackwardParams& params) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  const AttentionShape& shape = params.shape;
  const int64_t rows = group_size(shape) * shape.query_len;
  const int64_t products = rows * (keeps_products(shape) ? round_up(shape.key_len, kStepKeys) : kStepKeys);
  const int64_t dim = padded_dim<S>(shape.head_dim), value_dim = padded_dim<S>(shape.value_dim);
  FewRowsScratch<S> s{};
  s.query_stride = row_stride_of<S>(shape.head_dim);
  s.value_stride = row_stride_of<S>(shape.value_dim);
  s.terms = take_row_terms<S>(arena, rows);
  s.query = take<Operand>(arena, rows * s.query_stride);
  s.grad_output = take<Operand>(arena, rows * s.value_stride);
  s.query_rows = take<T>(arena, rows * dim);
  s.grad_rows = take<T>(arena, rows * value_dim);
  s.grad_query = take<T>(arena, rows * dim);
  s.grad_sums = take<T>(arena, rows * S::kLane);
  s.weight_sums = take<T>(arena, rows * S::kLane);
  s.weights = take<T>(arena, products);
  s.grads = take<T>(arena, products);
  if (params.rule.softcap > 0) s.cap_slope = take<T>(arena, products);
  if (params.dropout.enabled) s.keep = take<T>(arena, rows * kDropoutColumns);
  s.gathered =
      take<Element>(arena, larger(kStepKeys, shape.query_len) * larger(shape.head_dim, shape.value_dim));
  if (lies_across(params.key)) s.keys = take<Element>(arena, kAcrossRows<Element> * shape.head_dim);
  if (lies_across(params.value)) s.values = take<Element>(arena, kAcrossRows<Element> * shape.value_dim);
  s.key_rows = take<T>(arena, kStepKeys * dim);
  s.out = take<T>(arena, kStepKeys * larger(dim, value_dim));
  s.stage = take<Element>(arena, kStepKeys * larger(shape.head_dim, shape.value_dim) +
                                     kLineBytes / static_cast<int64_t>(sizeof(Element)));
  return s;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
