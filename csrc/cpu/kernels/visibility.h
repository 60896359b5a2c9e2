// Which keys a query row sees: the range that causality, window and offset leave, and the mask inside it.
#pragma once

#include <type_traits>

#include "convert.h"
#include "params.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

struct KeyRange {
  int64_t begin, end;
};

ATTN_EXT_INLINE bool is_empty(KeyRange range) {
  return range.begin >= range.end;
}

ATTN_EXT_INLINE KeyRange intersect(KeyRange a, KeyRange b) {
  return {larger(a.begin, b.begin), smaller(a.end, b.end)};
}

ATTN_EXT_INLINE KeyRange window_keys(const ScoreRule& rule, int64_t key_len, int64_t row) {
  const int64_t centre = row + rule.query_offset;
  KeyRange range{0, key_len};
  if (rule.window_left >= 0) range.begin = larger(0, centre - rule.window_left);
  if (rule.window_right >= 0) range.end = smaller(key_len, centre + rule.window_right + 1);
  return range;
}

ATTN_EXT_INLINE int64_t batch_offset(const TensorView& view, int64_t batch) {
  return view.batch_offsets != nullptr ? view.batch_offsets[batch] : batch * view.batch_stride;
}

template <typename T>
ATTN_EXT_INLINE T* row_pointer(const TensorView& view, int64_t batch, int64_t head, int64_t row) {
  return static_cast<T*>(view.data) + batch_offset(view, batch) + head * view.head_stride +
         row * view.row_stride;
}

// A bool mask lets a key through by being true, a floating one by not being -inf.
ATTN_EXT_INLINE bool lets_through(uint8_t m) {
  return m != 0;
}
ATTN_EXT_INLINE bool lets_through(float m) {
  return m != -kInfinity<float>;
}
ATTN_EXT_INLINE bool lets_through(double m) {
  return m != -kInfinity<double>;
}
ATTN_EXT_INLINE bool lets_through(BFloat16 m) {
  return m.bits != 0xff80;
}
ATTN_EXT_INLINE bool lets_through(Float16 m) {
  return m.bits != 0xfc00;
}

template <typename M>
struct TypeTag {
  using Type = M;
};

// Calls body with the tag of the mask's (or the sinks') element type.
template <typename Element, typename Body>
ATTN_EXT_INLINE void with_mask_type(ScalarKind kind, Body body) {
  if (kind == ScalarKind::kBool) {
    body(TypeTag<uint8_t>{});
  } else if (kind == ScalarKind::kFloat32) {
    body(TypeTag<float>{});
  } else {
    body(TypeTag<Element>{});
  }
}

template <typename M>
inline bool any_let_through(const M* mask, int64_t stride, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    if (lets_through(mask[j * stride])) return true;
  }
  return false;
}

template <>
inline bool any_let_through(const uint8_t* mask, int64_t stride, int64_t count) {
  int64_t j = 0;
  if (stride == 1) {
    for (; j + 8 <= count; j += 8) {
      uint64_t eight;
      memcpy(&eight, mask + j, sizeof(eight));
      if (eight != 0) return true;
    }
  }
  for (; j < count; ++j) {
    if (mask[j * stride] != 0) return true;
  }
  return false;
}

// The range from the first key that a bool mask row lets through to the last; `gapless` tells whether it lets
// all of that range through, as padding masks do: then the range says all and the mask need not be looked at
// again.
inline KeyRange mask_row_range(const uint8_t* mask, int64_t stride, int64_t key_len, bool& gapless) {
  KeyRange range{0, key_len};
  while (range.begin < range.end && mask[range.begin * stride] == 0) ++range.begin;
  while (range.begin < range.end && mask[(range.end - 1) * stride] == 0) --range.end;
  gapless = true;
  for (int64_t j = range.begin; j < range.end && gapless; ++j) gapless = mask[j * stride] != 0;
  return range;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
