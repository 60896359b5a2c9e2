// What a query row goes through between its products and dS where queries are rows (few rows, few keys).
#pragma once

#include "../interface/params.h"
#include "../matrix/gather.h"
#include "../matrix/matrix.h"
#include "../matrix/pack.h"
#include "../scores/mask_and_scale.h"
#include "score_gradients.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

struct RowPlace {
  int64_t batch, head, row;
};

// Scores of so many columns.
template <typename T>
struct ScoreRow {
  T* scores;
  int64_t columns;
};

// Scale or softcap, mask and window: -inf where the row does not see a key, and past the keys.
template <typename S>
ATTN_EXT_INLINE void finish_row_scores(const BackwardParams& params,
                                       const ScoreUnits<typename S::Accum>& units, RowPlace place, Range keys,
                                       ScoreRow<typename S::Accum> row, typename S::Accum* cap_slope) {
  using T = typename S::Accum;
  const ScoreRule& rule = params.rule;
  const TensorView& mask = rule.mask;
  const Range seen = intersect(window_keys(rule, params.shape.key_len, place.row), keys);
  // What a bool mask says of all keys of a query is in lse.
  const bool masks = is_biased(rule) || (rule.mask_kind == ScalarKind::kBool && mask.column_stride != 0);
  finish_scores(row.scores, cap_slope, {0, row.columns}, {seen.begin - keys.begin, seen.end - keys.begin},
                units, is_biased(rule), [&](T scale) {
                  if (!masks) return;
                  with_kind<typename S::Element>(rule.mask_kind, [&](auto tag) {
                    using M = typename decltype(tag)::Type;
                    mask_span</*KeepSeen=*/true>(
                        row.scores, 0, row.columns,
                        row_pointer<const M>(mask, place.batch, place.head, place.row) +
                            keys.begin * mask.column_stride,
                        mask.column_stride, keys.end - keys.begin, scale);
                  });
                });
}

template <typename S>
using RowSpan = ScoreSpan<S, Uniform, Varying>;

// What reaches the weights of a row beside dO V^T: dMass and dW of `keys`, gathered into buffers of
// `columns`.
template <typename S>
ATTN_EXT_INLINE RowSpan<S> row_span(const BackwardParams& params, RowPlace place, Range keys, int64_t columns,
                                    typename S::Accum* mass_grads, typename S::Accum* weight_grads) {
  using T = typename S::Accum;
  const int64_t count = keys.end - keys.begin;
  RowSpan<S> span{};
  span.has_grads = params.grad_output.data != nullptr;
  span.row_scale = {1};
  span.has_mass = params.grad_key_mass.data != nullptr;
  if (span.has_mass) {
    const TensorView& view = params.grad_key_mass;
    const Matrix<T> m{
        row_pointer<const T>(view, place.batch, place.head, 0) + keys.begin * view.column_stride, 0,
        view.column_stride, 1, count};
    gather_block(m, 0, 1, 0, columns, mass_grads);
    span.mass_grads = {mass_grads};
  }
  if (params.grad_weights.data != nullptr) {
    auto m = rows_of<typename S::Element>(params.grad_weights, place.batch, place.head, place.row, 1, count);
    m.data += keys.begin * m.column_stride;
    pack_rows<PlainProduct<T>>(m, 0, 1, weight_grads, columns);
    span.weight_grads = weight_grads;
  }
  return span;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
