// QueryBlock: which keys its rows see, and the mask pass.
#pragma once

#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void QueryBlock<S>::set_rows(int64_t first_head, int64_t first, int64_t rows, Range keys, bool again) {
  const AttentionShape& shape = params_.shape;
  rows_ = rows;
  key_head_ = first_head / larger(1, group_size(shape));
  heads_beside_ = plan_.pieces.heads_beside > 1 ? ceil_div(rows, group_size(shape) * shape.query_len) : 1;
  query_ = s_.query;
  query_stride_ = s_.query_stride;
  for (int64_t r = 0; r < rows;) {
    const int64_t head = first_head + (first + r) / shape.query_len;
    const int64_t index = (first + r) % shape.query_len;
    const int64_t count = smaller(rows - r, shape.query_len - index);
    const Matrix<Element> query{row_pointer<const Element>(params_.query, batch_, head, 0),
                                params_.query.row_stride, params_.query.column_stride, shape.query_len,
                                shape.head_dim};
    if (count == rows && lie_packed(query)) {
      query_ = reinterpret_cast<const Operand*>(query.data + index * query.row_stride);
      query_stride_ = query.row_stride / S::kDepth;
    } else if (!again) {
      pack_rows<Product>(query, index, count, s_.query + r * s_.query_stride, s_.query_stride);
    }
    for (int64_t i = 0; i < count; ++i, ++r) {
      s_.row_head[r] = head;
      s_.row_index[r] = index + i;
    }
  }
  if constexpr (!Product::kInRegisters) {
    if (by_unit() && !plan_.pieces.packs_keys && !again) pack_query_columns();
  }
  limit_rows(keys);
}

// Folds into the rows' key ranges whatever of the mask is a range: rows masked as a whole and padding.
template <typename S>
void QueryBlock<S>::limit_rows(Range keys) {
  const ScoreRule& rule = params_.rule;
  const int64_t key_len = params_.shape.key_len;
  const bool is_bool = rule.mask_kind == ScalarKind::kBool;
  const bool by_row = is_bool && rule.mask.column_stride == 0;
  const bool by_key = is_bool && !by_row && rule.mask.row_stride == 0;
  mask_by_key_ = rule.mask_kind != ScalarKind::kNone && !by_row && !by_key;
  Range padding = keys;
  for (int64_t r = 0; r < rows_; ++r) {
    s_.row_keys[r] = intersect(window_keys(rule, key_len, s_.row_index[r]), keys);
    if (key_len == 0 || !is_bool) continue;
    const uint8_t* mask = row_pointer<const uint8_t>(rule.mask, batch_, s_.row_head[r], s_.row_index[r]);
    if (by_row && *mask == 0) s_.row_keys[r] = {0, 0};
    if (!by_key) continue;
    if (r == 0 || s_.row_head[r] != s_.row_head[r - 1]) {
      bool gapless = true;
      padding = mask_row_range(mask, rule.mask.column_stride, keys, gapless);
      mask_by_key_ |= !gapless;
    }
    s_.row_keys[r] = intersect(s_.row_keys[r], padding);
  }
  mask_in_tile_ = Product::kInRegisters && mask_by_key_ && rule.mask.column_stride == 1 &&
                  units_.softcap == 0 && (!is_bool || !units_.scale_first) &&
                  plan_.path != ForwardPath::kFewRows;
}

// False: no row sees any of these keys.
template <typename S>
bool QueryBlock<S>::set_key_block(int64_t first_key, int64_t count) {
  block_key_ = first_key;
  block_count_ = count;
  Range hull{count, 0};
  for (int64_t tile = 0; tile < rows_; tile += S::kTileRows) {
    Range span{count, 0};
    for (int64_t r = tile; r < tile + tile_rows(tile); ++r) {
      Range keys = intersect(s_.row_keys[r], {first_key, first_key + count});
      keys.begin -= first_key;
      keys.end -= first_key;
      s_.row_span[r] = keys;
      if (!is_empty(keys)) span = {smaller(span.begin, keys.begin), larger(span.end, keys.end)};
    }
    s_.tile_span[tile / S::kTileRows] = span;
    if (!is_empty(span)) hull = {smaller(hull.begin, span.begin), larger(hull.end, span.end)};
  }
  run_count_ = 0;
  if (is_empty(hull)) return false;
  if (plan_.path == ForwardPath::kFewRows) {  // all rows go through all that is read
    for (int64_t tile = 0; tile < rows_; tile += S::kTileRows) s_.tile_span[tile / S::kTileRows] = hull;
  }
  runs_[0] = aligned(hull);
  run_count_ = 1;
  if (mask_by_key_) select_runs();
  return run_count_ > 0;
}

// Cuts the one run into those that the mask leaves.
template <typename S>
void QueryBlock<S>::select_runs() {
  const Range all = runs_[0];
  run_count_ = 0;
  for (int64_t begin = all.begin; begin < all.end;) {
    const int64_t end = smaller(round_down(begin, kRunKeys) + kRunKeys, all.end);
    if (is_live(begin, end)) {
      if (run_count_ > 0 && runs_[run_count_ - 1].end == begin) {
        runs_[run_count_ - 1].end = end;
      } else {
        runs_[run_count_++] = {begin, end};
      }
    }
    begin = end;
  }
}

template <typename S>
bool QueryBlock<S>::is_live(int64_t begin, int64_t end) const {
  for (int64_t r = 0; r < rows_; ++r) {
    const Range span = intersect(s_.row_span[r], {begin, end});
    const Range keys{block_key_ + span.begin, block_key_ + span.end};
    if (any_let_through<Element>(params_.rule, batch_, s_.row_head[r], s_.row_index[r], keys)) return true;
  }
  return false;
}

// Whether a tile's scores meet the mask as soon as they are made: all of a panel, if the mask's row lies
// dense.
template <typename S>
bool QueryBlock<S>::masked_in_tile(int64_t tile, Range span) const {
  return mask_in_tile_ && tile_rows(tile) == S::kTileRows && span.end - span.begin == S::kPanel &&
         block_key_ + span.end <= params_.shape.key_len;
}

// The part of a run that masked_in_tile() is true of.
template <typename S>
Range QueryBlock<S>::masked_panels(int64_t r, Range run) const {
  const int64_t present = params_.shape.key_len - block_key_;
  const Range panels{round_up(run.begin, S::kPanel), round_down(smaller(run.end, present), S::kPanel)};
  const bool in_tile = mask_in_tile_ && tile_rows(round_down(r, S::kTileRows)) == S::kTileRows;
  return in_tile && !is_empty(panels) ? panels : Range{run.end, run.end};
}

template <typename S>
void QueryBlock<S>::scores_masked(int64_t tile, Range span, const TileArgs<Product>& args) const {
  if constexpr (!Product::kInRegisters) return;
  with_kind<Element>(params_.rule.mask_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    const M* rows[S::kTileRows];
    for (int64_t r = 0; r < S::kTileRows; ++r) {
      rows[r] =
          row_pointer<const M>(params_.rule.mask, batch_, s_.row_head[tile + r], s_.row_index[tile + r]) +
          block_key_ + span.begin;
    }
    // All but a run's first panel have been asked for by the panel before.
    masked_tile<Product>(args, rows, units_.scale, span.begin == runs_[0].begin ? 0 : S::kPanel);
  });
}

// Scales, caps, masks, and puts -inf wherever a tile has computed a score that its row does not see.
template <typename S>
void QueryBlock<S>::mask(int64_t band) {
  // A bias is added by the multiply-add that scales, if nothing has to happen in between.
  const bool scaled_by_mask =
      mask_by_key_ && params_.rule.mask_kind != ScalarKind::kBool && units_.softcap == 0;
  const bool changes_scores = mask_by_key_ || units_.scale_first;
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    const Range computed = aligned(tile_span(r));
    if (is_empty(computed)) continue;
    T* row = score_row(band, r);
    if (changes_scores) {
      each_run(computed, [&](int64_t begin, int64_t end) {
        if (units_.scale_first && !scaled_by_mask) scale_span(row, begin, end, units_);
        if (!mask_by_key_) return;
        Range done = masked_panels(r, {begin, end});
        mask_row(r, row, begin, done.begin);
        mask_row(r, row, done.end, end);
      });
    }
    hide_outside(row, computed, s_.row_span[r]);
  }
}

// A score without its bias, from the tensors: few keys of few rows are asked for it. No call has a bias and a
// cache.
template <typename S>
double QueryBlock<S>::score_of_key(int64_t r, int64_t key) const {
  const int64_t head = s_.row_head[r], columns = params_.shape.head_dim;
  const TensorView &query = params_.query, &keys = params_.key;
  const Element* a = row_pointer<const Element>(query, batch_, head, s_.row_index[r]);
  const Element* b = row_pointer<const Element>(keys, batch_, head / group_size(params_.shape), key);
  double sum = 0;
  for (int64_t c = 0; c < columns; ++c) {
    sum += static_cast<double>(to_compute(a[c * query.column_stride])) *
           static_cast<double>(to_compute(b[c * keys.column_stride]));
  }
  sum *= params_.rule.scale;
  const double cap = params_.rule.softcap;
  return cap > 0 ? cap * tanh<double>(broadcast(sum / cap))[0] : sum;
}

// Of the keys that a row sees, and its sink, that with the largest bias whose score is not -inf.
template <typename S>
typename S::Accum QueryBlock<S>::score_of_largest_bias(int64_t r) const {
  const ScoreRule& rule = params_.rule;
  T top = sink_of<Element>(rule, batch_, s_.row_head[r]);
  if (!is_biased(rule)) return top;
  double score = static_cast<double>(top);
  with_kind<Element>(rule.mask_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    if constexpr (!std::is_same_v<M, uint8_t>) {
      const M* mask = row_pointer<const M>(rule.mask, batch_, s_.row_head[r], s_.row_index[r]);
      for (int64_t j = s_.row_keys[r].begin; j < s_.row_keys[r].end; ++j) {
        const T bias = static_cast<T>(to_compute(mask[j * rule.mask.column_stride]));
        if (!(bias > top)) continue;
        const double product = score_of_key(r, j);
        if (product == -kInfinity<double>) continue;
        top = bias;
        score = product + static_cast<double>(bias);
      }
    }
  });
  const double most = static_cast<double>(FloatFormat<T>::kLargest);
  return static_cast<T>(score > most ? most : score < -most ? -most : score);
}

template <typename S>
void QueryBlock<S>::mask_row(int64_t r, T* row, int64_t begin, int64_t end) const {
  if (begin >= end) return;
  with_kind<Element>(params_.rule.mask_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    const TensorView& view = params_.rule.mask;
    const M* mask = row_pointer<const M>(view, batch_, s_.row_head[r], s_.row_index[r]);
    mask_span(row, begin, end, mask + block_key_ * view.column_stride, view.column_stride,
              params_.shape.key_len - block_key_, units_.softcap == 0 ? units_.scale : static_cast<T>(1));
  });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
