// From scores and dO V^T to weights and dS where anything takes part beside them: dropout, gradients of
// weights and of key mass, far rows. With M the dropout factors, delta = rowsum(P dP) - dLse:
//   dP = M (dO V^T + dW + dMass),  dS = P (dP - delta),  and P to M P for the values' gradient
// Rows that have none of that take shorter ways of their own (tiles/cell.h, few_keys/rows.h).
#pragma once

#include "../scores/softmax.h"
#include "row_terms.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// A number for all lanes, and one for each: what belongs to a query is the former along its keys, and what
// belongs to a key the latter.
template <typename T>
struct Uniform {
  T x;
  Vec<T> operator[](int64_t) const { return broadcast(x); }
};

template <typename T>
struct Varying {
  const T* data;
  Vec<T> operator[](int64_t j) const { return load(data + j); }
};

// Scores of one query along its keys, or of one key along its queries.
template <typename S, template <typename> typename OfQuery, template <typename> typename OfKey>
struct ScoreSpan {
  using T = typename S::Accum;
  T* scores;                  // S, then P
  T* grads;                   // dO V^T, then dS
  bool has_grads;             // whether dO V^T is there, else 0
  T softmax_scale;            // of the scores
  OfQuery<T> lse, row_scale;  // P = row_scale 2^(softmax_scale S - lse)
  const T* weight_grads;      // dW; null: none
  bool has_mass;              // whether key mass has a gradient
  OfKey<T> mass_grads;        // dMass
  const T* keep;              // M; null: all 1

  // Where scores are far from 0 the product is rounded, as the row's maximum was.
  ATTN_EXT_INLINE Vec<T> weight(int64_t j) const {
    const Vec<T> s = load(scores + j), scale = broadcast(softmax_scale);
    const Vec<T> product = rounded(s * scale), near = broadcast(static_cast<T>(kFarScore / 2));
    const Vec<Bits<T>> is_far = (lse[j] > near) | (lse[j] < -near);
    const Vec<T> exponent = is_far ? product - lse[j] : multiply_add(s, scale, -lse[j]);
    return (hidden(j) ? Vec<T>{} : exp2<T>(exponent)) * row_scale[j];
  }
  ATTN_EXT_INLINE Vec<Bits<T>> hidden(int64_t j) const { return is_hidden<T>(load(scores + j), lse[j]); }
  // dP without M
  ATTN_EXT_INLINE Vec<T> grad(int64_t j) const {
    Vec<T> sum = has_grads ? load(grads + j) : Vec<T>{};
    if (has_mass) sum += mass_grads[j];
    if (weight_grads != nullptr) sum += load(weight_grads + j);
    return sum;
  }
  ATTN_EXT_INLINE Vec<T> factor(int64_t j) const {
    return keep != nullptr ? load(keep + j) : broadcast(static_cast<T>(1));
  }
};

// P and dS of a span, in place; ToDelta: without delta, so that dS adds up to it. Returns sum + dS, lane by
// lane.
template <bool ToDelta, typename S, template <typename> typename OfQuery, template <typename> typename OfKey>
ATTN_EXT_INLINE Vec<typename S::Accum> make_score_grads(const ScoreSpan<S, OfQuery, OfKey>& span,
                                                        int64_t begin, int64_t end,
                                                        OfQuery<typename S::Accum> delta,
                                                        Vec<typename S::Accum> sum) {
  using T = typename S::Accum;
  for (int64_t j = begin; j < end; j += S::kLane) {
    const Vec<T> p = span.weight(j), factor = span.factor(j);
    const Vec<Bits<T>> hidden = span.hidden(j);
    Vec<T> grad = rounded(span.grad(j) * factor);
    if constexpr (!ToDelta) grad -= delta[j];
    grad = hidden ? Vec<T>{} : p * grad;
    store(span.scores + j, p * factor);
    store(span.grads + j, grad);
    sum += grad;
  }
  return sum;
}

// What a softcap lets through of dS to query and key.
template <typename T>
ATTN_EXT_INLINE void multiply_by_slope(T* grads, const T* slope, int64_t begin, int64_t end) {
  for (int64_t j = begin; j < end; j += kLanes<T>) {
    const Vec<T> grad = load(grads + j);
    store(grads + j, grad == Vec<T>{} ? grad : grad * load(slope + j));
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
