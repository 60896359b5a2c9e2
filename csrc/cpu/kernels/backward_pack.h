// What the backward reads of a block of queries and of a block of keys, packed for the five products of a
// tile, or where it lies if that will do:
//   S^T  = K Q^T      left key_rows,   right query_columns
//   dP^T = V dO^T     left value_rows, right grad_columns
//   dV  += P^T dO     left the tile,   right grad_rows
//   dK  += dS^T Q     left the tile,   right query_rows
//   dQ^T += K^T dS^T  left key_depth,  right the tile
#pragma once

#include "scheme.h"
#include "scores.h"
#include "visibility.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

ATTN_EXT_INLINE int64_t pieces(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

// Rows of operands somewhere in memory, perhaps in panels of columns.
template <typename Operand>
struct OperandRows {
  const Operand* data;
  int64_t row_stride;
  int64_t panel_stride;
};

// rows: of queries, in panels of kPanel as columns, in panels of the dim's own width as rows.
template <typename S>
struct QueryPack {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  Operand* query_columns;            // (query panels, depth of D, panel width)
  Operand* grad_columns;             // (query panels, depth of Dv, panel width)
  OperandRows<Operand>* query_rows;  // (D panels, depth of queries, width)
  OperandRows<Operand>* grad_rows;   // (Dv panels, depth of queries, width)
  T* lse;                // in units of log2; +inf where a row sees no key, so that its weights come out as 0
  T* delta;              // rowsum(P dP) - dLse
  T* row_scale;          // 1, but for far rows
  T *row_max, *row_sum;  // of far rows, in the making
  T* grad_query;         // (query panels, D, panel width), to be scaled
  int64_t* has_dead_rows;
  int64_t* has_far_rows;
  Operand *query_row_buffer, *grad_row_buffer;
};

template <typename S>
struct KeyPack {
  using Operand = typename S::Operand;
  OperandRows<Operand>* key_rows;    // (keys, depth of D)
  OperandRows<Operand>* value_rows;  // (keys, depth of Dv)
  OperandRows<Operand>* key_depth;   // (depth of keys, D); 0 for NaN and Inf, centred where keys_centre
  typename S::Accum* centre;         // (padded D)
  int64_t* has_bad_keys;
  int64_t* has_bad_values;
  Operand *key_row_buffer, *value_row_buffer, *key_depth_buffer;
};

template <typename S>
ATTN_EXT_INLINE int64_t row_stride_of(int64_t dim) {
  return round_up(depth_of<typename S::Product>(dim), S::kLane);
}

template <typename S>
ATTN_EXT_INLINE int64_t row_panels_size(int64_t queries, int64_t dim) {
  const int64_t width = value_panel_width<S>(dim);
  return pieces(dim, width) * depth_of<typename S::Product>(queries) * width;
}

// queries: of a block, in whole vectors.
template <typename S>
QueryPack<S> take_query_pack(Arena& arena, const AttentionShape& shape, int64_t queries) {
  using Operand = typename S::Operand;
  using T = typename S::Accum;
  QueryPack<S> pack;
  pack.query_columns = take<Operand>(arena, queries * depth_of<typename S::Product>(shape.head_dim));
  pack.grad_columns = take<Operand>(arena, queries * depth_of<typename S::Product>(shape.value_dim));
  pack.query_rows = take<OperandRows<Operand>>(arena, 2);
  pack.grad_rows = pack.query_rows + 1;
  pack.lse = take<T>(arena, queries);
  pack.delta = take<T>(arena, queries);
  pack.row_scale = take<T>(arena, queries);
  pack.row_max = take<T>(arena, queries);
  pack.row_sum = take<T>(arena, queries);
  pack.has_far_rows = take<int64_t>(arena, 1);
  pack.grad_query = take<T>(arena, queries * shape.head_dim);
  pack.has_dead_rows = take<int64_t>(arena, 1);
  pack.query_row_buffer = take<Operand>(arena, row_panels_size<S>(queries, shape.head_dim));
  pack.grad_row_buffer = take<Operand>(arena, row_panels_size<S>(queries, shape.value_dim));
  return pack;
}

template <typename S>
KeyPack<S> take_key_pack(Arena& arena, const AttentionShape& shape, int64_t keys) {
  using Operand = typename S::Operand;
  KeyPack<S> pack;
  pack.key_rows = take<OperandRows<Operand>>(arena, 3);
  pack.value_rows = pack.key_rows + 1;
  pack.key_depth = pack.key_rows + 2;
  pack.key_row_buffer = take<Operand>(arena, keys * row_stride_of<S>(shape.head_dim));
  pack.value_row_buffer = take<Operand>(arena, keys * row_stride_of<S>(shape.value_dim));
  pack.key_depth_buffer =
      take<Operand>(arena, depth_of<typename S::Product>(keys) * padded_value_dim<S>(shape.head_dim));
  pack.centre = take<typename S::Accum>(arena, padded_value_dim<S>(shape.head_dim));
  pack.has_bad_keys = take<int64_t>(arena, 1);
  pack.has_bad_values = take<int64_t>(arena, 1);
  return pack;
}

// Rows [first, first + count) of a matrix, as a matrix.
template <typename Element>
ATTN_EXT_INLINE Matrix<Element> rows_of(const TensorView& view, int64_t batch, int64_t head, int64_t first,
                                        int64_t count, int64_t columns) {
  return {row_pointer<const Element>(view, batch, head, first), view.row_stride, view.column_stride, count,
          columns};
}

template <typename Element>
ATTN_EXT_INLINE bool is_dense(const Matrix<Element>& m) {
  return m.column_stride == 1 && m.row_stride == m.columns;
}

template <typename S>
void pack_query_columns(const Matrix<typename S::Element>& m, typename S::Operand* columns) {
  const int64_t depth = depth_of<typename S::Product>(m.columns);
  for (int64_t first = 0; first < m.rows; first += S::kPanel) {
    const int64_t width = smaller(S::kPanel, round_up(m.rows, S::kLane) - first);
    pack_column_panel<typename S::Product>(m, first, width, columns + first * depth);
  }
}

// The rows as they lie, if they are operands in whole vectors and `in_place` allows it.
template <typename S>
OperandRows<typename S::Operand> query_operand_rows(const Matrix<typename S::Element>& m, bool in_place,
                                                    typename S::Operand* buffer, int64_t block_queries) {
  using Product = typename S::Product;
  const int64_t width = value_panel_width<S>(m.columns);
  if constexpr (std::is_same_v<typename S::Element, typename S::Operand>) {
    if (in_place && is_dense(m) && m.columns % S::kLane == 0) return {m.data, m.row_stride, width};
  }
  const int64_t panel_stride = depth_of<Product>(block_queries) * width;
  pack_row_panels<Product>(m, 0, depth_of<Product>(m.rows), width, buffer, panel_stride);
  return {buffer, width, panel_stride};
}

// The rows of keys or values as left operand: as they lie if they are operands.
template <typename S>
OperandRows<typename S::Operand> key_operand_rows(const Matrix<typename S::Element>& m,
                                                  typename S::Operand* buffer) {
  using Operand = typename S::Operand;
  if constexpr (sizeof(typename S::Element) * S::kDepth == sizeof(Operand)) {
    const bool aligned = reinterpret_cast<uintptr_t>(m.data) % alignof(Operand) == 0;
    if (is_dense(m) && m.columns % S::kDepth == 0 && aligned) {
      return {reinterpret_cast<const Operand*>(m.data), m.columns / S::kDepth, 0};
    }
  }
  const int64_t stride = row_stride_of<S>(m.columns);
  pack_rows<typename S::Product>(m, 0, m.rows, buffer, stride);
  return {buffer, stride, 0};
}

template <typename Element>
ATTN_EXT_INLINE Compute<Element> dot_rows(const Matrix<Element>& a, const Matrix<Element>& b, int64_t row) {
  using T = Compute<Element>;
  constexpr int64_t kWidth = kLanes<T>;
  const Element* x = a.data + row * a.row_stride;
  const Element* y = b.data + row * b.row_stride;
  if (a.column_stride != 1 || b.column_stride != 1) {
    T sum = 0;
    for (int64_t c = 0; c < a.columns; ++c)
      sum += to_compute(x[c * a.column_stride]) * to_compute(y[c * b.column_stride]);
    return sum;
  }
  Vec<T> sums = {};
  int64_t c = 0;
  for (; c + kWidth <= a.columns; c += kWidth)
    sums = multiply_add(load_compute(x + c), load_compute(y + c), sums);
  if (c < a.columns) {
    sums = multiply_add(load_compute_partial(x + c, a.columns - c),
                        load_compute_partial(y + c, a.columns - c), sums);
  }
  return lane_sum<T>(sums);
}

// Whether a bool mask that says the same of every key hides all of row i.
ATTN_EXT_INLINE bool row_is_masked(const ScoreRule& rule, int64_t batch, int64_t head, int64_t row) {
  return rule.mask_kind == ScalarKind::kBool && rule.mask.column_stride == 0 &&
         *row_pointer<const uint8_t>(rule.mask, batch, head, row) == 0;
}

// A row whose scores are so far from 0 that lse, rounded as they are, says little about their sum, as happens
// where a bias of -1e9 or the lowest finite value hides all keys. Its weights are made as 2^(s - row max) /
// row sum again.
constexpr double kFarScore = 4096;  // in units of log2

template <typename T>
ATTN_EXT_INLINE bool is_far(T lse) {
  return lse != kInfinity<T> && (lse > static_cast<T>(kFarScore) || lse < static_cast<T>(-kFarScore));
}

// lse, and delta = rowsum(dO O) - dLse unless the tiles are to make it.
template <typename S>
void set_row_terms(const BackwardParams& params, const QueryPack<S>& pack, int64_t batch, int64_t head,
                   int64_t first, int64_t count, int64_t queries, bool exact_delta) {
  using Element = typename S::Element;
  using T = typename S::Accum;
  const AttentionShape& shape = params.shape;
  const bool from_output = params.grad_output.data != nullptr && !exact_delta;
  const Matrix<Element> grad =
      rows_of<Element>(params.grad_output, batch, head, first, count, shape.value_dim);
  const Matrix<Element> output = rows_of<Element>(params.output, batch, head, first, count, shape.value_dim);
  const T* lse =
      static_cast<const T*>(params.lse) + (batch * shape.query_heads + head) * shape.query_len + first;
  *pack.has_dead_rows = 0;
  *pack.has_far_rows = 0;
  for (int64_t r = 0; r < queries; ++r) {
    const bool live =
        r < count && lse[r] != -kInfinity<T> && !row_is_masked(params.rule, batch, head, first + r);
    pack.lse[r] = live ? static_cast<T>(lse[r] * static_cast<T>(kLog2E)) : kInfinity<T>;
    pack.delta[r] = live && from_output ? dot_rows(grad, output, r) : 0;
    if (r < count && params.grad_lse.data != nullptr) {
      pack.delta[r] -= *row_pointer<const T>(params.grad_lse, batch, head, first + r);
    }
    if (r < count && !live) *pack.has_dead_rows = 1;
    if (is_biased(params.rule) && is_far(pack.lse[r])) *pack.has_far_rows = 1;
    pack.row_scale[r] = 1;
    pack.row_max[r] = -kInfinity<T>;
    pack.row_sum[r] = 0;
  }
}

template <typename Element>
ATTN_EXT_INLINE bool is_finite_at(const Matrix<Element>& m, int64_t r, int64_t c) {
  const Compute<Element> x = to_compute(m.data[r * m.row_stride + c * m.column_stride]);
  return x - x == 0;
}

template <typename Element>
bool all_finite(const Matrix<Element>& m) {
  using T = Compute<Element>;
  constexpr int64_t kWidth = kLanes<T>;
  Vec<Bits<T>> residue = {};  // x - x is 0, NaN for what is not finite
  bool finite = true;
  for (int64_t r = 0; r < m.rows; ++r) {
    const Element* row = m.data + r * m.row_stride;
    int64_t c = 0;
    for (; m.column_stride == 1 && c + kWidth <= m.columns; c += kWidth) {
      const Vec<T> x = load_compute(row + c);
      residue |= (Vec<Bits<T>>)(x - x);
    }
    for (; c < m.columns; ++c) finite &= is_finite_at(m, r, c);
  }
  for (int i = 0; i < kLanes<T>; ++i) finite &= residue[i] == 0;
  return finite;
}

// Puts 0 for element (r, c) of a query block's row panels.
template <typename S>
void clear_in_rows(typename S::Operand* rows, int64_t dim, int64_t block_queries, int64_t r, int64_t c) {
  const int64_t width = value_panel_width<S>(dim);
  const int64_t panel_stride = depth_of<typename S::Product>(block_queries) * width;
  typename S::Operand& operand = rows[c / width * panel_stride + r / S::kDepth * width + c % width];
  if constexpr (S::kNarrow) {
    operand &= r % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
  } else {
    operand = 0;
  }
}

// Puts 0 for what is not finite in row panels of m, or in those of its rows alone that see no key.
template <typename S>
void clear_nonfinite_rows(const QueryPack<S>& pack, const Matrix<typename S::Element>& m,
                          typename S::Operand* rows, bool dead_only, int64_t block_queries) {
  for (int64_t r = 0; r < m.rows; ++r) {
    if (dead_only && pack.lse[r] != kInfinity<typename S::Accum>) continue;
    for (int64_t c = 0; c < m.columns; ++c) {
      if (!is_finite_at(m, r, c)) clear_in_rows<S>(rows, m.columns, block_queries, r, c);
    }
  }
}

// dS is 0 where a query does not see a key, and 0 NaN would be NaN: a query's NaN and Inf stay out of dK,
// where those that keys see show through dS itself, and whatever a dead row holds stays out of dV.
template <typename S>
void pack_query_block(const BackwardParams& params, const QueryPack<S>& pack, int64_t batch, int64_t head,
                      int64_t first, int64_t count, int64_t block_queries, bool exact_delta) {
  using Element = typename S::Element;
  const AttentionShape& shape = params.shape;
  const int64_t queries = round_up(count, S::kLane);
  set_row_terms<S>(params, pack, batch, head, first, count, queries, exact_delta);
  const auto pack_side = [&](const Matrix<Element>& m, typename S::Operand* columns,
                             OperandRows<typename S::Operand>* rows, typename S::Operand* buffer,
                             bool dead_only) {
    pack_query_columns<S>(m, columns);
    const bool clean = (dead_only && *pack.has_dead_rows == 0) || all_finite(m);
    *rows = query_operand_rows<S>(m, clean, buffer, block_queries);
    if (!clean) clear_nonfinite_rows<S>(pack, m, buffer, dead_only, block_queries);
  };
  pack_side(rows_of<Element>(params.query, batch, head, first, count, shape.head_dim), pack.query_columns,
            pack.query_rows, pack.query_row_buffer, false);
  if (params.grad_output.data != nullptr) {
    pack_side(rows_of<Element>(params.grad_output, batch, head, first, count, shape.value_dim),
              pack.grad_columns, pack.grad_rows, pack.grad_row_buffer, true);
  }
  if (params.grad_query.data != nullptr) {
    memset(pack.grad_query, 0, static_cast<size_t>(queries * shape.head_dim) * sizeof(typename S::Accum));
  }
}

// delta from an output rounded to 16 bits is off by some e, and with it dS of the whole row by e P: dQ by e
// times the mean key. Where a row of dS sums to 0, dQ = dS (K - c) for any c, and with c close to the mean
// key e matters no more.
template <typename S>
ATTN_EXT_INLINE bool keys_centre(const BackwardParams& params) {
  const ScoreRule& rule = params.rule;
  return sizeof(typename S::Element) == 2 && !S::kNarrow && rule.mask_kind == ScalarKind::kNone &&
         rule.sinks_kind == ScalarKind::kNone && rule.softcap == 0 && rule.window_left < 0 &&
         rule.window_right < 0 && params.grad_lse.data == nullptr;
}

constexpr int64_t kCentreKeys = 256;

// centre = the mean of the head's first keys, 0 where that is not finite.
template <typename S>
void set_centre(const BackwardParams& params, const KeyPack<S>& pack, int64_t batch, int64_t key_head) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  const int64_t dim = params.shape.head_dim, count = smaller(kCentreKeys, params.shape.key_len);
  const Matrix<Element> key = rows_of<Element>(params.key, batch, key_head, 0, count, dim);
  for (int64_t d = 0; d < padded_value_dim<S>(dim); d += S::kLane) {
    Vec<T> sum = {};
    for (int64_t j = 0; j < count; ++j) {
      const Element* from = key.data + j * key.row_stride + d * key.column_stride;
      Element block[kLanes<T>];
      if (key.column_stride != 1 || d + S::kLane > dim) {
        gather_block(key, j, 1, d, S::kLane, block);
        from = block;
      }
      sum += load_compute(from);
    }
    const Vec<T> mean = sum * (static_cast<T>(1) / static_cast<T>(count));
    store(pack.centre + d, mean - mean == Vec<T>{} ? mean : Vec<T>{});
  }
}

// The keys as left operand of dQ: key_rows where these will do.
template <typename S>
OperandRows<typename S::Operand> key_depth_rows(const KeyPack<S>& pack,
                                                const Matrix<typename S::Element>& key, bool centred) {
  using Product = typename S::Product;
  if (!S::kNarrow && !centred && *pack.has_bad_keys == 0) return *pack.key_rows;
  const int64_t width = padded_value_dim<S>(key.columns);
  typename S::Operand* out = pack.key_depth_buffer;
  pack_row_panels<Product>(key, 0, depth_of<Product>(key.rows), width, out, 0);
  if constexpr (!S::kNarrow) {
    for (int64_t i = 0; centred && i < key.rows * width; i += S::kLane) {
      store(out + i, load(out + i) - load(pack.centre + i % width));
    }
  }
  for (int64_t j = 0; *pack.has_bad_keys != 0 && j < key.rows; ++j) {
    for (int64_t d = 0; d < key.columns; ++d) {
      if (is_finite_at(key, j, d)) continue;
      auto* operand = reinterpret_cast<char*>(out + j / S::kDepth * width + d);
      constexpr size_t kBytes = sizeof(typename S::Operand) / S::kDepth;
      memset(operand + static_cast<size_t>(j % S::kDepth) * kBytes, 0, kBytes);
    }
  }
  return {out, width, 0};
}

template <typename S>
void pack_key_block(const BackwardParams& params, const KeyPack<S>& pack, int64_t batch, int64_t key_head,
                    int64_t first, int64_t count) {
  using Element = typename S::Element;
  const AttentionShape& shape = params.shape;
  const Matrix<Element> key = rows_of<Element>(params.key, batch, key_head, first, count, shape.head_dim);
  const Matrix<Element> value =
      rows_of<Element>(params.value, batch, key_head, first, count, shape.value_dim);
  *pack.key_rows = key_operand_rows<S>(key, pack.key_row_buffer);
  *pack.value_rows = key_operand_rows<S>(value, pack.value_row_buffer);
  *pack.has_bad_values = !all_finite(value);
  *pack.has_bad_keys = !all_finite(key);
  if (params.grad_query.data == nullptr) return;
  const bool centred = keys_centre<S>(params);
  if (centred) set_centre<S>(params, pack, batch, key_head);
  *pack.key_depth = key_depth_rows<S>(pack, key, centred);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
