// A head of a few rows and a few keys with nothing special about it: thousands of them are a call, so that
// what is done once a head is what counts. Keys are rows here and queries lanes, so that the sums of a query
// row are sums of vectors:
//   S^T = K Q^T,  dP^T = V dO^T     right: Q and dO, transposed
//   dV = P^T dO,  dK = dS^T Q       left: P^T and dS^T along their rows
//   dQ = dS K                       left: dS^T along its columns
// Every sum has the order that FewKeysUnit gives it: a head that holds NaN or Inf goes there, and no bit of
// it changes.
#pragma once

#include "../../matrix/arena.h"
#include "../chains.h"
#include "../plan.h"
#include "../row_terms.h"
#include "small_tiles.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Whether a call's heads are such, as far as the call alone tells.
template <typename S>
bool has_small_heads(const BackwardParams& params) {
  const AttentionShape& shape = params.shape;
  const ScoreRule& rule = params.rule;
  if (kReadsWeights<S> && params.weights.data != nullptr) return false;
  if (S::kPaired || shape.query_len > kSmallRows || shape.key_len > kSmallKeys || shape.query_len == 0 ||
      shape.key_len == 0 || shape.query_heads != shape.key_heads) {
    return false;
  }
  for (const TensorView* view : {&params.query, &params.key, &params.value, &params.grad_output}) {
    if (view->data == nullptr || view->column_stride != 1) return false;
  }
  const bool all_wanted = params.grad_query.data != nullptr && params.grad_key.data != nullptr &&
                          params.grad_value.data != nullptr;
  const bool special = params.grad_mask.data != nullptr || params.grad_weights.data != nullptr ||
                       params.grad_key_mass.data != nullptr || params.grad_lse.data != nullptr ||
                       params.grad_sinks != nullptr || params.delta != nullptr || params.dropout.enabled;
  const bool plain_rule = rule.mask_kind == ScalarKind::kNone && rule.sinks_kind == ScalarKind::kNone &&
                          rule.window_left < 0 && rule.window_right < 0;
  return all_wanted && !special && plain_rule && !score_units<typename S::Accum>(rule).scale_first;
}

// Rows of elements as numbers that are computed with.
template <typename T>
struct SmallRows {
  const T* data;
  int64_t stride;
};

template <typename S>
struct SmallScratch {
  using T = typename S::Accum;
  T *query, *key, *value, *grad;    // rows, where they are not used in place
  T *query_columns, *grad_columns;  // Q^T, dO^T in panels
  T *scores, *grads;                // (keys, stride): S^T, then P^T; dP^T, then dS^T

  int64_t stride;
};

template <typename S>
SmallScratch<S> take_small_scratch(Arena& arena, const AttentionShape& shape) {
  using T = typename S::Accum;
  const int64_t dim = padded_dim<S>(shape.head_dim), value_dim = padded_dim<S>(shape.value_dim);
  const int64_t rows = shape.query_len, keys = shape.key_len;
  SmallScratch<S> s{};
  s.stride = padded_dim<S>(rows);
  s.query = take<T>(arena, rows * dim);
  s.key = take<T>(arena, keys * dim);
  s.value = take<T>(arena, keys * value_dim);
  s.grad = take<T>(arena, rows * value_dim);
  s.query_columns = take<T>(arena, s.stride * shape.head_dim);
  s.grad_columns = take<T>(arena, s.stride * shape.value_dim);
  s.scores = take<T>(arena, keys * s.stride);
  s.grads = take<T>(arena, keys * s.stride);
  return s;
}

template <typename S>
class SmallHead {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Product = typename S::Product;

  SmallHead(const BackwardParams& params, const SmallScratch<S>& scratch)
      : params_(params),
        s_(scratch),
        keys_(params.shape.key_len),
        rows_(params.shape.query_len),
        factor_(score_units<T>(params.rule).softmax_scale),
        streamed_(streams_key_gradients<S>(params.shape)) {}
  SmallHead(const SmallHead&) = delete;
  SmallHead& operator=(const SmallHead&) = delete;

  // All of a head; false, and nothing written, where it is to be left to FewKeysUnit.
  bool run(Unit unit) const;

 private:
  Matrix<Element> matrix(const TensorView& view, Unit unit, int64_t rows, int64_t columns) const {
    return rows_of<Element>(view, unit.batch, unit.key_head, 0, rows, columns);
  }
  SmallRows<T> rows(const Matrix<Element>& m, T* buffer) const {
    if constexpr (std::is_same_v<Element, T>) {
      if (m.columns % S::kLane == 0) return {m.data, m.row_stride};
    }
    const int64_t stride = padded_dim<S>(m.columns);
    pack_rows<Product>(m, 0, m.rows, buffer, stride);
    return {buffer, stride};
  }
  // out (keys, rows) = left (keys, dim) . right^T (dim, rows)
  void multiply_columns(const SmallRows<T>& left, const Matrix<Element>& right, T* columns, T* out) const;
  // A gradient (rows, dim) = scale left (rows, depth) . right (depth, dim)
  void write_product(SmallProduct<T, T> product, const SmallRows<T>& right, const ResultView& to,
                     Unit unit) const;
  bool finish_rows(const T* lse, int64_t column, int64_t present) const;

  const BackwardParams& params_;
  const SmallScratch<S>& s_;
  const int64_t keys_, rows_;
  const T factor_;
  const bool streamed_;
};

template <typename S>
ATTN_EXT_INLINE void SmallHead<S>::multiply_columns(const SmallRows<T>& left, const Matrix<Element>& right,
                                                    T* columns, T* out) const {
  const int64_t stride = s_.stride;
  pack_column_panel<Product>(right, 0, stride, columns);
  multiply_small_rows<T>({.rows = keys_,
                          .columns = rows_,
                          .depth = right.columns,
                          .left = left.data,
                          .left_stride = left.stride,
                          .left_step = 1,
                          .right = columns,
                          .right_stride = stride,
                          .to = out,
                          .to_stride = stride,
                          .scale = 1});
}

template <typename S>
ATTN_EXT_INLINE void SmallHead<S>::write_product(SmallProduct<T, T> m, const SmallRows<T>& right,
                                                 const ResultView& to, Unit unit) const {
  const auto write = [&](auto* first_row) __attribute__((always_inline)) {
    multiply_small<T>(SmallProduct<T, std::remove_reference_t<decltype(*first_row)>>{
        m.rows, m.columns, m.depth, m.left, m.left_stride, m.left_step, right.data, right.stride, first_row,
        to.row_stride, m.scale,
        streamed_ && !to.wide && streams_small<T>(first_row, to.row_stride, m.columns)});
  };
  if (to.wide) {
    write(row_pointer<T>(to, unit.batch, unit.key_head, 0));
  } else {
    write(row_pointer<Element>(to, unit.batch, unit.key_head, 0));
  }
}

// The sums over the keys of a vector of query rows, and what they are of.
template <typename T>
struct SmallSums {
  Vec<T> weights, grads;  // sum P, sum P dP
};

// From S^T and dP^T of a vector of query rows to P^T and dS^T. The keys that are `Step` apart from `first` on
// are added up as the lanes of a row of keys would be, by halving.
template <typename T, int Step, typename Leaf>
ATTN_EXT_INLINE SmallSums<T> sum_keys(int64_t first, int64_t keys, Leaf leaf) {
  if constexpr (Step == kLanes<T>) {
    return leaf(first);
  } else {
    SmallSums<T> sums = sum_keys<T, 2 * Step>(first, keys, leaf);
    if (first + Step < keys) {
      const SmallSums<T> others = sum_keys<T, 2 * Step>(first + Step, keys, leaf);
      sums.weights += others.weights;
      sums.grads += others.grads;
    }
    return sums;
  }
}

template <typename S>
bool SmallHead<S>::finish_rows(const T* lse, int64_t column, int64_t present) const {
  constexpr T kMost = static_cast<T>(kFarScore * kLn2);
  const Vec<T> row_lse = present >= kLanes<T> ? load(lse + column) : load_partial(lse + column, present);
  const Vec<T> factor = broadcast(factor_), shift = -(row_lse * static_cast<T>(kLog2E));
  const int64_t stride = s_.stride, keys = keys_;
  T* scores = s_.scores + column;
  T* grads = s_.grads + column;
  Vec<T> lowest = {};
  const SmallSums<T> sums = sum_keys<T, 1>(
      0, keys, [&](int64_t first) __attribute__((always_inline)) {
        SmallSums<T> sum{};
        for (int64_t j = first; j < keys; j += kLanes<T>) {
          const Vec<T> s = load(scores + j * stride);
          lowest = minimum(s, lowest);
          const Vec<T> p = exp2<T>(multiply_add(s, factor, shift));
          store(scores + j * stride, p);
          sum.weights += p;
          sum.grads = multiply_add(p, load(grads + j * stride), sum.grads);
        }
        return sum;
      });
  // NaN and +Inf of Q and K show in P, those of V and dO in the sum of P dP, a score of -Inf by itself.
  const Vec<T> least = broadcast(-FloatFormat<T>::kLargest);
  const Vec<T> residue = (sums.weights - sums.weights) + (sums.grads - sums.grads);
  const auto near = (lowest >= least) & (row_lse <= kMost) & (row_lse >= -kMost);
  if (lane_sum<T>(near ? residue : broadcast(kInfinity<T>)) != 0) return false;
  const Vec<T> delta = sums.weights > Vec<T>{} ? sums.grads / sums.weights : sums.grads;
  for (int64_t j = 0; j < keys; ++j) {
    const Vec<T> p = load(scores + j * stride);
    const Vec<T> grad = p * (load(grads + j * stride) - delta);
    store(grads + j * stride, p == Vec<T>{} ? p : grad);
  }
  return true;
}

template <typename S>
bool SmallHead<S>::run(Unit unit) const {
  const AttentionShape& shape = params_.shape;
  const T scale = static_cast<T>(params_.rule.scale);
  const Matrix<Element> query = matrix(params_.query, unit, rows_, shape.head_dim);
  const Matrix<Element> grad = matrix(params_.grad_output, unit, rows_, shape.value_dim);
  const SmallRows<T> key = rows(matrix(params_.key, unit, keys_, shape.head_dim), s_.key);
  const SmallRows<T> value = rows(matrix(params_.value, unit, keys_, shape.value_dim), s_.value);
  multiply_columns(key, query, s_.query_columns, s_.scores);
  multiply_columns(value, grad, s_.grad_columns, s_.grads);
  const T* lse = lse_rows<S>(params_, unit.batch, unit.key_head);
  for (int64_t r = 0; r < rows_; r += S::kLane) {
    if (!finish_rows(lse, r, rows_ - r)) return false;
  }
  const SmallRows<T> query_rows = rows(query, s_.query), grad_rows = rows(grad, s_.grad);
  const int64_t dim = shape.head_dim, stride = s_.stride;
  write_product({.rows = keys_,
                 .columns = shape.value_dim,
                 .depth = rows_,
                 .left = s_.scores,
                 .left_stride = stride,
                 .left_step = 1,
                 .scale = 1},
                grad_rows, params_.grad_value, unit);
  write_product({.rows = keys_,
                 .columns = dim,
                 .depth = rows_,
                 .left = s_.grads,
                 .left_stride = stride,
                 .left_step = 1,
                 .scale = scale},
                query_rows, params_.grad_key, unit);
  write_product({.rows = rows_,
                 .columns = dim,
                 .depth = keys_,
                 .left = s_.grads,
                 .left_stride = 1,
                 .left_step = stride,
                 .scale = scale},
                key, params_.grad_query, unit);
  return true;
}

// What a task has for a call's heads: nothing, unless these are small.
template <typename S>
class SmallHeads {
 public:
  SmallHeads(const BackwardParams& params, Arena& arena)
      : params_(params), has_any_(has_small_heads<S>(params)) {
    if (has_any_) scratch_ = take_small_scratch<S>(arena, params.shape);
  }
  // False where the head is not one, and nothing is done.
  bool run(Unit unit) const {
    if constexpr (S::kPaired) {
      return false;
    } else {
      return has_any_ && SmallHead<S>(params_, scratch_).run(unit);
    }
  }

 private:
  const BackwardParams& params_;
  const bool has_any_;
  SmallScratch<S> scratch_{};
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
