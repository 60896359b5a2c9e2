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
#include "../plan.h"
#include "../row_gradients.h"
#include "../row_terms.h"
#include "../store_rows.h"
#include "memory.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewKeysBand = 16;  // rows that are finished together
constexpr int64_t kPlainVectors = 8;  // of a row that has code of its own for its length

// In place of a mask's type: weights are there, and no mask is needed.
struct SavedWeights {};

// A unit (a batch's key head and its group of query heads), block of rows after block.
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
              params.grad_key_mass.data != nullptr || !has_grad_),
        streamed_(streams_key_gradients<S>(params.shape)) {}
  FewKeysUnit(const FewKeysUnit&) = delete;
  FewKeysUnit& operator=(const FewKeysUnit&) = delete;

  // Packs the keys.
  void begin(Unit unit, const FewKeysMemory<S>& memory) {
    set_unit(unit, memory);
    pack_ = {};
    set_keys(visible_keys());
    pack_keys();
    for (int64_t g = 0; params_.grad_sinks != nullptr && g < group_; ++g) {
      grad_sink<S>(params_, unit.batch, unit.key_head * group_ + g) = 0;
    }
  }
  // The same for those who resume the unit.
  void begin_for_all(Unit unit, const FewKeysMemory<S>& memory) {
    begin(unit, memory);
    key_columns();
    *memory.pack = pack_;
  }
  void resume(Unit unit, const FewKeysMemory<S>& memory) {
    set_unit(unit, memory);
    pack_ = *memory.pack;
    set_keys(pack_.count);
  }
  // P, dS and dQ of a block of rows of one of the group's heads.
  void make_rows(int64_t group_head, int64_t block);
  // What make_rows() has left to add: the blocks of a unit one after the other, head after head.
  void add_to_values(Range keys) const;
  void add_to_keys(Range keys) const;
  void add_to_sink() const;
  Range part_of_keys(int64_t parts, int64_t part) const {
    return part_in_steps(keys_, S::kTileRows, parts, part);
  }
  void store_keys() const;

 private:
  void set_unit(Unit unit, const FewKeysMemory<S>& memory) {
    unit_ = unit;
    memory_ = memory;
  }
  void set_keys(int64_t keys) {
    keys_ = pack_.count = keys;
    stride_ = padded_dim<S>(keys);
  }
  int64_t visible_keys() const;
  void pack_keys();
  // K^T, packed when first asked for: who reads the weights of the forward pass has no use for it.
  const Operands<Operand>& key_columns() {
    if (pack_.key_columns.data == nullptr) {
      pack_.key_columns = pack_columns(pack_.key, memory_.key_columns);
    }
    return pack_.key_columns;
  }
  // K^T or V^T as right operand.
  Operands<typename S::Operand> pack_columns(const Matrix<Element>& m, Operand* out) const {
    const int64_t width = panel_width_of<S>(keys_), depth = depth_of<Product>(m.columns);
    for (int64_t first = 0; first < stride_; first += width) {
      pack_column_panel<Product>(m, first, width, out + first * depth);
    }
    return {out, width, depth * width};
  }
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
        pack_.key, count, [&](int64_t r, int64_t j) { return is_seen(first + r, j); },
        [&](int64_t r, int64_t j) { return s_.grads[r * stride_ + j]; },
        [&](int64_t r, int64_t c, Vec<T> sum, int64_t present) {
          add_row(s_.grad_query + r * padded_dim<S>(pack_.key.columns) + c, 1, sum, present);
        });
  }
  // What the NaN and Inf of query rows, or of their dO, give to the keys that they see.
  void add_bad_rows(const Matrix<Element>& rows, Range keys, const T* left, T* out) const {
    add_nonfinite(
        rows, keys.end - keys.begin,
        [&](int64_t j, int64_t r) { return is_seen(first_ + r, keys.begin + j); },
        [&](int64_t j, int64_t r) { return left[r * stride_ + keys.begin + j]; },
        [&](int64_t j, int64_t c, Vec<T> sum, int64_t present) {
          add_row(out + (keys.begin + j) * padded_dim<S>(rows.columns) + c, 1, sum, present);
        });
  }
  bool grads_values() const { return params_.grad_value.data != nullptr && has_grad_; }
  // left: P or dS (rows, stride). The first block's sums begin anew.
  void add_product(Range keys, const Operand* left, const Operand* columns, Operands<Operand> right,
                   int64_t dim, T* out) const {
    MultiplyArgs<Product> args =
        product_args(tile_rows(keys.end - keys.begin), dim, depth_of<Product>(count_), right,
                     out + keys.begin * padded_dim<S>(dim));
    args.left = Product::kInRegisters ? left + keys.begin : columns + keys.begin * (s_.block_rows / 2);
    args.left_stride = Product::kInRegisters ? 1 : s_.block_rows / 2;
    args.left_step = Product::kInRegisters ? stride_ : 1;
    is_first_block() ? multiply<Product, false>(args) : multiply<Product, true>(args);
  }
  bool is_first_block() const { return first_ == 0 && head_ == unit_.key_head * group_; }
  MultiplyArgs<Product> product_args(int64_t rows, int64_t columns, int64_t depth, Operands<Operand> right,
                                     T* out) const;
  // As many as whole tiles have, where others cost more: for products whose memory has room for them.
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
  // A band of rows whose P is there, with what its deltas are made of, by lanes.
  struct Band {
    int64_t first, begin, end;  // rows [begin, end) of the block, which begins with the head's row `first`
    Vec<T> sums[kFewKeysBand], weight_sums[kFewKeysBand];
  };
  template <int Vectors>
  bool finish_plain_rows(int64_t first, int64_t begin, int64_t end, bool by_key);
  template <int Vectors, typename M>
  bool make_band_weights(Band& band) const;
  template <int Vectors, typename M>
  void make_plain_weights(T* scores, const T* grads, const M* mask, Range seen, T lse, Vec<T>& sum,
                          Vec<T>& weight_sum, Vec<T>& lowest) const;
  template <int Vectors>
  void take_weights(const Element* weights, T* scores, const T* grads, Vec<T>& sum, Vec<T>& weight_sum) const;
  template <int Vectors, int Rows>
  void make_plain_grads(int64_t r, const T* deltas, int64_t mask_place, bool keeps);
  using PlainRows = bool (FewKeysUnit::*)(int64_t, int64_t, int64_t, bool);
  static PlainRows plain_rows(int64_t vectors);
  bool reads_weights(int64_t first, int64_t count) const;
  void finish_full_row(int64_t row, int64_t index);
  T finish_delta(int64_t row, T share, T sum, T weight_sum);
  bool finish_deltas(const Band& band, T* deltas);
  void draw_row(int64_t row) const;
  T set_far_row(int64_t row, RowSpan<S>& span) const;
  // Where the pairs of two rows go.
  struct PairPlace {
    Operand *weight_pairs, *grad_pairs, *row, *next_row;
  };
  PairPlace pair_place(int64_t r) const;
  static void store_pairs(const PairPlace& to, int64_t j, const Vec<T> (&weights)[2],
                          const Vec<T> (&grads)[2]);
  void pair_rows(int64_t begin, int64_t end);

  const BackwardParams& params_;
  const FewKeysScratch<S>& s_;
  const ScoreUnits<T> units_;
  const int64_t group_;
  const MaskGrad<S> mask_grad_;
  const bool has_grad_, wants_grads_, full_, streamed_;
  Unit unit_{0, 0};
  FewKeysMemory<S> memory_{};
  FewKeysPack<S> pack_{};
  int64_t keys_ = 0, stride_ = 0;  // those of the pack; in whole steps
  int64_t head_ = 0;
  T sink_ = 0;
  // Of the block of rows:
  int64_t first_ = 0, count_ = 0;
  Matrix<Element> query_{}, grad_{}, finite_grad_{};
  Operands<Operand> query_right_{}, grad_right_{};
  bool bad_queries_ = false;
  bool reads_weights_ = false;       // those of the forward pass; no score is made
  bool may_have_bad_grads_ = false;  // NaN or Inf in dO
  T sink_grad_ = 0;
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
  pack_.key = rows(params_.key, shape.head_dim);
  if (has_grad_ && wants_grads_) {
    const Matrix<Element> value = rows(params_.value, shape.value_dim);
    pack_.value_columns = pack_columns(value, memory_.value_columns);
    pack_.bad_values = kReadsWeights<S> && params_.weights.data != nullptr && !all_finite(value);
  }
  if (params_.grad_query.data == nullptr) return;
  const Matrix<Element> finite = finite_only(pack_.key, memory_.finite_key);
  pack_.bad_keys = finite.data != pack_.key.data;
  pack_.key_rows = right_operands<S>(finite, memory_.key_rows, shape.key_len);
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
void FewKeysUnit<S>::store_grad_query(int64_t first, int64_t count) {
  const int64_t dim = params_.shape.head_dim;
  MultiplyArgs<Product> args =
      product_args(tile_rows(count), dim, depth_of<Product>(keys_), pack_.key_rows, s_.grad_query);
  args.left = s_.grad_rows;
  if constexpr (std::is_same_v<Operand, T>) args.left = s_.grads;
  args.left_stride = std::is_same_v<Operand, T> ? stride_ : s_.left_stride;
  multiply<Product, false>(args);
  if (pack_.bad_keys) add_bad_keys(first, count);
  const HeadGradient<S> result{params_.grad_query, unit_.batch, head_, dim, params_.rule.scale};
  result.write(s_.grad_query, padded_dim<S>(dim), {first, first + count});
}

template <typename S>
void FewKeysUnit<S>::make_rows(int64_t group_head, int64_t block) {
  const AttentionShape& shape = params_.shape;
  head_ = unit_.key_head * group_ + group_head;
  first_ = block * s_.block_rows;
  count_ = smaller(s_.block_rows, shape.query_len - first_);
  sink_ = sink_of<Element>(params_.rule, unit_.batch, head_);
  sink_grad_ = 0;
  query_ = rows_of<Element>(params_.query, unit_.batch, head_, first_, count_, shape.head_dim);
  grad_ = rows_of<Element>(params_.grad_output, unit_.batch, head_, first_, count_, shape.value_dim);
  const bool grads_keys = params_.grad_key.data != nullptr;
  const Matrix<Element> finite_query = grads_keys ? finite_only(query_, s_.finite_query) : query_;
  bad_queries_ = finite_query.data != query_.data;
  reads_weights_ = reads_weights(first_, count_);
  if (!reads_weights_) multiply_rows(query_, s_.query_left, key_columns(), s_.scores);
  if (has_grad_ && wants_grads_) multiply_rows(grad_, s_.grad_left, pack_.value_columns, s_.grads);
  may_have_bad_grads_ = !wants_grads_;  // nothing else would tell
  finish_rows(first_, count_);
  if constexpr (!Product::kInRegisters) clear_ends(count_);
  if (params_.grad_query.data != nullptr) store_grad_query(first_, count_);
  finite_grad_ = grads_values() && may_have_bad_grads_ ? finite_only(grad_, s_.finite_grad) : grad_;
  if (grads_values()) grad_right_ = right_operands<S>(finite_grad_, s_.grad_right, s_.block_rows);
  if (grads_keys) query_right_ = right_operands<S>(finite_query, s_.query_right, s_.block_rows);
  if constexpr (!Product::kInRegisters) {
    const auto turn = [&](const Operand* pairs, Operand* columns) {
      transpose_operands<Product>(pairs, stride_, depth_of<Product>(count_), stride_, columns,
                                  s_.block_rows / 2);
    };
    if (grads_values()) turn(s_.weight_pairs, s_.weight_columns);
    if (grads_keys) turn(s_.grad_pairs, s_.grad_columns);
  }
}

template <typename S>
void FewKeysUnit<S>::add_to_values(Range keys) const {
  if (!grads_values()) return;
  const Operand* weights = s_.weight_pairs;
  if constexpr (std::is_same_v<Operand, T>) weights = s_.scores;
  add_product(keys, weights, s_.weight_columns, grad_right_, params_.shape.value_dim, memory_.grad_value);
  if (finite_grad_.data != grad_.data) add_bad_rows(grad_, keys, s_.scores, memory_.grad_value);
}

template <typename S>
void FewKeysUnit<S>::add_to_keys(Range keys) const {
  if (params_.grad_key.data == nullptr) return;
  const Operand* grads = s_.grad_pairs;
  if constexpr (std::is_same_v<Operand, T>) grads = s_.grads;
  add_product(keys, grads, s_.grad_columns, query_right_, params_.shape.head_dim, memory_.grad_key);
  if (bad_queries_) add_bad_rows(query_, keys, s_.grads, memory_.grad_key);
}

template <typename S>
void FewKeysUnit<S>::add_to_sink() const {
  if (params_.grad_sinks != nullptr) grad_sink<S>(params_, unit_.batch, head_) += sink_grad_;
}

template <typename S>
void FewKeysUnit<S>::store_keys() const {
  const AttentionShape& shape = params_.shape;
  const auto write = [&](const T* from, const ResultView& grad, int64_t dim, bool there, double scale) {
    if (grad.data == nullptr) return;
    const int64_t keys = there ? keys_ : 0;
    const HeadGradient<S> result{grad, unit_.batch, unit_.key_head, dim, scale, streamed_};
    result.write(from, padded_dim<S>(dim), {0, keys});
    for (int64_t j = keys; j < shape.key_len; ++j) {
      clear_gradient_row<S>(grad, unit_.batch, unit_.key_head, j, dim);
    }
  };
  const bool any_rows = shape.query_len > 0;
  write(memory_.grad_key, params_.grad_key, shape.head_dim, any_rows, params_.rule.scale);
  write(memory_.grad_value, params_.grad_value, shape.value_dim, any_rows && has_grad_, 1);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
