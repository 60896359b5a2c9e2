// Rows of gradients from sums to what the caller gets: scaled, and rounded once.
#pragma once

#include "../interface/params.h"
#include "../matrix/matrix.h"
#include "../scores/visible_keys.h"
#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kLineBytes = 64;  // of a cache

// Past the caches: into lines that nobody will read soon, and that need not be read to be written.
template <typename V>
ATTN_EXT_INLINE void stream(void* p, V v) {
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 8) {
    long long bits;
    memcpy(&bits, &v, sizeof(v));
    _mm_stream_si64(static_cast<long long*>(p), bits);
  } else if constexpr (sizeof(V) == 16) {
    _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
  }
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) _mm256_stream_si256(static_cast<__m256i*>(p), (__m256i)v);
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) _mm512_stream_si512(static_cast<__m512i*>(p), (__m512i)v);
#endif
#else
  memcpy(p, &v, sizeof(v));
#endif
}

ATTN_EXT_INLINE void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// to = scale * from; streamed: `to` and count are whole vectors.
template <bool Streamed, typename T, typename Out>
void write_scaled_row(const T* from, Out* to, int64_t count, Vec<T> scale) {
  constexpr int64_t kLane = kLanes<T>;
  int64_t c = 0;
  for (; c + kLane <= count; c += kLane) {
    const auto v = to_element(load(from + c) * scale, to);
    if constexpr (Streamed) {
      stream(to + c, v);
    } else {
      memcpy(to + c, &v, sizeof(v));
    }
  }
  if (c < count) store_element_partial(to + c, load(from + c) * scale, count - c);
}

// The gradient of some rows of a head, (rows, dim): scale * what is written. Streamed: past the caches, where
// it lies as that needs.
template <typename S>
struct HeadGradient {
  using T = typename S::Accum;
  using Element = typename S::Element;

  const ResultView& view;
  int64_t batch, head, dim;
  double scale;
  bool streamed = false;

  // from: (rows, stride)
  void write(const T* from, int64_t stride, Range rows) const {
    // Rows that lie side by side, here and there, are one long row.
    const bool dense = stride == dim && view.row_stride == dim;
    const int64_t step = dense ? rows.end - rows.begin : 1;
    for (int64_t row = rows.begin; row < rows.end; row += step, from += stride) {
      write_row(from, row, step * dim);
    }
  }

 private:
  void write_row(const T* from, int64_t row, int64_t count) const {
    const Vec<T> factor = broadcast(static_cast<T>(scale));
    if (view.wide)
      return write_scaled_row<false>(from, row_pointer<T>(view, batch, head, row), count, factor);
    Element* to = row_pointer<Element>(view, batch, head, row);
    const bool streams = streamed && count * static_cast<int64_t>(sizeof(Element)) % kLineBytes == 0 &&
                         reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
    (streams ? write_scaled_row<true, T, Element> : write_scaled_row<false, T, Element>)(from, to, count,
                                                                                         factor);
  }
};

// What lies at `from`, as far from a line's beginning as `to`, past the caches by whole lines.
ATTN_EXT_INLINE void stream_bytes(const char* from, char* to, int64_t count) {
  const int64_t head = smaller(-reinterpret_cast<intptr_t>(to) & (kLineBytes - 1), count);
  const int64_t lines = head + (count - head) / kLineBytes * kLineBytes;
  memcpy(to, from, static_cast<size_t>(head));
  for (int64_t i = head; i < lines; i += kVectorBytes) {
    stream(to + i, load(reinterpret_cast<const float*>(from + i)));
  }
  memcpy(to + lines, from + lines, static_cast<size_t>(count - lines));
}

// Where in `stage`, a line more than what is staged, lies as far from a line's beginning as `to`.
template <typename Element>
ATTN_EXT_INLINE Element* staged_at(Element* stage, const Element* to) {
  return stage + reinterpret_cast<uintptr_t>(to) % kLineBytes / sizeof(Element);
}

template <typename Element>
ATTN_EXT_INLINE void stream_rows(const Element* staged, Element* to, int64_t count) {
  stream_bytes(reinterpret_cast<const char*>(staged), reinterpret_cast<char*>(to),
               count * static_cast<int64_t>(sizeof(Element)));
}

// Rows of a gradient that lie one after the other, scale * from (rows, stride), by way of `stage` past the
// caches: a line that is written in part has to be read first.
template <typename S>
void stream_gradient_rows(const typename S::Accum* from, int64_t stride, typename S::Element* to,
                          int64_t rows, int64_t count, typename S::Accum scale, typename S::Element* stage) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  stage = staged_at(stage, to);
  for (int64_t r = 0; r < rows; ++r) {
    write_scaled_row<false, T, Element>(from + r * stride, stage + r * count, count, broadcast(scale));
  }
  stream_rows(stage, to, rows * count);
}

template <typename S>
void clear_gradient_row(const ResultView& grad, int64_t batch, int64_t head, int64_t row, int64_t count) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  if (grad.wide) {
    memset(row_pointer<T>(grad, batch, head, row), 0, static_cast<size_t>(count) * sizeof(T));
  } else {
    memset(row_pointer<Element>(grad, batch, head, row), 0, static_cast<size_t>(count) * sizeof(Element));
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
