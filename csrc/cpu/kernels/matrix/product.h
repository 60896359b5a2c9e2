// The register-tile product that all the matrix work is made of:
//   out (Rows, n) = carry * out + left (Rows, depth) . right (depth, n)      n = Vectors * lanes
// `left` is read element by element along its rows, `right` vector by vector along its rows, and Rows x
// Vectors accumulators stay in registers. Every output element is one chain of fused multiply-adds along the
// depth, so its value depends neither on Rows nor on Vectors.
#pragma once

#include <utility>

#include "../vector/simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// How one step along the depth is done: the packed type of an operand and its multiply-add.
template <typename T>
struct PlainProduct {
  using Operand = T;
  using Accum = T;
  static constexpr int kDepth = 1;  // elements in an operand
  static constexpr int kTileRows = kRegisterTileRows;
  static constexpr int kDepthStep =
      1;  // operands: a product takes whole multiples of so many along the depth
  static constexpr bool kInRegisters = true;
  static ATTN_EXT_INLINE void stay_awake() {}  // between products, now and then
  template <typename V>
  static ATTN_EXT_INLINE V step(V a, V b, V c) {
    return multiply_add(a, b, c);
  }
};

#if defined(ATTN_EXT_HAS_PAIRS)
// Operands are pairs of bfloat16, neighbours along the depth, the first in the low half.
struct BFloat16Product {
  using Operand = uint32_t;
  using Accum = float;
  static constexpr int kDepth = 2;
  static constexpr int kTileRows = kRegisterTileRows;
  static constexpr int kDepthStep = 1;
  static constexpr bool kInRegisters = true;
  static ATTN_EXT_INLINE void stay_awake() {}  // between products, now and then
#if defined(__AVX512BF16__)
  static ATTN_EXT_INLINE Vec<float> step(Vec<uint32_t> a, Vec<uint32_t> b, Vec<float> c) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
  static ATTN_EXT_INLINE HalfVec<float> step(HalfVec<uint32_t> a, HalfVec<uint32_t> b, HalfVec<float> c) {
    return (HalfVec<float>)_mm256_dpbf16_ps((__m256)c, (__m256bh)a, (__m256bh)b);
  }
#else
  static ATTN_EXT_INLINE Vec<float> step(Vec<uint32_t> a, Vec<uint32_t> b, Vec<float> c) {
    return (Vec<float>)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
  }
#endif
};
#endif

// Operands that so many columns take along the depth.
template <typename Product>
ATTN_EXT_INLINE int64_t depth_of(int64_t columns) {
  return round_up(ceil_div(columns, Product::kDepth), Product::kDepthStep);
}

template <typename Product>
struct TileArgs {
  using Operand = typename Product::Operand;
  using Accum = typename Product::Accum;
  int64_t depth;  // in operands
  const Operand* left;
  int64_t left_stride;
  const Operand* right;
  int64_t right_stride;
  Accum* out;
  int64_t out_stride;
  const Accum* carry;     // one factor a row, read only by products that carry; null: all 1
  int64_t left_step = 1;  // from one step along the depth to the next
};

// Rows of a tile, those past the first kRegisterTileRows from a pointer of their own: addresses are made of
// few registers then.
template <typename T>
struct TileRowsOf {
  T *upper, *lower;
  int64_t stride;

  TileRowsOf(T* data, int64_t row_stride, int rows)
      : upper(data),
        lower(rows > kRegisterTileRows ? data + kRegisterTileRows * row_stride : data),
        stride(row_stride) {}
  ATTN_EXT_INLINE T* operator[](int r) const {
    return r < kRegisterTileRows ? upper + r * stride : lower + (r - kRegisterTileRows) * stride;
  }
  ATTN_EXT_INLINE void advance(int64_t step) {
    upper += step;
    lower += step;
  }
};

template <typename Product>
using TileFunction = void (*)(const TileArgs<Product>&);

#if defined(ATTN_EXT_NEON)
// c += lane `Lane` of a, times b. By name, as GCC would make a vector of each lane first, and has no
// registers left for these.
template <typename Product, int Lane>
ATTN_EXT_INLINE void add_lane_product(Vec<typename Product::Operand> a, Vec<typename Product::Operand> b,
                                      Vec<typename Product::Accum>& c) {
  if constexpr (Product::kDepth == 2) {
    __asm__("bfdot %0.4s, %1.8h, %2.2h[%3]" : "+w"(c) : "w"(b), "w"(a), "i"(Lane));
  } else if constexpr (sizeof(typename Product::Operand) == 4) {
    __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(c) : "w"(b), "w"(a), "i"(Lane));
  } else {
    __asm__("fmla %0.2d, %1.2d, %2.d[%3]" : "+w"(c) : "w"(b), "w"(a), "i"(Lane));
  }
}

// *p in the first lane.
template <typename T>
ATTN_EXT_INLINE Vec<T> load_first_lane(const T* p) {
  Vec<T> v;
  if constexpr (sizeof(T) == 4) {
    __asm__("ldr %s0, %1" : "=w"(v) : "m"(*p));
  } else {
    __asm__("ldr %d0, %1" : "=w"(v) : "m"(*p));
  }
  return v;
}

// One step along the depth, whose elements of the left rows are lane `Lane` of `left`. Sums, these and one
// vector of the right side fill the registers: no compiler is to load the next one early.
template <typename Product, int Lane, int Rows, int Vectors>
ATTN_EXT_INLINE void multiply_step(const Vec<typename Product::Operand> (&left)[Rows],
                                   const typename Product::Operand* right,
                                   Vec<typename Product::Accum> (&sums)[Rows][Vectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    const Vec<typename Product::Operand> row = load(right + v * kLanes<typename Product::Operand>);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) add_lane_product<Product, Lane>(left[r], row, sums[r][v]);
    __asm__ volatile("" ::: "memory");
  }
}

template <typename Product, int Rows, int Vectors, int... Lane>
ATTN_EXT_INLINE void multiply_steps(const Vec<typename Product::Operand> (&left)[Rows],
                                    const typename Product::Operand* right, int64_t right_stride,
                                    Vec<typename Product::Accum> (&sums)[Rows][Vectors],
                                    std::integer_sequence<int, Lane...>) {
  (multiply_step<Product, Lane>(left, right + Lane * right_stride, sums), ...);
}

// sums += left . right. A multiply-add takes its element out of a vector: where rows lie along the depth, one
// load of each serves as many steps as a vector has lanes.
template <typename Product, int Rows, int Vectors, bool Half>
ATTN_EXT_INLINE void multiply_tile(const TileArgs<Product>& args,
                                   Vec<typename Product::Accum> (&sums)[Rows][Vectors],
                                   [[maybe_unused]] HalfVec<typename Product::Accum> (&halves)[Rows]) {
  static_assert(!Half);
  using Operand = typename Product::Operand;
  constexpr int kWidth = kLanes<Operand>;
  const Operand* left = args.left;
  const Operand* right = args.right;
  const int64_t left_stride = args.left_stride;
  const int64_t left_step = args.left_step;
  const int64_t right_stride = args.right_stride;
  Vec<Operand> elements[Rows];
  int64_t k = args.depth;
  for (; left_step == 1 && k >= kWidth; k -= kWidth) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) elements[r] = load(left + r * left_stride);
    multiply_steps<Product>(elements, right, right_stride, sums, std::make_integer_sequence<int, kWidth>{});
    left += kWidth;
    right += kWidth * right_stride;
  }
  for (; k > 0; --k) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) elements[r] = load_first_lane(left + r * left_stride);
    multiply_step<Product, 0>(elements, right, sums);
    left += left_step;
    right += right_stride;
  }
}
#else
// sums += left . right; Half: n = (Vectors + 1/2) lanes, the last in `halves`, and the last of `sums` is not
// used.
template <typename Product, int Rows, int Vectors, bool Half>
ATTN_EXT_INLINE void multiply_tile(const TileArgs<Product>& args,
                                   Vec<typename Product::Accum> (&sums)[Rows][Vectors + Half],
                                   [[maybe_unused]] HalfVec<typename Product::Accum> (&halves)[Rows]) {
  using Operand = typename Product::Operand;
  constexpr int kWidth = kLanes<Operand>;
  TileRowsOf<const Operand> left(args.left, args.left_stride, Rows);
  const Operand* right = args.right;
  const int64_t left_step = args.left_step;
  const int64_t right_stride = args.right_stride;
  for (int64_t k = args.depth; k > 0; --k) {
    Vec<Operand> row[Vectors + Half];
    [[maybe_unused]] HalfVec<Operand> half;
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) row[v] = load(right + v * kWidth);
    if constexpr (Half) half = load_half(right + Vectors * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const Vec<Operand> element = broadcast(*left[r]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = Product::step(element, row[v], sums[r][v]);
      if constexpr (Half) halves[r] = Product::step(lower_half<Operand>(element), half, halves[r]);
    }
    left.advance(left_step);
    right += right_stride;
  }
}
#endif

// Half: the upper half of the last vector of `out` becomes 0.
template <typename Product, int Rows, int Vectors, bool Half, bool Carry>
void tile_product(const TileArgs<Product>& args) {
  using Accum = typename Product::Accum;
  constexpr int kWidth = kLanes<Accum>;
  const TileRowsOf<Accum> out(args.out, args.out_stride, Rows);
  Vec<Accum> sums[Rows][Vectors + Half];
  HalfVec<Accum> halves[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const Accum* row = out[r];
    const Accum carry = Carry && args.carry != nullptr ? args.carry[r] : static_cast<Accum>(1);
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = Carry ? load(row + v * kWidth) * carry : Vec<Accum>{};
    halves[r] = Carry && Half ? load_half(row + Vectors * kWidth) * carry : HalfVec<Accum>{};
  }
  multiply_tile<Product, Rows, Vectors, Half>(args, sums, halves);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out[r] + v * kWidth, sums[r][v]);
    if constexpr (Half) store(out[r] + Vectors * kWidth, with_zeros(halves[r]));
  }
}

// Columns of a product are counted in these: half vectors where the instruction set has them.
constexpr int kStepsOfVector = kHasHalfVectors ? 2 : 1;
template <typename Accum>
constexpr int kColumnStep = kLanes<Accum> / kStepsOfVector;

template <typename Product, bool Carry>
struct TileTable {
  static constexpr int kSteps = kTileVectors * kStepsOfVector;
  static constexpr int kTallSteps = kTallTileVectors * kStepsOfVector;
  TileFunction<Product> of[kRegisterTileRows][kSteps] = {};
  TileFunction<Product> tall[kTallSteps + 1] = {};

  template <int... Row>
  constexpr explicit TileTable(std::integer_sequence<int, Row...>) {
    (set_row<Row>(std::make_integer_sequence<int, kSteps>{}), ...);
    set_tall(std::make_integer_sequence<int, kTallSteps>{});
  }
  template <int... Step>
  constexpr void set_tall(std::integer_sequence<int, Step...>) {
    ((tall[Step] = tile_product<Product, kTallTileRows, (Step + 1) / kStepsOfVector,
                                (Step + 1) % kStepsOfVector != 0, Carry>),
     ...);
  }
  template <int Row, int... Step>
  constexpr void set_row(std::integer_sequence<int, Step...>) {
    ((of[Row][Step] = tile_product<Product, Row + 1, (Step + 1) / kStepsOfVector,
                                   (Step + 1) % kStepsOfVector != 0, Carry>),
     ...);
  }
};

template <typename Product, bool Carry>
constexpr TileTable<Product, Carry> kTileProducts{std::make_integer_sequence<int, kRegisterTileRows>{}};

// The product of so many rows and columns, to be called with its TileArgs: of the vectors' registers, or
// (amx.h) of others.
template <typename Product, bool Carry>
struct TileOf {
  TileFunction<Product> function;

  TileOf(int64_t rows, int64_t columns) {
    const TileTable<Product, Carry>& table = kTileProducts<Product, Carry>;
    const int64_t step = columns / kColumnStep<typename Product::Accum> - 1;
    function = rows == kTallTileRows ? table.tall[step] : table.of[rows - 1][step];
  }
  ATTN_EXT_INLINE void operator()(const TileArgs<Product>& args) const { function(args); }
};

// Rows of the highest tile of so many columns.
template <typename Product>
ATTN_EXT_INLINE int64_t tile_height(int64_t columns) {
  const bool tall = Product::kInRegisters && columns <= kTallTileVectors * kLanes<typename Product::Accum>;
  return tall ? kTallTileRows : Product::kTileRows;
}

// For 1 <= rows <= Product::kTileRows, or the very tile_height(columns); columns in whole steps of at most
// kTileVectors vectors.
template <typename Product, bool Carry>
ATTN_EXT_INLINE TileOf<Product, Carry> tile_function(int64_t rows, int64_t columns) {
  return {rows, columns};
}

// What a task holds while it makes products.
template <typename Product>
struct TaskOf {};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
