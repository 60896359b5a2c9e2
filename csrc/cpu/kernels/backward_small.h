// The backward of heads with few keys: all of them meet a block of query rows at once. Queries are rows and
// keys columns, so that whatever is a matrix of queries x keys (mask, its gradient, dW) is read and written
// as it lies, and a row's delta is known as soon as its dP is:
//   S  = Q K^T,  dP = dO V^T    right: K and V, transposed once a head
//   dQ = dS K                   left: dS
//   dV += P^T dO,  dK += dS^T Q left: P and dS read along their columns
// Where elements are what is computed with, everything else is used in place.
#pragma once

#include "backward_decode.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kSmallKeys = 128;
constexpr int64_t kSmallScores = 8192;  // of a block
constexpr int64_t kSmallRows = 16 * kTileRows;
constexpr int64_t kSmallGroup = 16;   // rows that are finished together
constexpr int64_t kPlainVectors = 8;  // of a row that has code of its own for its length

// A right operand (depth, columns), by panels of columns.
template <typename S>
struct RightSide {
  const typename S::Operand* data;
  int64_t row_stride, panel_stride;
};

template <typename S>
struct SmallScratch {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  using Element = typename S::Element;
  Operand *key_columns, *value_columns;  // K^T, V^T in panels
  Operand* key_rows;                     // K as a right operand
  Operand *query_left, *query_right, *grad_left, *grad_right;
  // Matrices with 0 in place of what must not spread.
  Element *finite_key, *finite_query, *finite_grad;
  T *scores, *grads;    // (rows, stride): S, then P; dP, then dS
  T *cap_slope, *keep;  // (stride): of a row
  Operand *weight_pairs,
      *grad_pairs;     // (pairs of rows, stride), narrow only: left operands along the columns
  Operand* grad_rows;  // (rows, stride / 2), narrow only: dS as a left operand
  T *grad_query, *grad_key, *grad_value;
  int64_t block_rows, stride;
};

template <typename S>
ATTN_EXT_INLINE int64_t small_stride(int64_t keys) {
  return round_up(keys, S::kLane);
}

template <typename S>
SmallScratch<S> take_small_scratch(Arena& arena, const BackwardParams& params) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  const AttentionShape& shape = params.shape;
  const int64_t keys = shape.key_len, dim = padded_value_dim<S>(shape.head_dim);
  const int64_t value_dim = padded_value_dim<S>(shape.value_dim);
  SmallScratch<S> s{};
  s.stride = small_stride<S>(keys);
  // Blocks of nearly equal size, in whole tiles.
  const int64_t most = larger(kTileRows, smaller(kSmallRows, round_down(kSmallScores / s.stride, kTileRows)));
  s.block_rows = round_up(pieces(shape.query_len, larger(1, pieces(shape.query_len, most))), kTileRows);
  const int64_t rows = s.block_rows;
  const int64_t columns = round_up(keys, value_panel_width<S>(keys));
  s.key_columns = take<Operand>(arena, columns * depth_of<typename S::Product>(shape.head_dim));
  s.value_columns = take<Operand>(arena, columns * depth_of<typename S::Product>(shape.value_dim));
  s.key_rows = take<Operand>(arena, depth_of<typename S::Product>(keys) * dim);
  s.query_left = take<Operand>(arena, rows * row_stride_of<S>(shape.head_dim));
  s.query_right = take<Operand>(arena, rows * dim);
  s.grad_left = take<Operand>(arena, rows * row_stride_of<S>(shape.value_dim));
  s.grad_right = take<Operand>(arena, rows * value_dim);
  s.finite_key = take<typename S::Element>(arena, keys * shape.head_dim);
  s.finite_query = take<typename S::Element>(arena, rows * shape.head_dim);
  s.finite_grad = take<typename S::Element>(arena, rows * shape.value_dim);
  s.scores = take<T>(arena, rows * s.stride);
  s.grads = take<T>(arena, rows * s.stride);
  if (params.rule.softcap > 0) s.cap_slope = take<T>(arena, s.stride);
  if (params.dropout.enabled) s.keep = take<T>(arena, round_up(s.stride, kDropoutColumns));
  if constexpr (S::kNarrow) {
    s.weight_pairs = take<Operand>(arena, rows / 2 * s.stride);
    s.grad_pairs = take<Operand>(arena, rows / 2 * s.stride);
    s.grad_rows = take<Operand>(arena, rows * s.stride / 2);
  }
  s.grad_query = take<T>(arena, rows * dim);
  s.grad_key = take<T>(arena, keys * dim);
  s.grad_value = take<T>(arena, keys * value_dim);
  return s;
}

// All of a unit (a batch's key head and its group of query heads), by one task.
template <typename S>
class SmallUnit {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  SmallUnit(const BackwardParams& params, const SmallScratch<S>& scratch, T* grad_mask)
      : params_(params),
        s_(scratch),
        units_(score_units<T>(params.rule)),
        group_(params.shape.query_heads / larger(1, params.shape.key_heads)),
        grad_mask_(grad_mask),
        has_grad_(params.grad_output.data != nullptr),
        wants_grads_(params.grad_query.data != nullptr || params.grad_key.data != nullptr ||
                     params.grad_mask.data != nullptr || params.grad_sinks != nullptr),
        full_(params.dropout.enabled || params.rule.softcap > 0 || params.grad_weights.data != nullptr ||
              params.grad_key_mass.data != nullptr || !has_grad_) {}
  SmallUnit(const SmallUnit&) = delete;
  SmallUnit& operator=(const SmallUnit&) = delete;

  void begin(int64_t batch, int64_t key_head);
  // Adds what a query head of the group gives; its sink, -inf where there is none.
  void add_head(int64_t head, T sink);
  void store_keys();

 private:
  struct LeftSide {
    const Operand* data;
    int64_t row_stride;
  };

  int64_t visible_keys() const;
  void pack_keys();
  void add_rows(int64_t first, int64_t count);
  LeftSide left_side(const Matrix<Element>& m, Operand* buffer) const;
  RightSide<S> right_side(const Matrix<Element>& m, Operand* buffer) const;
  template <bool Carry>
  void multiply(const Operand* left, int64_t left_stride, int64_t left_step, int64_t rows,
                const RightSide<S>& right, int64_t depth, int64_t columns, T* out) const;
  // backward_small_rows.h
  void finish_rows(int64_t first, int64_t count);
  template <int Vectors, typename M>
  void finish_plain_rows(int64_t first, int64_t begin, int64_t end);
  template <int Vectors, typename M>
  void make_weights(T* scores, const T* grads, const M* mask, KeyRange seen, T lse, T& sum,
                    T& weight_sum) const;
  template <int Vectors, int Rows>
  void make_score_grads(int64_t r, const T* deltas, T* mask_grads, bool keeps);
  bool all_near(int64_t first, int64_t begin, int64_t end) const;
  using PlainRows = void (*)(SmallUnit&, int64_t, int64_t, int64_t);
  template <typename M>
  static PlainRows plain_rows(int64_t vectors);
  void finish_full_row(int64_t row, int64_t index);
  T finish_delta(int64_t row, T lse, T sum, T weight_sum);
  void finish_scores(int64_t row, T* scores);
  void draw_row(int64_t row);
  void set_far_row(const T* scores, T& lse, T& scale) const;
  void add_mask_row(int64_t row, const T* grads);
  void narrow_lanes(int64_t r, int64_t j, const Vec<T> (&weights)[2], const Vec<T> (&grads)[2]);
  void narrow_rows(int64_t begin, int64_t end);
  void add_bad_keys(int64_t count);
  Matrix<Element> without_dead_rows(const Matrix<Element>& m, int64_t first) const;
  template <bool Carry>
  void add_key_side(int64_t count, const RightSide<S>& query, const RightSide<S>& grad);

  const BackwardParams& params_;
  const SmallScratch<S>& s_;
  const ScoreUnits<T> units_;
  const int64_t group_;
  T* const grad_mask_;
  const bool has_grad_, wants_grads_, full_;
  int64_t batch_ = 0, key_head_ = 0, head_ = 0;
  int64_t keys_ = 0, stride_ = 0;  // without those at the end that padding hides; in whole vectors
  Matrix<Element> key_{};
  RightSide<S> key_columns_{}, value_columns_{}, key_rows_{};
  bool bad_keys_ = false;   // some are not finite
  bool started_ = false;    // there is something in the gradients of key and value
  bool dead_rows_ = false;  // in the block
  T sink_ = 0, sink_grad_ = 0;
};

// m with 0 in place of elements that are not finite, in `buffer`.
template <typename Element>
Matrix<Element> finite_copy(const Matrix<Element>& m, Element* buffer) {
  for (int64_t r = 0; r < m.rows; ++r) {
    for (int64_t c = 0; c < m.columns; ++c) {
      buffer[r * m.columns + c] =
          is_finite_at(m, r, c) ? m.data[r * m.row_stride + c * m.column_stride] : Element{};
    }
  }
  return {buffer, m.columns, 1, m.rows, m.columns};
}

template <typename S>
typename SmallUnit<S>::LeftSide SmallUnit<S>::left_side(const Matrix<Element>& m, Operand* buffer) const {
  if (sizeof(Element) * S::kDepth == sizeof(Operand) && m.column_stride == 1 && m.columns % S::kDepth == 0 &&
      m.row_stride % S::kDepth == 0 && reinterpret_cast<uintptr_t>(m.data) % sizeof(Operand) == 0) {
    return {reinterpret_cast<const Operand*>(m.data), m.row_stride / S::kDepth};
  }
  const int64_t stride = row_stride_of<S>(m.columns);
  pack_rows<Product>(m, 0, m.rows, buffer, stride);
  return {buffer, stride};
}

// (depth of rows, columns), panels side by side.
template <typename S>
RightSide<S> SmallUnit<S>::right_side(const Matrix<Element>& m, Operand* buffer) const {
  const int64_t width = value_panel_width<S>(m.columns), padded = padded_value_dim<S>(m.columns);
  if constexpr (std::is_same_v<Element, Operand>) {
    if (m.column_stride == 1 && m.columns == padded) return {m.data, m.row_stride, width};
  }
  pack_row_panels<Product>(m, 0, depth_of<Product>(m.rows), padded, buffer, 0);
  return {buffer, padded, width};
}

// Up to the last key that a mask of keys alone lets any head of the group see.
template <typename S>
int64_t SmallUnit<S>::visible_keys() const {
  const ScoreRule& rule = params_.rule;
  const int64_t keys = params_.shape.key_len;
  if (rule.mask_kind != ScalarKind::kBool || rule.mask.row_stride != 0 || rule.mask.column_stride == 0) {
    return keys;
  }
  int64_t seen = 1;
  for (int64_t g = 0; g < (rule.mask.head_stride == 0 ? 1 : group_); ++g) {
    const uint8_t* mask = row_pointer<const uint8_t>(rule.mask, batch_, key_head_ * group_ + g, 0);
    int64_t end = keys;
    while (end > seen && mask[(end - 1) * rule.mask.column_stride] == 0) --end;
    seen = larger(seen, end);
  }
  return seen;
}

template <typename S>
void SmallUnit<S>::pack_keys() {
  const AttentionShape& shape = params_.shape;
  const int64_t width = value_panel_width<S>(keys_);
  key_ = rows_of<Element>(params_.key, batch_, key_head_, 0, keys_, shape.head_dim);
  const Matrix<Element> value = rows_of<Element>(params_.value, batch_, key_head_, 0, keys_, shape.value_dim);
  const auto pack_columns = [&](const Matrix<Element>& m, Operand* out) {
    const int64_t depth = depth_of<Product>(m.columns);
    for (int64_t first = 0; first < stride_; first += width) {
      pack_column_panel<Product>(m, first, width, out + first * depth);
    }
    return RightSide<S>{out, width, depth * width};
  };
  key_columns_ = pack_columns(key_, s_.key_columns);
  if (has_grad_ && wants_grads_) value_columns_ = pack_columns(value, s_.value_columns);
  if (params_.grad_query.data == nullptr) return;
  bad_keys_ = !all_finite(key_);
  key_rows_ = right_side(bad_keys_ ? finite_copy(key_, s_.finite_key) : key_, s_.key_rows);
}

// out (rows, columns) (+)= left . right
template <typename S>
template <bool Carry>
void SmallUnit<S>::multiply(const Operand* left, int64_t left_stride, int64_t left_step, int64_t rows,
                            const RightSide<S>& right, int64_t depth, int64_t columns, T* out) const {
  const int64_t padded = round_up(columns, S::kLane), width = value_panel_width<S>(columns);
  const int64_t tiles = pieces(rows, kTileRows);
  TileArgs<Product> args{};
  args.depth = depth;
  args.left_stride = left_stride;
  args.left_step = left_step;
  args.right_stride = right.row_stride;
  args.out_stride = padded;
  for (int64_t column = 0; column < columns; column += width) {
    const int64_t now = round_up(smaller(width, columns - column), kColumnUnit<T>);
    args.right = right.data + column / width * right.panel_stride;
    for (int64_t tile = 0; tile < tiles; ++tile) {  // of nearly equal height: a low one waits for itself
      const int64_t row = tile * rows / tiles;
      args.left = left + row * left_stride;
      args.out = out + row * padded + column;
      tile_function_of_columns<Product, Carry>((tile + 1) * rows / tiles - row, now)(args);
    }
  }
}

// The keys' NaN and Inf, which key_rows_ leaves out, reach only the queries that see them.
template <typename S>
void SmallUnit<S>::add_bad_keys(int64_t count) {
  const int64_t padded = padded_value_dim<S>(key_.columns);
  for (int64_t j = 0; j < key_.rows; ++j) {
    for (int64_t d = 0; d < key_.columns; ++d) {
      if (is_finite_at(key_, j, d)) continue;
      const T bad = to_compute(key_.data[j * key_.row_stride + d * key_.column_stride]);
      for (int64_t r = 0; r < count; ++r) {
        const T grad = s_.grads[r * stride_ + j];
        if (grad != 0) s_.grad_query[r * padded + d] += grad * bad;
      }
    }
  }
}

template <typename S>
template <bool Carry>
void SmallUnit<S>::add_key_side(int64_t count, const RightSide<S>& query, const RightSide<S>& grad) {
  const AttentionShape& shape = params_.shape;
  const Operand *weights = s_.weight_pairs, *grads = s_.grad_pairs;
  if constexpr (std::is_same_v<Operand, T>) {
    weights = s_.scores;
    grads = s_.grads;
  }
  const int64_t depth = depth_of<Product>(count);
  if (params_.grad_value.data != nullptr && has_grad_) {
    multiply<Carry>(weights, 1, stride_, keys_, grad, depth, shape.value_dim, s_.grad_value);
  }
  if (params_.grad_key.data != nullptr) {
    multiply<Carry>(grads, 1, stride_, keys_, query, depth, shape.head_dim, s_.grad_key);
  }
}

template <typename S>
void SmallUnit<S>::add_rows(int64_t first, int64_t count) {
  const AttentionShape& shape = params_.shape;
  Matrix<Element> query = rows_of<Element>(params_.query, batch_, head_, first, count, shape.head_dim);
  Matrix<Element> grad = rows_of<Element>(params_.grad_output, batch_, head_, first, count, shape.value_dim);
  const LeftSide left = left_side(query, s_.query_left);
  multiply<false>(left.data, left.row_stride, 1, count, key_columns_, depth_of<Product>(shape.head_dim),
                  keys_, s_.scores);
  if (has_grad_ && wants_grads_) {
    const LeftSide grad_left = left_side(grad, s_.grad_left);
    multiply<false>(grad_left.data, grad_left.row_stride, 1, count, value_columns_,
                    depth_of<Product>(shape.value_dim), keys_, s_.grads);
  }
  dead_rows_ = false;
  finish_rows(first, count);
  if (params_.grad_query.data != nullptr) {
    const Operand* grads = s_.grad_rows;
    if constexpr (std::is_same_v<Operand, T>) grads = s_.grads;
    multiply<false>(grads, stride_ / S::kDepth, 1, count, key_rows_, depth_of<Product>(keys_), shape.head_dim,
                    s_.grad_query);
    if (bad_keys_) add_bad_keys(count);
    for (int64_t r = 0; r < count; ++r) {
      write_gradient_row<S>(s_.grad_query + r * padded_value_dim<S>(shape.head_dim), params_.grad_query,
                            batch_, head_, first + r, shape.head_dim, static_cast<T>(params_.rule.scale));
    }
  }
  // P and dS are 0 where a query does not see a key, and 0 NaN would be NaN: a query's NaN and Inf stay out
  // of dK, where those that keys see show through dS itself, and whatever a dead row holds stays out of dV.
  RightSide<S> grad_right{}, query_right{};
  if (params_.grad_value.data != nullptr && has_grad_) {
    if (dead_rows_ && !all_finite(grad)) grad = without_dead_rows(grad, first);
    grad_right = right_side(grad, s_.grad_right);
  }
  if (params_.grad_key.data != nullptr) {
    query_right = right_side(all_finite(query) ? query : finite_copy(query, s_.finite_query), s_.query_right);
  }
  started_ ? add_key_side<true>(count, query_right, grad_right)
           : add_key_side<false>(count, query_right, grad_right);
  started_ = true;
}

// dO with 0 for all of a dead row.
template <typename S>
Matrix<typename S::Element> SmallUnit<S>::without_dead_rows(const Matrix<Element>& m, int64_t first) const {
  const T* lse = static_cast<const T*>(params_.lse) +
                 (batch_ * params_.shape.query_heads + head_) * params_.shape.query_len + first;
  for (int64_t r = 0; r < m.rows; ++r) {
    const bool dead = lse[r] == -kInfinity<T> || row_is_masked(params_.rule, batch_, head_, first + r);
    for (int64_t c = 0; c < m.columns; ++c) {
      s_.finite_grad[r * m.columns + c] = dead ? Element{} : m.data[r * m.row_stride + c * m.column_stride];
    }
  }
  return {s_.finite_grad, m.columns, 1, m.rows, m.columns};
}

template <typename S>
void SmallUnit<S>::begin(int64_t batch, int64_t key_head) {
  batch_ = batch;
  key_head_ = key_head;
  keys_ = visible_keys();
  stride_ = small_stride<S>(keys_);
  started_ = bad_keys_ = false;
  pack_keys();
}

template <typename S>
void SmallUnit<S>::add_head(int64_t head, T sink) {
  head_ = head;
  sink_ = sink;
  sink_grad_ = 0;
  const int64_t rows = params_.shape.query_len;
  for (int64_t first = 0; first < rows; first += s_.block_rows) {
    add_rows(first, smaller(s_.block_rows, rows - first));
  }
  if (params_.grad_sinks != nullptr) {
    static_cast<T*>(params_.grad_sinks)[batch_ * params_.shape.query_heads + head] = sink_grad_;
  }
}

template <typename S>
void SmallUnit<S>::store_keys() {
  const AttentionShape& shape = params_.shape;
  const auto write = [&](const T* from, const GradView& grad, int64_t dim, bool there, double scale) {
    for (int64_t j = 0; grad.data != nullptr && j < shape.key_len; ++j) {
      if (there && j < keys_) {
        write_gradient_row<S>(from + j * padded_value_dim<S>(dim), grad, batch_, key_head_, j, dim,
                              static_cast<T>(scale));
      } else {
        clear_gradient_row<S>(grad, batch_, key_head_, j, dim);
      }
    }
  };
  write(s_.grad_key, params_.grad_key, shape.head_dim, started_, params_.rule.scale);
  write(s_.grad_value, params_.grad_value, shape.value_dim, started_ && has_grad_, 1);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY

#include "backward_small_rows.h"
