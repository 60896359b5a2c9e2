// The backward pass of few query rows, bound by reading keys and values once and writing their gradients
// once. All query rows of a key head's group meet its keys a few at a time:
//   S = Q K^T,  dP = dO V^T     dot products of rows as they lie in memory
//   dV = P^T dO,  dK = dS^T Q   done with these keys, so rounded and written
//   dQ += dS K                  kept for the merge of the pieces of the keys
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/across.h"
#include "../../matrix/arena.h"
#include "../../matrix/finite.h"
#include "../../matrix/gather.h"
#include "../../matrix/multiply.h"
#include "../../matrix/row_dots.h"
#include "../../scores/dropout_draw.h"
#include "../chains.h"
#include "../mask_grad.h"
#include "../row_gradients.h"
#include "../row_terms.h"
#include "../store_rows.h"
#include "in_registers.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

static_assert(kDropoutColumns % kStepKeys == 0);

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

// The sum of all weights is 1 but for the rounding of lse, which delta, a mean, must not take in. The weights
// of a far row were made of its sum, and of no lse.
template <typename S>
void FewRowsBlock<S>::make_delta() {
  fill_span(s_.weight_sums, 0, rows_ * S::kLane, static_cast<T>(0));
  visit(Pass::kDelta, {0, params_.shape.key_len});
  are_kept_ = keeps_;
  for (int64_t r = 0; r < rows_; ++r) {
    const RowPlace at = row_place(r);
    const T lse = lse_rows<S>(params_, at.batch, at.head)[at.row];
    const T total = lane_sum<T>(load(s_.weight_sums + r * S::kLane)) +
                    sink_share(sink_of<Element>(params_.rule, at.batch, at.head), lse);
    const T sum = lane_sum<T>(load(s_.grad_sums + r * S::kLane));
    const bool divides = total > 0 && !is_far(log2_lse<T>(lse));
    s_.terms.delta[r] += divides ? sum / total : sum;
  }
  fill_span(s_.grad_sums, 0, rows_ * S::kLane, static_cast<T>(0));
}

// P and dS of a row (ScoreSpan), or what sums up to delta.
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

// What the NaN and Inf of the rows give to the keys that they see.
template <typename S>
void FewRowsBlock<S>::add_bad_rows(const KeySide& side, Range keys) const {
  const int64_t count = params_.shape.query_len;
  for (int64_t first = 0; first < rows_; first += count) {
    add_nonfinite(
        rows_of_head(side.rows, first / count, side.dim), keys.end - keys.begin,
        [&](int64_t j, int64_t i) { return is_seen(first + i, keys.begin + j); },
        [&](int64_t j, int64_t i) { return side.left[(first + i) * kStepKeys + j]; },
        [&](int64_t j, int64_t c, Vec<T> sum, int64_t present) {
          add_row(s_.out + j * padded_dim<S>(side.dim) + c, 1, sum, present);
        });
  }
}

// Into the caller's tensor.
template <typename S>
void FewRowsBlock<S>::store_key_side(const KeySide& side, const ResultView& grad, Range keys) const {
  const int64_t dim = side.dim, padded = padded_dim<S>(dim), width = panel_width_of<S>(dim);
  if (!side.has_bad_rows && writes_from_registers<S>(grad, rows_, dim)) {
    Element* to = row_pointer<Element>(grad, unit_.batch, unit_.key_head, keys.begin);
    return write_outer<S>(
        {side.left, side.right, padded, to, grad.row_stride, keys.end - keys.begin, dim, side.scale}, rows_,
        streamed_ && streams_from_registers<S>(grad, to, dim));
  }
  MultiplyArgs<PlainProduct<T>> args{};
  args.rows = keys.end - keys.begin;
  args.columns = dim;
  args.depth = rows_;
  args.left = side.left;
  args.left_stride = 1;
  args.left_step = kStepKeys;
  args.right = {side.right, padded, width};
  args.right_width = width;
  args.out = s_.out;
  args.out_stride = padded;
  multiply<PlainProduct<T>, false>(args);
  if (side.has_bad_rows) add_bad_rows(side, keys);
  constexpr int64_t kSize = sizeof(Element);
  if (streamed_ && !grad.wide && grad.row_stride == dim && grad.column_stride == 1 &&
      dim * kSize % kLineBytes != 0) {
    Element* to = row_pointer<Element>(grad, unit_.batch, unit_.key_head, keys.begin);
    return stream_gradient_rows<S>(s_.out, padded, to, keys.end - keys.begin, dim, side.scale, s_.stage);
  }
  const HeadGradient<S> result{grad, unit_.batch, unit_.key_head, dim, side.scale, streamed_};
  result.write(s_.out, padded, keys);
}

// dQ += dS K. A key that is not finite must not meet the rows that do not see it.
template <typename S>
void FewRowsBlock<S>::add_grad_query(const Matrix<Element>& key, int64_t first_key, bool finite) const {
  const int64_t padded = padded_dim<S>(key.columns);
  if (finite && key.column_stride == 1 && fits_registers<S>(rows_, key.columns)) {
    return add_keys<S>({grads_, key.data, key.row_stride, key.rows, key.columns, s_.grad_query, padded},
                       rows_);
  }
  MultiplyArgs<PlainProduct<T>> args{};
  args.rows = rows_;
  args.columns = key.columns;
  args.depth = key.rows;
  args.left = grads_;
  args.left_stride = kStepKeys;
  args.right_width = panel_width_of<S>(key.columns);
  args.out = s_.grad_query;
  args.out_stride = padded;
  if constexpr (std::is_same_v<Element, T>) {
    if (key.column_stride == 1 && key.columns == padded)
      args.right = {key.data, key.row_stride, args.right_width};
  }
  if (args.right.data == nullptr) {
    pack_rows<PlainProduct<T>>(key, 0, key.rows, s_.key_rows, padded);
    args.right = {s_.key_rows, padded, args.right_width};
  }
  if (finite) return multiply<PlainProduct<T>, true>(args);
  args.rows = args.depth = 1;
  const T* keys = args.right.data;
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t j = 0; j < key.rows; ++j) {
      args.left = grads_ + r * kStepKeys + j;
      args.right.data = keys + j * args.right.row_stride;
      args.out = s_.grad_query + r * padded;
      if (is_seen(r, first_key + j)) multiply<PlainProduct<T>, true>(args);
    }
  }
}

template <typename S>
void FewRowsBlock<S>::store_key_sides(Range keys) const {
  const AttentionShape& shape = params_.shape;
  if (params_.grad_output.data == nullptr) {
    clear_key_side(params_.grad_value, keys, shape.value_dim);
  } else if (params_.grad_value.data != nullptr) {
    store_key_side({weights_, s_.grad_rows, params_.grad_output, bad_grads_, shape.value_dim, 1},
                   params_.grad_value, keys);
  }
  if (params_.grad_key.data != nullptr) {
    store_key_side({grads_, s_.query_rows, params_.query, bad_queries_, shape.head_dim,
                    static_cast<T>(params_.rule.scale)},
                   params_.grad_key, keys);
  }
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
