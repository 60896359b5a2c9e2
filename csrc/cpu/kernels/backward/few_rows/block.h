// The backward pass of few query rows, bound by reading keys and values once and writing their gradients
// once. All query rows of a key head's group meet its keys a few at a time:
//   S = Q K^T,  dP = dO V^T     dot products of rows as they lie in memory
//   dV = P^T dO,  dK = dS^T Q   done with these keys, so rounded and written
//   dQ += dS K                  kept for the merge of the pieces of the keys
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/across.h"
#include "../../matrix/finite.h"
#include "../../matrix/gather.h"
#include "../../matrix/row_dots.h"
#include "../../scores/dropout_draw.h"
#include "../chains.h"
#include "../mask_grad.h"
#include "../row_gradients.h"
#include "../row_terms.h"
#include "memory.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

static_assert(kDropoutColumns % kStepKeys == 0);

template <typename S>
class FewRowsBlock {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  FewRowsBlock(const BackwardParams& params, const BackwardPlan& plan, const FewRowsScratch<S>& scratch)
      : params_(params),
        s_(scratch),
        units_(score_units<T>(params.rule)),
        group_(group_size(params.shape)),
        rows_(group_ * params.shape.query_len),
        exact_delta_(plan.exact_delta),
        streamed_(plan.streamed),
        keeps_(keeps_products(params.shape)) {}
  FewRowsBlock(const FewRowsBlock&) = delete;
  FewRowsBlock& operator=(const FewRowsBlock&) = delete;

  // The group of a key head: its rows' lse and delta, as far as they follow from the rows.
  void set_unit(Unit unit);
  // After that: what the keys are to meet. The rows' terms must be known by now.
  void pack_rows_of_unit();
  // Lets the rows meet some keys, from a multiple of kDropoutColumns on.
  void visit(Pass pass, Range keys);
  // By a visit of all keys.
  void make_delta();

 private:
  int64_t head_of(int64_t row) const { return unit_.key_head * group_ + row / params_.shape.query_len; }
  int64_t query_of(int64_t row) const { return row % params_.shape.query_len; }
  Matrix<Element> rows_of_head(const TensorView& view, int64_t group_head, int64_t dim) const {
    return rows_of<Element>(view, unit_.batch, unit_.key_head * group_ + group_head, 0,
                            params_.shape.query_len, dim);
  }
  // Keys, or values: where they lie, or in `copy`.
  Matrix<Element> key_side(const TensorView& view, Range keys, int64_t dim, const Element* copy) const {
    const int64_t count = keys.end - keys.begin;
    if (copy != nullptr) return {copy + (keys.begin - copied_.begin) * dim, dim, 1, count, dim};
    return rows_of<Element>(view, unit_.batch, unit_.key_head, keys.begin, count, dim);
  }
  void copy_side(const TensorView& view, int64_t dim, Element* to) const {
    if (to == nullptr) return;
    const Element* from = row_pointer<const Element>(view, unit_.batch, unit_.key_head, copied_.begin);
    copy_across<Element>({from, view.column_stride, copied_.end - copied_.begin, dim}, to, true);
  }
  RowPlace row_place(int64_t row) const { return {unit_.batch, head_of(row), query_of(row)}; }
  bool pack_side(const TensorView& view, int64_t dim, Operand* operands, T* rows, bool may_be_bad) const;
  // Whether any of the rows sees any of the keys.
  bool is_live(Range keys) const {
    const ScoreRule& rule = params_.rule;
    for (int64_t r = 0; r < rows_; ++r) {
      const Range seen = intersect(window_keys(rule, params_.shape.key_len, query_of(r)), keys);
      if (any_let_through<Element>(rule, unit_.batch, head_of(r), query_of(r), seen)) return true;
    }
    return false;
  }
  // Keys, or values, of a step, and how many rows lie before them.
  struct StepRows {
    Matrix<Element> rows;
    int64_t before;
  };
  StepRows step_rows(const TensorView& view, Range keys, int64_t dim, const Element* copy) const {
    return {key_side(view, keys, dim, copy), keys.begin - (copy != nullptr ? copied_.begin : 0)};
  }
  void multiply_rows(const Operand* left, int64_t left_stride, const StepRows& right, T* out) const;
  void step(Pass pass, Range keys, int64_t end);
  // S and dP of a step, in place.
  bool make_products(Pass pass, Range keys) const;
  void add_to_delta(int64_t row, const RowSpan<S>& span) const;
  // The factors of kDropoutColumns keys.
  void draw_dropout(int64_t first_key) const {
    const PhiloxBatch state = philox_batch(params_.dropout, unit_.batch);
    for (int64_t r = 0; r < rows_; ++r) {
      dropout_factors(state, params_.dropout, head_of(r), query_of(r), first_key / kDropoutColumns,
                      s_.keep + r * kDropoutColumns);
    }
  }
  void finish_step_scores(Range keys) const {
    for (int64_t r = 0; r < rows_; ++r) {
      finish_row_scores<S>(params_, units_, row_place(r), keys, {weights_ + r * kStepKeys, kStepKeys},
                           units_.capped ? cap_slope_ + r * kStepKeys : nullptr);
    }
  }
  void add_to_terms(Pass pass) const;
  void finish_row(Pass pass, int64_t row, Range keys) const;
  bool is_seen(int64_t row, int64_t key) const {
    return sees_key<Element>(params_.rule, params_.shape.key_len, unit_.batch, head_of(row), query_of(row),
                             key);
  }
  void store_key_sides(Range keys) const;
  // Gradients of keys or of values: left (rows, kStepKeys)^T . right (rows, dim).
  struct KeySide {
    const T* left;
    const T* right;  // of `rows`, as float and without NaN and Inf
    const TensorView& rows;
    bool has_bad_rows;
    int64_t dim;
    T scale;
  };
  void store_key_side(const KeySide& side, const ResultView& grad, Range keys) const;
  void add_bad_rows(const KeySide& side, Range keys) const;
  void clear_key_side(const ResultView& grad, Range keys, int64_t dim) const {
    for (int64_t j = keys.begin; grad.data != nullptr && j < keys.end; ++j) {
      clear_gradient_row<S>(grad, unit_.batch, unit_.key_head, j, dim);
    }
  }
  void add_grad_query(const Matrix<Element>& key, int64_t first_key, bool finite) const;

  const BackwardParams& params_;
  const FewRowsScratch<S>& s_;
  const ScoreUnits<T> units_;
  const int64_t group_, rows_;
  const bool exact_delta_, streamed_, keeps_;
  Unit unit_{0, 0};
  T *weights_ = nullptr, *grads_ = nullptr, *cap_slope_ = nullptr;  // of the step
  bool are_kept_ = false;                                           // by the visit before
  bool finite_[kFewKeys / kStepKeys] = {};                          // of each step that is kept
  Range copied_{0, 0};                                              // of the unit's keys
  bool bad_queries_ = false, bad_grads_ = false;  // NaN or Inf in a query row, in a row of dO
};

template <typename S>
void FewRowsBlock<S>::set_unit(Unit unit) {
  unit_ = unit;
  are_kept_ = false;
  const int64_t count = params_.shape.query_len;
  int64_t dead = 0, far = 0, bad = 0;
  for (int64_t g = 0; g < group_; ++g) {
    const RowTerms<S> terms = s_.terms.from(g * count);
    set_row_terms<S>(params_, terms, unit.batch, unit.key_head * group_ + g, {0, count}, count, exact_delta_);
    dead |= *terms.has_dead_rows;
    far |= *terms.has_far_rows;
    bad |= *terms.may_have_bad_grads;
  }
  *s_.terms.has_dead_rows = dead;
  *s_.terms.has_far_rows = far;
  *s_.terms.may_have_bad_grads = bad;
}

// The rows as operands as they are, and as float without NaN and Inf; whether there were any.
template <typename S>
bool FewRowsBlock<S>::pack_side(const TensorView& view, int64_t dim, Operand* operands, T* rows,
                                bool may_be_bad) const {
  bool bad = false;
  const int64_t count = params_.shape.query_len, width = padded_dim<S>(dim), stride = row_stride_of<S>(dim);
  for (int64_t g = 0; g < group_; ++g) {
    const Matrix<Element> m = rows_of_head(view, g, dim);
    pack_rows<Product>(m, 0, count, operands + g * count * stride, stride);
    const Matrix<Element> finite = may_be_bad ? finite_only(m, s_.gathered) : m;
    bad |= finite.data != m.data;
    pack_rows<PlainProduct<T>>(finite, 0, count, rows + g * count * width, width);
  }
  return bad;
}

template <typename S>
void FewRowsBlock<S>::pack_rows_of_unit() {
  const AttentionShape& shape = params_.shape;
  bad_queries_ = pack_side(params_.query, shape.head_dim, s_.query, s_.query_rows, true);
  fill_span(s_.grad_query, 0, rows_ * padded_dim<S>(shape.head_dim), static_cast<T>(0));
  fill_span(s_.grad_sums, 0, rows_ * S::kLane, static_cast<T>(0));
  if (params_.grad_output.data == nullptr) return;
  bad_grads_ = pack_side(params_.grad_output, shape.value_dim, s_.grad_output, s_.grad_rows,
                         *s_.terms.may_have_bad_grads != 0);
}

// out (rows, kStepKeys) = left (rows, depth) . right (keys, dim)^T. What lies a step further on is asked for
// meanwhile. Fewer keys than a step's are met together with the ones before them.
template <typename S>
void FewRowsBlock<S>::multiply_rows(const Operand* left, int64_t left_stride, const StepRows& right,
                                    T* out) const {
  Matrix<Element> rows = right.rows;
  RowsAhead ahead;
  int64_t met = 0;
  const int64_t missing = kStepKeys - rows.rows;
  if (rows.column_stride != 1 || missing > right.before) {
    gather_block(rows, 0, kStepKeys, 0, rows.columns, s_.gathered);
    rows = {s_.gathered, rows.columns, 1, kStepKeys, rows.columns};
  } else if (missing > 0) {
    met = missing;
    rows.data -= met * rows.row_stride;
    rows.rows = kStepKeys;
  } else {
    const int64_t row_bytes = rows.row_stride * static_cast<int64_t>(sizeof(Element));
    ahead = {reinterpret_cast<const char*>(rows.data) + kStepKeys * row_bytes, row_bytes};
  }
  for (int64_t j = 0; j < kStepKeys; j += S::kLane) {
    RowsAhead rest = ahead;
    each_few_rows<S>(0, rows_, [&](auto count, int64_t r) {
      dot_rows<S, decltype(count)::value>(left + r * left_stride, left_stride, rows, rest,
                                          out + r * kStepKeys + j, kStepKeys);
      rest = {};
    });
    rows.data += S::kLane * rows.row_stride;
    if (ahead.next != nullptr) ahead.next += S::kLane * ahead.row_bytes;
  }
  for (int64_t r = 0; met > 0 && r < rows_; ++r) {
    T products[2 * kStepKeys] = {};
    memcpy(products, out + r * kStepKeys, sizeof(products) / 2);
    memcpy(out + r * kStepKeys, products + met, sizeof(products) / 2);
  }
}

template <typename S>
void FewRowsBlock<S>::add_to_terms(Pass pass) const {
  for (int64_t r = 0; r < rows_; ++r) {
    const T* scores = weights_ + r * kStepKeys;
    T &top = s_.terms.row_max[r], &sum = s_.terms.row_sum[r];
    for (int64_t j = 0; j < kStepKeys; j += S::kLane) {
      if (pass == Pass::kRowMax) {
        top = lane_max<T>(add_to_max<S>(scores, j, j + S::kLane, units_, broadcast(top)));
      } else {
        sum += lane_sum<T>(add_to_sum<S>(scores, j, j + S::kLane, units_, broadcast(top), Vec<T>{}));
      }
    }
  }
}

// P dP and P of a span, neither of which is written.
template <typename S>
void FewRowsBlock<S>::add_to_delta(int64_t row, const RowSpan<S>& span) const {
  T* sums = s_.grad_sums + row * S::kLane;
  T* weight_sums = s_.weight_sums + row * S::kLane;
  Vec<T> sum = load(sums), weight_sum = load(weight_sums);
  for (int64_t j = 0; j < kStepKeys; j += S::kLane) {
    const Vec<T> p = span.weight(j);
    weight_sum += p;
    sum = multiply_add(p, span.hidden(j) ? Vec<T>{} : span.grad(j) * span.factor(j), sum);
  }
  store(sums, sum);
  store(weight_sums, weight_sum);
}

template <typename S>
void FewRowsBlock<S>::make_delta() {
  fill_span(s_.weight_sums, 0, rows_ * S::kLane, static_cast<T>(0));
  visit(Pass::kDelta, {0, params_.shape.key_len});
  are_kept_ = keeps_;
  for (int64_t r = 0; r < rows_; ++r) {
    s_.terms.delta[r] +=
        mean_of_grads(lane_sum<T>(load(s_.grad_sums + r * S::kLane)),
                      lane_sum<T>(load(s_.weight_sums + r * S::kLane)), s_.terms.sink_share[r]);
  }
  fill_span(s_.grad_sums, 0, rows_ * S::kLane, static_cast<T>(0));
}

// P and dS of a row (ScoreSpan); for delta, what sums up to it.
template <typename S>
void FewRowsBlock<S>::finish_row(Pass pass, int64_t row, Range keys) const {
  T mass_grads[kStepKeys], weight_grads[kStepKeys] = {};
  RowSpan<S> span = row_span<S>(params_, row_place(row), keys, kStepKeys, mass_grads, weight_grads);
  span.scores = weights_ + row * kStepKeys;
  span.grads = grads_ + row * kStepKeys;
  span.softmax_scale = units_.softmax_scale;
  span.lse = {s_.terms.lse[row]};
  span.row_scale = {s_.terms.row_scale[row]};
  if (params_.dropout.enabled) span.keep = s_.keep + row * kDropoutColumns + keys.begin % kDropoutColumns;
  if (pass == Pass::kDelta) return add_to_delta(row, span);
  T* sums = s_.grad_sums + row * S::kLane;
  store(sums, make_score_grads<false>(span, 0, kStepKeys, Uniform<T>{s_.terms.delta[row]}, load(sums)));
  if (params_.grad_mask.data != nullptr && params_.grad_mask.column_stride != 0) {
    const MaskGrad<S> mask_grad(params_.grad_mask, params_.grad_mask.data);
    const RowPlace at = row_place(row);
    mask_grad.put_row(mask_grad.place(at.batch, at.head, at.row, keys.begin), span.grads,
                      keys.end - keys.begin);
  }
  if (units_.capped) multiply_by_slope(span.grads, cap_slope_ + row * kStepKeys, 0, kStepKeys);
}

// S as it is after mask and window; whether it is finite before.
template <typename S>
bool FewRowsBlock<S>::make_products(Pass pass, Range keys) const {
  const AttentionShape& shape = params_.shape;
  multiply_rows(s_.query, s_.query_stride, step_rows(params_.key, keys, shape.head_dim, s_.keys), weights_);
  // A key that is not finite gives no finite product with any row.
  const bool finite = are_finite(weights_, rows_ * kStepKeys);
  if (!finite) keep_seen(params_.rule, weights_, rows_ * kStepKeys);
  finish_step_scores(keys);
  const bool wants_grads = pass == Pass::kDelta || pass == Pass::kGradients;
  if (wants_grads && params_.grad_output.data != nullptr) {
    multiply_rows(s_.grad_output, s_.value_stride, step_rows(params_.value, keys, shape.value_dim, s_.values),
                  grads_);
  }
  return finite;
}

// `end`: of the keys that are visited.
template <typename S>
void FewRowsBlock<S>::step(Pass pass, Range keys, int64_t end) {
  const AttentionShape& shape = params_.shape;
  if (keys.begin >= copied_.end) {
    copied_ = {keys.begin, smaller(keys.begin + kAcrossRows<Element>, end)};
    copy_side(params_.key, shape.head_dim, s_.keys);
    if (params_.grad_output.data != nullptr) copy_side(params_.value, shape.value_dim, s_.values);
  }
  const int64_t index = keeps_ ? keys.begin / kStepKeys : 0, place = index * rows_ * kStepKeys;
  weights_ = s_.weights + place;
  grads_ = s_.grads + place;
  cap_slope_ = units_.capped ? s_.cap_slope + place : nullptr;
  if (!are_kept_) finite_[index] = make_products(pass, keys);
  if (pass == Pass::kRowMax || pass == Pass::kRowSum) return add_to_terms(pass);
  for (int64_t r = 0; r < rows_; ++r) finish_row(pass, r, keys);
  if (pass == Pass::kDelta) return;
  store_key_sides(keys);
  if (params_.grad_query.data != nullptr) {
    add_grad_query(key_side(params_.key, keys, shape.head_dim, s_.keys), keys.begin, finite_[index]);
  }
}

template <typename S>
void FewRowsBlock<S>::visit(Pass pass, Range keys) {
  copied_ = {0, 0};
  for (int64_t first = keys.begin; first < keys.end; first += kStepKeys) {
    const Range these{first, smaller(first + kStepKeys, keys.end)};
    if (params_.dropout.enabled && first % kDropoutColumns == 0) draw_dropout(first);
    if (is_live(these)) {
      step(pass, these, keys.end);
    } else if (pass == Pass::kGradients) {
      clear_key_side(params_.grad_key, these, params_.shape.head_dim);
      clear_key_side(params_.grad_value, these, params_.shape.value_dim);
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
