// From products q.k to scores in units of log2, a pass over a span of a row that is in cache:
//   S = (softcap * tanh(scale * s / softcap) or scale * s) + bias,  times log2 e,  -inf where masked out.
// In that unit the softmax needs exp2 only, and scale * log2 e costs nothing more than scale did. Where
// neither softcap nor bias is there, the scale is left to the softmax pass, which multiplies anyway.
#pragma once

#include <type_traits>

#include "../matrix/product.h"
#include "../vector/convert.h"
#include "../vector/math.h"
#include "visible_keys.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename T>
struct ScoreUnits {
  bool capped;       // by a softcap
  bool scale_first;  // this pass scales; the softmax pass then multiplies by 1
  T scale;           // of this pass, log2 e included unless there is a softcap
  T softcap;         // times log2 e; 0: none
  T inverse_cap;     // 1 / softcap: scale / softcap in one might vanish, and Inf times that be NaN
  T softmax_scale;   // of the softmax pass

  // What products are multiplied by where a mask is added to them.
  T beside_mask() const { return scale_first && !capped ? scale : static_cast<T>(1); }
};

ATTN_EXT_INLINE bool is_biased(const ScoreRule& rule) {
  return rule.mask_kind != ScalarKind::kNone && rule.mask_kind != ScalarKind::kBool;
}

// The sink of a head; -inf, which changes nothing, where there is none.
template <typename Element>
ATTN_EXT_INLINE Compute<Element> sink_of(const ScoreRule& rule, int64_t batch, int64_t head) {
  using T = Compute<Element>;
  T sink = -kInfinity<T>;
  if (rule.sinks_kind == ScalarKind::kNone) return sink;
  with_kind<Element>(rule.sinks_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    const M value = *row_pointer<const M>(rule.sinks, batch, head, 0);
    if constexpr (!std::is_same_v<M, uint8_t>) sink = static_cast<T>(to_compute(value));
  });
  return sink;
}

template <typename T>
ATTN_EXT_INLINE ScoreUnits<T> score_units(const ScoreRule& rule) {
  const double log2_scale = rule.scale * kLog2E;
  const bool capped = rule.softcap > 0;
  ScoreUnits<T> units;
  units.capped = capped;
  // The softmax pass looks for the largest product, so its scale must be positive, and not so small that
  // -inf times it could be anything but -inf.
  units.scale_first = capped || is_biased(rule) || !(log2_scale > 1e-30);
  units.scale = static_cast<T>(capped ? rule.scale : log2_scale);
  units.softcap = static_cast<T>(capped ? rule.softcap * kLog2E : 0);
  units.inverse_cap = static_cast<T>(capped ? 1 / rule.softcap : 0);
  units.softmax_scale = units.scale_first ? static_cast<T>(1) : static_cast<T>(log2_scale);
  return units;
}

template <typename T>
ATTN_EXT_INLINE void fill_span(T* scores, int64_t begin, int64_t end, T value) {
  for (int64_t j = begin; j < end; ++j) scores[j] = value;
}

// -inf for the scores of `computed` that lie outside of `seen`.
template <typename T>
ATTN_EXT_INLINE void hide_outside(T* scores, Range computed, Range seen) {
  if (is_empty(seen)) seen = {computed.end, computed.end};
  fill_span(scores, computed.begin, seen.begin, -kInfinity<T>);
  fill_span(scores, seen.end, computed.end, -kInfinity<T>);
}

// The lanes from `begin` on to `end`; -inf in the others.
template <typename T>
ATTN_EXT_INLINE Vec<T> keep_lanes(Vec<T> s, int64_t begin, int64_t end) {
  const Vec<T> lane = lane_index<T>();
  const auto kept = (lane >= broadcast(static_cast<T>(begin))) & (lane < broadcast(static_cast<T>(end)));
  return kept ? s : broadcast(-kInfinity<T>);
}

template <typename T>
inline void scale_span(T* scores, int64_t begin, int64_t end, const ScoreUnits<T>& units) {
  const Vec<T> scale = broadcast(units.scale);
  if (units.softcap == 0) {
    for (int64_t j = begin; j < end; j += kLanes<T>) store(scores + j, load(scores + j) * scale);
    return;
  }
  const Vec<T> cap = broadcast(units.softcap);
  for (int64_t j = begin; j < end; j += kLanes<T>) {
    store(scores + j, cap * tanh<T>(load(scores + j) * scale * units.inverse_cap));
  }
}

// As scale_span with a softcap; slope = 1 - tanh^2, the cap's derivative.
template <typename T>
inline void cap_span(T* scores, T* slope, int64_t begin, int64_t end, const ScoreUnits<T>& units) {
  for (int64_t i = begin; i < end; i += kLanes<T>) {
    const Vec<T> t = tanh<T>(load(scores + i) * units.scale * units.inverse_cap);
    store(scores + i, t * units.softcap);
    store(slope + i, static_cast<T>(1) - t * t);
  }
}

// Products of infinite factors may be -inf where a key is seen: not to be taken for hidden ones, whose weight
// times NaN is 0.
template <typename T>
ATTN_EXT_INLINE Vec<T> keep_seen(Vec<T> score) {
  return maximum(broadcast(-FloatFormat<T>::kLargest), score);
}

// Before what hides keys. A bias, which can be as large as the number that they become, keeps them itself.
template <typename T>
inline void keep_seen(const ScoreRule& rule, T* products, int64_t count) {
  if (is_biased(rule)) return;
  for (int64_t j = 0; j < count; j += kLanes<T>) store(products + j, keep_seen<T>(load(products + j)));
}

// v where the lane's byte is not 0, -inf elsewhere; bytes from `count` on do not exist and count as 0.
template <typename T>
ATTN_EXT_INLINE Vec<T> keep_flagged(Vec<T> v, const uint8_t* flags, int64_t count = kLanes<T>) {
  const Vec<T> hidden = broadcast(-kInfinity<T>);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m128i lanes = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), flags);
  const __mmask16 set = _mm_test_epi8_mask(lanes, lanes);
  if constexpr (sizeof(T) == 4) {
    return (Vec<T>)_mm512_mask_mov_ps((__m512)hidden, set, (__m512)v);
  } else {
    return (Vec<T>)_mm512_mask_mov_pd((__m512d)hidden, static_cast<__mmask8>(set), (__m512d)v);
  }
#else
  uint64_t bytes[2] = {0, 0};
  if (count == kLanes<T>) {
    memcpy(bytes, flags, kLanes<T>);
  } else {
    for (int64_t i = 0; i < count; ++i) bytes[i / 8] |= static_cast<uint64_t>(flags[i]) << (8 * (i % 8));
  }
#if defined(__AVX2__)
  const __m128i lanes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  if constexpr (sizeof(T) == 4) {
    return (Vec<Bits<T>>)_mm256_cvtepu8_epi32(lanes) != 0 ? v : hidden;
  } else {
    return (Vec<Bits<T>>)_mm256_cvtepu8_epi64(lanes) != 0 ? v : hidden;
  }
#elif defined(ATTN_EXT_NEON)
  const uint32x4_t lanes = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes[0]))));
  if constexpr (sizeof(T) == 4) {
    return (Vec<Bits<T>>)lanes != 0 ? v : hidden;
  } else {
    return (Vec<Bits<T>>)vmovl_u32(vget_low_u32(lanes)) != 0 ? v : hidden;
  }
#else
  Vec<Bits<T>> lanes;
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = static_cast<Bits<T>>((bytes[i / 8] >> (8 * (i % 8))) & 0xff);
  return lanes != 0 ? v : hidden;
#endif
#endif
}

template <typename T, typename M>
ATTN_EXT_INLINE Vec<T> load_bias(const M* mask) {
  if constexpr (std::is_same_v<Compute<M>, T>) {
    return load_compute(mask);
  } else {  // float bias, double scores
    typedef M Lanes __attribute__((vector_size(kLanes<T> * sizeof(M))));
    Lanes lanes;
    memcpy(&lanes, mask, sizeof(lanes));
    return __builtin_convertvector(lanes, Vec<T>);
  }
}

// A bias of -inf masks; one near the lowest finite value does so too, but a row of nothing else is not dead.
template <typename T, bool KeepSeen>
ATTN_EXT_INLINE Vec<T> add_bias(Vec<T> s, Vec<T> bias, Vec<T> scale) {
  const Vec<T> sum = multiply_add(s, scale, in_log2<T>(bias));
  return hide_where_minus_inf<T>(bias, KeepSeen ? keep_seen<T>(sum) : sum);
}

// What a mask adds to a score: a bias in units of log2, or 0 and -inf for true and false.
template <typename T, typename M>
ATTN_EXT_INLINE Vec<T> mask_lanes(const M* mask) {
  if constexpr (std::is_same_v<M, uint8_t>) {
    return keep_flagged<T>(Vec<T>{}, mask);
  } else {
    return in_log2<T>(load_bias<T>(mask));
  }
}

template <typename T, bool KeepSeen = false, typename M>
ATTN_EXT_INLINE Vec<T> apply_mask(Vec<T> s, const M* mask, Vec<T> scale) {
  if constexpr (std::is_same_v<M, uint8_t>) {
    return keep_flagged<T>(s, mask);
  } else {
    return add_bias<T, KeepSeen>(s, load_bias<T>(mask), scale);
  }
}

// The same where only `count` elements of the mask are there.
template <typename T, bool KeepSeen = false, typename M>
ATTN_EXT_INLINE Vec<T> apply_mask_partial(Vec<T> s, const M* mask, int64_t count, Vec<T> scale) {
  if constexpr (std::is_same_v<M, uint8_t>) {
    return keep_flagged<T>(s, mask, count);
  } else if constexpr (std::is_same_v<Compute<M>, T>) {
    return add_bias<T, KeepSeen>(s, load_compute_partial(mask, count), scale);
  } else {
    M present[kLanes<T>] = {};
    copy_partial(present, mask, count);
    return apply_mask<T, KeepSeen>(s, present, scale);
  }
}

// S = scale s + mask; mask[j * stride] belongs to scores[j]. Elements from `present` on do not exist: what is
// masked there does not matter, since no row sees it. A bool mask leaves the scale to others.
template <bool KeepSeen = false, typename T, typename M>
void mask_span(T* scores, int64_t begin, int64_t end, const M* mask, int64_t stride, int64_t present,
               T scale) {
  const Vec<T> factor = broadcast(scale);
  int64_t j = begin;
  if (stride == 1) {
    for (; j < end && j + kLanes<T> <= present; j += kLanes<T>) {
      store(scores + j, apply_mask<T, KeepSeen>(load(scores + j), mask + j, factor));
    }
  }
  for (; j < end; j += kLanes<T>) {
    const int64_t count = larger(0, smaller(kLanes<T>, present - j));
    if (stride == 1) {
      store(scores + j, apply_mask_partial<T, KeepSeen>(load(scores + j), mask + j, count, factor));
      continue;
    }
    M gathered[kLanes<T>] = {};
    for (int64_t i = 0; i < count; ++i) gathered[i] = mask[(j + i) * stride];
    store(scores + j, apply_mask<T, KeepSeen>(load(scores + j), gathered, factor));
  }
}

// A whole tile of scores that meets its mask in registers, where that costs no pass of its own:
// out = scale left . right + mask, row r of the mask at rows[r]. Memory is asked for the columns from `ahead`
// on.
template <typename Product, typename M>
void masked_tile(const TileArgs<Product>& args, const M* const (&rows)[Product::kTileRows],
                 typename Product::Accum scale, int64_t ahead) {
  using T = typename Product::Accum;
  constexpr int kWidth = kLanes<T>, kRows = Product::kTileRows;
  constexpr int kLineElements = 64 / sizeof(M);
  constexpr int kColumns = kTileVectors * kWidth;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    for (int64_t j = ahead; j < 2 * kColumns; j += kLineElements) __builtin_prefetch(rows[r] + j);
  }
  Vec<T> sums[kRows][kTileVectors] = {};
  HalfVec<T> none[kRows];
  multiply_tile<Product, kRows, kTileVectors, false>(args, sums, none);
  const Vec<T> factor = broadcast(scale);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      store(args.out + r * args.out_stride + v * kWidth,
            apply_mask<T>(sums[r][v], rows[r] + v * kWidth, factor));
    }
  }
}

// scale_span() without a softcap, -inf kept apart from what is hidden: a negative scale makes it of +inf.
template <typename T>
ATTN_EXT_INLINE void scale_seen_span(T* scores, int64_t begin, int64_t end, T scale) {
  for (int64_t j = begin; j < end; j += kLanes<T>) {
    store(scores + j, keep_seen<T>(load(scores + j) * broadcast(scale)));
  }
}

// All that makes scores of products for the backward pass: scale or softcap (with its slope), the mask by
// add_mask(factor of the products), and -inf outside of `seen`. A mask that `scales` multiplies by that
// factor.
template <typename T, typename AddMask>
ATTN_EXT_INLINE void finish_scores(T* scores, T* cap_slope, Range computed, Range seen,
                                   const ScoreUnits<T>& units, bool mask_scales, AddMask add_mask) {
  if (units.capped) {
    cap_span(scores, cap_slope, computed.begin, computed.end, units);
  } else if (units.scale_first && !mask_scales) {
    scale_seen_span(scores, computed.begin, computed.end, units.scale);
  }
  add_mask(units.beside_mask());
  hide_outside(scores, computed, seen);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
