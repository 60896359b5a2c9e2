// The backward pass of heads with few keys: all of them meet a block of query rows at once. Queries are rows
// and keys columns, so that whatever is a matrix of queries x keys (mask, its gradient, dW) is read and
// written as it lies, and a row's delta is known as soon as its dP is:
//   S  = Q K^T,  dP = dO V^T    right: K and V, transposed once a head
//   dQ = dS K                   left: dS
//   dV += P^T dO,  dK += dS^T Q left: P and dS read along their columns
// Where elements are what is computed with, everything else is used in place.
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/arena.h"
#include "../../matrix/finite.h"
#include "../../matrix/multiply.h"
#include "../../scores/dropout_draw.h"
#include "../chains.h"
#include "../mask_grad.h"
#include "../row_gradients.h"
#include "../row_terms.h"
#include "../store_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewKeysScores = 8192;  // of a block
constexpr int64_t kFewKeysRows = 96;
constexpr int64_t kFewKeysBand = 16;  // rows that are finished together
constexpr int64_t kPlainVectors = 8;  // of a row that has code of its own for its length

template <typename S>
struct FewKeysScratch {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  using Element = typename S::Element;
  Operand *key_columns, *value_columns;  // K^T, V^T in panels
  Operand* key_rows;                     // K as a right operand
  Operand *query_left, *query_right, *grad_left, *grad_right;
  Element *finite_key, *finite_query, *finite_grad;  // copies, where there is something to leave out
  T *scores, *grads;                                 // (rows, stride): S, then P; dP, then dS
  T *cap_slope, *keep;                               // (stride): of a row
  Operand *weight_pairs,
      *grad_pairs;     // (pairs of rows, stride), paired only: left operands along the columns
  Operand* grad_rows;  // (rows, left_stride), paired only: dS as a left operand
  Operand *weight_columns,
      *grad_columns;  // (stride, rows / 2), the pairs turned around: outside of registers only
  T *grad_query, *grad_key, *grad_value;
  int64_t block_rows, stride, left_stride;
};

template <typename S>
FewKeysScratch<S> take_few_keys_scratch(Arena& arena, const BackwardParams& params) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  const AttentionShape& shape = params.shape;
  const int64_t keys = shape.key_len, dim = padded_dim<S>(shape.head_dim);
  const int64_t value_dim = padded_dim<S>(shape.value_dim);
  FewKeysScratch<S> s{};
  s.stride = padded_dim<S>(keys);
  s.left_stride = round_up(keys, S::kSpan) / S::kDepth;
  // Blocks of nearly equal size, in whole tiles, and whole steps of a product along them.
  const int64_t unit = S::Product::kInRegisters ? S::kTileRows : S::kSpan;
  const int64_t most = larger(unit, smaller(kFewKeysRows, round_down(kFewKeysScores / s.stride, unit)));
  s.block_rows = round_up(ceil_div(shape.query_len, larger(1, ceil_div(shape.query_len, most))), unit);
  const int64_t rows = s.block_rows;
  const int64_t columns = round_up(keys, panel_width_of<S>(keys));
  s.key_columns = take<Operand>(arena, columns * depth_of<typename S::Product>(shape.head_dim));
  s.value_columns = take<Operand>(arena, columns * depth_of<typename S::Product>(shape.value_dim));
  s.key_rows = take<Operand>(arena, row_panels_size<S>(keys, shape.head_dim));
  s.query_left = take<Operand>(arena, rows * row_stride_of<S>(shape.head_dim));
  s.query_right = take<Operand>(arena, row_panels_size<S>(rows, shape.head_dim));
  s.grad_left = take<Operand>(arena, rows * row_stride_of<S>(shape.value_dim));
  s.grad_right = take<Operand>(arena, row_panels_size<S>(rows, shape.value_dim));
  s.finite_key = take<typename S::Element>(arena, keys * shape.head_dim);
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
  s.grad_query = take<T>(arena, rows * dim);
  const int64_t key_tiles = round_up(keys, S::kTileRows);
  s.grad_key = take<T>(arena, key_tiles * dim);
  s.grad_value = take<T>(arena, key_tiles * value_dim);
  return s;
}

// All of a unit (a batch's key head and its group of query heads), by one task.
template <typename S>
class FewKeysUnit {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  FewKeysUnit(const BackwardParams& params, const FewKeysScratch<S>& scratch, MaskGrad<S> mask_grad)
      : params_(params),
        s_(scratch),
        units_(score_units<T>(params.rule)),
        group_(group_size(params.shape)),
        mask_grad_(mask_grad),
        has_grad_(params.grad_output.data != nullptr),
        wants_grads_(params.grad_query.data != nullptr || params.grad_key.data != nullptr ||
                     params.grad_mask.data != nullptr || params.grad_sinks != nullptr),
        full_(params.dropout.enabled || params.rule.softcap > 0 || params.grad_weights.data != nullptr ||
              params.grad_key_mass.data != nullptr || !has_grad_) {}
  FewKeysUnit(const FewKeysUnit&) = delete;
  FewKeysUnit& operator=(const FewKeysUnit&) = delete;

  void begin(Unit unit) {
    unit_ = unit;
    keys_ = visible_keys();
    stride_ = padded_dim<S>(keys_);
    started_ = bad_keys_ = bad_queries_ = false;
    pack_keys();
  }
  // Adds what a query head of the group gives.
  void add_head(int64_t head);
  void store_keys();

 private:
  int64_t visible_keys() const;
  void pack_keys();
  // K^T or V^T as right operand.
  Operands<typename S::Operand> pack_columns(const Matrix<Element>& m, Operand* out) const {
    const int64_t width = panel_width_of<S>(keys_), depth = depth_of<Product>(m.columns);
    for (int64_t first = 0; first < stride_; first += width) {
      pack_column_panel<Product>(m, first, width, out + first * depth);
    }
    return {out, width, depth * width};
  }
  void add_rows(int64_t first, int64_t count);
  // Zeros up to a whole step along the depth: behind the keys of dS, and behind the last pair of rows.
  void clear_ends(int64_t count) const {
    const int64_t written = stride_ / S::kDepth;
    for (int64_t r = 0; r < count && written < depth_of<Product>(keys_); ++r) {
      fill_span(s_.grad_rows + r * s_.left_stride, written, depth_of<Product>(keys_), Operand{0});
    }
    for (Operand* pairs : {s_.weight_pairs, s_.grad_pairs}) {
      fill_span(pairs, ceil_div(count, S::kDepth) * stride_, depth_of<Product>(count) * stride_, Operand{0});
    }
  }
  void store_grad_query(int64_t first, int64_t count);
  bool is_seen(int64_t row, int64_t key) const {
    return sees_key<Element>(params_.rule, params_.shape.key_len, unit_.batch, head_, row, key);
  }
  // What the NaN and Inf of the keys give to the queries that see them: dQ += dS K.
  void add_bad_keys(int64_t first, int64_t count) const {
    add_nonfinite(
        key_, count, [&](int64_t r, int64_t j) { return is_seen(first + r, j); },
        [&](int64_t r, int64_t j) { return s_.grads[r * stride_ + j]; },
        [&](int64_t r, int64_t c, Vec<T> sum, int64_t present) {
          add_row(s_.grad_query + r * padded_dim<S>(key_.columns) + c, 1, sum, present);
        });
  }
  // What the NaN and Inf of query rows, or of their dO, give to the keys that they see.
  void add_bad_rows(const Matrix<Element>& rows, int64_t first, const T* left, T* out) const {
    add_nonfinite(
        rows, keys_, [&](int64_t j, int64_t r) { return is_seen(first + r, j); },
        [&](int64_t j, int64_t r) { return left[r * stride_ + j]; },
        [&](int64_t j, int64_t c, Vec<T> sum, int64_t present) {
          add_row(out + j * padded_dim<S>(rows.columns) + c, 1, sum, present);
        });
  }
  template <bool Carry>
  void add_key_side(int64_t count, Operands<Operand> query, Operands<Operand> grad) const;
  MultiplyArgs<Product> product_args(int64_t rows, int64_t columns, int64_t depth, Operands<Operand> right,
                                     T* out) const;
  // As many as whole tiles have, where others cost more: for products of the scratch memory, which has room.
  static int64_t tile_rows(int64_t count) {
    return Product::kInRegisters ? count : round_up(count, S::kTileRows);
  }
  // out (rows, keys) = left (rows, dim) . right (dim, keys)
  void multiply_rows(const Matrix<Element>& left, Operand* buffer, Operands<Operand> right, T* out) const {
    const bool fills_tile = Product::kInRegisters || left.rows >= S::kTileRows;
    const Operands<Operand> rows = left_operands<S>(left, buffer, fills_tile);
    MultiplyArgs<Product> args = product_args(fills_tile ? left.rows : tile_rows(left.rows), keys_,
                                              depth_of<Product>(left.columns), right, out);
    args.left = rows.data;
    args.left_stride = rows.row_stride;
    multiply<Product, false>(args);
  }
  bool is_dead_row(int64_t row) const {
    return is_dead(params_.rule, unit_.batch, head_, row, lse_rows<S>(params_, unit_.batch, head_)[row]);
  }
  RowPlace row_place(int64_t row) const { return {unit_.batch, head_, row}; }
  // rows.h
  void finish_rows(int64_t first, int64_t count);
  void finish_full_rows(int64_t first, int64_t begin, int64_t end);
  void finish_bad_rows(int64_t first, int64_t begin, int64_t end);
  template <int Vectors, typename M>
  bool finish_plain_rows(int64_t first, int64_t begin, int64_t end);
  template <int Vectors, typename M>
  void make_plain_weights(T* scores, const T* grads, const M* mask, Range seen, T lse, T& sum, T& weight_sum,
                          Vec<T>& lowest) const;
  template <int Vectors, int Rows>
  void make_plain_grads(int64_t r, const T* deltas, int64_t mask_place, bool keeps);
  using PlainRows = bool (FewKeysUnit::*)(int64_t, int64_t, int64_t);
  template <typename M>
  static PlainRows plain_rows(int64_t vectors);
  void finish_full_row(int64_t row, int64_t index);
  T finish_delta(int64_t row, T lse, T sum, T weight_sum);
  void draw_row(int64_t row) const;
  void set_far_row(int64_t row, RowSpan<S>& span) const;
  void store_pairs(int64_t r, int64_t j, const Vec<T> (&weights)[2], const Vec<T> (&grads)[2]);
  void pair_rows(int64_t begin, int64_t end);

  const BackwardParams& params_;
  const FewKeysScratch<S>& s_;
  const ScoreUnits<T> units_;
  const int64_t group_;
  const MaskGrad<S> mask_grad_;
  const bool has_grad_, wants_grads_, full_;
  Unit unit_{0, 0};
  int64_t head_ = 0;
  int64_t keys_ = 0, stride_ = 0;  // without those at the end that padding hides; in whole steps
  Matrix<Element> key_{};
  Operands<Operand> key_columns_{}, value_columns_{}, key_rows_{};
  bool bad_keys_ = false;            // some are not finite
  bool bad_queries_ = false;         // of the block
  bool may_have_bad_grads_ = false;  // NaN or Inf in dO of the block
  bool started_ = false;             // there is something in the gradients of key and value
  T sink_ = 0, sink_grad_ = 0;
};

// Up to the last key that a mask of keys alone lets any head of the group see.
template <typename S>
int64_t FewKeysUnit<S>::visible_keys() const {
  const ScoreRule& rule = params_.rule;
  const int64_t keys = params_.shape.key_len;
  if (rule.mask_kind != ScalarKind::kBool || rule.mask.row_stride != 0 || rule.mask.column_stride == 0) {
    return keys;
  }
  int64_t seen = 1;
  for (int64_t g = 0; g < (rule.mask.head_stride == 0 ? 1 : group_); ++g) {
    const uint8_t* mask = row_pointer<const uint8_t>(rule.mask, unit_.batch, unit_.key_head * group_ + g, 0);
    int64_t end = keys;
    while (end > seen && mask[(end - 1) * rule.mask.column_stride] == 0) --end;
    seen = larger(seen, end);
  }
  return seen;
}

template <typename S>
void FewKeysUnit<S>::pack_keys() {
  const AttentionShape& shape = params_.shape;
  const auto rows = [&](const TensorView& view, int64_t dim) {
    return rows_of<Element>(view, unit_.batch, unit_.key_head, 0, keys_, dim);
  };
  key_ = rows(params_.key, shape.head_dim);
  key_columns_ = pack_columns(key_, s_.key_columns);
  if (has_grad_ && wants_grads_) {
    value_columns_ = pack_columns(rows(params_.value, shape.value_dim), s_.value_columns);
  }
  if (params_.grad_query.data == nullptr) return;
  const Matrix<Element> finite = finite_only(key_, s_.finite_key);
  bad_keys_ = finite.data != key_.data;
  key_rows_ = right_operands<S>(finite, s_.key_rows, shape.key_len);
}

template <typename S>
MultiplyArgs<typename S::Product> FewKeysUnit<S>::product_args(int64_t rows, int64_t columns, int64_t depth,
                                                               Operands<Operand> right, T* out) const {
  MultiplyArgs<Product> args{};
  args.rows = rows;
  args.columns = columns;
  args.depth = depth;
  args.right = right;
  args.right_width = panel_width_of<S>(columns);
  args.out = out;
  args.out_stride = padded_dim<S>(columns);
  return args;
}

template <typename S>
template <bool Carry>
void FewKeysUnit<S>::add_key_side(int64_t count, Operands<Operand> query, Operands<Operand> grad) const {
  const AttentionShape& shape = params_.shape;
  const Operand *weights = s_.weight_pairs, *grads = s_.grad_pairs;
  if constexpr (std::is_same_v<Operand, T>) {
    weights = s_.scores;
    grads = s_.grads;
  }
  const auto add = [&](const Operand* left, Operand* columns, Operands<Operand> right, int64_t dim, T* out) {
    MultiplyArgs<Product> args = product_args(tile_rows(keys_), dim, depth_of<Product>(count), right, out);
    if constexpr (Product::kInRegisters) {
      args.left = left;
      args.left_stride = 1;
      args.left_step = stride_;
    } else {
      transpose_operands<Product>(left, stride_, args.depth, stride_, columns, s_.block_rows / 2);
      args.left = columns;
      args.left_stride = s_.block_rows / 2;
    }
    multiply<Product, Carry>(args);
  };
  if (params_.grad_value.data != nullptr && has_grad_) {
    add(weights, s_.weight_columns, grad, shape.value_dim, s_.grad_value);
  }
  if (params_.grad_key.data != nullptr) add(grads, s_.grad_columns, query, shape.head_dim, s_.grad_key);
}

template <typename S>
void FewKeysUnit<S>::store_grad_query(int64_t first, int64_t count) {
  const int64_t dim = params_.shape.head_dim;
  MultiplyArgs<Product> args =
      product_args(tile_rows(count), dim, depth_of<Product>(keys_), key_rows_, s_.grad_query);
  args.left = s_.grad_rows;
  if constexpr (std::is_same_v<Operand, T>) args.left = s_.grads;
  args.left_stride = std::is_same_v<Operand, T> ? stride_ : s_.left_stride;
  multiply<Product, false>(args);
  if (bad_keys_) add_bad_keys(first, count);
  for (int64_t r = 0; r < count; ++r) {
    write_gradient_row<S>(s_.grad_query + r * padded_dim<S>(dim), params_.grad_query, unit_.batch, head_,
                          first + r, dim, static_cast<T>(params_.rule.scale));
  }
}

template <typename S>
void FewKeysUnit<S>::add_rows(int64_t first, int64_t count) {
  const AttentionShape& shape = params_.shape;
  const Matrix<Element> query =
      rows_of<Element>(params_.query, unit_.batch, head_, first, count, shape.head_dim);
  const Matrix<Element> grad =
      rows_of<Element>(params_.grad_output, unit_.batch, head_, first, count, shape.value_dim);
  const bool grad_key = params_.grad_key.data != nullptr;
  const bool grad_value = params_.grad_value.data != nullptr && has_grad_;
  const Matrix<Element> finite_query = grad_key ? finite_only(query, s_.finite_query) : query;
  bad_queries_ = finite_query.data != query.data;
  multiply_rows(query, s_.query_left, key_columns_, s_.scores);
  if (has_grad_ && wants_grads_) multiply_rows(grad, s_.grad_left, value_columns_, s_.grads);
  may_have_bad_grads_ = !wants_grads_;  // nothing else would tell
  finish_rows(first, count);
  if constexpr (!Product::kInRegisters) clear_ends(count);
  if (params_.grad_query.data != nullptr) store_grad_query(first, count);
  Matrix<Element> finite_grad = grad;
  if (grad_value && may_have_bad_grads_) finite_grad = finite_only(grad, s_.finite_grad);
  Operands<Operand> grad_right{}, query_right{};
  if (grad_value) grad_right = right_operands<S>(finite_grad, s_.grad_right, s_.block_rows);
  if (grad_key) query_right = right_operands<S>(finite_query, s_.query_right, s_.block_rows);
  started_ ? add_key_side<true>(count, query_right, grad_right)
           : add_key_side<false>(count, query_right, grad_right);
  if (finite_grad.data != grad.data) add_bad_rows(grad, first, s_.scores, s_.grad_value);
  if (bad_queries_) add_bad_rows(query, first, s_.grads, s_.grad_key);
  started_ = true;
}

template <typename S>
void FewKeysUnit<S>::add_head(int64_t head) {
  head_ = head;
  sink_ = sink_of<Element>(params_.rule, unit_.batch, head);
  sink_grad_ = 0;
  const int64_t rows = params_.shape.query_len;
  for (int64_t first = 0; first < rows; first += s_.block_rows) {
    add_rows(first, smaller(s_.block_rows, rows - first));
  }
  if (params_.grad_sinks != nullptr) grad_sink<S>(params_, unit_.batch, head) = sink_grad_;
}

template <typename S>
void FewKeysUnit<S>::store_keys() {
  const AttentionShape& shape = params_.shape;
  const auto write = [&](const T* from, const ResultView& grad, int64_t dim, bool there, double scale) {
    for (int64_t j = 0; grad.data != nullptr && j < shape.key_len; ++j) {
      if (there && j < keys_) {
        write_gradient_row<S>(from + j * padded_dim<S>(dim), grad, unit_.batch, unit_.key_head, j, dim,
                              static_cast<T>(scale));
      } else {
        clear_gradient_row<S>(grad, unit_.batch, unit_.key_head, j, dim);
      }
    }
  };
  write(s_.grad_key, params_.grad_key, shape.head_dim, started_, params_.rule.scale);
  write(s_.grad_value, params_.grad_value, shape.value_dim, started_ && has_grad_, 1);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
