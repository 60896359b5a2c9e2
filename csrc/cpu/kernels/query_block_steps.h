// QueryBlock: from scores to the undivided output. Included by query_block.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Keys of a value product: so many rows of values stay in the nearest cache for all tiles of a group.
constexpr int64_t kValueDepth = 1024;

template <typename S>
void QueryBlock<S>::attend(KeyRange keys) {
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
    for (int64_t group = 0; group < rows_; group += kGroupRows) attend_group(group);
  }
  for (int64_t tile = 0; tile < rows_; tile += kTileRows) {
    if (s_.tile_started[tile / kTileRows] != 0) continue;
    for (int64_t r = tile; r < tile + tile_rows(tile); ++r) {
      fill_span(s_.output + r * s_.output_stride, 0, s_.output_stride, static_cast<T>(0));
    }
  }
}

template <typename S>
void QueryBlock<S>::attend_group(int64_t group) {
  const bool decodes = plan_.path == ForwardPath::kDecode;
  const bool drops = params_.dropout.enabled;
  const bool wide =
      emit_in_place_ || kept_weights_ != nullptr;  // somebody wants the weights before they narrow
  decodes ? stream_scores(group) : scores(group);
  mask(group);
  if (visible_ != nullptr) note_visible(group);
  softmax(group, S::kNarrow && !drops && !wide);
  if (drops) dropout(group, S::kNarrow && !wide);
  if (emit_in_place_) {
    finish_rows(group);
    emit(group);
  }
  if (kept_weights_ != nullptr) keep_weights(group);
  if (S::kNarrow && wide) narrow(group);
  if (decodes) {
    stream_values(group);
  } else if (visible_ != nullptr) {
    values_careful(group);
  } else {
    values(group);
  }
}

// S (rows, keys) = Q (rows, D) . K^T (D, keys), panel by panel, where the tiles' rows see anything.
template <typename S>
void QueryBlock<S>::scores(int64_t group) {
  const int64_t depth = depth_of<Product>(params_.shape.head_dim);
  const int64_t first_panel = (block_key_ - packed_.first_key) / S::kPanel;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t p = runs_[i].begin / S::kPanel; p * S::kPanel < runs_[i].end; ++p) {
      const KeyRange columns = intersect(runs_[i], {p * S::kPanel, (p + 1) * S::kPanel});
      const Operand* panel = packed_.keys + (first_panel + p) * S::kPanel * depth;
      for (int64_t tile = group; tile < group + group_rows(group); tile += kTileRows) {
        const KeyRange span = intersect(columns, aligned(tile_span(tile)));
        if (is_empty(span)) continue;
        TileArgs<Product> args{};
        args.depth = depth;
        args.left = query_ + tile * query_stride_;
        args.left_stride = query_stride_;
        args.right = panel + (span.begin - p * S::kPanel);
        args.right_stride = S::kPanel;
        args.out = score_row(group, tile) + span.begin;
        args.out_stride = s_.score_stride;
        if (masked_in_tile(tile, span)) {
          scores_masked(tile, span, args);
        } else {
          tile_function<Product, false>(tile_rows(tile), (span.end - span.begin) / S::kLane)(args);
        }
      }
    }
  }
}

template <typename S>
void QueryBlock<S>::row_maxima(int64_t group, T* top) const {
  for (int64_t r = group; r < group + group_rows(group); ++r) {
    const T* row = score_row(group, r);
    Vec<T> lanes = broadcast(-kInfinity<T>);
    each_run(aligned(tile_span(r)),
             [&](int64_t begin, int64_t end) { lanes = max_span(row, begin, end, lanes); });
    top[r - group] = lane_max<T>(lanes);
  }
}

// Running softmax: m' = max(m, row max), carry = 2^(m - m'), l' = carry l + sum 2^(s - m').
template <typename S>
void QueryBlock<S>::softmax(int64_t group, bool narrow) {
  T top[kGroupRows + S::kLane];
  fill_span(top, 0, kGroupRows + S::kLane, -kInfinity<T>);
  row_maxima(group, top);
  for (int64_t r = 0; r < kGroupRows; r += S::kLane) {
    const Vec<T> old_max = load(s_.row_max + group + r);
    // A NaN shows in its weight; in the row max it would hide that others are masked out.
    const Vec<T> scaled = load(top + r) * units_.softmax_scale;
    const Vec<T> new_max = maximum(old_max, scaled == scaled ? scaled : Vec<T>{});
    const Vec<T> origin = new_max == -kInfinity<T> ? Vec<T>{} : new_max;  // a row that has seen nothing yet
    const Vec<T> carry = old_max == new_max ? broadcast(static_cast<T>(1)) : exp2<T>(old_max - origin);
    store(s_.row_max + group + r, new_max);
    store(s_.carry + group + r, carry);
    store(s_.row_sum + group + r, load(s_.row_sum + group + r) * carry);
  }
  exponentials(group, narrow);
}

// P = 2^(scale s - m), the sums added to the row sums.
template <typename S>
void QueryBlock<S>::exponentials(int64_t group, bool narrow) {
  constexpr T kExactSteps = 256;
  Vec<T> sums[kGroupRows + S::kLane] = {};
  for (int64_t r = group; r < group + group_rows(group); ++r) {
    T* row = score_row(group, r);
    const T top = s_.row_max[r];
    const T origin = top == -kInfinity<T> ? 0 : top;
    // scale s - m is not rounded in between, but m was, by as much as a step of its own format: where such
    // steps are large, the products are rounded like it first.
    const bool rounds_first = units_.softmax_scale != 1 && !(origin < kExactSteps && origin > -kExactSteps);
    const T scale = rounds_first ? static_cast<T>(1) : units_.softmax_scale;
    Vec<T> sum = {};
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      if (rounds_first) scale_span(row, begin, end, units_);
      if constexpr (S::kNarrow) {
        if (narrow) {
          sum = exp_span_narrow<S::kExpDegree>(row, begin, end, scale, origin, sum);
          return;
        }
      }
      sum = exp_span<T, S::kExpDegree>(row, begin, end, scale, origin, sum);
    });
    sums[r - group] = sum;
  }
  for (int64_t r = 0; r < kGroupRows; r += S::kLane) {
    Vec<T> lanes[S::kLane];
    memcpy(lanes, sums + r, sizeof(lanes));
    store(s_.row_sum + group + r, load(s_.row_sum + group + r) + lane_sums<T>(lanes));
  }
}

template <typename S>
void QueryBlock<S>::dropout(int64_t group, bool narrow) {
  const DropoutRule& rule = params_.dropout;
  PhiloxRow state;
  set_philox_batch(state, rule, batch_);
  const int64_t end_row = group + group_rows(group);
  for (int64_t r = group; r < end_row; r += 2) {  // two rows of a tile, which share their span
    const int64_t rows = smaller(2, end_row - r);
    const int64_t row[2] = {s_.row_index[r], s_.row_index[r + rows - 1]};
    const int64_t head[2] = {s_.row_head[r], s_.row_head[r + rows - 1]};
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      for (int64_t first = round_down(begin, kDropoutColumns); first < end; first += kDropoutColumns) {
        uint32_t words[2][kDropoutColumns];
        philox_words(state, static_cast<uint64_t>((block_key_ + first) / kDropoutColumns), row, head, words);
        const KeyRange part = intersect({begin, end}, {first, first + kDropoutColumns});
        for (int64_t i = 0; i < rows; ++i) {
          T* to = score_row(group, r + i);
          drop_span(to, part.begin, part.end, words[i] + (part.begin - first), rule.threshold,
                    [&](int64_t j, Vec<T> p) {
                      if constexpr (S::kNarrow) {
                        if (narrow) return store_narrow(to, j, p);
                      }
                      store(to + j, p);
                    });
        }
      }
    });
  }
}

template <typename S>
void QueryBlock<S>::narrow(int64_t group) {
  if constexpr (S::kNarrow) {
    for (int64_t r = group; r < group + group_rows(group); ++r) {
      T* row = score_row(group, r);
      each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) { narrow_span(row, begin, end); });
    }
  }
}

// O (rows, Dv) = carry O + P (rows, keys) . V (keys, Dv), a panel of columns and a stretch of keys at a time.
template <typename S>
void QueryBlock<S>::values(int64_t group) {
  const int64_t width = value_panel_width<S>(params_.shape.value_dim);
  for (int64_t column = 0; column < s_.output_stride; column += width) {
    for (int64_t i = 0; i < run_count_; ++i) {
      for (int64_t key = runs_[i].begin; key < runs_[i].end; key += kValueDepth) {
        const KeyRange stretch{key, smaller(key + kValueDepth, runs_[i].end)};
        for (int64_t tile = group; tile < group + group_rows(group); tile += kTileRows) {
          const KeyRange span = intersect(stretch, tile_span(tile));
          if (!is_empty(span)) multiply_values(group, tile, column, span);
        }
      }
    }
  }
  for (int64_t tile = group; tile < group + group_rows(group); tile += kTileRows) {
    each_run(tile_span(tile), [&](int64_t, int64_t) { s_.tile_started[tile / kTileRows] = 1; });
  }
}

template <typename S>
void QueryBlock<S>::multiply_values(int64_t group, int64_t tile, int64_t column, KeyRange span) {
  const int64_t width = value_panel_width<S>(params_.shape.value_dim);
  const int64_t begin = span.begin / S::kDepth, end = depth_of<Product>(span.end);
  const int64_t first = (block_key_ - packed_.first_key) / S::kDepth;
  // The row maximum has moved once for this block of keys: only the first product of a tile carries it over.
  bool first_of_tile = true;
  each_run(tile_span(tile), [&](int64_t run_begin, int64_t) { first_of_tile &= span.begin <= run_begin; });
  TileArgs<Product> args{};
  args.depth = end - begin;
  args.left = reinterpret_cast<const Operand*>(score_row(group, tile)) + begin;
  args.left_stride = s_.score_stride;
  args.right = packed_.values + column / width * packed_.value_panel_stride +
               (first + begin) * packed_.value_row_stride;
  args.right_stride = packed_.value_row_stride;
  args.out = s_.output + tile * s_.output_stride + column;
  args.out_stride = s_.output_stride;
  args.carry = first_of_tile ? s_.carry + tile : s_.ones + tile;
  const int64_t columns = round_up(smaller(width, params_.shape.value_dim - column), kColumnUnit<T>);
  const bool fresh = first_of_tile && s_.tile_started[tile / kTileRows] == 0;
  (fresh ? tile_function_of_columns<Product, false>(tile_rows(tile), columns)
         : tile_function_of_columns<Product, true>(tile_rows(tile), columns))(args);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
