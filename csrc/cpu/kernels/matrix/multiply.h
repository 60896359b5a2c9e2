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

// Where tiles of rows begin, and how high they are: tall ones first, where there are such; then nearly equal,
// as a low one waits for itself. Outside of registers a tile of fewer rows than there can be costs more than
// a whole one, so that the last one goes back over rows that are made already, where making them once more
// changes nothing.
struct TileRows {
  int64_t begin, end;
};
template <typename Product, bool Carry>
struct RowTiles {
  int64_t rows, tall, height, higher;  // rows of tall tiles; then the first `higher` tiles have a row more

  RowTiles(int64_t count, int64_t columns) : rows(count), tall(0), height(Product::kTileRows), higher(0) {
    if (!Product::kInRegisters || count == 0) return;
    if (tile_height<Product>(columns) > height) {
      tall = round_down(count, kTallTileRows);
      if (tall > 0 && count > tall && count - tall < kTallTileRows / 3) tall -= kTallTileRows;
    }
    const auto all = static_cast<uint32_t>(count - tall);  // what divides these is quicker
    if (all == 0) return;
    const uint32_t tiles = (all + Product::kTileRows - 1) / Product::kTileRows;
    height = all / tiles;
    higher = all % tiles;
  }
  TileRows next(int64_t begin) const {
    if (begin < tall) return {begin, begin + kTallTileRows};
    const int64_t end = begin + height + (begin - tall < higher * (height + 1));
    if (end <= rows) return {begin, end};
    return {Carry || rows < height ? begin : rows - height, rows};
  }
};

template <typename Product, bool Carry>
void multiply(const MultiplyArgs<Product>& m) {
  TileArgs<Product> args{};
  args.depth = m.depth;
  args.left_stride = m.left_stride;
  args.left_step = m.left_step;
  args.right_stride = m.right.row_stride;
  args.out_stride = m.out_stride;
  args.right = m.right.data;
  for (int64_t column = 0; column < m.columns; column += m.right_width) {
    const int64_t columns =
        round_up(smaller(m.right_width, m.columns - column), kColumnStep<typename Product::Accum>);
    const RowTiles<Product, Carry> tiles(m.rows, columns);
    for (int64_t row = 0; row < m.rows;) {
      const TileRows place = tiles.next(row);
      args.left = m.left + place.begin * m.left_stride;
      args.out = m.out + place.begin * m.out_stride + column;
      tile_function<Product, Carry>(place.end - place.begin, columns)(args);
      row = place.end;
    }
    args.right += m.right.panel_stride;
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
