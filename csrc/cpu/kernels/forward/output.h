// QueryBlock: from row sums to what the caller gets.
#pragma once

#include <type_traits>

#include "../scores/softmax.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Where the weights of a row go, from some key on; null: not wanted.
template <typename S>
struct WeightRow {
  using T = typename S::Accum;
  typename S::Element* weights;
  T* mass;

  // weights = factor P, mass += weights, for `count` lanes from key j on. The factor of a row with a visible
  // NaN is NaN, and so are the weights of all keys that it sees(j).
  template <typename Sees>
  ATTN_EXT_INLINE void write(int64_t j, Vec<T> p, Vec<T> factor, int64_t count, Sees sees) const {
    Vec<T> w = p == Vec<T>{} ? p : p * factor;
    if (factor[0] != factor[0]) {
      for (int64_t i = 0; i < count; ++i) w[i] = sees(j + i) ? factor[0] : 0;
    }
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
    const T sink = sink_of<Element>(params_.rule, batch_, s_.row_head[r]);
    s_.lse[r] = static_cast<T>(sink_in_log2<T>(sink));
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
  const Vec<T> infinity = broadcast(kInfinity<T>);
  constexpr T kLn2High = static_cast<T>(kLn2);
  constexpr T kLn2Low = static_cast<T>(kLn2 - static_cast<double>(kLn2High));
  if (has_sinks) gather_sinks(band);
  for (int64_t r = band; r < band + kBandRows<S>; r += S::kLane) {
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
    store(s_.lse + r, sum == Vec<T>{} ? nothing : (top == infinity ? top : lse));
    store(s_.factor + r, sum == Vec<T>{} ? Vec<T>{} : factor / sum);
  }
  // A sink of NaN or +Inf shows in what sees any key.
  for (int64_t r = band; has_sinks && r < band + band_rows(band); ++r) {
    if (s_.factor[r] != s_.factor[r] &&
        !sees_any<Element>(params_.rule, params_.shape.key_len, batch_, s_.row_head[r], s_.row_index[r])) {
      s_.factor[r] = 0;
    }
  }
}

// Where a bias lies beyond what log2 units hold of it, lse is further from 0 than they tell.
template <typename S>
void QueryBlock<S>::finish_largest(int64_t band) const {
  constexpr T kLarge = kFarthest<T> * static_cast<T>(0.69);  // a little less than ln 2
  const auto is_large = [](T x) { return x - x == 0 && (x > kLarge || x < -kLarge); };
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    const T lse = s_.lse[r];
    if (!is_large(lse)) continue;
    const T score = score_of_largest_bias(r);
    if (is_large(score) && (lse < 0 ? score < lse : score > lse)) s_.lse[r] = score;
  }
}

template <typename S>
void QueryBlock<S>::finish() {
  for (int64_t band = 0; band < rows_; band += kBandRows<S>) {
    finish_rows(band);
    finish_largest(band);
  }
  T* lse = static_cast<T*>(params_.lse);
  for (int64_t r = 0; lse != nullptr && r < rows_; ++r) {
    lse[(batch_ * params_.shape.query_heads + s_.row_head[r]) * params_.lse_stride + s_.row_index[r]] =
        s_.lse[r];
  }
  for (int64_t r = 0; params_.double_lse != nullptr && r < rows_; ++r) {
    params_.double_lse[(batch_ * params_.shape.query_heads + s_.row_head[r]) * params_.lse_stride +
                       s_.row_index[r]] = double_lse(r);
  }
  params_.output.wide ? store_output_as<T>() : store_output_as<Element>();
}

// lse of a row once more, from the same maximum and sum. Where it is not finite, or the row's bias lies
// beyond log2 units, it is what it was.
template <typename S>
double QueryBlock<S>::double_lse(int64_t r) const {
  const double lse = static_cast<double>(s_.lse[r]);
  if (!(lse - lse == 0) || lse > kFarthest<T> / 2 || lse < -kFarthest<T> / 2) return lse;
  const auto power = [](double x) { return exp2<double>(broadcast(x))[0]; };
  const double row_max = static_cast<double>(s_.row_max[r]);
  const double sink = sink_in_log2<T>(sink_of<Element>(params_.rule, batch_, s_.row_head[r]));
  const double top = sink > row_max ? sink : row_max;
  const double sum = static_cast<double>(s_.row_sum[r]) * power(row_max - top) + power(sink - top);
  return top * kLn2 + log_normal<double>(broadcast(sum))[0];
}

template <typename S>
template <typename Out>
void QueryBlock<S>::store_output_as() const {
  const int64_t value_dim = params_.shape.value_dim;
  for (int64_t r = 0; r < rows_; ++r) {
    const T* from = s_.output + r * s_.output_stride;
    Out* to = row_pointer<Out>(params_.output, batch_, s_.row_head[r], s_.row_index[r]);
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
    for (int64_t band = 0; band < rows_; band += kBandRows<S>) {
      make_scores(band);
      mask(band);
      T sums[kBandRows<S>];  // known already: kept from being added again
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

// Writes the weights of the band while they are rounded for the product with the values.
template <typename S>
void QueryBlock<S>::emit_pairs([[maybe_unused]] int64_t band) {
  if constexpr (S::kPaired) {
    constexpr int64_t kStep = 2 * S::kLane;
    for (int64_t r = band; r < band + band_rows(band); ++r) {
      T* row = score_row(band, r);
      const T factor = s_.factor[r];
      if (factor - factor != 0) {
        emit_row(r, row);
        each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) { pair_span(row, begin, end); });
        continue;
      }
      Element* weights =
          row_pointer<Element>(params_.weights, batch_, s_.row_head[r], s_.row_index[r]) + block_key_;
      int64_t written = 0;
      each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
        memset(weights + written, 0, static_cast<size_t>(begin - written) * sizeof(Element));
        written = smaller(end, block_count_);
        int64_t j = begin;
        for (; j + kStep <= written; j += kStep) {
          const Vec<T> low = load(row + j), high = load(row + j + S::kLane);
          const Vec<uint32_t> pairs = to_pairs(low * broadcast(factor), high * broadcast(factor));
          memcpy(weights + j, &pairs, sizeof(pairs));
          store_paired(row, j, low, high);
        }
        for (; j < end; j += S::kLane) {
          const Vec<T> p = load(row + j), weight = p * broadcast(factor);
          if (j + S::kLane <= written) {
            store_element(weights + j, weight);
          } else if (j < written) {
            store_element_partial(weights + j, weight, written - j);
          }
          store_paired(row, j, p);
        }
      });
      memset(weights + written, 0, static_cast<size_t>(block_count_ - written) * sizeof(Element));
    }
  }
}

// weights = factor P over the keys of the block, zero where nothing was computed; key mass += weights.
template <typename S>
void QueryBlock<S>::emit_row(int64_t r, const T* row) const {
  const Vec<T> factor = broadcast(s_.factor[r]);
  WeightRow<S> out{};
  if (key_mass_ != nullptr) out.mass = key_mass_ + s_.row_head[r] * key_mass_stride_ + block_key_;
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
    for (int64_t j = begin; j < smaller(end, block_count_); j += S::kLane) {
      out.write(j, load(row + j), factor, smaller(S::kLane, block_count_ - j),
                [&](int64_t key) { return is_seen(r, key); });
    }
  });
  clear_up_to(block_count_);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
