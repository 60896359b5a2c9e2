// FewKeysUnit: from S and dP of a block of rows to P and dS.
#pragma once

#include <type_traits>

#include "../plan.h"
#include "unit.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// The dropout factors of a row.
template <typename S>
void FewKeysUnit<S>::draw_row(int64_t row) const {
  const PhiloxBatch state = philox_batch(params_.dropout, unit_.batch);
  for (int64_t first = 0; first < stride_; first += kDropoutColumns) {
    dropout_factors(state, params_.dropout, head_, row, first / kDropoutColumns, s_.keep + first);
  }
}

// For a far row, of which lse does not tell the sum. Gives the sink's share.
template <typename S>
typename S::Accum FewKeysUnit<S>::set_far_row(int64_t row, RowSpan<S>& span) const {
  const T top = lane_max<T>(add_to_max<S>(span.scores, 0, stride_, units_, broadcast(-kInfinity<T>)));
  if (!is_told<S>(params_, unit_.batch, head_, top)) return sink_share<S>(params_, unit_.batch, head_, row);
  Vec<T> sums = {};
  if (top != -kInfinity<T>) sums = add_to_sum<S>(span.scores, 0, stride_, units_, broadcast(top), sums);
  const FarRow<T> far = far_row<S>(params_, unit_.batch, head_, row, top, lane_sum<T>(sums));
  span.lse = {far.top};
  span.row_scale = {far.scale};
  return far.sink_share;
}

// delta from rowsum(P dP) unless it is given, and what it gives to the sink's gradient.
template <typename S>
ATTN_EXT_INLINE typename S::Accum FewKeysUnit<S>::finish_delta(int64_t row, T share, T sum, T weight_sum) {
  const bool sinks = sink_ != -kInfinity<T> && lse_rows<S>(params_, unit_.batch, head_)[row] != -kInfinity<T>;
  // A row of dO that is not finite has no finite product; one that sees nothing does not show it.
  if (!(sum - sum == 0) || weight_sum == 0) may_have_bad_grads_ = true;
  T delta = mean_of_grads(sum, weight_sum, share);
  if (params_.delta != nullptr) {
    delta = given_row_delta<S>(params_, unit_.batch, head_, row);
  } else if (params_.grad_lse.data != nullptr) {
    delta -= *row_pointer<const T>(params_.grad_lse, unit_.batch, head_, row);
  }
  if (sinks) sink_grad_ -= share * delta;
  return delta;
}

// From S and dO V^T to P (after dropout) and dS; delta is made of the row's own P and dP.
template <typename S>
void FewKeysUnit<S>::finish_full_row(int64_t row, int64_t index) {
  T mass_grads[kFewKeys], weight_grads[kFewKeys];
  RowSpan<S> span = row_span<S>(params_, row_place(row), {0, keys_}, stride_, mass_grads, weight_grads);
  span.scores = s_.scores + index * stride_;
  span.grads = s_.grads + index * stride_;
  span.softmax_scale = units_.softmax_scale;
  finish_row_scores<S>(params_, units_, row_place(row), {0, keys_}, {span.scores, stride_}, s_.cap_slope);
  const T natural = lse_rows<S>(params_, unit_.batch, head_)[row];
  span.lse = {is_dead_row(row) ? kInfinity<T> : log2_lse<T>(natural)};
  const T share =
      is_far(span.lse.x) ? set_far_row(row, span) : sink_share<S>(params_, unit_.batch, head_, row);
  if (params_.dropout.enabled) {
    draw_row(row);
    span.keep = s_.keep;
  }
  Vec<T> sum = {}, weight_sum = {};
  Vec<Bits<T>> hidden[kFewKeys / kLanes<T>];
  for (int64_t j = 0; j < stride_; j += S::kLane) {
    const Vec<T> p = span.weight(j);
    hidden[j / S::kLane] = span.hidden(j);
    store(span.scores + j, p);
    if (!wants_grads_) continue;
    const Vec<T> grad = hidden[j / S::kLane] ? Vec<T>{} : span.grad(j) * span.factor(j);
    weight_sum += p;
    sum = multiply_add(p, grad, sum);
    store(span.grads + j, grad);
  }
  const T delta = finish_delta(row, share, lane_sum<T>(sum), lane_sum<T>(weight_sum));
  for (int64_t j = 0; wants_grads_ && j < stride_; j += S::kLane) {
    const Vec<T> grad = load(span.scores + j) * (load(span.grads + j) - broadcast(delta));
    store(span.grads + j, hidden[j / S::kLane] ? Vec<T>{} : grad);
  }
  if (mask_grad_.wanted()) {
    mask_grad_.put_row(mask_grad_.place(unit_.batch, head_, row, 0), span.grads, keys_);
  }
  for (int64_t j = 0; span.keep != nullptr && j < stride_; j += S::kLane) {
    store(span.scores + j, load(span.scores + j) * span.factor(j));
  }
  if (wants_grads_ && units_.capped) multiply_by_slope(span.grads, s_.cap_slope, 0, stride_);
}

template <typename S>
ATTN_EXT_INLINE typename FewKeysUnit<S>::PairPlace FewKeysUnit<S>::pair_place(int64_t r) const {
  if constexpr (!S::kPaired) return {};
  Operand* row = s_.grad_rows + r * s_.left_stride;
  return {s_.weight_pairs + r / 2 * stride_, s_.grad_pairs + r / 2 * stride_, row, row + s_.left_stride};
}

// P and dS of two neighbouring rows as bfloat16: in pairs of rows, dS also in pairs of neighbouring keys.
template <typename S>
ATTN_EXT_INLINE void FewKeysUnit<S>::store_pairs([[maybe_unused]] const PairPlace& to,
                                                 [[maybe_unused]] int64_t j,
                                                 [[maybe_unused]] const Vec<T> (&weights)[2],
                                                 [[maybe_unused]] const Vec<T> (&grads)[2]) {
#if defined(__AVX512BF16__)
  if constexpr (S::kPaired) {
    const Vec<int32_t> words = lane_index<int32_t>() * 0x10001 + (16 << 16);  // words 0, 16, 1, 17, ...
    const __m512i p = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    const __m512i g = (__m512i)_mm512_cvtne2ps_pbh((__m512)grads[1], (__m512)grads[0]);
    store(to.weight_pairs + j, (Vec<Operand>)_mm512_permutexvar_epi16((__m512i)words, p));
    store(to.grad_pairs + j, (Vec<Operand>)_mm512_permutexvar_epi16((__m512i)words, g));
    const __m256i low = _mm512_castsi512_si256(g), high = _mm512_extracti64x4_epi64(g, 1);
    memcpy(to.row + j / 2, &low, sizeof(low));
    memcpy(to.next_row + j / 2, &high, sizeof(high));
  }
#elif defined(ATTN_EXT_HAS_PAIRS)
  if constexpr (S::kPaired) {
    const uint16x8_t p = (uint16x8_t)to_pairs(weights[0], weights[1]);
    const uint16x8_t g = (uint16x8_t)to_pairs(grads[0], grads[1]);
    const uint16x8_t next_p = vextq_u16(p, p, 4), next_g = vextq_u16(g, g, 4);
    store(to.weight_pairs + j, (Vec<Operand>)vzip1q_u16(p, next_p));
    store(to.grad_pairs + j, (Vec<Operand>)vzip1q_u16(g, next_g));
    memcpy(to.row + j / 2, &g, sizeof(g) / 2);
    memcpy(to.next_row + j / 2, &next_g, sizeof(next_g) / 2);
  }
#endif
}

// Rows [begin, end) of the block, of which finish_full_row() has made P and dS.
template <typename S>
void FewKeysUnit<S>::pair_rows(int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r += 2) {
    const T* weights = s_.scores + r * stride_;
    const T* grads = s_.grads + r * stride_;
    const PairPlace place = pair_place(r);
    for (int64_t j = 0; j < stride_; j += S::kLane) {
      const bool has_next = r + 1 < end;
      store_pairs(place, j, {load(weights + j), has_next ? load(weights + stride_ + j) : Vec<T>{}},
                  {load(grads + j), has_next ? load(grads + stride_ + j) : Vec<T>{}});
    }
  }
}

// finish_full_row() for rows with nothing special about them, none of them far: P of a row, its sums by
// lanes, and the lowest of the products that it is made of.
template <typename S>
template <int Vectors, typename M>
ATTN_EXT_INLINE void FewKeysUnit<S>::make_plain_weights(T* scores, const T* grads, const M* mask, Range seen,
                                                        T lse, Vec<T>& sum, Vec<T>& weight_sum,
                                                        Vec<T>& lowest) const {
  const int64_t keys = keys_;
  const Vec<T> factor = broadcast(units_.softmax_scale), mask_factor = broadcast(units_.scale);
  const Vec<T> shift = broadcast(-lse);
  const bool has_window = seen.begin > 0 || seen.end < keys;
  Vec<T> product_lanes = {}, weight_lanes = {};
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    const int64_t j = v * S::kLane;
    Vec<T> s = load(scores + j);
    lowest = minimum(s, lowest);
    if constexpr (!std::is_same_v<M, void>) {
      if (v + 1 < Vectors || j + S::kLane == keys) {
        s = apply_mask<T>(s, mask + j, mask_factor);
      } else {
        s = apply_mask_partial<T>(s, mask + j, keys - j, mask_factor);
      }
    }
    if (v + 1 == Vectors || has_window) s = keep_lanes<T>(s, seen.begin - j, seen.end - j);
    const Vec<T> power = exp2<T>(multiply_add(s, factor, shift));
    const Vec<Bits<T>> hidden = s == -kInfinity<T>;
    const Vec<T> p = hidden ? Vec<T>{} : power;
    store(scores + j, p);
    weight_lanes += p;
    product_lanes = multiply_add(p, hidden ? Vec<T>{} : load(grads + j), product_lanes);
  }
  sum = product_lanes;
  weight_sum = weight_lanes;
}

// The same of P as the forward pass has written it, 0 in what is hidden: a dP that is not finite shows in the
// sum even there.
template <typename S>
template <int Vectors>
ATTN_EXT_INLINE void FewKeysUnit<S>::take_weights(const Element* weights, T* scores, const T* grads,
                                                  Vec<T>& sum, Vec<T>& weight_sum) const {
  const int64_t keys = keys_;
  Vec<T> product_lanes = {}, weight_lanes = {};
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    const int64_t j = v * S::kLane;
    const bool whole = v + 1 < Vectors || j + S::kLane == keys;
    const Vec<T> p = whole ? load_compute(weights + j) : load_compute_partial(weights + j, keys - j);
    store(scores + j, p);
    weight_lanes += p;
    product_lanes = multiply_add(p, load(grads + j), product_lanes);
  }
  sum = product_lanes;
  weight_sum = weight_lanes;
}

// dS of `Rows` neighbouring rows, of which P and dP are there; also from mask_place on (negative: not) into
// the mask's gradient, whose keys are neighbours then.
template <typename S>
template <int Vectors, int Rows>
ATTN_EXT_INLINE void FewKeysUnit<S>::make_plain_grads(int64_t r, const T* deltas, int64_t mask_place,
                                                      bool keeps) {
  const int64_t keys = keys_, stride = stride_, mask_stride = params_.grad_mask.row_stride;
  const T* weights = s_.scores + r * stride;
  T* grads = s_.grads + r * stride;
  const PairPlace pairs = pair_place(r);
  const MaskGrad<S> to_mask = mask_grad_;
  T* const mask_sums = mask_place < 0 ? nullptr : to_mask.sums(mask_place);
  const Vec<T> delta[2] = {broadcast(deltas[0]), broadcast(deltas[Rows - 1])};
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    const int64_t j = v * S::kLane;
    const bool whole = v + 1 < Vectors || j + S::kLane == keys;
    Vec<T> p[2] = {}, grad[2] = {};
#pragma GCC unroll 2
    for (int k = 0; k < Rows; ++k) {
      p[k] = load(weights + k * stride + j);
      const Vec<T> centred = load(grads + k * stride + j) - delta[k];
      grad[k] = p[k] == Vec<T>{} ? p[k] : p[k] * centred;
      if (keeps) store(grads + k * stride + j, grad[k]);
      if (mask_sums != nullptr) {
        add_row(mask_sums + k * mask_stride + j, 1, grad[k], whole ? S::kLane : keys - j);
      } else if (mask_place >= 0) {
        to_mask.put(mask_place + k * mask_stride + j, grad[k], whole ? S::kLane : keys - j);
      }
    }
    store_pairs(pairs, j, p, grad);
  }
}

// finish_delta() of a band's rows; false if one of the sums is not finite. deltas: kFewKeysBand of them.
template <typename S>
bool FewKeysUnit<S>::finish_deltas(const Band& band, T* deltas) {
  const int64_t first = band.first + band.begin, count = band.end - band.begin;
  T products[kFewKeysBand], weights[kFewKeysBand];
  for (int64_t i = 0; i < kFewKeysBand; i += S::kLane) {
    Vec<T> some[kLanes<T>], weight[kLanes<T>];
    for (int64_t l = 0; l < S::kLane; ++l) {
      some[l] = band.sums[i + l];
      weight[l] = band.weight_sums[i + l];
    }
    store(products + i, lane_sums_by_halving<T>(some));
    store(weights + i, lane_sums_by_halving<T>(weight));
  }
  T residue = 0;  // x - x is 0, NaN for what is not finite
  for (int64_t i = 0; i < count; ++i) residue += products[i] - products[i];
  if (const T* given = given_delta<S>(params_, unit_.batch, head_); given != nullptr) {
    for (int64_t r = first; r < first + count; ++r) residue += given[r] - given[r];
  }
  if (residue != 0) return false;
  if (params_.delta != nullptr || params_.grad_lse.data != nullptr || sink_ != -kInfinity<T>) {
    for (int64_t i = 0; i < count; ++i) {
      const T share = sink_share<S>(params_, unit_.batch, head_, first + i);
      deltas[i] = finish_delta(first + i, share, products[i], weights[i]);
    }
    return true;
  }
  for (int64_t i = 0; i < kFewKeysBand; i += S::kLane) {
    const Vec<T> product = load(products + i), weight = load(weights + i);
    store(deltas + i, weight > Vec<T>{} ? product / weight : product);
  }
  for (int64_t i = 0; i < count; ++i) may_have_bad_grads_ |= weights[i] == 0;
  return true;
}

// P of a band's rows and its sums, by what a mask is made of; false if a row sees a score of -inf.
template <typename S>
template <int Vectors, typename M>
bool FewKeysUnit<S>::make_band_weights(Band& band) const {
  const ScoreRule& rule = params_.rule;
  const bool has_window = rule.window_left >= 0 || rule.window_right >= 0;
  const T* lse = lse_rows<S>(params_, unit_.batch, head_) + band.first;
  Vec<T> lowest = {};
  for (int64_t r = band.begin; r < band.begin + kFewKeysBand; ++r) {
    const int64_t row = band.first + r;
    T* scores = s_.scores + r * stride_;
    const T* grads = s_.grads + r * stride_;
    Vec<T>&sum = band.sums[r - band.begin], &weight_sum = band.weight_sums[r - band.begin];
    if (r >= band.end || is_dead(rule, unit_.batch, head_, row, lse[r])) {
      sum = weight_sum = Vec<T>{};
      if (r < band.end) memset(scores, 0, static_cast<size_t>(stride_) * sizeof(T));
    } else if constexpr (std::is_same_v<M, SavedWeights>) {
      const auto* weights = row_pointer<const Element>(params_.weights, unit_.batch, head_, row);
      take_weights<Vectors>(weights, scores, grads, sum, weight_sum);
    } else {
      const M* mask = nullptr;
      if constexpr (!std::is_same_v<M, void>) mask = row_pointer<const M>(rule.mask, unit_.batch, head_, row);
      make_plain_weights<Vectors>(scores, grads, mask,
                                  has_window ? window_keys(rule, keys_, row) : Range{0, keys_},
                                  lse[r] * static_cast<T>(kLog2E), sum, weight_sum, lowest);
    }
  }
  // A score of -inf that a row sees has a weight of 0 like what is hidden, but 0 times NaN is NaN.
  const auto below = lowest < broadcast(-FloatFormat<T>::kLargest);
  return lane_sum<T>(below ? broadcast(static_cast<T>(1)) : Vec<T>{}) == 0;
}

// All that is made of up to kFewKeysBand rows: the deltas come together, so that no row waits for its own.
// False, and nothing made but P, if there is NaN or Inf among what they see: finish_bad_rows() has to.
template <typename S>
template <int Vectors>
bool FewKeysUnit<S>::finish_plain_rows(int64_t first, int64_t begin, int64_t end, bool by_key) {
  Band band;
  band.first = first, band.begin = begin, band.end = end;
  bool plain = false;
  if (reads_weights_) {
    if constexpr (kReadsWeights<S>) plain = make_band_weights<Vectors, SavedWeights>(band);
  } else if (!by_key) {
    plain = make_band_weights<Vectors, void>(band);
  } else {
    with_kind<Element>(params_.rule.mask_kind, [&](auto tag) {
      plain = make_band_weights<Vectors, typename decltype(tag)::Type>(band);
    });
  }
  T deltas[kFewKeysBand];
  if (!plain || !finish_deltas(band, deltas)) return false;
  const bool to_mask = mask_grad_.wanted(), at_once = to_mask && mask_grad_.view().column_stride == 1;
  const bool keeps = !S::kPaired || pack_.bad_keys || bad_queries_ || (to_mask && !at_once);
  const auto mask_place = [&](int64_t r) { return mask_grad_.place(unit_.batch, head_, first + r, 0); };
  int64_t r = begin;
  for (; S::kPaired && r + 1 < end; r += 2) {
    make_plain_grads<Vectors, 2>(r, deltas + (r - begin), at_once ? mask_place(r) : -1, keeps);
  }
  for (; r < end; ++r) {
    make_plain_grads<Vectors, 1>(r, deltas + (r - begin), at_once ? mask_place(r) : -1, keeps);
  }
  for (r = begin; to_mask && !at_once && r < end; ++r) {
    mask_grad_.put_row(mask_place(r), s_.grads + r * stride_, keys_);
  }
  return true;
}

// finish_plain_rows() for so many vectors.
template <typename S>
typename FewKeysUnit<S>::PlainRows FewKeysUnit<S>::plain_rows(int64_t vectors) {
  static constexpr PlainRows kTable[kPlainVectors] = {
      &FewKeysUnit::template finish_plain_rows<1>, &FewKeysUnit::template finish_plain_rows<2>,
      &FewKeysUnit::template finish_plain_rows<3>, &FewKeysUnit::template finish_plain_rows<4>,
      &FewKeysUnit::template finish_plain_rows<5>, &FewKeysUnit::template finish_plain_rows<6>,
      &FewKeysUnit::template finish_plain_rows<7>, &FewKeysUnit::template finish_plain_rows<8>};
  return kTable[vectors - 1];
}

template <typename S>
void FewKeysUnit<S>::finish_full_rows(int64_t first, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) finish_full_row(first + r, r);
  if (S::kPaired) pair_rows(begin, end);
}

// After finish_plain_rows() has given up: the scores are made once more.
template <typename S>
void FewKeysUnit<S>::finish_bad_rows(int64_t first, int64_t begin, int64_t end) {
  T* scores = s_.scores + begin * stride_;
  const Matrix<Element> query =
      rows_of<Element>(params_.query, unit_.batch, head_, first + begin, end - begin, params_.shape.head_dim);
  multiply_rows(query, s_.query_left, key_columns(), scores);
  keep_seen(params_.rule, scores, (end - begin) * stride_);
  finish_full_rows(first, begin, end);
}

// With NaN or Inf about, a weight of 0 does not tell what is hidden from what is small: only in dO it shows.
// The gradient of sinks is in float, and made of the rows' sums, as is that of a mask that all keys share.
template <typename S>
bool FewKeysUnit<S>::reads_weights(int64_t first, int64_t count) const {
  return kReadsWeights<S> && params_.weights.data != nullptr && !full_ && wants_grads_ &&
         params_.grad_sinks == nullptr && !needs_exact_delta(params_) &&
         stride_ / S::kLane <= kPlainVectors && !pack_.bad_keys && !pack_.bad_values && !bad_queries_ &&
         !any_far(lse_rows<S>(params_, unit_.batch, head_) + first, count);
}

template <typename S>
void FewKeysUnit<S>::finish_rows(int64_t first, int64_t count) {
  const ScoreRule& rule = params_.rule;
  const bool by_key =
      rule.mask_kind != ScalarKind::kNone && (is_biased(rule) || rule.mask.column_stride != 0);
  const int64_t vectors = stride_ / S::kLane;
  const T* lse = lse_rows<S>(params_, unit_.batch, head_) + first;
  // Only a bias scales the scores that it meets; a negative scale makes low scores of the high ones.
  const bool scaled = units_.scale_first && (!is_biased(rule) || units_.scale < 0);
  const bool special =
      full_ || !wants_grads_ || vectors > kPlainVectors || scaled || (by_key && rule.mask.column_stride != 1);
  for (int64_t begin = 0; begin < count; begin += kFewKeysBand) {
    const int64_t end = smaller(count, begin + kFewKeysBand);
    if (!reads_weights_ && (special || any_far(lse + begin, end - begin))) {
      T* scores = s_.scores + begin * stride_;
      // A key or a query that is not finite gives no finite product.
      if (!are_finite(scores, (end - begin) * stride_)) keep_seen(rule, scores, (end - begin) * stride_);
      finish_full_rows(first, begin, end);
      continue;
    }
    const bool finished = (this->*plain_rows(vectors))(first, begin, end, by_key);
    if (!finished) finish_bad_rows(first, begin, end);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
