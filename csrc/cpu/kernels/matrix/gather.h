// Blocks of a matrix of which no vector can be loaded: at its edge, or of columns that are no neighbours in
// memory, as where query, key and value lie between each other number by number.
#pragma once

#include <type_traits>
#include <utility>

#include "../vector/lanes.h"
#include "matrix.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Numbers so far apart at most are gathered by shuffling the vectors that they lie in.
constexpr int64_t kMostShuffledStride = 4;

// Numbers of so many bytes: vectors of two bytes have shuffles of any lanes in 512 bits alone.
#if defined(__AVX512BW__)
constexpr size_t kLeastShuffledBytes = 2;
#else
constexpr size_t kLeastShuffledBytes = 4;
#endif

// A vector of numbers that lie `Stride` apart, from `Stride` vectors. The last of these ends with the last
// number, as nothing past it may be read.
template <typename T, int Stride>
struct ShuffledGather {
  static constexpr int kCount = kLanes<T>;
  static_assert(Stride <= kCount + 1);  // the vectors before the last end before it
  static constexpr int start(int vector) {
    return vector < Stride - 1 ? vector * kCount : (kCount - 1) * (Stride - 1);
  }
  // From the lanes filled by the vectors before `vector`, and from it, numbered from kCount on.
  static constexpr int chosen(int vector, int lane) {
    const int source = lane * Stride / kCount, place = lane * Stride - start(source);
    if (source == vector) return kCount + place;
    return source == 0 && vector == 1 ? place : lane;
  }
  template <int Vector, int... Lane>
  static ATTN_EXT_INLINE Vec<T> join(Vec<T> filled, const T* from, std::integer_sequence<int, Lane...>) {
    constexpr Vec<Bits<T>> kChosen = {static_cast<Bits<T>>(chosen(Vector, Lane))...};
    return shuffle<T>(filled, load(from + start(Vector)), kChosen);
  }
  static ATTN_EXT_INLINE Vec<T> at(const T* from) {
    constexpr std::make_integer_sequence<int, kCount> kAllLanes;
    Vec<T> v = join<1>(load(from), from, kAllLanes);
    if constexpr (Stride > 2) v = join<2>(v, from, kAllLanes);
    if constexpr (Stride > 3) v = join<3>(v, from, kAllLanes);
    return v;
  }
};

#if defined(__AVX512BW__)
// The same of half as many numbers of two bytes, as a vector of floats has: from two vectors, the
// second of which ends with the last number.
template <int Stride>
struct ShuffledHalf {
  static constexpr int kVector = kLanes<uint16_t>, kCount = kVector / 2;
  static constexpr int kSpan = (kCount - 1) * Stride + 1, kSecond = kSpan - kVector;
  static_assert(kSecond <= kVector);
  static constexpr int chosen(int lane) {
    const int place = lane * Stride;
    return lane >= kCount ? 0 : place < kVector ? place : kVector + place - kSecond;
  }
  template <int... Lane>
  static ATTN_EXT_INLINE HalfVec<float> join(Vec<uint16_t> first, Vec<uint16_t> second,
                                             std::integer_sequence<int, Lane...>) {
    constexpr Vec<Bits<uint16_t>> kChosen = {static_cast<Bits<uint16_t>>(chosen(Lane))...};
    return (HalfVec<float>)_mm512_castsi512_si256((__m512i)shuffle<uint16_t>(first, second, kChosen));
  }
  static ATTN_EXT_INLINE HalfVec<float> at(const uint16_t* from) {
    constexpr std::make_integer_sequence<int, kVector> kAllLanes;
    if constexpr (kSecond < 0) {  // nothing past the last number may be read
      const auto only = (Vec<uint16_t>)_mm512_maskz_loadu_epi16((uint32_t{1} << kSpan) - 1, from);
      return join(only, only, kAllLanes);
    } else {
      return join(load(from), load(from + kSecond), kAllLanes);
    }
  }
};
#endif

template <typename Gather, int Stride, typename T>
ATTN_EXT_INLINE void shuffle_row(const T* from, int64_t count, T* to) {
  for (int64_t i = 0; i < count; i += Gather::kCount) {  // the last vector overlaps the one before it
    const int64_t first = smaller(i, count - Gather::kCount);
    const auto numbers = Gather::at(from + first * Stride);
    memcpy(to + first, &numbers, sizeof(numbers));
  }
}

// False: fewer numbers than are gathered at a time.
template <int Stride, typename T>
ATTN_EXT_INLINE bool gather_by_shuffles(const T* from, int64_t count, T* to) {
  if (count >= kLanes<T>) {
    shuffle_row<ShuffledGather<T, Stride>, Stride>(from, count, to);
    return true;
  }
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    if (count >= ShuffledHalf<Stride>::kCount) {
      shuffle_row<ShuffledHalf<Stride>, Stride>(from, count, to);
      return true;
    }
  }
#endif
  return false;
}

// to (count) = numbers that lie `stride` apart.
template <typename Element>
ATTN_EXT_INLINE void gather_row(const Element* from, int64_t stride, int64_t count, Element* to) {
  if constexpr (sizeof(Element) >= kLeastShuffledBytes) {
    using T = std::conditional_t<sizeof(Element) == 8, double,
                                 std::conditional_t<sizeof(Element) == 4, float, uint16_t>>;
    const T* numbers = reinterpret_cast<const T*>(from);
    T* row = reinterpret_cast<T*>(to);
    if (stride == 2 && gather_by_shuffles<2>(numbers, count, row)) return;
    if (stride == 3 && gather_by_shuffles<3>(numbers, count, row)) return;
    if constexpr (kMostShuffledStride <= kLanes<T> + 1) {
      if (stride == kMostShuffledStride && gather_by_shuffles<kMostShuffledStride>(numbers, count, row))
        return;
    }
  }
  for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
}

// Short runs, far apart, are nothing that the processor foresees by itself: a row is asked for so many rows
// before it is read.
constexpr int64_t kRowsAhead = 16;

// Asks for the memory of a row.
template <typename Element>
ATTN_EXT_INLINE void prefetch_row(const Element* row, int64_t stride, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  const int64_t step = larger(stride, kLine);
  for (int64_t i = 0; i < count * stride; i += step) __builtin_prefetch(row + i, 0, 2);
}

// Copies rows [row, row + rows) x columns [column, column + columns) into a dense block, zero past the
// matrix. Out of line to keep the packing loops small.
template <typename Element>
__attribute__((noinline)) void gather_block(const Matrix<Element>& m, int64_t row, int64_t rows,
                                            int64_t column, int64_t columns, Element* out) {
  const int64_t there = larger(0, smaller(rows, m.rows - row));
  const int64_t present = larger(0, smaller(columns, m.columns - column));
  const Element* from = m.data + row * m.row_stride + column * m.column_stride;
  for (int64_t r = 0; r < there; ++r, from += m.row_stride, out += columns) {
    if (m.column_stride == 1) {
      memcpy(out, from, static_cast<size_t>(present) * sizeof(Element));
    } else {
      if (m.row_stride != 1) prefetch_row(from + kRowsAhead * m.row_stride, m.column_stride, present);
      gather_row(from, m.column_stride, present, out);
    }
    memset(out + present, 0, static_cast<size_t>(columns - present) * sizeof(Element));
  }
  memset(out, 0, static_cast<size_t>((rows - there) * columns) * sizeof(Element));
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
