// KeyQueryBlock: a cell from its two products to P and dS.
#pragma once

#include "../../scores/mask_and_scale.h"
#include "../score_gradients.h"
#include "block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void KeyQueryBlock<S>::run_cell(int64_t cell, int64_t panel) {
  const AttentionShape& shape = params_.shape;
  if constexpr (kReadsWeights<S>) {
    if (reads_weights_ && pass_ == Pass::kGradients) return run_saved_cell(cell, panel);
  }
  const bool rows_only = pass_ == Pass::kRowMax || pass_ == Pass::kRowSum;
  const bool with_grads = pass_ == Pass::kDelta || (pass_ == Pass::kGradients && wants_grads_);
  multiply_cell(cell, panel, *keys_.key_rows, queries_.query_columns, shape.head_dim, s_.scores,
                mask_ahead(cell, panel));
  if (with_grads && params_.grad_output.data != nullptr) {
    multiply_cell(cell, panel, *keys_.value_rows, queries_.grad_columns, shape.value_dim, s_.grads,
                  mask_grad_ahead(cell, panel));
  }
  if (*keys_.has_bad_keys != 0 || *queries_.has_bad_queries != 0) keep_seen_of_cell(cell, panel);
  if (mask_by_key_) load_bias_cell(cell, panel);
  if (with_grads && params_.grad_weights.data != nullptr) load_weight_grads_cell(cell, panel);
  const bool whole = is_whole(cell, panel);
  special_ = full_ || pass_ != Pass::kGradients || *queries_.terms.has_far_rows != 0;
  if (whole && !special_) return run_plain_cell(cell, panel);
  if ((special_ && !whole) || mask_by_key_ || units_.scale_first) finish_cell_scores(cell, panel);
  if (rows_only) return sum_rows(cell, panel);
  if constexpr (S::kPaired) {
    if (!special_ && (!mask_grad_.wanted() || mask_pairs_)) return partial_paired_cell(cell, panel);
  }
  finish_weights(cell, panel);
  if (pass_ == Pass::kDelta) return sum_delta(cell, panel);
  if (!whole) clear_outside(cell, panel);
  finish_side_grads(cell, panel);
  pair_cell(cell, panel);
}

// out (keys, queries) = left (keys, dim) . right (dim, queries), where the tiles' keys are seen at all.
template <typename S>
void KeyQueryBlock<S>::multiply_cell(int64_t cell, int64_t panel, const Operands<Operand>& left,
                                     const Operand* right, int64_t dim, T* out, RowsAhead ahead) {
  const int64_t rows_to_ask_for = ceil_div(S::kPanel, cell_size_ / S::kTileRows);
  TileArgs<Product> args{};
  args.depth = depth_of<Product>(dim);
  args.left_stride = left.row_stride;
  args.right_stride = panel_width(panel);
  args.out_stride = s_.score_stride;
  const int64_t end = cell + cell_rows(cell);
  for (int64_t tile = cell, rows = 0; tile < end; tile += rows) {
    const Range span = panel_span(tile, panel);
    rows = tile_rows(tile, end, span.end - span.begin);
    if (is_empty(span)) continue;
    prefetch_some(ahead, rows_to_ask_for);
    args.left = left.data + tile * left.row_stride;
    args.right = right + panel * args.depth + span.begin;
    args.out = out + cell_offset(cell, panel, tile) + span.begin;
    tile_function<Product, false>(rows, span.end - span.begin)(args);
  }
}

// mask: a bias, or 0 and -inf for true and false
template <typename T>
ATTN_EXT_INLINE Vec<T> masked_score(Vec<T> product, Vec<T> scale, Vec<T> mask) {
  return hide_where_minus_inf<T>(mask, keep_seen<T>(multiply_add(product, scale, mask)));
}

template <typename T>
inline void add_bias_span(T* scores, const T* bias, int64_t begin, int64_t end, T scale) {
  for (int64_t i = begin; i < end; i += kLanes<T>) {
    store(scores + i, masked_score<T>(load(scores + i), broadcast(scale), load(bias + i)));
  }
}

// Scales, caps, masks, and puts -inf wherever a tile has computed a score that its query does not see.
template <typename S>
void KeyQueryBlock<S>::finish_cell_scores(int64_t cell, int64_t panel) {
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range computed = panel_span(round_down(r, S::kTileRows), panel);
    if (is_empty(computed)) continue;
    T* row = score_row(cell, panel, r);
    T* slope = units_.capped ? s_.cap_slope + (r - cell) * S::kPanel : nullptr;
    Range seen = intersect(spans_of_key(r, panel).seen, computed);
    // What fills up the last vector is dead anyway.
    if (seen.end >= smaller(computed.end, query_count_ - panel)) seen.end = computed.end;
    finish_scores(row, slope, computed, seen, units_, mask_by_key_, [&](T scale) {
      if (mask_by_key_) {
        add_bias_span(row, s_.bias + (r - cell) * S::kPanel, computed.begin, computed.end, scale);
      }
    });
  }
}

template <typename S>
void KeyQueryBlock<S>::keep_seen_of_cell(int64_t cell, int64_t panel) const {
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range span = panel_span(round_down(r, S::kTileRows), panel);
    if (!is_empty(span)) {
      keep_seen(params_.rule, score_row(cell, panel, r) + span.begin, span.end - span.begin);
    }
  }
}

// P and dS = P (dP - delta) of a vector of scores; grad: dP, then dS. Select: dP may be anything where a key
// is hidden.
template <bool Select, typename T>
ATTN_EXT_INLINE void make_weights(Vec<T> score, Vec<T> scale, Vec<T> lse, Vec<T> delta, Vec<T>& weight,
                                  Vec<T>& grad) {
  weight = weights_of<T, Select>(score, scale, lse);
  grad = weight * (grad - delta);
  if constexpr (Select) grad = is_hidden<T>(score, lse) ? Vec<T>{} : grad;
}

// What a tile has computed of a key's row in a panel, and what of that is seen, the mask apart.
template <typename S>
typename KeyQueryBlock<S>::KeySpans KeyQueryBlock<S>::spans_of_key(int64_t r, int64_t panel) const {
  const Range seen = queries_of_key(r);
  return {panel_span(round_down(r, S::kTileRows), panel), {seen.begin - panel, seen.end - panel}};
}

// The queries from i on; grad: dP.
template <typename S>
ATTN_EXT_INLINE void KeyQueryBlock<S>::make_seen_weights(Range seen, const T* scores, int64_t panel,
                                                         int64_t i, Vec<T>& weight, Vec<T>& grad) const {
  const Vec<T> score = keep_lanes<T>(load(scores + i), seen.begin - i, seen.end - i);
  make_weights<true, T>(score, broadcast(units_.softmax_scale), load(queries_.terms.lse + panel + i),
                        load(queries_.terms.delta + panel + i), weight, grad);
}

template <typename S>
void KeyQueryBlock<S>::partial_row(int64_t cell, int64_t panel, int64_t r) const {
  const KeySpans spans = spans_of_key(r, panel);
  T* scores = score_row(cell, panel, r);
  T* grads = grad_row(cell, panel, r);
  for (int64_t i = spans.computed.begin; i < spans.computed.end; i += S::kLane) {
    Vec<T> weight, grad = load(grads + i);
    make_seen_weights(spans.seen, scores, panel, i, weight, grad);
    store(scores + i, weight);
    store(grads + i, grad);
  }
}

template <typename S>
void KeyQueryBlock<S>::full_row(int64_t cell, int64_t panel, int64_t r, Range columns) const {
  const bool to_delta = pass_ == Pass::kDelta;
  const int64_t key = key_first_ + r;
  ScoreSpan<S, Varying, Uniform> span{};
  span.scores = score_row(cell, panel, r);
  span.grads = grad_row(cell, panel, r);
  span.has_grads = params_.grad_output.data != nullptr && (wants_grads_ || to_delta);
  span.softmax_scale = units_.softmax_scale;
  span.lse = {queries_.terms.lse + panel};
  span.row_scale = {queries_.terms.row_scale + panel};
  if (params_.grad_weights.data != nullptr) span.weight_grads = s_.weight_grads + (r - cell) * S::kPanel;
  if (params_.dropout.enabled) span.keep = s_.keep + (key - keep_first_) * S::kPanel;
  span.has_mass = params_.grad_key_mass.data != nullptr;
  if (span.has_mass) {
    const TensorView& view = params_.grad_key_mass;
    span.mass_grads = {row_pointer<const T>(view, batch_, head_, 0)[key * view.column_stride]};
  }
  to_delta ? make_score_grads<true>(span, columns.begin, columns.end, Varying<T>{}, Vec<T>{})
           : make_score_grads<false>(span, columns.begin, columns.end,
                                     Varying<T>{queries_.terms.delta + panel}, Vec<T>{});
}

template <typename S>
void KeyQueryBlock<S>::finish_weights(int64_t cell, int64_t panel) {
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range span = panel_span(round_down(r, S::kTileRows), panel);
    if (is_empty(span)) continue;
    special_ ? full_row(cell, panel, r, span) : partial_row(cell, panel, r);
  }
}

// P and dS are 0 in what the tiles have left out of a live cell.
template <typename S>
void KeyQueryBlock<S>::clear_outside(int64_t cell, int64_t panel) {
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    Range span = panel_span(round_down(r, S::kTileRows), panel);
    if (is_empty(span)) span = {0, 0};
    if (span.begin == 0 && span.end == panel_width(panel)) continue;
    T* rows[2] = {score_row(cell, panel, r), grad_row(cell, panel, r)};
    for (T* row : rows) {
      fill_span(row, 0, span.begin, static_cast<T>(0));
      fill_span(row, span.end, panel_width(panel), static_cast<T>(0));
    }
  }
}

// The mask's gradient takes dS as it is, query and key what the softcap lets through of it.
template <typename S>
void KeyQueryBlock<S>::finish_side_grads(int64_t cell, int64_t panel) {
  if (mask_grad_.wanted() && !mask_pairs_) put_mask_grads(cell, panel);
  if (params_.rule.softcap == 0) return;
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range span = panel_span(round_down(r, S::kTileRows), panel);
    T* grads = grad_row(cell, panel, r);
    const T* slope = s_.cap_slope + (r - cell) * S::kPanel;
    multiply_by_slope(grads, slope, span.begin, span.end);
  }
}

// P and dS of keys r and r + 1 and of the 2 x lanes queries from column i of the panel on, as bfloat16: both
// in pairs of neighbouring queries, dS also in pairs of neighbouring keys. Columns past the panel land in the
// padding.
template <typename S>
ATTN_EXT_INLINE void KeyQueryBlock<S>::store_pairs([[maybe_unused]] int64_t panel, [[maybe_unused]] int64_t r,
                                                   [[maybe_unused]] int64_t i,
                                                   [[maybe_unused]] const Vec<T> (&weights)[2][2],
                                                   [[maybe_unused]] const Vec<T> (&grads)[2][2]) {
#if defined(ATTN_EXT_HAS_PAIRS)
  if constexpr (S::kPaired) {
    const Vec<Operand> first = to_pairs(grads[0][0], grads[0][1]);
    const Vec<Operand> second = to_pairs(grads[1][0], grads[1][1]);
    const int64_t left = r * s_.operand_stride + (panel + i) / 2;
    store(s_.grads_left + left, first);
    store(s_.grads_left + left + s_.operand_stride, second);
    store(s_.weights_left + left, to_pairs(weights[0][0], weights[0][1]));
    store(s_.weights_left + left + s_.operand_stride, to_pairs(weights[1][0], weights[1][1]));
    Operand* right = grads_right_at(panel, r, i);
    store(right, pair_first_half(first, second));
    store(right + S::kLane, pair_second_half(first, second));
  }
#endif
}

// make(r, k, i, weight, grad), of key r + k and the queries from i on, for each of `keys` x `vectors` vectors
// of P and dS, 0 in place of the others; then store_pairs().
template <typename S>
template <typename Make>
ATTN_EXT_INLINE void KeyQueryBlock<S>::make_pairs(int64_t panel, int64_t r, int64_t i, int keys, int vectors,
                                                  Make make) {
  Vec<T> weights[2][2] = {}, grads[2][2] = {};
#pragma GCC unroll 2
  for (int k = 0; k < keys; ++k) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v) make(r, k, i + v * S::kLane, weights[k][v], grads[k][v]);
  }
  store_pairs(panel, r, i, weights, grads);
}

// make_pairs() over a cell, of which the last key and the last vector of queries may be without a neighbour.
template <typename S>
template <typename Make>
ATTN_EXT_INLINE void KeyQueryBlock<S>::make_pairs_of_cell(int64_t cell, int64_t panel, Make make) {
  const int64_t end = cell + cell_rows(cell), width = panel_width(panel);
  for (int64_t r = cell; r < end; r += 2) {
    for (int64_t i = 0; i < width; i += 2 * S::kLane) {
      if (r + 2 <= end && i + 2 * S::kLane <= width) {
        make_pairs(panel, r, i, 2, 2, make);
      } else {
        make_pairs(panel, r, i, static_cast<int>(smaller(2, end - r)),
                   static_cast<int>(smaller(2, (width - i) / S::kLane)), make);
      }
    }
  }
}

template <typename S>
void KeyQueryBlock<S>::pair_cell(int64_t cell, int64_t panel) {
  if constexpr (S::kPaired) {
    make_pairs_of_cell(
        cell,
        panel, [&](int64_t r, int k, int64_t i, Vec<T>& weight, Vec<T>& grad) __attribute__((always_inline)) {
          weight = load(score_row(cell, panel, r + k) + i);
          grad = load(grad_row(cell, panel, r + k) + i);
        });
  }
}

// A cell with nothing special about it, all of whose keys every query sees but for a mask: what that does to
// the scores, and P and dS, at once.
template <typename S>
void KeyQueryBlock<S>::run_plain_cell(int64_t cell, int64_t panel) {
  const auto run = [&](auto masked, auto select) {
    constexpr bool kMasked = decltype(masked)::value, kSelect = decltype(select)::value;
    if constexpr (S::kPaired) {
      if (!mask_grad_.wanted() || mask_pairs_) return plain_paired_cell<kMasked, kSelect>(cell, panel);
    }
    plain_cell<kMasked, kSelect>(cell, panel);
    finish_side_grads(cell, panel);
    pair_cell(cell, panel);
  };
  if (units_.scale_first && !mask_by_key_) finish_cell_scores(cell, panel);
  if (mask_by_key_) return run(std::true_type{}, std::true_type{});
  select_all_ ? run(std::false_type{}, std::true_type{}) : run(std::false_type{}, std::false_type{});
}

// A column of vectors at a time, so that lse and delta stay in registers.
template <typename S>
template <bool Masked, bool Select>
void KeyQueryBlock<S>::plain_cell(int64_t cell, int64_t panel) const {
  const Vec<T> scale = broadcast(units_.softmax_scale), mask_scale = broadcast(units_.beside_mask());
  for (int64_t i = 0; i < panel_width(panel); i += S::kLane) {
    const Vec<T> lse = load(queries_.terms.lse + panel + i), delta = load(queries_.terms.delta + panel + i);
    T* scores = score_row(cell, panel, cell) + i;
    T* grads = grad_row(cell, panel, cell) + i;
    const T* mask = Masked ? s_.bias + i : nullptr;
    for (int64_t r = cell_rows(cell); r > 0; --r) {
      Vec<T> score = load(scores), weight, grad = load(grads);
      if constexpr (Masked) {
        score = masked_score<T>(score, mask_scale, load(mask));
        mask += S::kPanel;
      }
      make_weights<Select, T>(score, scale, lse, delta, weight, grad);
      store(scores, weight);
      store(grads, grad);
      scores += s_.score_stride;
      grads += s_.score_stride;
    }
  }
}

// The same where pairs follow, P and dS never leaving the registers as float.
template <typename S>
template <bool Masked, bool Select>
void KeyQueryBlock<S>::plain_paired_cell(int64_t cell, int64_t panel) {
  const Vec<T> scale = broadcast(units_.softmax_scale), mask_scale = broadcast(units_.beside_mask());
  const T* lse = queries_.terms.lse + panel;
  const T* delta = queries_.terms.delta + panel;
  const auto make = [&](int64_t r, int k, int64_t i, Vec<T>& weight, Vec<T>& grad)
      __attribute__((always_inline)) {
    Vec<T> score = load(score_row(cell, panel, r + k) + i);
    if constexpr (Masked) {
      score = masked_score<T>(score, mask_scale, load(s_.bias + (r + k - cell) * S::kPanel + i));
    }
    grad = load(grad_row(cell, panel, r + k) + i);
    make_weights<Select, T>(score, scale, load(lse + i), load(delta + i), weight, grad);
  };
  make_pairs_of_cell(cell, panel, make);
}

// A cell with nothing special about it but that some queries do not see some of its keys. Where a tile has
// computed nothing only dQ's product reads on.
template <typename S>
void KeyQueryBlock<S>::partial_paired_cell(int64_t cell, int64_t panel) {
  static_assert(S::kTileRows % 2 == 0);  // a pair of keys is of one tile
  const int64_t end = cell + cell_rows(cell), width = panel_width(panel);
  for (int64_t r = cell; r < end; r += 2) {
    const int keys = static_cast<int>(smaller(2, end - r));
    const KeySpans first = spans_of_key(r, panel), second = spans_of_key(smaller(r + 1, end - 1), panel);
    const Range computed = first.computed, seen[2] = {first.seen, second.seen};
    const auto make = [&](int64_t, int k, int64_t i, Vec<T>& weight, Vec<T>& grad)
        __attribute__((always_inline)) {
      if (i < computed.begin || i >= computed.end) return;
      grad = load(grad_row(cell, panel, r + k) + i);
      make_seen_weights(seen[k], score_row(cell, panel, r + k), panel, i, weight, grad);
    };
    for (int64_t i = 0; i < width; i += 2 * S::kLane) {
      if (i >= computed.end || i + 2 * S::kLane <= computed.begin) {
        memset(grads_right_at(panel, r, i), 0, 2 * S::kLane * sizeof(Operand));
      } else {
        make_pairs(panel, r, i, keys, static_cast<int>(smaller(2, (width - i) / S::kLane)), make);
      }
    }
  }
}

// dS of the keys past the block's last one, up to a whole step along the depth of dQ.
template <typename S>
void KeyQueryBlock<S>::clear_last_pairs(int64_t panel) const {
  Operand* right = grads_right_at(panel, 0, 0);
  for (int64_t k = ceil_div(key_count_, S::kDepth); k < depth_of<Product>(key_count_); ++k) {
    memset(right + k * S::kPanel, 0, S::kPanel * sizeof(Operand));
  }
}

template <typename S>
void KeyQueryBlock<S>::sum_delta(int64_t cell, int64_t panel) {
  T* delta = queries_.terms.delta + panel;
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range span = panel_span(round_down(r, S::kTileRows), panel);
    const T* grads = grad_row(cell, panel, r);
    for (int64_t i = span.begin; i < span.end; i += S::kLane)
      store(delta + i, load(delta + i) + load(grads + i));
  }
}

// Row maximum, or row sum of 2^(s - row maximum).
template <typename S>
void KeyQueryBlock<S>::sum_rows(int64_t cell, int64_t panel) {
  T* top = queries_.terms.row_max + panel;
  T* sum = queries_.terms.row_sum + panel;
  for (int64_t r = cell; r < cell + cell_rows(cell); ++r) {
    const Range span = panel_span(round_down(r, S::kTileRows), panel);
    const T* scores = score_row(cell, panel, r);
    for (int64_t i = span.begin; i < span.end; i += S::kLane) {
      if (pass_ == Pass::kRowMax) {
        store(top + i, add_to_max<S>(scores + i, 0, S::kLane, units_, load(top + i)));
      } else {
        store(sum + i, add_to_sum<S>(scores + i, 0, S::kLane, units_, load(top + i), load(sum + i)));
      }
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
