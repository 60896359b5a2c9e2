// The backward of few query rows against many keys, bound by reading keys and values once and writing their
// gradients once. All query rows of a key head's group meet its keys a few at a time:
//   S = Q K^T,  dP = dO V^T     dot products of rows as they lie in memory
//   dV = P^T dO,  dK = dS^T Q   done with these keys, so rounded and written
//   dQ += dS K                  kept for the merge of the pieces of the keys
#pragma once

#include "backward.h"
#include "backward_pack.h"
#include "backward_tile.h"
#include "dot_rows.h"
#include "gradient_rows.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kStepKeys = 16;  // worked on at once
static_assert(kDropoutColumns % kStepKeys == 0);

// rows: all of a group, head by head.
template <typename S>
struct DecodeScratch {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  QueryPack<S> terms;      // the vectors over the rows only
  Operand* query;          // (rows, query_stride), as the dot products want them
  Operand* grad_output;    // (rows, value_stride)
  T* query_rows;           // (rows, padded D): as float, 0 in place of NaN and Inf
  T* grad_rows;            // (rows, padded Dv): as float, 0 in dead rows
  T* grad_query;           // (rows, padded D), to be scaled
  T* grad_sums;            // (rows, lanes): sums of dS
  T *weights, *grads;      // (rows, kStepKeys): S, then P after dropout; dP, then dS
  T* cap_slope;            // (rows, kStepKeys): 1 - tanh^2
  uint32_t* draws;         // (rows, kDropoutColumns)
  Operand *keys, *values;  // (kStepKeys, stride): what cannot be read in place
  T* key_rows;             // (kStepKeys, padded D): keys as float
  T* out;                  // (kStepKeys, padded dim): dK or dV
  int64_t query_stride, value_stride;
};

// The vectors over `rows` rows that set_row_terms fills.
template <typename S>
QueryPack<S> take_row_terms(Arena& arena, int64_t rows) {
  using T = typename S::Accum;
  QueryPack<S> terms{};
  terms.lse = take<T>(arena, rows);
  terms.delta = take<T>(arena, rows);
  terms.row_scale = take<T>(arena, rows);
  terms.row_max = take<T>(arena, rows);
  terms.row_sum = take<T>(arena, rows);
  terms.has_dead_rows = take<int64_t>(arena, 1);
  terms.has_far_rows = take<int64_t>(arena, 1);
  return terms;
}

// The terms from row `first` on.
template <typename S>
QueryPack<S> terms_from(QueryPack<S> terms, int64_t first) {
  terms.lse += first;
  terms.delta += first;
  terms.row_scale += first;
  terms.row_max += first;
  terms.row_sum += first;
  return terms;
}

template <typename S>
DecodeScratch<S> take_decode_scratch(Arena& arena, const BackwardParams& params, int64_t rows) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  const int64_t dim = padded_value_dim<S>(params.shape.head_dim);
  const int64_t value_dim = padded_value_dim<S>(params.shape.value_dim);
  DecodeScratch<S> s{};
  s.query_stride = row_stride_of<S>(params.shape.head_dim);
  s.value_stride = row_stride_of<S>(params.shape.value_dim);
  s.terms = take_row_terms<S>(arena, rows);
  s.query = take<Operand>(arena, rows * s.query_stride);
  s.grad_output = take<Operand>(arena, rows * s.value_stride);
  s.query_rows = take<T>(arena, rows * dim);
  s.grad_rows = take<T>(arena, rows * value_dim);
  s.grad_query = take<T>(arena, rows * dim);
  s.grad_sums = take<T>(arena, rows * S::kLane);
  s.weights = take<T>(arena, rows * kStepKeys);
  s.grads = take<T>(arena, rows * kStepKeys);
  if (params.rule.softcap > 0) s.cap_slope = take<T>(arena, rows * kStepKeys);
  if (params.dropout.enabled) s.draws = take<uint32_t>(arena, rows * kDropoutColumns);
  s.keys = take<Operand>(arena, kStepKeys * s.query_stride);
  s.values = take<Operand>(arena, kStepKeys * s.value_stride);
  s.key_rows = take<T>(arena, kStepKeys * dim);
  s.out = take<T>(arena, kStepKeys * larger(dim, value_dim));
  return s;
}

template <typename S>
class DecodeBlock {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  DecodeBlock(const BackwardParams& params, const BackwardPlan& plan, const DecodeScratch<S>& scratch)
      : params_(params),
        s_(scratch),
        units_(score_units<T>(params.rule)),
        group_(params.shape.query_heads / larger(1, params.shape.key_heads)),
        rows_(group_ * params.shape.query_len),
        exact_delta_(plan.exact_delta),
        streamed_(plan.streamed) {}
  DecodeBlock(const DecodeBlock&) = delete;
  DecodeBlock& operator=(const DecodeBlock&) = delete;

  // The group of a key head: its rows' lse and delta, as far as they follow from the rows.
  void set_unit(int64_t batch, int64_t key_head);
  // After that: what the keys are to meet. The rows' terms must be known by now.
  void pack_rows_of_unit();
  // Lets the rows meet some keys, from a multiple of kDropoutColumns on.
  void visit(TilePass pass, KeyRange keys);

 private:
  // The rows of some keys or values for dot products, in place or packed.
  struct OperandRows {
    const Operand* data;
    int64_t stride;
    bool in_place;
  };

  int64_t head_of(int64_t row) const { return key_head_ * group_ + row / params_.shape.query_len; }
  int64_t query_of(int64_t row) const { return row % params_.shape.query_len; }
  const Matrix<Element> matrix(const TensorView& view, int64_t dim) const {
    return {row_pointer<const Element>(view, batch_, key_head_, 0), view.row_stride, view.column_stride,
            params_.shape.key_len, dim};
  }
  void pack_side(const TensorView& view, int64_t dim, Operand* operands, int64_t stride, T* rows);
  bool is_live(KeyRange keys) const;
  OperandRows operand_rows(const Matrix<Element>& m, KeyRange keys, int64_t stride, Operand* buffer) const;
  const T* float_rows(const Matrix<Element>& key, KeyRange keys, const OperandRows& operands,
                      int64_t& stride) const;
  void multiply_rows(const Operand* left, int64_t left_stride, const OperandRows& right, T* out) const;
  bool scores_are_finite() const;
  void step(TilePass pass, KeyRange keys);
  void finish_scores(KeyRange keys);
  void add_to_terms(TilePass pass);
  void finish_row(TilePass pass, int64_t row, KeyRange keys);
  void add_mask_grads(int64_t row, KeyRange keys);
  void store_key_side(const T* left, const T* right, int64_t dim, const GradView& grad, KeyRange keys,
                      T scale);
  void clear_key_side(KeyRange keys);
  void add_grad_query(const T* keys, int64_t stride, int64_t count, bool finite);

  const BackwardParams& params_;
  const DecodeScratch<S>& s_;
  const ScoreUnits<T> units_;
  const int64_t group_, rows_;
  const bool exact_delta_, streamed_;
  int64_t batch_ = 0, key_head_ = 0;
};

template <typename S>
void DecodeBlock<S>::set_unit(int64_t batch, int64_t key_head) {
  batch_ = batch;
  key_head_ = key_head;
  const int64_t count = params_.shape.query_len;
  int64_t dead = 0, far = 0;
  for (int64_t g = 0; g < group_; ++g) {
    const QueryPack<S> terms = terms_from<S>(s_.terms, g * count);
    set_row_terms<S>(params_, terms, batch, key_head * group_ + g, 0, count, count, exact_delta_);
    dead |= *terms.has_dead_rows;
    far |= *terms.has_far_rows;
  }
  *s_.terms.has_dead_rows = dead;
  *s_.terms.has_far_rows = far;
}

template <typename S>
void DecodeBlock<S>::pack_side(const TensorView& view, int64_t dim, Operand* operands, int64_t stride,
                               T* rows) {
  const int64_t count = params_.shape.query_len, width = padded_value_dim<S>(dim);
  for (int64_t g = 0; g < group_; ++g) {
    const Matrix<Element> m = rows_of<Element>(view, batch_, key_head_ * group_ + g, 0, count, dim);
    pack_rows<Product>(m, 0, count, operands + g * count * stride, stride);
    pack_rows<PlainProduct<T>>(m, 0, count, rows + g * count * width, width);
  }
}

template <typename S>
void DecodeBlock<S>::pack_rows_of_unit() {
  const AttentionShape& shape = params_.shape;
  const int64_t dim = padded_value_dim<S>(shape.head_dim), value_dim = padded_value_dim<S>(shape.value_dim);
  pack_side(params_.query, shape.head_dim, s_.query, s_.query_stride, s_.query_rows);
  for (int64_t i = 0; i < rows_ * dim; i += S::kLane) {
    const Vec<T> q = load(s_.query_rows + i);
    store(s_.query_rows + i, q - q == Vec<T>{} ? q : Vec<T>{});
  }
  fill_span(s_.grad_query, 0, rows_ * dim, static_cast<T>(0));
  fill_span(s_.grad_sums, 0, rows_ * S::kLane, static_cast<T>(0));
  if (params_.grad_output.data == nullptr) return;
  pack_side(params_.grad_output, shape.value_dim, s_.grad_output, s_.value_stride, s_.grad_rows);
  for (int64_t r = 0; r < rows_; ++r) {
    if (s_.terms.lse[r] == kInfinity<T>)
      fill_span(s_.grad_rows + r * value_dim, 0, value_dim, static_cast<T>(0));
  }
}

// Whether any of the rows sees any of the keys.
template <typename S>
bool DecodeBlock<S>::is_live(KeyRange keys) const {
  const ScoreRule& rule = params_.rule;
  bool live = false;
  for (int64_t r = 0; r < rows_ && !live; ++r) {
    const KeyRange seen = intersect(window_keys(rule, params_.shape.key_len, query_of(r)), keys);
    if (is_empty(seen)) continue;
    live = rule.mask_kind == ScalarKind::kNone;
    with_mask_type<Element>(rule.mask_kind, [&](auto tag) {
      using M = typename decltype(tag)::Type;
      if (live) return;
      const M* mask = row_pointer<const M>(rule.mask, batch_, head_of(r), query_of(r));
      live = any_let_through(mask + seen.begin * rule.mask.column_stride, rule.mask.column_stride,
                             seen.end - seen.begin);
    });
  }
  return live;
}

template <typename S>
typename DecodeBlock<S>::OperandRows DecodeBlock<S>::operand_rows(const Matrix<Element>& m, KeyRange keys,
                                                                  int64_t stride, Operand* buffer) const {
  const int64_t count = keys.end - keys.begin;
  // In place if a row is whole vectors of operands.
  if (sizeof(Element) * S::kDepth == sizeof(Operand) && m.column_stride == 1 && count == kStepKeys &&
      m.columns == stride * S::kDepth && m.row_stride % S::kDepth == 0) {
    return {reinterpret_cast<const Operand*>(m.data + keys.begin * m.row_stride), m.row_stride / S::kDepth,
            true};
  }
  pack_rows<Product>(m, keys.begin, count, buffer, stride);
  memset(buffer + count * stride, 0, static_cast<size_t>((kStepKeys - count) * stride) * sizeof(Operand));
  return {buffer, stride, false};
}

template <typename S>
const typename S::Accum* DecodeBlock<S>::float_rows(const Matrix<Element>& key, KeyRange keys,
                                                    const OperandRows& operands, int64_t& stride) const {
  if constexpr (std::is_same_v<Operand, T>) {
    stride = operands.stride;
    return operands.data;
  } else {
    stride = padded_value_dim<S>(key.columns);
    pack_rows<PlainProduct<T>>(key, keys.begin, keys.end - keys.begin, s_.key_rows, stride);
    return s_.key_rows;
  }
}

// out (rows, kStepKeys) = left (rows, depth) . right (kStepKeys, depth)^T. What lies a step further on is
// asked for meanwhile: short pieces of many rows are not what a processor guesses by itself.
template <typename S>
void DecodeBlock<S>::multiply_rows(const Operand* left, int64_t left_stride, const OperandRows& right,
                                   T* out) const {
  for (int64_t r = 0; r < rows_; ++r) {
    const int64_t ahead = r == 0 && right.in_place ? kStepKeys * right.stride : 0;
    for (int64_t j = 0; j < kStepKeys; j += S::kLane) {
      dot_rows<Product>(left + r * left_stride, right.data + j * right.stride, right.stride, left_stride,
                        ahead, out + r * kStepKeys + j);
    }
  }
}

// Scores, window and mask: units of log2, -inf where a row does not see a key.
template <typename S>
void DecodeBlock<S>::finish_scores(KeyRange keys) {
  const ScoreRule& rule = params_.rule;
  const bool scale_here = units_.scale_first && rule.softcap == 0;
  for (int64_t r = 0; r < rows_; ++r) {
    T* scores = s_.weights + r * kStepKeys;
    if (rule.softcap > 0) {
      cap_span(scores, s_.cap_slope + r * kStepKeys, 0, kStepKeys, units_);
    } else if (scale_here && !is_biased(rule)) {
      scale_span(scores, 0, kStepKeys, units_);
    }
    if (rule.mask_kind != ScalarKind::kNone) {
      with_mask_type<Element>(rule.mask_kind, [&](auto tag) {
        using M = typename decltype(tag)::Type;
        const M* mask = row_pointer<const M>(rule.mask, batch_, head_of(r), query_of(r));
        mask_span(scores, 0, kStepKeys, mask + keys.begin * rule.mask.column_stride, rule.mask.column_stride,
                  keys.end - keys.begin, scale_here ? units_.scale : static_cast<T>(1));
      });
    }
    const KeyRange seen = intersect(window_keys(rule, params_.shape.key_len, query_of(r)), keys);
    if (is_empty(seen)) {
      fill_span(scores, 0, kStepKeys, -kInfinity<T>);
    } else {
      fill_span(scores, 0, seen.begin - keys.begin, -kInfinity<T>);
      fill_span(scores, seen.end - keys.begin, kStepKeys, -kInfinity<T>);
    }
  }
}

template <typename S>
void DecodeBlock<S>::add_to_terms(TilePass pass) {
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t j = 0; j < kStepKeys; j += S::kLane) {
      const Vec<T> s = load(s_.weights + r * kStepKeys + j), factor = broadcast(units_.softmax_scale);
      if (pass == TilePass::kRowMax) {
        s_.terms.row_max[r] = maximum(broadcast(lane_max<T>(s * factor)), broadcast(s_.terms.row_max[r]))[0];
      } else {
        s_.terms.row_sum[r] +=
            lane_sum<T>(weights_of<T, S::kExpDegree, true>(s, factor, broadcast(s_.terms.row_max[r])));
      }
    }
  }
}

// With M the dropout factors: P to M P, and dP to dS = P (M (dP + dW + dMass) - delta), or to P M (...),
// which sums up to delta.
template <typename S>
void DecodeBlock<S>::finish_row(TilePass pass, int64_t row, KeyRange keys) {
  const int64_t count = keys.end - keys.begin, head = head_of(row);
  const bool has_grad = params_.grad_output.data != nullptr;
  T* weights = s_.weights + row * kStepKeys;
  T* grads = s_.grads + row * kStepKeys;
  T mass_grads[kStepKeys], keep[kStepKeys];
  Element weight_grads[kStepKeys];
  if (params_.grad_key_mass.data != nullptr) {
    const TensorView& view = params_.grad_key_mass;
    const Matrix<T> m{row_pointer<const T>(view, batch_, head, 0), 0, view.column_stride, 1,
                      params_.shape.key_len};
    gather_block(m, 0, 1, keys.begin, kStepKeys, mass_grads);
  }
  if (params_.grad_weights.data != nullptr) {
    gather_block(
        rows_of<Element>(params_.grad_weights, batch_, head, query_of(row), 1, params_.shape.key_len), 0, 1,
        keys.begin, kStepKeys, weight_grads);
  }
  if (params_.dropout.enabled) {
    const uint32_t* draws = s_.draws + row * kDropoutColumns + keys.begin % kDropoutColumns;
    const T scale = static_cast<T>(params_.dropout.keep_scale);
    for (int64_t j = 0; j < kStepKeys; ++j) keep[j] = draws[j] >= params_.dropout.threshold ? scale : 0;
  }
  const T* slope = params_.rule.softcap > 0 ? s_.cap_slope + row * kStepKeys : nullptr;
  const Vec<T> delta = broadcast(pass == TilePass::kDelta ? 0 : s_.terms.delta[row]);
  Vec<T> sum = load(s_.grad_sums + row * S::kLane);
  for (int64_t j = 0; j < kStepKeys; j += S::kLane) {
    Vec<T> p = weights_of<T, S::kExpDegree, true>(load(weights + j), broadcast(units_.softmax_scale),
                                                  broadcast(s_.terms.lse[row]));
    p *= broadcast(s_.terms.row_scale[row]);
    Vec<T> grad = has_grad ? load(grads + j) : Vec<T>{};
    if (params_.grad_key_mass.data != nullptr) grad += load(mass_grads + j);
    if (params_.grad_weights.data != nullptr) grad += load_compute(weight_grads + j);
    const Vec<T> factor = params_.dropout.enabled ? load(keep + j) : broadcast(static_cast<T>(1));
    grad = p == Vec<T>{} ? p : p * (grad * factor - delta);
    store(weights + j, p * factor);
    store(grads + j, grad);
    sum += grad;
  }
  store(s_.grad_sums + row * S::kLane, sum);
  if (pass == TilePass::kDelta) return;
  if (params_.grad_mask.data != nullptr && params_.grad_mask.column_stride != 0) {
    for (int64_t j = 0; j < count; j += S::kLane) {
      T* to = row_pointer<T>(params_.grad_mask, batch_, head, query_of(row)) +
              (keys.begin + j) * params_.grad_mask.column_stride;
      add_row(to, params_.grad_mask.column_stride, load(grads + j), smaller(S::kLane, count - j));
    }
  }
  for (int64_t j = 0; slope != nullptr && j < kStepKeys; j += S::kLane) {
    const Vec<T> grad = load(grads + j);
    store(grads + j, grad == Vec<T>{} ? grad : grad * load(slope + j));
  }
}

// The gradients of keys or of values, scale (rows, kStepKeys)^T . (rows, dim), into the caller's tensor.
template <typename S>
void DecodeBlock<S>::store_key_side(const T* left, const T* right, int64_t dim, const GradView& grad,
                                    KeyRange keys, T scale) {
  const int64_t padded = padded_value_dim<S>(dim), width = value_panel_width<S>(dim);
  const int64_t count = keys.end - keys.begin;
  for (int64_t column = 0; column < padded; column += width) {
    const int64_t vectors = smaller(width, padded - column) / S::kLane;
    for (int64_t tile = 0; tile < count; tile += kTileRows) {
      TileArgs<PlainProduct<T>> args{};
      args.depth = rows_;
      args.left = left + tile;
      args.left_stride = 1;
      args.left_step = kStepKeys;
      args.right = right + column;
      args.right_stride = padded;
      args.out = s_.out + tile * padded + column;
      args.out_stride = padded;
      tile_function<PlainProduct<T>, false>(smaller(kTileRows, count - tile), vectors)(args);
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    write_gradient_row<S>(s_.out + j * padded, grad, batch_, key_head_, keys.begin + j, dim, scale,
                          streamed_);
  }
}

template <typename S>
void DecodeBlock<S>::clear_key_side(KeyRange keys) {
  const auto clear = [&](const GradView& grad, int64_t dim) {
    for (int64_t j = keys.begin; grad.data != nullptr && j < keys.end; ++j) {
      clear_gradient_row<S>(grad, batch_, key_head_, j, dim);
    }
  };
  clear(params_.grad_key, params_.shape.head_dim);
  clear(params_.grad_value, params_.shape.value_dim);
}

// dQ += dS K. A key that is not finite must not meet the rows that do not see it.
template <typename S>
void DecodeBlock<S>::add_grad_query(const T* keys, int64_t stride, int64_t count, bool finite) {
  const int64_t padded = padded_value_dim<S>(params_.shape.head_dim);
  const int64_t width = value_panel_width<S>(params_.shape.head_dim);
  for (int64_t column = 0; column < padded; column += width) {
    const int64_t vectors = smaller(width, padded - column) / S::kLane;
    TileArgs<PlainProduct<T>> args{};
    args.left_stride = kStepKeys;
    args.right_stride = stride;
    args.out_stride = padded;
    for (int64_t r = 0; r < rows_; r += finite ? kTileRows : 1) {
      args.out = s_.grad_query + r * padded + column;
      const T* grads = s_.grads + r * kStepKeys;
      for (int64_t j = 0; j < count; j += finite ? count : 1) {
        if (!finite && grads[j] == 0) continue;
        args.depth = finite ? count : 1;
        args.left = grads + j;
        args.right = keys + j * stride + column;
        tile_function<PlainProduct<T>, true>(finite ? smaller(kTileRows, rows_ - r) : 1, vectors)(args);
      }
    }
  }
}

// A key that is not finite gives no finite product with any row.
template <typename S>
bool DecodeBlock<S>::scores_are_finite() const {
  Vec<T> residue = {};  // x - x is 0, NaN for what is not finite
  for (int64_t i = 0; i < rows_ * kStepKeys; i += S::kLane) {
    const Vec<T> s = load(s_.weights + i);
    residue += s - s;
  }
  return lane_sum<T>(residue) == 0;
}

template <typename S>
void DecodeBlock<S>::step(TilePass pass, KeyRange keys) {
  const AttentionShape& shape = params_.shape;
  const Matrix<Element> key = matrix(params_.key, shape.head_dim);
  const OperandRows key_rows = operand_rows(key, keys, s_.query_stride, s_.keys);
  multiply_rows(s_.query, s_.query_stride, key_rows, s_.weights);
  const bool finite = scores_are_finite();
  finish_scores(keys);
  if (pass == TilePass::kRowMax || pass == TilePass::kRowSum) return add_to_terms(pass);
  if (params_.grad_output.data != nullptr) {
    const OperandRows values =
        operand_rows(matrix(params_.value, shape.value_dim), keys, s_.value_stride, s_.values);
    multiply_rows(s_.grad_output, s_.value_stride, values, s_.grads);
  }
  for (int64_t r = 0; r < rows_; ++r) finish_row(pass, r, keys);
  if (pass == TilePass::kDelta) return;
  if (params_.grad_value.data != nullptr && params_.grad_output.data != nullptr) {
    store_key_side(s_.weights, s_.grad_rows, shape.value_dim, params_.grad_value, keys, 1);
  } else if (params_.grad_value.data != nullptr) {
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      clear_gradient_row<S>(params_.grad_value, batch_, key_head_, j, shape.value_dim);
    }
  }
  if (params_.grad_key.data != nullptr) {
    store_key_side(s_.grads, s_.query_rows, shape.head_dim, params_.grad_key, keys,
                   static_cast<T>(params_.rule.scale));
  }
  if (params_.grad_query.data != nullptr) {
    int64_t stride = 0;
    const T* rows = float_rows(key, keys, key_rows, stride);
    add_grad_query(rows, stride, keys.end - keys.begin, finite);
  }
}

template <typename S>
void DecodeBlock<S>::visit(TilePass pass, KeyRange keys) {
  PhiloxRow state;
  if (params_.dropout.enabled) {
    set_philox_batch(state, params_.dropout, batch_);
  }
  for (int64_t first = keys.begin; first < keys.end; first += kStepKeys) {
    const KeyRange these{first, smaller(first + kStepKeys, keys.end)};
    for (int64_t r = 0; params_.dropout.enabled && first % kDropoutColumns == 0 && r < rows_; ++r) {
      uint32_t words[kDropoutColumns];
      state.row = static_cast<uint32_t>(query_of(r));
      state.head = static_cast<uint32_t>(head_of(r));
      philox_words(state, static_cast<uint32_t>(first / kDropoutColumns), words);
      memcpy(s_.draws + r * kDropoutColumns, words, sizeof(words));
    }
    if (is_live(these)) {
      step(pass, these);
    } else if (pass == TilePass::kGradients) {
      clear_key_side(these);
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
