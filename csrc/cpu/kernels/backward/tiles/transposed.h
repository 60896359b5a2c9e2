// KeyQueryBlock: what comes from matrices of queries x keys (mask, dW, dropout) or goes into one (dMask),
// turned around to keys x queries.
#pragma once

#include "../../matrix/gather.h"
#include "../score_gradients.h"
#include "../store_rows.h"
#include "block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Two squares of lanes of queries and a vector of keys, turned around: pairs of keys go as one, those of the
// second square beside those of the first.
template <typename S, typename Finish>
ATTN_EXT_INLINE void load_transposed_pairs(const BFloat16* from, int64_t row_stride, typename S::Accum* out,
                                           Finish finish) {
  constexpr int kWidth = kLanes<float>;
  const BFloat16* second = from + kWidth * row_stride;
  Vec<float> square[kWidth];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    square[i] = load_halves<float>(from + i * row_stride, second + i * row_stride);
  }
  transpose_square<float>(square);
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) {
    typename S::Accum* to = out + i % (kWidth / 2) * 2 * S::kPanel + i / (kWidth / 2) * kWidth;
    const auto pair = (Vec<uint32_t>)square[i];
    store(to, finish((Vec<float>)(pair << 16)));
    store(to + S::kPanel, finish((Vec<float>)(pair & 0xffff0000u)));
  }
}

// out (keys, kPanel) = the transpose of m (queries, keys), of finish(load(where they lie)); m may have fewer
// keys, or more.
template <typename S, typename M, typename Load, typename Finish>
void load_transposed(const Matrix<M>& m, int64_t keys, typename S::Accum* out, Load load_lanes,
                     Finish finish) {
  using T = typename S::Accum;
  const int64_t queries = round_up(m.rows, S::kSpan);
  for (int64_t k = 0; k < keys; k += S::kLane) {
    const bool whole = m.column_stride == 1 && k + S::kLane <= m.columns;
    int64_t q = 0;
    if constexpr (std::is_same_v<M, BFloat16> && std::is_same_v<T, float>) {
      for (; whole && q + 2 * S::kLane <= m.rows; q += 2 * S::kLane) {
        load_transposed_pairs<S>(m.data + q * m.row_stride + k, m.row_stride, out + k * S::kPanel + q,
                                 finish);
      }
    }
    for (; q < queries; q += S::kLane) {
      M block[kLanes<T> * kLanes<T>];
      const M* from = m.data + q * m.row_stride + k * m.column_stride;
      int64_t stride = m.row_stride;
      if (!whole || q + S::kLane > m.rows) {
        gather_block(m, q, S::kLane, k, S::kLane, block);
        from = block;
        stride = S::kLane;
      }
      Vec<T> square[kLanes<T>];
#pragma GCC unroll 16
      for (int64_t i = 0; i < S::kLane; ++i) square[i] = finish(load_lanes(from + i * stride));
      transpose_square<T>(square);
#pragma GCC unroll 16
      for (int64_t i = 0; i < S::kLane; ++i) store(out + (k + i) * S::kPanel + q, square[i]);
    }
  }
}

template <typename S>
RowsAhead KeyQueryBlock<S>::rows_ahead(const TensorView& view, const void* data, int64_t size, int64_t cell,
                                       int64_t panel) const {
  if (view.row_stride == 0 || view.column_stride != 1) return {};
  const int64_t first = batch_offset(view, batch_) + head_ * view.head_stride +
                        (query_first_ + panel) * view.row_stride + key_first_ + cell;
  return {static_cast<const char*>(data) + first * size, view.row_stride * size, cell_rows(cell) * size,
          smaller(S::kPanel, query_count_ - panel), true};
}

template <typename S>
RowsAhead KeyQueryBlock<S>::mask_ahead(int64_t cell, int64_t panel) const {
  RowsAhead ahead;
  if (!mask_by_key_) return ahead;
  const TensorView& mask = params_.rule.mask;
  with_kind<Element>(params_.rule.mask_kind, [&](auto tag) {
    ahead = rows_ahead(mask, mask.data, sizeof(typename decltype(tag)::Type), cell, panel);
  });
  return ahead;
}

template <typename S>
RowsAhead KeyQueryBlock<S>::mask_grad_ahead(int64_t cell, int64_t panel) const {
  if (!mask_grad_.wanted() || mask_pairs_) return {};
  const ResultView& view = mask_grad_.view();
  return rows_ahead(view, mask_grad_.data(), view.wide ? sizeof(T) : sizeof(Element), cell, panel);
}

// A cell of a matrix of queries x keys of Ms, converted and turned around.
template <typename S>
template <typename M, typename Load, typename Finish>
void KeyQueryBlock<S>::load_cell(const TensorView& view, int64_t cell, int64_t panel, T* out, Load load_lanes,
                                 Finish finish) const {
  const int64_t key = key_first_ + cell;
  const Matrix<M> m{
      row_pointer<const M>(view, batch_, head_, query_first_ + panel) + key * view.column_stride,
      view.row_stride, view.column_stride, smaller(S::kPanel, query_count_ - panel),
      params_.shape.key_len - key};
  load_transposed<S>(m, cell_rows(cell), out, load_lanes, finish);
}

template <typename S>
void KeyQueryBlock<S>::load_bias_cell(int64_t cell, int64_t panel) const {
  with_kind<Element>(params_.rule.mask_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    if constexpr (std::is_same_v<M, uint8_t>) {
      load_cell<M>(
          params_.rule.mask, cell, panel, s_.bias, [](const M* p) { return mask_lanes<T>(p); },
          [](Vec<T> v) { return v; });
    } else {
      load_cell<M>(
          params_.rule.mask, cell, panel, s_.bias, [](const M* p) { return load_bias<T>(p); },
          [](Vec<T> v) { return in_log2<T>(v); });
    }
  });
}

template <typename S>
void KeyQueryBlock<S>::load_weight_grads_cell(int64_t cell, int64_t panel) const {
  load_cell<Element>(
      params_.grad_weights, cell, panel, s_.weight_grads, [](const Element* p) { return load_compute(p); },
      [](Vec<T> v) { return v; });
}

// dS of the cell, into the mask's gradient.
template <typename S>
void KeyQueryBlock<S>::put_mask_grads(int64_t cell, int64_t panel) const {
  const TensorView& view = mask_grad_.view();
  const int64_t first = mask_grad_.place(batch_, head_, query_first_ + panel, key_first_ + cell);
  const int64_t queries = smaller(S::kPanel, query_count_ - panel), keys = cell_rows(cell);
  for (int64_t q = 0; q < queries; q += S::kLane) {
    const int64_t place = first + q * view.row_stride, present = smaller(S::kLane, queries - q);
    if (view.column_stride == 0) {
      Vec<T> sum = {};
      for (int64_t r = cell; r < cell + keys; ++r) sum += load(grad_row(cell, panel, r) + q);
      T* to = static_cast<T*>(mask_grad_.data()) + place;
      view.row_stride == 0 ? static_cast<void>(*to += lane_sum<T>(sum))
                           : add_row(to, view.row_stride, sum, present);
      continue;
    }
    for (int64_t k = 0; k < keys; k += S::kLane) {
      put_mask_square(grad_row(cell, panel, cell + k) + q, smaller(S::kLane, keys - k),
                      place + k * view.column_stride, present);
    }
  }
}

// A square of lanes of dS (keys, queries), turned around.
template <typename S>
void KeyQueryBlock<S>::put_mask_square(const T* grads, int64_t keys, int64_t place, int64_t queries) const {
  const MaskGrad<S> to = mask_grad_;
  const int64_t row_stride = to.view().row_stride;
  Vec<T> square[kLanes<T>];
  if (keys == S::kLane) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < S::kLane; ++i) square[i] = load(grads + i * s_.score_stride);
  } else {
    for (int64_t i = 0; i < S::kLane; ++i)
      square[i] = i < keys ? load(grads + i * s_.score_stride) : Vec<T>{};
  }
  transpose_square<T>(square);
  if (keys == S::kLane && queries == S::kLane) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < S::kLane; ++i) to.put(place + i * row_stride, square[i], S::kLane);
  } else {
    for (int64_t i = 0; i < queries; ++i) to.put(place + i * row_stride, square[i], keys);
  }
}

// dS of the block, as it was paired, into the mask's gradient.
template <typename S>
void KeyQueryBlock<S>::put_mask_pairs() {
  constexpr int64_t kKeys = S::kLane * S::kDepth;
  const int64_t row_stride = mask_grad_.view().row_stride;
  for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
    const Operand* pairs = grads_right_at(panel, 0, 0);
    const int64_t queries = smaller(S::kPanel, query_count_ - panel);
    auto* rows = static_cast<Element*>(mask_grad_.data()) +
                 mask_grad_.place(batch_, head_, query_first_ + panel, key_first_);
    each_live_key_run(panel, [&](Range keys) {
      for (int64_t q = 0; q < queries; q += S::kLane) {
        for (int64_t k = keys.begin; k < keys.end; k += kKeys) {
          put_pairs_square(pairs + k / S::kDepth * S::kPanel + q, smaller(kKeys, keys.end - k),
                           rows + q * row_stride + k, smaller(S::kLane, queries - q));
        }
      }
    });
  }
}

// Of cells that no query sees.
template <typename S>
void KeyQueryBlock<S>::clear_unseen_mask_grads() {
  const ResultView& view = mask_grad_.view();
  const int64_t bytes = view.wide ? sizeof(T) : sizeof(Element);
  for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
    const int64_t queries = smaller(S::kPanel, query_count_ - panel);
    const int64_t first = mask_grad_.place(batch_, head_, query_first_ + panel, key_first_);
    for (int64_t cell = part_.keys.begin; cell < part_.keys.end; cell += cell_size_) {
      for (int64_t q = 0; !live(cell, panel) && q < queries; ++q) {
        char* row = static_cast<char*>(mask_grad_.data()) + (first + q * view.row_stride + cell) * bytes;
        memset(row, 0, static_cast<size_t>(cell_rows(cell) * bytes));
      }
    }
  }
}

// A square of lanes of pairs of keys (keys / 2, queries), turned around.
template <typename S>
void KeyQueryBlock<S>::put_pairs_square(const Operand* pairs, int64_t keys, Element* to,
                                        int64_t queries) const {
  constexpr int64_t kKeys = S::kLane * S::kDepth;
  const int64_t row_stride = mask_grad_.view().row_stride;
  const bool streams = streams_mask_ && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0;
  Vec<T> square[kLanes<T>];
  if (keys == kKeys && queries == S::kLane) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < S::kLane; ++i) square[i] = (Vec<T>)load(pairs + i * S::kPanel);
    transpose_square<T>(square);
#pragma GCC unroll 16
    for (int64_t i = 0; i < S::kLane; ++i) {
      streams ? stream(to + i * row_stride, square[i])
              : static_cast<void>(memcpy(to + i * row_stride, &square[i], sizeof(square[i])));
    }
    return;
  }
  const int64_t present = ceil_div(keys, S::kDepth);
  for (int64_t i = 0; i < S::kLane; ++i) {
    square[i] = i < present ? (Vec<T>)load(pairs + i * S::kPanel) : Vec<T>{};
  }
  transpose_square<T>(square);
  for (int64_t i = 0; i < queries; ++i) {
    memcpy(to + i * row_stride, &square[i], static_cast<size_t>(keys) * sizeof(Element));
  }
}

// Fills `keep` for a panel of queries and all of the part's keys: rows in the lanes, four keys a draw.
template <typename S>
void KeyQueryBlock<S>::draw_dropout(int64_t panel) {
  const DropoutRule& rule = params_.dropout;
  const PhiloxBatch state = philox_batch(rule, batch_);
  keep_first_ = round_down(key_first_ + part_.keys.begin, kDropoutColumns);
  const T scale = static_cast<T>(rule.keep_scale);
  for (int64_t key = keep_first_; key < key_first_ + part_.keys.end; key += kDropoutColumns) {
    for (int64_t q = 0; q < panel_width(panel); q += kLanes<uint32_t>) {
      for (uint32_t i = 0; i < 16; ++i) {
        uint32_t words[4][kLanes<uint32_t>];
        philox_rows(state, static_cast<uint64_t>(key / kDropoutColumns * 16 + i), query_first_ + panel + q,
                    head_, words);
        for (uint32_t w = 0; w < 4; ++w) {
          T* keep = s_.keep + (key - keep_first_ + 16 * w + i) * S::kPanel + q;
          const int64_t count = smaller(kLanes<uint32_t>, S::kPanel - q);
          for (int64_t l = 0; l < count; ++l) keep[l] = words[w][l] >= rule.threshold ? scale : 0;
        }
      }
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
