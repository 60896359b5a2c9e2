// Whole products of matrices, tile by tile.
#pragma once

#include "pack.h"
#include "product.h"
#include "scheme.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// out (rows, columns) (+)= left (rows, depth) . right (depth, columns)
template <typename Product>
struct MultiplyArgs {
  using Operand = typename Product::Operand;
  int64_t rows, columns, depth;  // depth in operands
  const Operand* left;
  int64_t left_stride;    // from row to row
  int64_t left_step = 1;  // from one step along the depth to the next
  Operands<Operand> right;
  int64_t right_width;  // of its panels
  typename Product::Accum* out;
  int64_t out_stride;  // in whole vectors
};

template <typename Product, bool Carry>
void multiply(const MultiplyArgs<Product>& m) {
  const int64_t tiles = ceil_div(m.rows, Product::kTileRows);
  // Of nearly equal height, as a low one waits for itself; outside of registers whole ones, which cost least.
  const auto first_row = [&](int64_t tile) {
    return Product::kInRegisters ? tile * m.rows / tiles : smaller(tile * Product::kTileRows, m.rows);
  };
  TileArgs<Product> args{};
  args.depth = m.depth;
  args.left_stride = m.left_stride;
  args.left_step = m.left_step;
  args.right_stride = m.right.row_stride;
  args.out_stride = m.out_stride;
  for (int64_t column = 0; column < m.columns; column += m.right_width) {
    const int64_t columns =
        round_up(smaller(m.right_width, m.columns - column), kColumnStep<typename Product::Accum>);
    args.right = m.right.data + column / m.right_width * m.right.panel_stride;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t row = first_row(tile);
      args.left = m.left + row * m.left_stride;
      args.out = m.out + row * m.out_stride + column;
      tile_function<Product, Carry>(first_row(tile + 1) - row, columns)(args);
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
