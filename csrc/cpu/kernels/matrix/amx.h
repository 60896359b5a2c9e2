// The product of blocks on the matrix unit (AMX) of a processor: 16 rows x 16 columns of sums in each of four
// of its tile registers, 32 bfloat16 along the depth at a time. Where the processor has none, the same blocks
// are made by the register tiles of vectors, so that this instruction set can be run, and tested, there.
//   out (rows, n) = carry * out + left (rows, depth) . right (depth, n)      rows <= 16, n <= 4 lanes
// Each step along the depth adds sums of its own to what there is: a row's bits depend on where steps begin,
// which is therefore always a multiple of 32 elements, and on nothing else.
#pragma once

#include "../interface/matrix_unit.h"
#include "product.h"
#include "rows_ahead.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

#if defined(ATTN_EXT_AMX)

struct AmxProduct : BFloat16Product {
  static constexpr int kTileRows = 16;
  static constexpr int kDepthStep = 16;
  static constexpr bool kInRegisters = false;
  // The unit falls asleep after half a microsecond without a product, and takes a third of one to wake up: so
  // where vectors wait for memory between products, one is made now and then, of whatever lies in the
  // registers. Where they multiply all the time none is: they do so at half their rate for 80 ns after it.
  static ATTN_EXT_INLINE void stay_awake() {
    if (matrix_unit_is_there()) asm volatile("tdpbf16ps %tmm5, %tmm4, %tmm3");
  }
};

namespace amx_unit {

constexpr int kColumns = 16;

// What the registers hold, as LDTILECFG reads it: 0 to 3 the sums, 4 and up the operands. Only the rows of
// the sums and of the left operand vary.
struct alignas(64) Configuration {
  uint8_t palette = 1;
  uint8_t zero[15] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16];
  explicit Configuration(uint8_t n) : rows{n, n, n, n, n, 16, 16} {}
};

ATTN_EXT_INLINE void configure(int rows) {
  const Configuration configuration(static_cast<uint8_t>(rows));
  asm volatile("ldtilecfg %0" ::"m"(configuration));
}

template <int Tile>
ATTN_EXT_INLINE void clear() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Tile>
ATTN_EXT_INLINE void load_tile(const void* p, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(Tile) : "memory");
}

template <int Tile>
ATTN_EXT_INLINE void store_tile(void* p, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(Tile) : "memory");
}

// sums += left . right
template <int Sums, int Left, int Right>
ATTN_EXT_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(Right), "i"(Left), "i"(Sums));
}

template <int Vector, int Vectors, typename Body>
ATTN_EXT_INLINE void each_vector(Body body) {
  if constexpr (Vector < Vectors) {
    body(std::integral_constant<int, Vector>{});
    each_vector<Vector + 1, Vectors>(body);
  }
}

// The registers are configured for the block's rows.
template <int Vectors, bool Carry>
void multiply_block(const TileArgs<AmxProduct>& args) {
  const int64_t out_bytes = args.out_stride * static_cast<int64_t>(sizeof(float));
  const int64_t left_bytes = args.left_stride * static_cast<int64_t>(sizeof(uint32_t));
  const int64_t right_bytes = args.right_stride * static_cast<int64_t>(sizeof(uint32_t));
  each_vector<0, Vectors>([&](auto v) __attribute__((always_inline)) {
    constexpr int kVector = decltype(v)::value;
    if constexpr (Carry) {
      load_tile<kVector>(args.out + kVector * kColumns, out_bytes);
    } else {
      clear<kVector>();
    }
  });
  const uint32_t* left = args.left;
  const uint32_t* right = args.right;
  for (int64_t k = args.depth; k > 0; k -= AmxProduct::kDepthStep) {
    load_tile<4>(left, left_bytes);
    each_vector<0, Vectors>([&](auto v) __attribute__((always_inline)) {
      constexpr int kVector = decltype(v)::value, kRight = 5 + kVector % 2;
      load_tile<kRight>(right + kVector * kColumns, right_bytes);
      multiply_tiles<kVector, 4, kRight>();
    });
    left += AmxProduct::kDepthStep;
    right += AmxProduct::kDepthStep * args.right_stride;
  }
  each_vector<0, Vectors>([&](auto v) __attribute__((always_inline)) {
    constexpr int kVector = decltype(v)::value;
    store_tile<kVector>(args.out + kVector * kColumns, out_bytes);
  });
}

template <bool Carry>
inline TileFunction<AmxProduct> block_function(int64_t columns) {
  constexpr TileFunction<AmxProduct> kOf[] = {multiply_block<1, Carry>, multiply_block<2, Carry>,
                                              multiply_block<3, Carry>, multiply_block<4, Carry>};
  return kOf[ceil_div(columns, kColumns) - 1];
}

// sums (16 rows, 16 columns) = rows (16, depth) . columns (depth, 16), the rows row_bytes apart, where they
// lie. Memory is asked for `ahead` meanwhile, if it asks. One tile at a time: what vectors do with its sums
// goes on beside the next, whose operands come from memory; of four tiles, with more steps waiting, nothing
// does.
struct RowsTile {
  const char* rows;
  int64_t row_bytes;
  const uint32_t* columns;
  int64_t depth;
  bool asks;
  LinesAhead ahead;
  alignas(64) float sums[kColumns][kColumns];
};

inline void multiply_rows(RowsTile& tile) {
  constexpr int64_t kRowBytes = kColumns * sizeof(float);
  clear<0>();
  const uint32_t* columns = tile.columns;
  const char* rows = tile.rows;
  for (int64_t k = 0; k < tile.depth; k += AmxProduct::kDepthStep, rows += kRowBytes) {
    if (tile.asks) tile.ahead.ask<kColumns, 1>(0, rows - tile.rows);
    load_tile<4>(columns, kRowBytes);
    load_tile<5>(rows, tile.row_bytes);
    multiply_tiles<0, 5, 4>();
    columns += AmxProduct::kDepthStep * kColumns;
  }
  store_tile<0>(tile.sums, kRowBytes);
}

// Four columns of a tile's sums, from `column` on, as vectors.
ATTN_EXT_INLINE void tile_columns(const RowsTile& tile, int64_t column, Vec<float> (&columns)[4]) {
  __m512 parts[4];  // of the rows i, 4 + i, 8 + i and 12 + i, four numbers each
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const auto of_row = [&](int row) __attribute__((always_inline)) {
      return _mm_load_ps(&tile.sums[row][column]);
    };
    __m512 part = _mm512_castps128_ps512(of_row(i));
    part = _mm512_insertf32x4(part, of_row(4 + i), 1);
    part = _mm512_insertf32x4(part, of_row(8 + i), 2);
    parts[i] = _mm512_insertf32x4(part, of_row(12 + i), 3);
  }
  const auto low = (__m512d)_mm512_unpacklo_ps(parts[0], parts[1]);
  const auto high = (__m512d)_mm512_unpackhi_ps(parts[0], parts[1]);
  const auto next_low = (__m512d)_mm512_unpacklo_ps(parts[2], parts[3]);
  const auto next_high = (__m512d)_mm512_unpackhi_ps(parts[2], parts[3]);
  columns[0] = (Vec<float>)_mm512_unpacklo_pd(low, next_low);
  columns[1] = (Vec<float>)_mm512_unpackhi_pd(low, next_low);
  columns[2] = (Vec<float>)_mm512_unpacklo_pd(high, next_high);
  columns[3] = (Vec<float>)_mm512_unpackhi_pd(high, next_high);
}

// While it lives, vectors treat numbers below the smallest normal one as the unit does: as 0.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlush); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned int kFlush = 0x8040;  // results, and operands
  const unsigned int saved_;
};

// The same by the register tiles of vectors.
template <bool Carry>
void multiply_in_vectors(const TileArgs<AmxProduct>& args, int64_t rows, int64_t columns) {
  if (args.depth % AmxProduct::kDepthStep != 0) __builtin_trap();  // the unit would read on
  for (int64_t row = 0; row < rows; row += BFloat16Product::kTileRows) {
    TileArgs<BFloat16Product> tile{};
    tile.depth = args.depth;
    tile.left = args.left + row * args.left_stride;
    tile.left_stride = args.left_stride;
    tile.right = args.right;
    tile.right_stride = args.right_stride;
    tile.out = args.out + row * args.out_stride;
    tile.out_stride = args.out_stride;
    tile.carry = args.carry == nullptr ? nullptr : args.carry + row;
    const int64_t count = smaller(BFloat16Product::kTileRows, rows - row);
    tile_function<BFloat16Product, Carry>(count, round_up(columns, kColumns))(tile);
  }
}

// A sum that is carried over is multiplied before the registers load it.
inline void carry_over(const TileArgs<AmxProduct>& args, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    if (args.carry[r] == 1) continue;
    const Vec<float> factor = broadcast(args.carry[r]);
    float* row = args.out + r * args.out_stride;
    for (int64_t c = 0; c < columns; c += kColumns) store(row + c, load(row + c) * factor);
  }
}

}  // namespace amx_unit

template <bool Carry>
struct TileOf<AmxProduct, Carry> {
  int64_t rows, columns;

  void operator()(const TileArgs<AmxProduct>& args) const {
    if (!matrix_unit_is_there()) return amx_unit::multiply_in_vectors<Carry>(args, rows, columns);
    if (Carry && args.carry != nullptr) amx_unit::carry_over(args, rows, columns);
    if (rows == AmxProduct::kTileRows) return amx_unit::block_function<Carry>(columns)(args);
    amx_unit::configure(static_cast<int>(rows));
    amx_unit::block_function<Carry>(columns)(args);
    amx_unit::configure(AmxProduct::kTileRows);
  }
};

// While a task of products runs, the registers are configured for whole blocks. Released, they cost the
// system nothing when it switches to another thread.
template <>
struct TaskOf<AmxProduct> {
  TaskOf() {
    if (matrix_unit_is_there()) amx_unit::configure(AmxProduct::kTileRows);
  }
  ~TaskOf() {
    if (matrix_unit_is_there()) asm volatile("tilerelease");
  }
  TaskOf(const TaskOf&) = delete;
  TaskOf& operator=(const TaskOf&) = delete;
};

#endif

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
