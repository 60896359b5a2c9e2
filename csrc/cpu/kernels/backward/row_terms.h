// What the backward pass has to know of a whole row of queries x keys before it makes dS: lse, delta, and the
// sink's part in both.
#pragma once

#include "../interface/params.h"
#include "../matrix/arena.h"
#include "../matrix/matrix.h"
#include "../matrix/row_dots.h"
#include "../scores/mask_and_scale.h"
#include "../scores/softmax.h"
#include "../scores/visible_keys.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// What keys are visited for: the maximum of a far row, its sum, delta, or, these known, the gradients.
enum class Pass : int8_t { kRowMax, kRowSum, kDelta, kGradients };

// Vectors over some rows.
template <typename S>
struct RowTerms {
  using T = typename S::Accum;
  T* lse;                // in units of log2; +inf where a row sees no key, so that its weights come out as 0
  T* delta;              // rowsum(P dP) - dLse
  T* row_scale;          // 1, but for far rows
  T* sink_share;         // the sink's weight
  T *row_max, *row_sum;  // of far rows, in the making
  int64_t *has_dead_rows, *has_far_rows;
  int64_t* may_have_bad_grads;  // NaN or Inf in dO

  RowTerms from(int64_t row) const {
    return {lse + row,     delta + row,   row_scale + row, sink_share + row,  row_max + row,
            row_sum + row, has_dead_rows, has_far_rows,    may_have_bad_grads};
  }
};

template <typename S>
RowTerms<S> take_row_terms(Arena& arena, int64_t rows) {
  using T = typename S::Accum;
  RowTerms<S> terms;
  terms.lse = take<T>(arena, rows);
  terms.delta = take<T>(arena, rows);
  terms.row_scale = take<T>(arena, rows);
  terms.sink_share = take<T>(arena, rows);
  terms.row_max = take<T>(arena, rows);
  terms.row_sum = take<T>(arena, rows);
  terms.has_dead_rows = take<int64_t>(arena, 1);
  terms.has_far_rows = take<int64_t>(arena, 1);
  terms.may_have_bad_grads = take<int64_t>(arena, 1);
  return terms;
}

// The rows' lse of a head, natural.
template <typename S>
ATTN_EXT_INLINE const typename S::Accum* lse_rows(const BackwardParams& params, int64_t batch, int64_t head) {
  return static_cast<const typename S::Accum*>(params.lse) +
         (batch * params.shape.query_heads + head) * params.lse_stride;
}

// delta of the rows of a head, where the caller gives it; else null.
template <typename S>
ATTN_EXT_INLINE const typename S::Accum* given_delta(const BackwardParams& params, int64_t batch,
                                                     int64_t head) {
  if (params.delta == nullptr) return nullptr;
  return static_cast<const typename S::Accum*>(params.delta) +
         (batch * params.shape.query_heads + head) * params.lse_stride;
}

// As exactly as the caller gives it.
template <typename S>
ATTN_EXT_INLINE double lse_of_row(const BackwardParams& params, int64_t batch, int64_t head, int64_t row) {
  if (params.double_lse == nullptr) return static_cast<double>(lse_rows<S>(params, batch, head)[row]);
  return params.double_lse[(batch * params.shape.query_heads + head) * params.lse_stride + row];
}

// In units of log2. An infinite one is of a row with an infinite score or sink, whose weights are all NaN.
template <typename T>
ATTN_EXT_INLINE T log2_lse(T lse) {
  return lse == kInfinity<T> ? lse - lse : in_log2<T>(lse);
}

// Whether a row sees no key.
template <typename T>
ATTN_EXT_INLINE bool is_dead(const ScoreRule& rule, int64_t batch, int64_t head, int64_t row, T lse) {
  return lse == -kInfinity<T> || row_is_masked(rule, batch, head, row);
}

// A row whose scores are so far from 0 that lse, rounded as they are, says little about their sum, as happens
// where a bias of -1e9 or the lowest finite value hides all keys. Its weights are made as 2^(s - row max) /
// row sum again.
template <typename T>
ATTN_EXT_INLINE bool is_far(T lse) {
  return lse != kInfinity<T> && (lse > static_cast<T>(kFarScore) || lse < static_cast<T>(-kFarScore));
}

// Whether any of so many rows may be far, by their natural lse.
template <typename T>
ATTN_EXT_INLINE bool any_far(const T* lse, int64_t rows) {
  constexpr T kMost = static_cast<T>(kFarScore * kLn2);
  bool any = false;
  for (int64_t i = 0; i < rows; ++i) any |= lse[i] > kMost || (lse[i] < -kMost && lse[i] != -kInfinity<T>);
  return any;
}

// Whether any row of a call may be.
template <typename T>
bool any_far(const BackwardParams& params) {
  const AttentionShape& shape = params.shape;
  const T* lse = static_cast<const T*>(params.lse);
  for (int64_t head = 0; head < shape.batch * shape.query_heads; ++head) {
    if (any_far(lse + head * params.lse_stride, shape.query_len)) return true;
  }
  return false;
}

// Takes a span of scores into the maximum of a far row, or, that known, into its sum.
template <typename S>
ATTN_EXT_INLINE Vec<typename S::Accum> add_to_max(const typename S::Accum* scores, int64_t begin, int64_t end,
                                                  const ScoreUnits<typename S::Accum>& units,
                                                  Vec<typename S::Accum> row_max) {
  using T = typename S::Accum;
  const Vec<T> factor = broadcast(units.softmax_scale);
  for (int64_t j = begin; j < end; j += S::kLane) {
    row_max = maximum(row_max, rounded(load(scores + j) * factor));
  }
  return row_max;
}

template <typename S>
ATTN_EXT_INLINE Vec<typename S::Accum> add_to_sum(const typename S::Accum* scores, int64_t begin, int64_t end,
                                                  const ScoreUnits<typename S::Accum>& units,
                                                  Vec<typename S::Accum> row_max,
                                                  Vec<typename S::Accum> sum) {
  using T = typename S::Accum;
  const Vec<T> factor = broadcast(units.softmax_scale);
  for (int64_t j = begin; j < end; j += S::kLane) {
    const Vec<T> s = rounded(load(scores + j) * factor);
    sum += weights_of<T, true>(s, broadcast(static_cast<T>(1)), row_max);
  }
  return sum;
}

// The sink's weight in a row by its lse; 0 where there is none.
template <typename S>
ATTN_EXT_INLINE typename S::Accum sink_share(const BackwardParams& params, int64_t batch, int64_t head,
                                             int64_t row) {
  using T = typename S::Accum;
  const T sink = sink_of<typename S::Element>(params.rule, batch, head);
  const double lse = lse_of_row<S>(params, batch, head, row);
  if (sink == -kInfinity<T> || lse == -kInfinity<double>) return 0;
  // All of the row, but for an infinite one, which is NaN.
  if (params.delta == nullptr && row_is_masked(params.rule, batch, head, row)) return 1 + (sink - sink);
  return exp2<T>(broadcast(static_cast<T>(sink_in_log2<T>(sink) - lse * kLog2E)))[0];
}

// A far row's weights are scale 2^(s - top), top the maximum of the row and its sink.
template <typename T>
struct FarRow {
  T top, scale, sink_share;
};

template <typename T>
ATTN_EXT_INLINE FarRow<T> far_row(T row_max, T row_sum, T sink) {
  const T log2_sink = in_log2<T>(sink);
  const T top = log2_sink > row_max ? log2_sink : row_max;
  const auto share = [&](T x) { return exp2<T>(broadcast(x - top))[0]; };
  const T scale = 1 / (row_sum * share(row_max) + share(log2_sink));
  return {top, scale, scale * share(log2_sink)};
}

// The same where these keys are a part of what lse, natural, is over. Their weights sum up to 1 at most: that
// is what is known where lse is so far from 0 that not even a double holds more than the maximum.
template <typename T>
ATTN_EXT_INLINE FarRow<T> far_row_of_part(T row_max, T row_sum, double lse, T sink_share) {
  const double exponent = static_cast<double>(row_max) - lse * kLog2E;
  const double share = exp2<double>(broadcast(exponent < 0 ? exponent : 0))[0];
  const double most = 1 / static_cast<double>(row_sum);
  return {row_max, static_cast<T>(share < most ? share : most), sink_share};
}

// By the maximum and the sum of a row that is far.
template <typename S>
ATTN_EXT_INLINE FarRow<typename S::Accum> far_row(const BackwardParams& params, int64_t batch, int64_t head,
                                                  int64_t row, typename S::Accum row_max,
                                                  typename S::Accum row_sum) {
  using T = typename S::Accum;
  if (params.delta != nullptr) {
    return far_row_of_part<T>(row_max, row_sum, lse_of_row<S>(params, batch, head, row),
                              sink_share<S>(params, batch, head, row));
  }
  return far_row<T>(row_max, row_sum, sink_of<typename S::Element>(params.rule, batch, head));
}

// Whether anything but lse tells what the weights of a far row are: of one that sees none of these keys its
// sink does, but where other parts may have all of it.
template <typename S>
ATTN_EXT_INLINE bool is_told(const BackwardParams& params, int64_t batch, int64_t head,
                             typename S::Accum row_max) {
  using T = typename S::Accum;
  return row_max != -kInfinity<T> ||
         (params.delta == nullptr && sink_of<typename S::Element>(params.rule, batch, head) != -kInfinity<T>);
}

// From the maxima and sums of far rows to what their weights are made of.
template <typename S>
void finish_far_rows(const BackwardParams& params, const RowTerms<S>& terms, int64_t batch, int64_t head,
                     Range rows) {
  using T = typename S::Accum;
  for (int64_t r = 0; r < rows.end - rows.begin; ++r) {
    if (!is_far(terms.lse[r]) || !is_told<S>(params, batch, head, terms.row_max[r])) continue;
    const FarRow<T> row = far_row<S>(params, batch, head, rows.begin + r, terms.row_max[r], terms.row_sum[r]);
    terms.lse[r] = row.top;
    terms.row_scale[r] = row.scale;
    terms.sink_share[r] = row.sink_share;
  }
}

// lse, and delta = rowsum(dO O) - dLse unless it is given or to be made of P dP; `padded` terms, of which
// those past the rows are of dead ones.
template <typename S>
void set_row_terms(const BackwardParams& params, const RowTerms<S>& terms, int64_t batch, int64_t head,
                   Range rows, int64_t padded, bool exact_delta) {
  using Element = typename S::Element;
  using T = typename S::Accum;
  const int64_t first = rows.begin, count = rows.end - rows.begin;
  const AttentionShape& shape = params.shape;
  const T* given = given_delta<S>(params, batch, head);
  const bool from_output = params.grad_output.data != nullptr && !exact_delta && given == nullptr;
  const Matrix<Element> grad =
      rows_of<Element>(params.grad_output, batch, head, first, count, shape.value_dim);
  const Matrix<Element> output = rows_of<Element>(params.output, batch, head, first, count, shape.value_dim);
  const T* lse = lse_rows<S>(params, batch, head) + first;
  const bool sinks = params.rule.sinks_kind != ScalarKind::kNone;
  *terms.has_dead_rows = 0;
  *terms.has_far_rows = 0;
  *terms.may_have_bad_grads = exact_delta || given != nullptr;
  for (int64_t r = 0; r < padded; ++r) {
    const bool live = r < count && !is_dead(params.rule, batch, head, first + r, lse[r]);
    terms.lse[r] = live ? log2_lse<T>(lse[r]) : kInfinity<T>;
    terms.delta[r] = live && from_output ? dot_of_row(grad, output, r) : 0;
    // All weights of the row are NaN then, and their sum with whatever meets them: also where nothing does.
    if (live && terms.lse[r] != terms.lse[r]) terms.delta[r] = terms.lse[r];
    if (live && given != nullptr) terms.delta[r] = given[first + r];
    if (!(terms.delta[r] - terms.delta[r] == 0)) {
      *terms.may_have_bad_grads = 1;
      if (!sees_any<Element>(params.rule, shape.key_len, batch, head, first + r)) terms.delta[r] = 0;
    }
    if (r < count && params.grad_lse.data != nullptr) {
      terms.delta[r] -= *row_pointer<const T>(params.grad_lse, batch, head, first + r);
    }
    if (r < count && !live) *terms.has_dead_rows = *terms.may_have_bad_grads = 1;
    if (is_far(terms.lse[r])) *terms.has_far_rows = 1;
    terms.row_scale[r] = 1;
    terms.sink_share[r] = r < count && sinks ? sink_share<S>(params, batch, head, first + r) : 0;
    terms.row_max[r] = -kInfinity<T>;
    terms.row_sum[r] = 0;
  }
}

// rowsum(P dP) of a row's own weights. These sum up to 1, with the sink's share, but for the rounding of lse,
// which delta, a mean, must not take in.
template <typename T>
ATTN_EXT_INLINE T mean_of_grads(T sum, T weight_sum, T sink_share) {
  const T total = weight_sum + sink_share;
  return total > 0 ? sum / total : sum;
}

template <typename S>
ATTN_EXT_INLINE typename S::Accum& grad_sink(const BackwardParams& params, int64_t batch, int64_t head) {
  return static_cast<typename S::Accum*>(params.grad_sinks)[batch * params.shape.query_heads + head];
}

// delta - dLse of a row as it is given, also of one that sees none of these keys.
template <typename S>
ATTN_EXT_INLINE typename S::Accum given_row_delta(const BackwardParams& params, int64_t batch, int64_t head,
                                                  int64_t row) {
  using T = typename S::Accum;
  const T delta = given_delta<S>(params, batch, head)[row];
  if (params.grad_lse.data == nullptr) return delta;
  return delta - *row_pointer<const T>(params.grad_lse, batch, head, row);
}

// dsink = sum over the rows of exp(sink - lse) (dLse - delta). terms_of(row): those of a row, of which only
// the sink's share is read where delta is given.
template <typename S, typename TermsOf>
ATTN_EXT_INLINE void store_sink(const BackwardParams& params, int64_t batch, int64_t head, TermsOf terms_of) {
  using T = typename S::Accum;
  if (params.grad_sinks == nullptr) return;
  const T* lse = lse_rows<S>(params, batch, head);
  const bool none = sink_of<typename S::Element>(params.rule, batch, head) == -kInfinity<T>;
  T sum = 0;
  for (int64_t i = 0; !none && i < params.shape.query_len; ++i) {
    if (lse[i] == -kInfinity<T>) continue;
    const RowTerms<S> terms = terms_of(i);
    const T delta = params.delta != nullptr ? given_row_delta<S>(params, batch, head, i) : *terms.delta;
    sum -= *terms.sink_share * delta;
  }
  grad_sink<S>(params, batch, head) = sum;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
