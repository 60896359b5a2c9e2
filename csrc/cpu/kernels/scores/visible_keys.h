// Which keys a query row sees: the range that causality, window and offset leave, and the mask inside it.
#pragma once

#include <type_traits>

#include "../interface/params.h"
#include "../matrix/matrix.h"
#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

struct Range {
  int64_t begin, end;
};

ATTN_EXT_INLINE bool is_empty(Range range) {
  return range.begin >= range.end;
}

ATTN_EXT_INLINE Range intersect(Range a, Range b) {
  return {larger(a.begin, b.begin), smaller(a.end, b.end)};
}

// The whole steps that it touches.
template <int64_t Step>
ATTN_EXT_INLINE Range in_steps(Range range) {
  return {round_down(range.begin, Step), round_up(range.end, Step)};
}

// Part i of `parts` of [0, count), in whole steps.
ATTN_EXT_INLINE Range part_in_steps(int64_t count, int64_t step, int64_t parts, int64_t i) {
  const int64_t steps = ceil_div(count, step);
  return {smaller(count, i * steps / parts * step), smaller(count, (i + 1) * steps / parts * step)};
}

ATTN_EXT_INLINE Range window_keys(const ScoreRule& rule, int64_t key_len, int64_t row) {
  const int64_t centre = row + rule.query_offset;
  Range range{0, key_len};
  if (rule.window_left >= 0) range.begin = larger(0, centre - rule.window_left);
  if (rule.window_right >= 0) range.end = smaller(key_len, centre + rule.window_right + 1);
  return range;
}

// The queries that the window lets see a key.
ATTN_EXT_INLINE Range window_queries(const ScoreRule& rule, int64_t query_len, int64_t key) {
  const int64_t centre = key - rule.query_offset;
  Range range{0, query_len};
  if (rule.window_right >= 0) range.begin = larger(0, centre - rule.window_right);
  if (rule.window_left >= 0) range.end = smaller(query_len, centre + rule.window_left + 1);
  return range;
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

// Calls body with the tag of the element type of a mask or of sinks.
template <typename Element, typename Body>
ATTN_EXT_INLINE void with_kind(ScalarKind kind, Body body) {
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

// Whether a row of the mask, if there is one, lets any of `keys` through.
template <typename Element>
ATTN_EXT_INLINE bool any_let_through(const ScoreRule& rule, int64_t batch, int64_t head, int64_t row,
                                     Range keys) {
  if (is_empty(keys) || rule.mask_kind == ScalarKind::kNone) return !is_empty(keys);
  bool any = false;
  with_kind<Element>(rule.mask_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    const int64_t stride = rule.mask.column_stride;
    const M* mask = row_pointer<const M>(rule.mask, batch, head, row) + keys.begin * stride;
    any = any_let_through(mask, stride, keys.end - keys.begin);
  });
  return any;
}

// Whether a row sees a key, and whether it sees any: by window and mask, whatever the scores are.
template <typename Element>
ATTN_EXT_INLINE bool sees_key(const ScoreRule& rule, int64_t key_len, int64_t batch, int64_t head,
                              int64_t row, int64_t key) {
  return any_let_through<Element>(rule, batch, head, row,
                                  intersect(window_keys(rule, key_len, row), {key, key + 1}));
}

template <typename Element>
ATTN_EXT_INLINE bool sees_any(const ScoreRule& rule, int64_t key_len, int64_t batch, int64_t head,
                              int64_t row) {
  return any_let_through<Element>(rule, batch, head, row, window_keys(rule, key_len, row));
}

// How many of the first `count` bytes are 0.
inline int64_t leading_zeros(const uint8_t* mask, int64_t stride, int64_t count) {
  int64_t j = 0;
  for (uint64_t eight; stride == 1 && j + 8 <= count; j += 8) {
    memcpy(&eight, mask + j, sizeof(eight));
    if (eight != 0) break;
  }
  while (j < count && mask[j * stride] == 0) ++j;
  return j;
}

// Whether none of them is.
inline bool has_no_zero(const uint8_t* mask, int64_t stride, int64_t count) {
  if (stride == 1) return count <= 0 || memchr(mask, 0, static_cast<size_t>(count)) == nullptr;
  int64_t j = 0;
  while (j < count && mask[j * stride] != 0) ++j;
  return j == count;
}

// Of `keys` the range from the first that a bool mask row lets through to the last; `gapless` tells whether
// it lets all of that range through, as padding masks do: then the range says all and the mask need not be
// looked at again.
inline Range mask_row_range(const uint8_t* mask, int64_t stride, Range keys, bool& gapless) {
  if (is_empty(keys)) return {0, 0};
  Range range{keys.begin + leading_zeros(mask + keys.begin * stride, stride, keys.end - keys.begin),
              keys.end};
  while (range.begin < range.end && mask[(range.end - 1) * stride] == 0) --range.end;
  gapless &= has_no_zero(mask + range.begin * stride, stride, range.end - range.begin);
  return range;
}

// Whether a bool mask that says the same of every key hides all of row i.
ATTN_EXT_INLINE bool row_is_masked(const ScoreRule& rule, int64_t batch, int64_t head, int64_t row) {
  return rule.mask_kind == ScalarKind::kBool && rule.mask.column_stride == 0 &&
         *row_pointer<const uint8_t>(rule.mask, batch, head, row) == 0;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
