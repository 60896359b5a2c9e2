// KeyQueryBlock: a cell whose P comes from the forward pass, turned around: no score is made, no mask read.
#pragma once

#include "cell.h"
#include "transposed.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
RowsAhead KeyQueryBlock<S>::weights_ahead(int64_t cell, int64_t panel) const {
  return rows_ahead(params_.weights, params_.weights.data, sizeof(Element), cell, panel);
}

// P of the cell, of keys as they lie: those of a pair go as one through the turn.
template <typename S>
void KeyQueryBlock<S>::load_weights_cell(int64_t cell, int64_t panel) const {
  const int64_t key = key_first_ + cell, stride = params_.weights.row_stride;
  const int64_t queries = smaller(S::kPanel, query_count_ - panel);
  const Element* weights =
      row_pointer<const Element>(params_.weights, batch_, head_, query_first_ + panel) + key;
  constexpr int64_t kKeys = S::kLane * S::kDepth;
  const int64_t out_stride = S::kPaired ? S::kPanel : s_.score_stride;
  for (int64_t k = 0; k < cell_rows(cell); k += kKeys) {
    const int64_t present = smaller(kKeys, params_.shape.key_len - key - k);
    for (int64_t q = 0; q < panel_width(panel); q += S::kLane) {
      const Element* from = weights + q * stride + k;
      Vec<T> square[kLanes<T>];
      if (present == kKeys && q + S::kLane <= queries) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) {
          square[i] = (Vec<T>)load_operands<Product>(from + i * stride);
        }
      } else {
        for (int64_t i = 0; i < S::kLane; ++i) {
          square[i] =
              q + i < queries ? (Vec<T>)load_operands_partial<Product>(from + i * stride, present) : Vec<T>{};
        }
      }
      transpose_square<T>(square);
      Operand* out = saved_row(cell, panel, cell + k) + q;
#pragma GCC unroll 16
      for (int64_t i = 0; i < S::kLane; ++i) store(out + i * out_stride, (Vec<Operand>)square[i]);
    }
  }
}

// What is hidden has a P of 0.
template <typename S>
void KeyQueryBlock<S>::run_saved_cell(int64_t cell, int64_t panel) {
  if (wants_grads_) {
    multiply_cell(cell, panel, *keys_.value_rows, queries_.grad_columns, params_.shape.value_dim, s_.grads,
                  weights_ahead(cell, panel));
  }
  load_weights_cell(cell, panel);
  const bool whole = is_whole(cell, panel);
  if constexpr (S::kPaired) {
    if (whole && (!mask_grad_.wanted() || mask_pairs_)) {
      return mask_by_key_ || select_all_ ? saved_paired_cell<true>(cell, panel)
                                         : saved_paired_cell<false>(cell, panel);
    }
  }
  saved_rows(cell, panel);
  if (!whole) clear_outside(cell, panel);
  finish_side_grads(cell, panel);
  pair_cell(cell, panel);
}

// Of a key of the cell, from those of a pair.
template <typename S>
ATTN_EXT_INLINE Vec<typename S::Accum> saved_weight(Vec<typename S::Operand> weights, int64_t key) {
  if constexpr (S::kPaired) {
    return (Vec<typename S::Accum>)(key % 2 != 0 ? weights & 0xffff0000u : weights << 16);
  } else {
    return weights;
  }
}

template <bool Select, typename T>
ATTN_EXT_INLINE Vec<T> grad_of_weight(Vec<T> weight, Vec<T> grad, Vec<T> delta) {
  const Vec<T> product = weight * (grad - delta);
  if constexpr (!Select) return product;
  return weight == Vec<T>{} ? Vec<T>{} : product;
}

template <typename S>
template <bool Select>
void KeyQueryBlock<S>::saved_paired_cell(int64_t cell, int64_t panel) {
  const T* delta = queries_.terms.delta + panel;
  const auto make = [&](int64_t r, int k, int64_t i, Vec<T>& weight, Vec<T>& grad)
      __attribute__((always_inline)) {
    weight = saved_weight<S>(load(saved_row(cell, panel, r) + i), k);
    grad = grad_of_weight<Select, T>(weight, load(grad_row(cell, panel, r + k) + i), load(delta + i));
  };
  make_pairs_of_cell(cell, panel, make);
}

// The same, P and dS as floats.
template <typename S>
void KeyQueryBlock<S>::saved_rows(int64_t cell, int64_t panel) const {
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range span = panel_span(round_down(r, S::kTileRows), panel);
    const Operand* saved = saved_row(cell, panel, r);
    T* weights = score_row(cell, panel, r);
    T* grads = grad_row(cell, panel, r);
    for (int64_t i = span.begin; i < span.end; i += S::kLane) {
      const Vec<T> weight = saved_weight<S>(load(saved + i), r - cell);
      if constexpr (S::kPaired) store(weights + i, weight);
      store(grads + i,
            grad_of_weight<true, T>(weight, load(grads + i), load(queries_.terms.delta + panel + i)));
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
