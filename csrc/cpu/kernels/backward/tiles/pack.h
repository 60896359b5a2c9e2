// What the backward pass reads of a block of queries and of a block of keys, packed for its five products, or
// where it lies if that will do:
//   S^T  = K Q^T      left key_rows,   right query_columns
//   dP^T = V dO^T     left value_rows, right grad_columns
//   dV  += P^T dO     left the block,  right grad_rows
//   dK  += dS^T Q     left the block,  right query_rows
//   dQ^T += K^T dS^T  left key_depth,  right the block
// key_depth lies along the keys, for products whose left operand has to lie along the depth; else along D.
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/arena.h"
#include "../../matrix/finite.h"
#include "../../matrix/pack.h"
#include "../centre.h"
#include "../row_terms.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Queries as columns are in panels of kPanel, as rows in panels of the dim's own width.
template <typename S>
struct QueryPack {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  RowTerms<S> terms;
  Operand* query_columns;         // (query panels, depth of D, panel width)
  Operand* grad_columns;          // (query panels, depth of Dv, panel width)
  Operands<Operand>* query_rows;  // (D panels, depth of queries, width)
  Operands<Operand>* grad_rows;   // (Dv panels, depth of queries, width)
  T* grad_query;                  // (query panels, D, panel width), to be scaled
  int64_t* has_sums;              // 0: nothing was added to grad_query, and what lies there means nothing
  int64_t *has_bad_queries, *has_bad_grads;  // NaN or Inf, which query_rows and grad_rows leave out
  Operand *query_row_buffer, *grad_row_buffer;
};

template <typename S>
struct KeyPack {
  using Operand = typename S::Operand;
  Operands<Operand>* key_rows;    // (keys, depth of D)
  Operands<Operand>* value_rows;  // (keys, depth of Dv)
  Operands<Operand>* key_depth;   // (depth of keys, D), or (D, depth of keys) outside of registers; 0 for NaN
                                  // and Inf, centred where keys_centre
  typename S::Accum* centre;      // (padded D)
  int64_t* has_bad_keys;          // NaN or Inf
  int64_t* has_bad_values;
  int64_t* has_sums;  // 0: nothing was added to the gradients, and what lies there means nothing
  Operand *key_row_buffer, *value_row_buffer, *key_depth_buffer;
};

// Whether nothing was added to some sums yet; from now on something is.
inline bool begins_sums(int64_t* has_sums) {
  const bool first = *has_sums == 0;
  *has_sums = 1;
  return first;
}

// queries: of a block, in whole steps.
template <typename S>
QueryPack<S> take_query_pack(Arena& arena, const AttentionShape& shape, int64_t queries) {
  using Operand = typename S::Operand;
  QueryPack<S> pack;
  pack.terms = take_row_terms<S>(arena, queries);
  pack.query_columns = take<Operand>(arena, queries * depth_of<typename S::Product>(shape.head_dim));
  pack.grad_columns = take<Operand>(arena, queries * depth_of<typename S::Product>(shape.value_dim));
  pack.query_rows = take<Operands<Operand>>(arena, 1);
  pack.grad_rows = take<Operands<Operand>>(arena, 1);
  pack.grad_query = take<typename S::Accum>(arena, queries * shape.head_dim);
  pack.has_sums = take<int64_t>(arena, 1);
  pack.has_bad_queries = take<int64_t>(arena, 1);
  pack.has_bad_grads = take<int64_t>(arena, 1);
  pack.query_row_buffer = take<Operand>(arena, row_panels_size<S>(queries, shape.head_dim));
  pack.grad_row_buffer = take<Operand>(arena, row_panels_size<S>(queries, shape.value_dim));
  return pack;
}

template <typename S>
KeyPack<S> take_key_pack(Arena& arena, const AttentionShape& shape, int64_t keys) {
  using Operand = typename S::Operand;
  KeyPack<S> pack;
  pack.key_rows = take<Operands<Operand>>(arena, 1);
  pack.value_rows = take<Operands<Operand>>(arena, 1);
  pack.key_depth = take<Operands<Operand>>(arena, 1);
  pack.key_row_buffer = take<Operand>(arena, keys * row_stride_of<S>(shape.head_dim));
  pack.value_row_buffer = take<Operand>(arena, keys * row_stride_of<S>(shape.value_dim));
  pack.key_depth_buffer =
      take<Operand>(arena, depth_of<typename S::Product>(keys) * padded_dim<S>(shape.head_dim));
  pack.centre = take<typename S::Accum>(arena, padded_dim<S>(shape.head_dim));
  pack.has_bad_keys = take<int64_t>(arena, 1);
  pack.has_bad_values = take<int64_t>(arena, 1);
  pack.has_sums = take<int64_t>(arena, 1);
  return pack;
}

template <typename S>
void pack_query_columns(const Matrix<typename S::Element>& m, typename S::Operand* columns) {
  const int64_t depth = depth_of<typename S::Product>(m.columns);
  for (int64_t first = 0; first < m.rows; first += S::kPanel) {
    const int64_t width = smaller(S::kPanel, round_up(m.rows, S::kSpan) - first);
    pack_column_panel<typename S::Product>(m, first, width, columns + first * depth);
  }
}

// Elements of a copy of any matrix of a block.
template <typename S>
int64_t cleaned_size(const AttentionShape& shape, const TilesPlan& plan) {
  return larger(plan.block_keys, plan.block_queries) * larger(shape.head_dim, shape.value_dim);
}

// `clean` is m, or what is left of it. Rows that lie apart are packed, as so many of them would share cache
// sets, and so is a copy, whose memory is soon another's.
template <typename S>
Operands<typename S::Operand> row_operands(const Matrix<typename S::Element>& m,
                                           const Matrix<typename S::Element>& clean,
                                           typename S::Operand* buffer, int64_t most_rows) {
  return right_operands<S>(clean, buffer, most_rows, is_dense(m) && clean.data == m.data);
}

// `cleaned` has room for a copy.
template <typename S>
void pack_query_block(const BackwardParams& params, const TilesPlan& plan, const QueryPack<S>& pack,
                      int64_t batch, int64_t head, Range rows, bool exact_delta,
                      typename S::Element* cleaned) {
  using Element = typename S::Element;
  const AttentionShape& shape = params.shape;
  const int64_t count = rows.end - rows.begin, queries = round_up(count, S::kSpan);
  *pack.has_bad_grads = 0;
  set_row_terms<S>(params, pack.terms, batch, head, rows, queries, exact_delta);
  const Matrix<Element> query =
      rows_of<Element>(params.query, batch, head, rows.begin, count, shape.head_dim);
  pack_query_columns<S>(query, pack.query_columns);
  const Matrix<Element> finite_query = finite_only(query, cleaned);
  *pack.has_bad_queries = finite_query.data != query.data;
  *pack.query_rows = row_operands<S>(query, finite_query, pack.query_row_buffer, plan.block_queries);
  if (params.grad_output.data != nullptr) {
    const Matrix<Element> grad =
        rows_of<Element>(params.grad_output, batch, head, rows.begin, count, shape.value_dim);
    pack_query_columns<S>(grad, pack.grad_columns);
    const Matrix<Element> finite = *pack.terms.may_have_bad_grads != 0 ? finite_only(grad, cleaned) : grad;
    *pack.has_bad_grads = finite.data != grad.data;
    *pack.grad_rows = row_operands<S>(grad, finite, pack.grad_row_buffer, plan.block_queries);
  }
  *pack.has_sums = 0;
}

// The keys as left operand of dQ: key_rows where these will do.
template <typename S>
Operands<typename S::Operand> key_depth_rows(const KeyPack<S>& pack, const Matrix<typename S::Element>& key,
                                             bool centred, typename S::Element* cleaned) {
  using Product = typename S::Product;
  if (!S::kPaired && !centred && *pack.has_bad_keys == 0) return *pack.key_rows;
  const int64_t width = padded_dim<S>(key.columns);
  typename S::Operand* out = pack.key_depth_buffer;
  const Matrix<typename S::Element> finite = *pack.has_bad_keys == 0 ? key : finite_only(key, cleaned);
  if constexpr (!Product::kInRegisters) {
    const int64_t stride = depth_of<Product>(key.rows);
    pack_columns_as_rows<Product>(finite, out, stride);
    return {out, stride, 0};
  }
  pack_row_panels<Product>(finite, width, out, 0);
  if constexpr (!S::kPaired) {
    for (int64_t i = 0; centred && i < key.rows * width; i += S::kLane) {
      store(out + i, load(out + i) - load(pack.centre + i % width));
    }
  }
  return {out, width, 0};
}

// Rows of keys or values that lie apart are worth a copy if several panels read them, or if those of a tile
// share sets of the nearest cache, which come again after 4 KB. Elements that are no pairs are worth it
// always (docs/trials.md).
template <typename S>
bool is_read_once(const AttentionShape& shape, const Matrix<typename S::Element>& m) {
  constexpr int64_t kSets = 4096 / static_cast<int64_t>(sizeof(typename S::Element));
  const int64_t panels = group_size(shape) * ceil_div(shape.query_len, S::kPanel);
  return S::kPaired && panels == 1 && m.row_stride % kSets != 0 && are_operands<typename S::Product>(m);
}

template <typename S>
void pack_key_block(const BackwardParams& params, const KeyPack<S>& pack, int64_t batch, int64_t key_head,
                    Range keys, typename S::Element* cleaned) {
  using Element = typename S::Element;
  const AttentionShape& shape = params.shape;
  const int64_t count = keys.end - keys.begin;
  const Matrix<Element> key =
      rows_of<Element>(params.key, batch, key_head, keys.begin, count, shape.head_dim);
  const Matrix<Element> value =
      rows_of<Element>(params.value, batch, key_head, keys.begin, count, shape.value_dim);
  const bool key_in_place = is_read_once<S>(shape, key), value_in_place = is_read_once<S>(shape, value);
  *pack.key_rows = left_operands<S>(key, pack.key_row_buffer, key_in_place || is_dense(key));
  *pack.value_rows = left_operands<S>(value, pack.value_row_buffer, value_in_place || is_dense(value));
  *pack.has_bad_values = !all_finite(value, value_in_place);
  *pack.has_bad_keys = !all_finite(key, key_in_place);
  *pack.has_sums = 0;
  if (params.grad_query.data == nullptr) return;
  const bool centred = keys_centre<S>(params);
  if (centred) set_centre<S>(params, batch, key_head, pack.centre);
  *pack.key_depth = key_depth_rows<S>(pack, key, centred, cleaned);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
