// Where the weights of a query row go.
#pragma once

#include "../interface/params.h"
#include "../matrix/matrix.h"
#include "../matrix/scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// From some key on; null: not wanted.
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

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
