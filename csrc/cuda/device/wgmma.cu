// Products of tiles on the matrix units of Hopper, 128 threads at a time, which read tiles where they lie;
// after numbers.cu. HEAD_DIM and VALUE_DIM are 64 or 128.
//
// A tile lies in panels of 64 columns, a line of which is 128 bytes; eight lines make a square of eight by
// eight chunks, and chunk c of line r lies where c ^ r % 8 would ("128B swizzle"), at a multiple of 1024
// bytes.

constexpr int kPanel = 64;

/// Numbers of a tile in shared memory.
DEVICE constexpr int tile_size(int lines, int columns) {
  return lines * columns;
}

/// Where eight numbers of a line lie in a tile.
template <int lines, int columns>
DEVICE int chunk_place(int line, int chunk) {
  return chunk / 8 * lines * kPanel + line * kPanel + (chunk % 8 ^ line % 8) * 8;
}

/// How far lines lie apart, of a chunk that are a multiple of eight apart.
template <int columns>
DEVICE constexpr int line_distance() {
  return kPanel;
}

DEVICE void wait_for_tiles() {
  wait_for_copies();
  show_copies_to_matrix_units();
  __syncthreads();
}

/// What the units are told of a tile: where it begins, how far panels lie apart, and that squares of eight
/// lines follow each other.
DEVICE u64 tile_at(const u16* place, int panel_bytes) {
  constexpr u64 kSquareBytes = 1024, kSwizzle = 1;
  return (address_of(place) & 0x3ffff) >> 4 | (u64)(panel_bytes >> 4) << 16 | (kSquareBytes >> 4) << 32 |
         kSwizzle << 62;
}

/// Of a tile, from so many numbers on: what changes is where it begins, in the lower half.
DEVICE u64 from_number(u64 tile, int numbers) {
  return tile >> 32 << 32 | ((u32)tile + (u32)(numbers / 8));
}

/// Products go on while a thread does other things: `sum` must be let alone until `finish(sum)`, which waits
/// for all of them.
template <int columns>
DEVICE void finish(Numbers<columns>& sum) {
  wait_for_products();
  settle(sum);
}

/// sum = left (kHeld, inner) right^T (columns, inner), of a warp its lines.
template <int inner, int columns>
DEVICE void start_product(Numbers<columns>& sum, const u16* left, const u16* right) {
  const int group = kThreads == 128 ? 0 : same_in_warp(threadIdx.x / 128);
  const u64 lines = tile_at(left + group * 64 * kPanel, 0), columns_of_right = tile_at(right, 0);
  begin_products(sum);
#pragma unroll
  for (int k = 0; k < inner; k += 16) {
    const int panel = k / kPanel, within = k % kPanel;
    multiply_tiles(sum, from_number(lines, panel * kHeld * kPanel + within),
                   from_number(columns_of_right, panel * columns * kPanel + within), k > 0);
  }
  end_products();
}

/// sum += left (16 lines, inner) right (inner, columns).
template <int inner, int columns>
DEVICE void start_adding_product(Numbers<columns>& sum, const Rounded<inner>& left, const u16* right) {
  const u64 tile = tile_at(right, inner * kPanel * 2);
  begin_products(sum);
#pragma unroll
  for (int k = 0; k < inner / 16; ++k) {
    multiply_rounded(sum, left.at[k], from_number(tile, k * 16 * kPanel));
  }
  end_products();
}
