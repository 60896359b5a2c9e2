// SmallUnit: from S and dP of a block of rows to P and dS. Included by backward_small.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// The lanes of a row's keys from `begin` on to `end`; -inf in the others.
template <typename T>
ATTN_EXT_INLINE Vec<T> keep_lanes(Vec<T> s, int64_t begin, int64_t end) {
  const Vec<T> lane = lane_index<T>();
  const auto kept = (lane >= broadcast(static_cast<T>(begin))) & (lane < broadcast(static_cast<T>(end)));
  return kept ? s : broadcast(-kInfinity<T>);
}

// Scores, window and mask: units of log2, -inf where the row does not see a key and past the keys.
template <typename S>
void SmallUnit<S>::finish_scores(int64_t row, T* scores) {
  const ScoreRule& rule = params_.rule;
  const int64_t last = stride_ - S::kLane;
  const bool scale_here = units_.scale_first && rule.softcap == 0;
  if (rule.softcap > 0) {
    cap_span(scores, s_.cap_slope, 0, stride_, units_);
  } else if (scale_here && !is_biased(rule)) {
    scale_span(scores, 0, stride_, units_);
  }
  // What a bool mask says of all keys of a query is in lse.
  if (is_biased(rule) || (rule.mask_kind == ScalarKind::kBool && rule.mask.column_stride != 0)) {
    with_mask_type<Element>(rule.mask_kind, [&](auto tag) {
      using M = typename decltype(tag)::Type;
      mask_span(scores, 0, stride_, row_pointer<const M>(rule.mask, batch_, head_, row),
                rule.mask.column_stride, keys_, scale_here ? units_.scale : static_cast<T>(1));
    });
  }
  store(scores + last, keep_lanes<T>(load(scores + last), 0, keys_ - last));
  if (rule.window_left < 0 && rule.window_right < 0) return;
  const KeyRange seen = window_keys(rule, keys_, row);
  fill_span(scores, 0, is_empty(seen) ? keys_ : seen.begin, -kInfinity<T>);
  if (!is_empty(seen)) fill_span(scores, seen.end, keys_, -kInfinity<T>);
}

// The dropout factors of a row.
template <typename S>
void SmallUnit<S>::draw_row(int64_t row) {
  const DropoutRule& rule = params_.dropout;
  PhiloxRow state;
  set_philox_batch(state, rule, batch_);
  state.head = static_cast<uint32_t>(head_);
  state.row = static_cast<uint32_t>(row);
  const T scale = static_cast<T>(rule.keep_scale);
  for (int64_t first = 0; first < stride_; first += kDropoutColumns) {
    uint32_t words[kDropoutColumns];
    philox_words(state, static_cast<uint32_t>(first / kDropoutColumns), words);
    for (int64_t j = 0; j < kDropoutColumns; ++j) s_.keep[first + j] = words[j] >= rule.threshold ? scale : 0;
  }
}

// P = 2^(s - row max) / row sum for a far row, of which lse does not tell the sum.
template <typename S>
void SmallUnit<S>::set_far_row(const T* scores, T& lse, T& scale) const {
  const Vec<T> factor = broadcast(units_.softmax_scale);
  Vec<T> tops = broadcast(-kInfinity<T>), sums = {};
  for (int64_t j = 0; j < stride_; j += S::kLane) tops = maximum(tops, load(scores + j) * factor);
  const T top = lane_max<T>(tops);
  if (top == -kInfinity<T>) return;
  for (int64_t j = 0; j < stride_; j += S::kLane) {
    sums += weights_of<T, S::kExpDegree, true>(load(scores + j), factor, broadcast(top));
  }
  const T sink = sink_ * static_cast<T>(kLog2E);
  const T share = sink == -kInfinity<T> ? 0 : exp2<T>(broadcast(sink - top))[0];
  lse = top;
  scale = 1 / (lane_sum<T>(sums) + share);
}

template <typename S>
void SmallUnit<S>::add_mask_row(int64_t row, const T* grads) {
  const TensorView& view = params_.grad_mask;
  T* to = grad_mask_ + batch_offset(view, batch_) + head_ * view.head_stride + row * view.row_stride;
  if (view.column_stride == 0) {
    Vec<T> sum = {};
    for (int64_t j = 0; j < keys_; j += S::kLane) sum += load(grads + j);
    *to += lane_sum<T>(sum);
    return;
  }
  for (int64_t j = 0; j < keys_; j += S::kLane) {
    add_row(to + j * view.column_stride, view.column_stride, load(grads + j), smaller(S::kLane, keys_ - j));
  }
}

// delta from rowsum(P dP), and what it gives to the sink's gradient. The sum of all weights is 1 but for the
// rounding of lse, which delta, a mean, must not take in.
template <typename S>
ATTN_EXT_INLINE typename S::Accum SmallUnit<S>::finish_delta(int64_t row, T lse, T sum, T weight_sum) {
  const bool sinks = lse != -kInfinity<T> && sink_ != -kInfinity<T>;
  const T share = sinks ? exp2<T>(broadcast(static_cast<T>((sink_ - lse) * static_cast<T>(kLog2E))))[0] : 0;
  const T total = weight_sum + share;
  T delta = total > 0 ? sum / total : sum;
  if (params_.grad_lse.data != nullptr) delta -= *row_pointer<const T>(params_.grad_lse, batch_, head_, row);
  if (sinks) sink_grad_ -= share * delta;
  return delta;
}

// From S and dP to P (after dropout) and dS. With M the dropout factors:
//   dP = M (dO V^T + dW + dMass),  delta = rowsum(P dP) - dLse,  dS = P (dP - delta)
template <typename S>
void SmallUnit<S>::finish_full_row(int64_t row, int64_t index) {
  const ScoreRule& rule = params_.rule;
  T* scores = s_.scores + index * stride_;
  T* grads = s_.grads + index * stride_;
  finish_scores(row, scores);
  const T natural = static_cast<const T*>(
      params_.lse)[(batch_ * params_.shape.query_heads + head_) * params_.shape.query_len + row];
  const bool live = natural != -kInfinity<T> && !row_is_masked(rule, batch_, head_, row);
  dead_rows_ |= !live;
  T lse = live ? natural * static_cast<T>(kLog2E) : kInfinity<T>;
  T scale = 1;
  if (is_biased(rule) && is_far(lse)) set_far_row(scores, lse, scale);
  const bool has_mass = params_.grad_key_mass.data != nullptr;
  const bool has_weights = params_.grad_weights.data != nullptr;
  T mass_grads[kSmallKeys];
  Element weight_grads[kSmallKeys];
  if (has_mass) {
    const TensorView& view = params_.grad_key_mass;
    gather_block(Matrix<T>{row_pointer<const T>(view, batch_, head_, 0), 0, view.column_stride, 1, keys_}, 0,
                 1, 0, stride_, mass_grads);
  }
  if (has_weights) {
    gather_block(rows_of<Element>(params_.grad_weights, batch_, head_, row, 1, keys_), 0, 1, 0, stride_,
                 weight_grads);
  }
  const bool drops = params_.dropout.enabled;
  if (drops) draw_row(row);
  Vec<T> sum = {}, weight_sum = {};
  for (int64_t j = 0; j < stride_; j += S::kLane) {
    Vec<T> p =
        weights_of<T, S::kExpDegree, true>(load(scores + j), broadcast(units_.softmax_scale), broadcast(lse));
    p *= broadcast(scale);
    store(scores + j, p);
    if (!wants_grads_) continue;
    Vec<T> grad = has_grad_ ? load(grads + j) : Vec<T>{};
    if (has_mass) grad += load(mass_grads + j);
    if (has_weights) grad += load_compute(weight_grads + j);
    if (drops) grad *= load(s_.keep + j);
    grad = p == Vec<T>{} ? Vec<T>{} : grad;
    weight_sum += p;
    sum = multiply_add(p, grad, sum);
    store(grads + j, grad);
  }
  const T delta = finish_delta(row, natural, lane_sum<T>(sum), lane_sum<T>(weight_sum));
  for (int64_t j = 0; wants_grads_ && j < stride_; j += S::kLane) {
    const Vec<T> p = load(scores + j);
    store(grads + j, p == Vec<T>{} ? p : p * (load(grads + j) - broadcast(delta)));
  }
  if (grad_mask_ != nullptr) add_mask_row(row, grads);
  for (int64_t j = 0; drops && j < stride_; j += S::kLane) {
    store(scores + j, load(scores + j) * load(s_.keep + j));
  }
  for (int64_t j = 0; wants_grads_ && rule.softcap > 0 && j < stride_; j += S::kLane) {
    const Vec<T> grad = load(grads + j);
    store(grads + j, grad == Vec<T>{} ? grad : grad * load(s_.cap_slope + j));
  }
}

// P and dS of two neighbouring rows as bfloat16: in pairs of rows, dS also in pairs of neighbouring keys.
template <typename S>
ATTN_EXT_INLINE void SmallUnit<S>::narrow_lanes([[maybe_unused]] int64_t r, [[maybe_unused]] int64_t j,
                                                [[maybe_unused]] const Vec<T> (&weights)[2],
                                                [[maybe_unused]] const Vec<T> (&grads)[2]) {
#if defined(__AVX512BF16__)
  if constexpr (S::kNarrow) {
    const Vec<int32_t> words = lane_index<int32_t>() * 0x10001 + (16 << 16);  // words 0, 16, 1, 17, ...
    const __m512i p = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
    const __m512i g = (__m512i)_mm512_cvtne2ps_pbh((__m512)grads[1], (__m512)grads[0]);
    store(s_.weight_pairs + r / 2 * stride_ + j, (Vec<Operand>)_mm512_permutexvar_epi16((__m512i)words, p));
    store(s_.grad_pairs + r / 2 * stride_ + j, (Vec<Operand>)_mm512_permutexvar_epi16((__m512i)words, g));
    Operand* rows = s_.grad_rows + r * stride_ / 2;
    const __m256i low = _mm512_castsi512_si256(g), high = _mm512_extracti64x4_epi64(g, 1);
    memcpy(rows + j / 2, &low, sizeof(low));
    memcpy(rows + (stride_ + j) / 2, &high, sizeof(high));
  }
#endif
}

// Rows [begin, end) of the block, of which finish_full_row() has made P and dS.
template <typename S>
void SmallUnit<S>::narrow_rows(int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r += 2) {
    const T* weights = s_.scores + r * stride_;
    const T* grads = s_.grads + r * stride_;
    for (int64_t j = 0; j < stride_; j += S::kLane) {
      const bool has_next = r + 1 < end;
      narrow_lanes(r, j, {load(weights + j), has_next ? load(weights + stride_ + j) : Vec<T>{}},
                   {load(grads + j), has_next ? load(grads + stride_ + j) : Vec<T>{}});
    }
  }
}

// finish_full_row() for rows with nothing special about them: P of a row and its sums.
template <typename S>
template <int Vectors, typename M>
ATTN_EXT_INLINE void SmallUnit<S>::make_weights(T* scores, const T* grads, const M* mask, KeyRange seen,
                                                T lse, T& sum, T& weight_sum) const {
  const int64_t keys = keys_;
  const Vec<T> factor = broadcast(units_.softmax_scale), mask_factor = broadcast(units_.scale);
  const Vec<T> shift = broadcast(-lse);
  const bool has_window = seen.begin > 0 || seen.end < keys;
  Vec<T> sums = {}, weight_sums = {};
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    const int64_t j = v * S::kLane;
    Vec<T> s = load(scores + j);
    if constexpr (!std::is_same_v<M, void>) {
      if (v + 1 < Vectors || j + S::kLane == keys) {
        s = apply_mask<T>(s, mask + j, mask_factor);
      } else {
        s = apply_mask_partial<T>(s, mask + j, keys - j, mask_factor);
      }
    }
    if (v + 1 == Vectors || has_window) s = keep_lanes<T>(s, seen.begin - j, seen.end - j);
    const Vec<T> power = exp2<T, S::kExpDegree>(multiply_add(s, factor, shift));
    const Vec<T> p = s == -kInfinity<T> ? Vec<T>{} : power;
    store(scores + j, p);
    weight_sums += p;
    sums = multiply_add(p, p == Vec<T>{} ? Vec<T>{} : load(grads + j), sums);
  }
  sum = lane_sum<T>(sums);
  weight_sum = lane_sum<T>(weight_sums);
}

// dS of `Rows` neighbouring rows, of which P and dP are there; added to the mask's gradient where it has
// rows.
template <typename S>
template <int Vectors, int Rows>
ATTN_EXT_INLINE void SmallUnit<S>::make_score_grads(int64_t r, const T* deltas, T* mask_grads, bool keeps) {
  const int64_t keys = keys_, stride = stride_, mask_stride = params_.grad_mask.row_stride;
  const T* weights = s_.scores + r * stride;
  T* grads = s_.grads + r * stride;
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    const int64_t j = v * S::kLane;
    Vec<T> p[2] = {}, grad[2] = {};
#pragma GCC unroll 2
    for (int k = 0; k < Rows; ++k) {
      p[k] = load(weights + k * stride + j);
      const Vec<T> centred = load(grads + k * stride + j) - broadcast(deltas[k]);
      grad[k] = p[k] == Vec<T>{} ? p[k] : p[k] * centred;
      if (keeps) store(grads + k * stride + j, grad[k]);
      if (mask_grads == nullptr) continue;
      T* to = mask_grads + k * mask_stride + j;
      if (v + 1 < Vectors || j + S::kLane == keys) {
        store(to, load(to) + grad[k]);
      } else {
        add_row(to, 1, grad[k], keys - j);
      }
    }
    narrow_lanes(r, j, p, grad);
  }
}

// All that is made of up to kSmallGroup rows: the deltas come together, so that no row waits for its own.
template <typename S>
template <int Vectors, typename M>
void SmallUnit<S>::finish_plain_rows(int64_t first, int64_t begin, int64_t end) {
  const ScoreRule& rule = params_.rule;
  const TensorView& view = params_.grad_mask;
  const bool has_window = rule.window_left >= 0 || rule.window_right >= 0;
  const T* lse = static_cast<const T*>(params_.lse) +
                 (batch_ * params_.shape.query_heads + head_) * params_.shape.query_len + first;
  T sums[kSmallGroup], weight_sums[kSmallGroup], deltas[kSmallGroup];
  for (int64_t r = begin; r < end; ++r) {
    T* scores = s_.scores + r * stride_;
    sums[r - begin] = weight_sums[r - begin] = 0;
    if (lse[r] == -kInfinity<T> || row_is_masked(rule, batch_, head_, first + r)) {
      dead_rows_ = true;
      memset(scores, 0, static_cast<size_t>(stride_) * sizeof(T));
      continue;
    }
    const M* mask = nullptr;
    if constexpr (!std::is_same_v<M, void>) mask = row_pointer<const M>(rule.mask, batch_, head_, first + r);
    make_weights<Vectors>(scores, s_.grads + r * stride_, mask,
                          has_window ? window_keys(rule, keys_, first + r) : KeyRange{0, keys_},
                          lse[r] * static_cast<T>(kLog2E), sums[r - begin], weight_sums[r - begin]);
  }
  for (int64_t r = begin; r < end; ++r) {
    deltas[r - begin] = finish_delta(first + r, lse[r], sums[r - begin], weight_sums[r - begin]);
  }
  const bool has_rows = grad_mask_ != nullptr && view.column_stride == 1;
  const bool keeps = !S::kNarrow || bad_keys_ || (grad_mask_ != nullptr && !has_rows);
  T* mask_grads = grad_mask_ + (has_rows ? batch_offset(view, batch_) + head_ * view.head_stride : 0);
  int64_t r = begin;
  for (; S::kNarrow && r + 1 < end; r += 2) {
    make_score_grads<Vectors, 2>(r, deltas + (r - begin),
                                 has_rows ? mask_grads + (first + r) * view.row_stride : nullptr, keeps);
  }
  for (; r < end; ++r) {
    make_score_grads<Vectors, 1>(r, deltas + (r - begin),
                                 has_rows ? mask_grads + (first + r) * view.row_stride : nullptr, keeps);
  }
  for (r = begin; grad_mask_ != nullptr && !has_rows && r < end; ++r) {
    add_mask_row(first + r, s_.grads + r * stride_);
  }
}

// finish_plain_rows() for so many vectors.
template <typename S>
template <typename M>
typename SmallUnit<S>::PlainRows SmallUnit<S>::plain_rows(int64_t vectors) {
  constexpr auto with = [](auto count) -> PlainRows {
    return [](SmallUnit& unit, int64_t first, int64_t begin, int64_t end) {
      unit.template finish_plain_rows<decltype(count)::value, M>(first, begin, end);
    };
  };
  static constexpr PlainRows kTable[kPlainVectors] = {
      with(std::integral_constant<int, 1>{}), with(std::integral_constant<int, 2>{}),
      with(std::integral_constant<int, 3>{}), with(std::integral_constant<int, 4>{}),
      with(std::integral_constant<int, 5>{}), with(std::integral_constant<int, 6>{}),
      with(std::integral_constant<int, 7>{}), with(std::integral_constant<int, 8>{})};
  return kTable[vectors - 1];
}

// Whether lse says of all of the rows what their sums are.
template <typename S>
bool SmallUnit<S>::all_near(int64_t first, int64_t begin, int64_t end) const {
  const T* lse = static_cast<const T*>(params_.lse) +
                 (batch_ * params_.shape.query_heads + head_) * params_.shape.query_len + first;
  bool near = true;
  for (int64_t r = begin; r < end; ++r)
    near &= lse[r] == -kInfinity<T> || !is_far(lse[r] * static_cast<T>(kLog2E));
  return near;
}

template <typename S>
void SmallUnit<S>::finish_rows(int64_t first, int64_t count) {
  const ScoreRule& rule = params_.rule;
  const bool by_key =
      rule.mask_kind != ScalarKind::kNone && (is_biased(rule) || rule.mask.column_stride != 0);
  const int64_t vectors = stride_ / S::kLane;
  // Only a bias scales the scores that it meets.
  const bool special = full_ || !wants_grads_ || vectors > kPlainVectors ||
                       (units_.scale_first && !is_biased(rule)) || (by_key && rule.mask.column_stride != 1);
  for (int64_t begin = 0; begin < count; begin += kSmallGroup) {
    const int64_t end = smaller(count, begin + kSmallGroup);
    if (special || (is_biased(rule) && !all_near(first, begin, end))) {
      for (int64_t r = begin; r < end; ++r) finish_full_row(first + r, r);
      if (S::kNarrow) narrow_rows(begin, end);
    } else if (!by_key) {
      plain_rows<void>(vectors)(*this, first, begin, end);
    } else {
      with_mask_type<Element>(rule.mask_kind, [&](auto tag) {
        plain_rows<typename decltype(tag)::Type>(vectors)(*this, first, begin, end);
      });
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
