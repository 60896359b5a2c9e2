// QueryBlock: from scores to the undivided output; the products of keys and values that are packed.
#pragma once

#include "../scores/dropout_draw.h"
#include "../scores/softmax.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
bool QueryBlock<S>::has_bad_values(Range keys) {
  if (bad_values_ >= 0) return bad_values_ != 0;
  const StoredRows<Element> values = stored_values(0, params_.shape.value_dim);
  bool finite = true;
  for (int64_t key = keys.begin; key < keys.end && finite;) {
    int64_t count = keys.end - key;
    if (!values.lie_in_place(key, count)) count = smaller(count, kStreamKeys);
    finite = all_finite(values.rows(key, count, s_.stored_rows));
    key += count;
  }
  bad_values_ = !finite;
  return !finite;
}

// A thread that has met NaN or Inf among values looks for them first from then on.
template <typename S>
void QueryBlock<S>::attend(Range keys, bool emit) {
  careful_ = *s_.met_bad_values != 0 && has_bad_values(keys);
  emit_in_place_ = emit;
  attend_once(keys);
  if (careful_ || output_is_finite() || !has_bad_values(keys)) return;
  *s_.met_bad_values = 1;
  careful_ = true;
  emit_in_place_ = false;  // all is written already
  attend_once(keys);
}

template <typename S>
void QueryBlock<S>::attend_once(Range keys) {
  const int64_t padded_rows = round_up(rows_, S::kLane) + S::kLane;
  for (int64_t r = 0; r < padded_rows; ++r) {
    s_.row_max[r] = -kInfinity<T>;
    s_.row_sum[r] = 0;
    s_.ones[r] = 1;
  }
  memset(s_.tile_started, 0, static_cast<size_t>(rows_));
  for (int64_t key = keys.begin; key < keys.end; key += plan_.block_keys) {
    const bool live = set_key_block(key, smaller(plan_.block_keys, keys.end - key));
    if (!live && !emit_in_place_ && kept_weights_ == nullptr) continue;
    read_factors();
    for (int64_t band = 0; band < rows_; band += kBandRows<S>) attend_band(band);
  }
  for (int64_t tile = 0; tile < rows_; tile += S::kTileRows) {
    if (s_.tile_started[tile / S::kTileRows] != 0) continue;
    for (int64_t r = tile; r < tile + tile_rows(tile); ++r) {
      fill_span(s_.output + r * s_.output_stride, 0, s_.output_stride, static_cast<T>(0));
    }
  }
}

template <typename S>
void QueryBlock<S>::attend_band(int64_t band) {
  const bool drops = params_.dropout.enabled;
  const bool in_place = reads_values_in_place() && !careful_;
  // Somebody wants the weights before they are rounded.
  const bool wide = emit_in_place_ || kept_weights_ != nullptr || values_have_factors() || in_place;
  make_scores(band);
  multiply_factors(band, params_.key_storage, s_.key_factors);
  mask(band);
  softmax(band, S::kPaired && !drops && !wide);
  if (drops) dropout(band, S::kPaired && !wide);
  // Weights alone go out in the pass that pairs them.
  const bool emits_pairs = S::kPaired && emit_in_place_ && key_mass_ == nullptr && kept_weights_ == nullptr &&
                           !values_have_factors();
  if (emit_in_place_) {
    finish_rows(band);
    if (!emits_pairs) emit(band);
  }
  if (kept_weights_ != nullptr) keep_weights(band);
  multiply_factors(band, params_.value_storage, s_.value_factors);
  if (in_place) return unit_values(band);
  if (emits_pairs) {
    emit_pairs(band);
  } else if (S::kPaired && wide) {
    pair_weights(band);
  }
  add_values(band);
}

template <typename S>
void QueryBlock<S>::make_scores(int64_t band) {
  if constexpr (Product::kInRegisters) {
    if (plan_.path == ForwardPath::kFewRows) {
      if (heads_beside_ > 1) return scores_beside();
      return plan_.pieces.packs_keys ? shared_scores(band) : stream_scores(band);
    }
  } else if (by_unit() && !plan_.pieces.packs_keys) {
    return unit_scores(band);
  }
  scores(band);
}

template <typename S>
void QueryBlock<S>::add_values(int64_t band) {
  if constexpr (Product::kInRegisters) {
    if (heads_beside_ > 1) return values_beside();
    if (plan_.path == ForwardPath::kFewRows && (careful_ || !plan_.pieces.packs_values))
      return stream_values(band);
  }
  values(band);
}

// S (rows, keys) = Q (rows, D) . K^T (D, keys), panel by panel, where the tiles' rows see anything.
template <typename S>
void QueryBlock<S>::scores(int64_t band) {
  const int64_t depth = depth_of<Product>(params_.shape.head_dim);
  const int64_t first_panel = (block_key_ - packed_.first_key) / S::kPanel;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t p = runs_[i].begin / S::kPanel; p * S::kPanel < runs_[i].end; ++p) {
      const Range columns = intersect(runs_[i], {p * S::kPanel, (p + 1) * S::kPanel});
      const Operand* panel = packed_.keys + (first_panel + p) * S::kPanel * depth;
      for (int64_t tile = band; tile < band + band_rows(band); tile += S::kTileRows) {
        const Range span = intersect(columns, aligned(tile_span(tile)));
        if (is_empty(span)) continue;
        TileArgs<Product> args{};
        args.depth = depth;
        args.left = query_ + tile * query_stride_;
        args.left_stride = query_stride_;
        args.right = panel + (span.begin - p * S::kPanel);
        args.right_stride = S::kPanel;
        args.out = score_row(band, tile) + span.begin;
        args.out_stride = s_.score_stride;
        if (masked_in_tile(tile, span)) {
          scores_masked(tile, span, args);
        } else {
          tile_function<Product, false>(multiplied_rows(tile), span.end - span.begin)(args);
        }
      }
    }
  }
}

template <typename S>
void QueryBlock<S>::row_maxima(int64_t band, T* top) const {
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    const T* row = score_row(band, r);
    Vec<T> lanes = broadcast(-kInfinity<T>);
    each_run(aligned(tile_span(r)),
             [&](int64_t begin, int64_t end) { lanes = max_span(row, begin, end, lanes); });
    top[r - band] = lane_max<T>(lanes);
  }
}

// Running softmax: m' = max(m, row max), carry = 2^(m - m'), l' = carry l + sum 2^(s - m').
template <typename S>
void QueryBlock<S>::softmax(int64_t band, bool paired) {
  T top[kBandRows<S> + S::kLane];
  fill_span(top, 0, kBandRows<S> + S::kLane, -kInfinity<T>);
  row_maxima(band, top);
  for (int64_t r = 0; r < kBandRows<S>; r += S::kLane) {
    const Vec<T> old_max = load(s_.row_max + band + r);
    // A NaN shows in its weight; in the row max it would hide that others are masked out.
    const Vec<T> scaled = load(top + r) * units_.softmax_scale;
    const Vec<T> new_max = maximum(old_max, scaled == scaled ? scaled : Vec<T>{});
    const Vec<T> origin = new_max == -kInfinity<T> ? Vec<T>{} : new_max;  // a row that has seen nothing yet
    const Vec<T> carry = old_max == new_max ? broadcast(static_cast<T>(1)) : exp2<T>(old_max - origin);
    store(s_.row_max + band + r, new_max);
    store(s_.carry + band + r, carry);
    store(s_.row_sum + band + r, load(s_.row_sum + band + r) * carry);
  }
  exponentials(band, paired);
}

// P = 2^(scale s - m), the sums added to the row sums.
template <typename S>
void QueryBlock<S>::exponentials(int64_t band, bool paired) {
  constexpr T kExactSteps = 256;
  Vec<T> sums[kBandRows<S> + S::kLane] = {};
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    T* row = score_row(band, r);
    const T top = s_.row_max[r];
    const T origin = top == -kInfinity<T> ? 0 : top;
    // scale s - m is not rounded in between, but m was, by as much as a step of its own format: where such
    // steps are large, the products are rounded like it first.
    const bool rounds_first = units_.softmax_scale != 1 && !(origin < kExactSteps && origin > -kExactSteps);
    const T scale = rounds_first ? static_cast<T>(1) : units_.softmax_scale;
    Vec<T> sum = {};
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      if (rounds_first) scale_span(row, begin, end, units_);
      if constexpr (S::kPaired) {
        if (paired) {
          sum = exp_span_paired(row, begin, end, scale, origin, sum);
          return;
        }
      }
      sum = exp_span(row, begin, end, scale, origin, sum);
    });
    sums[r - band] = sum;
  }
  for (int64_t r = 0; r < kBandRows<S>; r += S::kLane) {
    Vec<T> lanes[S::kLane];
    memcpy(lanes, sums + r, sizeof(lanes));
    store(s_.row_sum + band + r, load(s_.row_sum + band + r) + lane_sums<T>(lanes));
  }
}

template <typename S>
void QueryBlock<S>::dropout(int64_t band, bool paired) {
  const DropoutRule& rule = params_.dropout;
  const PhiloxBatch state = philox_batch(rule, batch_);
  const int64_t end_row = band + band_rows(band);
  for (int64_t r = band; r < end_row; r += 2) {  // two rows of a tile, which share their span
    const int64_t rows = smaller(2, end_row - r);
    const int64_t row[2] = {s_.row_index[r], s_.row_index[r + rows - 1]};
    const int64_t head[2] = {s_.row_head[r], s_.row_head[r + rows - 1]};
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      for (int64_t first = round_down(begin, kDropoutColumns); first < end; first += kDropoutColumns) {
        uint32_t words[2][kDropoutColumns];
        philox_words(state, (block_key_ + first) / kDropoutColumns, row, head, words);
        const Range part = intersect({begin, end}, {first, first + kDropoutColumns});
        for (int64_t i = 0; i < rows; ++i) {
          T* to = score_row(band, r + i);
          drop_span(to, part.begin, part.end, words[i] + (part.begin - first), rule.threshold,
                    [&](int64_t j, Vec<T> p) {
                      if constexpr (S::kPaired) {
                        if (paired) return store_paired(to, j, p);
                      }
                      store(to + j, p);
                    });
        }
      }
    });
  }
}

template <typename S>
void QueryBlock<S>::pair_weights(int64_t band) {
  if constexpr (S::kPaired) {
    for (int64_t r = band; r < band + band_rows(band); ++r) {
      T* row = score_row(band, r);
      each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) { pair_span(row, begin, end); });
    }
  }
}

// O (rows, Dv) = carry O + P (rows, keys) . V (keys, Dv), a panel of columns and a stretch of keys at a time.
template <typename S>
void QueryBlock<S>::values(int64_t band) {
  const int64_t width = panel_width_of<S>(params_.shape.value_dim);
  for (int64_t column = 0; column < s_.output_stride; column += width) {
    for (int64_t i = 0; i < run_count_; ++i) {
      for (int64_t key = runs_[i].begin; key < runs_[i].end; key += kValueDepth) {
        const Range stretch{key, smaller(key + kValueDepth, runs_[i].end)};
        const ValueStretch<S> values = value_stretch(column, stretch);
        for (int64_t tile = band; tile < band + band_rows(band); tile += S::kTileRows) {
          const Range span = intersect(stretch, tile_span(tile));
          if (!is_empty(span)) multiply_values(band, tile, column, span, values);
        }
        if (values.bad_keys != nullptr) {
          add_bad_values(band, column, values_of(column, width, stretch), *values.bad_keys, stretch.begin);
        }
      }
    }
  }
  for (int64_t tile = band; tile < band + band_rows(band); tile += S::kTileRows) {
    each_run(tile_span(tile), [&](int64_t, int64_t) { s_.tile_started[tile / S::kTileRows] = 1; });
  }
}

// Some columns of the values of some keys of the block.
template <typename S>
Matrix<typename S::Element> QueryBlock<S>::values_of(int64_t column, int64_t columns, Range keys) const {
  const int64_t width = smaller(columns, params_.shape.value_dim - column);
  return stored_values(column, width)
      .rows(block_key_ + keys.begin, smaller(keys.end, block_count_) - keys.begin, s_.stored_rows);
}

template <typename S>
ValueStretch<S> QueryBlock<S>::value_stretch(int64_t column, Range stretch) {
  if (careful_) {
    const ValueStretch<S> finite = finite_stretch(column, stretch);
    if (finite.bad_keys != nullptr || reads_values_in_place()) return finite;
  }
  const auto& packed = packed_.values;
  return {packed.data + column / panel_width_of<S>(params_.shape.value_dim) * packed.panel_stride,
          packed.row_stride, packed_.first_key - block_key_, nullptr};
}

// Without NaN and Inf, in the scratch: of the same keys for one band after the other.
template <typename S>
ValueStretch<S> QueryBlock<S>::finite_stretch(int64_t column, Range stretch) {
  const int64_t width = panel_width_of<S>(params_.shape.value_dim);
  const Range keys{block_key_ + stretch.begin, block_key_ + stretch.end};
  if (keys.begin != finite_keys_.begin || keys.end != finite_keys_.end || column != finite_column_) {
    const Matrix<Element> m = values_of(column, width, stretch);
    find_bad_rows(m, *s_.bad_keys);
    if (s_.bad_keys->count > 0 || reads_values_in_place()) {
      pack_row_panels<Product>(finite_only(m, s_.finite_values), width, s_.finite_value_operands, 0);
    }
    finite_keys_ = keys;
    finite_column_ = column;
  }
  return {s_.finite_value_operands, width, stretch.begin, s_.bad_keys->count > 0 ? s_.bad_keys : nullptr};
}

// What the values' NaN and Inf give to the rows that see them; of the keys from first_key of the block on.
template <typename S>
void QueryBlock<S>::add_bad_values(int64_t band, int64_t column, const Matrix<Element>& values,
                                   const BadRows& bad, int64_t first_key) const {
  add_bad_rows(
      values, bad, band_rows(band), [&](int64_t r, int64_t j) { return is_seen(band + r, first_key + j); },
      [&](int64_t r, int64_t j) -> T {
        const T* row = score_row(band, band + r);
        if constexpr (S::kPaired) return to_compute(reinterpret_cast<const Element*>(row)[first_key + j]);
        return row[first_key + j];
      },
      [&](int64_t r, int64_t c, Vec<T> sum, int64_t count) {
        add_row(s_.output + (band + r) * s_.output_stride + column + c, 1, sum, count);
      });
}

template <typename S>
void QueryBlock<S>::multiply_values(int64_t band, int64_t tile, int64_t column, Range span,
                                    const ValueStretch<S>& values) {
  const int64_t width = panel_width_of<S>(params_.shape.value_dim);
  const int64_t begin = round_down(span.begin / S::kDepth, S::kDepthStep), end = depth_of<Product>(span.end);
  // The row maximum has moved once for this block of keys: only the first product of a tile carries it over.
  bool first_of_tile = true;
  each_run(tile_span(tile), [&](int64_t run_begin, int64_t) { first_of_tile &= span.begin <= run_begin; });
  TileArgs<Product> args{};
  args.depth = end - begin;
  args.left = reinterpret_cast<const Operand*>(score_row(band, tile)) + begin;
  args.left_stride = s_.score_stride;
  args.right = values.data + (begin - values.first / S::kDepth) * values.row_stride;
  args.right_stride = values.row_stride;
  args.out = s_.output + tile * s_.output_stride + column;
  args.out_stride = s_.output_stride;
  args.carry = first_of_tile ? s_.carry + tile : s_.ones + tile;
  const int64_t columns = round_up(smaller(width, params_.shape.value_dim - column), kColumnStep<T>);
  const bool fresh = first_of_tile && s_.tile_started[tile / S::kTileRows] == 0;
  if (fresh) {
    tile_function<Product, false>(multiplied_rows(tile), columns)(args);
  } else {
    tile_function<Product, true>(multiplied_rows(tile), columns)(args);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
