// QueryBlock: from row sums to what the caller gets, and the careful way of multiplying values.
#pragma once

#include <type_traits>

#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Where the weights of a row go, from some key on; null: not wanted.
template <typename S>
struct WeightRow {
  using T = typename S::Accum;
  typename S::Element* weights;
  T* mass;

  // weights = factor P, mass += weights, for `count` lanes from key j on.
  ATTN_EXT_INLINE void write(int64_t j, Vec<T> p, Vec<T> factor, int64_t count) const {
    const Vec<T> w = p == Vec<T>{} ? p : p * factor;  // the factor of a row with a visible NaN is NaN
    if (weights != nullptr) {
      count == S::kLane ? store_element(weights + j, w) : store_element_partial(weights + j, w, count);
    }
    if (mass == nullptr) return;
    if (count == S::kLane) {
      store(mass + j, load(mass + j) + w);
    } else {
      store_partial(mass + j, load_partial(mass + j, count) + w, count);
    }
  }
};

// The sinks of the rows of a band, in units of log2, into the place of their lse.
template <typename S>
void QueryBlock<S>::gather_sinks(int64_t band) {
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    s_.lse[r] = static_cast<T>(sink_of<Element>(params_.rule, batch_, s_.row_head[r]) * kLog2E);
  }
}

// With m the row max and l the row sum, both without the sink z:
//   m' = max(m, z),  l' = 2^(m - m') l + 2^(z - m'),  factor = 2^(m - m') / ((1 - p) l'),  lse = (m' + log2
//   l') ln 2
template <typename S>
void QueryBlock<S>::finish_rows(int64_t band) {
  const bool has_sinks = params_.rule.sinks_kind != ScalarKind::kNone;
  const Vec<T> keep = broadcast(static_cast<T>(params_.dropout.enabled ? params_.dropout.keep_scale : 1.0));
  const Vec<T> nothing = broadcast(-kInfinity<T>);
  const Vec<T> lowest = broadcast(-FloatFormat<T>::kLargest);
  constexpr T kLn2High = static_cast<T>(kLn2);
  constexpr T kLn2Low = static_cast<T>(kLn2 - static_cast<double>(kLn2High));
  if (has_sinks) gather_sinks(band);
  for (int64_t r = band; r < band + kBandRows; r += S::kLane) {
    Vec<T> top = load(s_.row_max + r);
    Vec<T> sum = load(s_.row_sum + r);
    Vec<T> factor = keep;
    if (has_sinks) {
      const Vec<T> sink = load(s_.lse + r);
      const Vec<T> both = maximum(top, sink);
      const Vec<T> origin = both == nothing ? Vec<T>{} : both;
      const Vec<T> share = exp2<T>(top - origin);
      sum = sum * share + exp2<T>(sink - origin);
      factor *= share;
      top = both;
    }
    const Vec<T> log_sum = log_normal<T>(sum);
    const Vec<T> lse = multiply_add(top, broadcast(kLn2High), multiply_add(top, broadcast(kLn2Low), log_sum));
    store(s_.lse + r, sum == Vec<T>{} ? nothing : (top == lowest ? lowest : lse));
    store(s_.factor + r, sum == Vec<T>{} ? Vec<T>{} : factor / sum);
  }
}

template <typename S>
void QueryBlock<S>::finish() {
  for (int64_t band = 0; band < rows_; band += kBandRows) finish_rows(band);
  T* lse = static_cast<T*>(params_.lse);
  for (int64_t r = 0; lse != nullptr && r < rows_; ++r) {
    const AttentionShape& shape = params_.shape;
    lse[(batch_ * shape.query_heads + s_.row_head[r]) * shape.query_len + s_.row_index[r]] = s_.lse[r];
  }
  store_output();
}

template <typename S>
void QueryBlock<S>::store_output() const {
  const int64_t value_dim = params_.shape.value_dim;
  for (int64_t r = 0; r < rows_; ++r) {
    const T* from = s_.output + r * s_.output_stride;
    Element* to = row_pointer<Element>(params_.output, batch_, s_.row_head[r], s_.row_index[r]);
    const Vec<T> factor = broadcast(s_.factor[r]);
    int64_t c = 0;
    for (; c + S::kLane <= value_dim; c += S::kLane) store_element(to + c, load(from + c) * factor);
    if (c < value_dim) store_element_partial(to + c, load(from + c) * factor, value_dim - c);
  }
}

// Scores once more, now against the final row max.
template <typename S>
void QueryBlock<S>::emit_all(Range keys) {
  for (int64_t key = keys.begin; key < keys.end; key += plan_.block_keys) {
    set_key_block(key, smaller(plan_.block_keys, keys.end - key));
    for (int64_t band = 0; band < rows_; band += kBandRows) {
      scores(band);
      mask(band);
      T sums[kBandRows];  // known already: kept from being added again
      memcpy(sums, s_.row_sum + band, sizeof(sums));
      exponentials(band, false);
      memcpy(s_.row_sum + band, sums, sizeof(sums));
      if (params_.dropout.enabled) dropout(band, false);
      emit(band);
    }
  }
}

template <typename S>
void QueryBlock<S>::emit(int64_t band) {
  for (int64_t r = band; r < band + band_rows(band); ++r) emit_row(r, score_row(band, r));
}

// weights = factor P over the keys of the block, zero where nothing was computed; key mass += weights.
template <typename S>
void QueryBlock<S>::emit_row(int64_t r, const T* row) const {
  const Vec<T> factor = broadcast(s_.factor[r]);
  WeightRow<S> out{};
  if (key_mass_ != nullptr) out.mass = key_mass_ + block_key_;
  if (params_.weights.data != nullptr) {
    out.weights = row_pointer<Element>(params_.weights, batch_, s_.row_head[r], s_.row_index[r]) + block_key_;
  }
  int64_t written = 0;
  const auto clear_up_to = [&](int64_t end) {
    if (out.weights == nullptr) return;
    memset(out.weights + written, 0, static_cast<size_t>(end - written) * sizeof(Element));
  };
  each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
    clear_up_to(begin);
    written = smaller(end, block_count_);
    for (int64_t j = begin; j < end; j += S::kLane) {
      out.write(j, load(row + j), factor, smaller(S::kLane, block_count_ - j));
    }
  });
  clear_up_to(block_count_);
}

template <typename S>
void QueryBlock<S>::attend_carefully(Range keys) {
  const int64_t flags = round_up(kBandRows * s_.score_stride, 64);
  const int64_t operands = depth_of<Product>(plan_.block_keys) * panel_width_of<S>(params_.shape.value_dim);
  void* memory =
      __builtin_malloc(static_cast<size_t>(flags + operands * static_cast<int64_t>(sizeof(Operand))));
  visible_ = static_cast<uint8_t*>(memory);
  chosen_values_ = reinterpret_cast<Operand*>(visible_ + flags);
  emit_in_place_ = false;
  attend(keys);
  visible_ = nullptr;
  __builtin_free(memory);
}

template <typename S>
void QueryBlock<S>::note_visible(int64_t band) {
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    const T* row = score_row(band, r);
    uint8_t* visible = visible_ + (r - band) * s_.score_stride;
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) visible[j] = row[j] != -kInfinity<T>;
    });
  }
}

template <typename S>
void QueryBlock<S>::values_careful(int64_t band) {
  const int64_t width = panel_width_of<S>(params_.shape.value_dim);
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    const bool started = s_.tile_started[r / kTileRows] != 0;
    for (int64_t column = 0; column < s_.output_stride; column += width) {
      bool first = true;
      each_run(tile_span(r), [&](int64_t begin, int64_t end) {
        careful_row(band, r, column, {begin, end}, first, !started && first);
        first = false;
      });
    }
  }
  for (int64_t tile = band; tile < band + band_rows(band); tile += kTileRows) {
    each_run(tile_span(tile), [&](int64_t, int64_t) { s_.tile_started[tile / kTileRows] = 1; });
  }
}

// One row's part of values(), from a copy of the values that is zero where the row does not see the key.
template <typename S>
void QueryBlock<S>::careful_row(int64_t band, int64_t r, int64_t column, Range span, bool first, bool fresh) {
  const int64_t width = panel_width_of<S>(params_.shape.value_dim);
  const int64_t columns = round_up(smaller(width, params_.shape.value_dim - column), kColumnStep<T>);
  const int64_t begin = span.begin / S::kDepth, end = depth_of<Product>(span.end);
  const int64_t origin = (block_key_ - packed_.first_key) / S::kDepth;
  const Operand* panel = packed_.values.data + column / width * packed_.values.panel_stride;
  const uint8_t* visible = visible_ + (r - band) * s_.score_stride;
  for (int64_t k = begin; k < end; ++k) {
    const Operand* from = panel + (origin + k) * packed_.values.row_stride;
    Operand* to = chosen_values_ + (k - begin) * width;
    for (int64_t c = 0; c < columns; ++c) {
      if constexpr (S::kPaired) {
        to[c] = from[c] & ((visible[2 * k] ? 0xffffu : 0u) | (visible[2 * k + 1] ? 0xffff0000u : 0u));
      } else {
        to[c] = visible[k] ? from[c] : Operand{};
      }
    }
  }
  TileArgs<Product> args{};
  args.depth = end - begin;
  args.left = reinterpret_cast<const Operand*>(score_row(band, r)) + begin;
  args.left_stride = s_.score_stride;
  args.right = chosen_values_;
  args.right_stride = width;
  args.out = s_.output + r * s_.output_stride + column;
  args.out_stride = s_.output_stride;
  args.carry = first ? s_.carry + r : s_.ones + r;
  (fresh ? tile_function<Product, false>(1, columns) : tile_function<Product, true>(1, columns))(args);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
