// delta from an output rounded to 16 bits is off by some e, and with it dS of the whole row by e P: dQ by e
// times the mean key. Where a row of dS sums to 0, dQ = dS (K - c) for any c, and with c close to the mean
// key e matters no more.
#pragma once

#include "../interface/params.h"
#include "../matrix/across.h"
#include "../matrix/gather.h"
#include "../matrix/matrix.h"
#include "../matrix/scheme.h"
#include "../scores/visible_keys.h"
#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Whether dQ is made of keys less their centre.
template <typename S>
ATTN_EXT_INLINE bool keys_centre(const BackwardParams& params) {
  const ScoreRule& rule = params.rule;
  return sizeof(typename S::Element) == 2 && !S::kPaired && rule.mask_kind == ScalarKind::kNone &&
         rule.sinks_kind == ScalarKind::kNone && rule.softcap == 0 && rule.window_left < 0 &&
         rule.window_right < 0 && params.grad_lse.data == nullptr && params.delta == nullptr;
}

constexpr int64_t kCentreKeys = 256;
constexpr int kOutlier = 16;  // times the mean size

// A vector of columns of some rows from row j on, as rows of `block`; how many rows.
template <typename Element>
ATTN_EXT_INLINE int64_t gather_rows(const Matrix<Element>& m, int64_t j, int64_t column, Element* block) {
  constexpr int64_t kWidth = kLanes<Compute<Element>>;
  if constexpr (sizeof(Element) == 2) {
    if (lies_across(m) && j + kSquareRows<Element> <= m.rows && column + kWidth <= m.columns) {
      turn_square(m.data + j + column * m.column_stride, m.column_stride, block, kWidth);
      return kSquareRows<Element>;
    }
  }
  gather_block(m, j, 1, column, kWidth, block);
  return 1;
}

// centre (padded D) = the mean of the head's first keys; 0 where that is not finite, or where a key that lies
// far from the others has made it, which is far from the keys that have the weights then.
template <typename S>
void set_centre(const BackwardParams& params, int64_t batch, int64_t key_head, typename S::Accum* centre) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  const int64_t dim = params.shape.head_dim, count = smaller(kCentreKeys, params.shape.key_len);
  const Matrix<Element> key = rows_of<Element>(params.key, batch, key_head, 0, count, dim);
  for (int64_t d = 0; d < padded_dim<S>(dim); d += S::kLane) {
    Vec<T> sum = {}, sizes = {}, largest = {};
    Element block[kSquareRows<Element> * kLanes<T>];
    Range gathered{0, 0};  // rows that the block holds
    for (int64_t j = 0; j < count; ++j) {
      const Element* from = key.data + j * key.row_stride + d;
      if (key.column_stride != 1 || d + S::kLane > dim) {
        if (j >= gathered.end) gathered = {j, j + gather_rows(key, j, d, block)};
        from = block + (j - gathered.begin) * S::kLane;
      }
      const Vec<T> key_lanes = load_compute(from), size = maximum(key_lanes, -key_lanes);
      sum += key_lanes;
      sizes += size;
      largest = maximum(largest, size);
    }
    const T share = static_cast<T>(1) / static_cast<T>(count);
    const Vec<T> mean = sum * share, limit = sizes * (share * kOutlier);
    const Vec<Bits<T>> is_central = (mean - mean == Vec<T>{}) & (largest <= limit);
    store(centre + d, is_central ? mean : Vec<T>{});
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
