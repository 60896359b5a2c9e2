// Rows of gradients from sums to what the caller gets: scaled, and rounded once.
#pragma once

#include "../interface/params.h"
#include "../matrix/matrix.h"
#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

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

// A row of a gradient, scale * from. Streamed: past the caches, where it lies as that needs.
template <typename S>
void write_gradient_row(const typename S::Accum* from, const ResultView& grad, int64_t batch, int64_t head,
                        int64_t row, int64_t count, typename S::Accum scale, bool streamed = false) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  if (grad.wide) {
    return write_scaled_row<false>(from, row_pointer<T>(grad, batch, head, row), count, broadcast(scale));
  }
  Element* to = row_pointer<Element>(grad, batch, head, row);
  streamed = streamed && reinterpret_cast<uintptr_t>(to) % kVectorBytes == 0;
  (streamed ? write_scaled_row<true, T, Element> : write_scaled_row<false, T, Element>)(from, to, count,
                                                                                        broadcast(scale));
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
