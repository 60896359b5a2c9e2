// Products of tiles on the matrix units that every GPU since Ampere has, a warp at a time; after numbers.cu.

constexpr int kPad = 8;  // keeps lines of a tile in different banks

/// Numbers of a tile in shared memory.
DEVICE constexpr int tile_size(int lines, int columns) {
  return lines * (columns + kPad);
}

/// Where eight numbers of a line lie in a tile.
template <int lines, int columns>
DEVICE int chunk_place(int line, int chunk) {
  return line * (columns + kPad) + chunk * 8;
}

/// How far lines lie apart.
template <int columns>
DEVICE constexpr int line_distance() {
  return columns + kPad;
}

DEVICE void wait_for_tiles() {
  wait_for_copies();
  __syncthreads();
}

/// Products are done when they have been called.
template <int columns>
DEVICE void finish(Numbers<columns>&) {}

/// sum = left (kHeld, inner) right^T (columns, inner), of a warp its lines.
template <int inner, int columns>
DEVICE void start_product(Numbers<columns>& sum, const u16* left, const u16* right) {
  const int lane = threadIdx.x % 32;
  const u16* a_place = left + (threadIdx.x / 32 * 16 + lane % 16) * (inner + kPad) + lane / 16 * 8;
  const u16* b_place = right + (lane / 16 * 8 + lane % 8) * (inner + kPad) + lane / 8 % 2 * 8;
  clear(sum);
#pragma unroll
  for (int k = 0; k < inner; k += 16) {
    u32 a[4];
    load_matrices(a, a_place + k);
#pragma unroll
    for (int pair = 0; pair < columns / 16; ++pair) {
      u32 b[4];
      load_matrices(b, b_place + pair * 16 * (inner + kPad) + k);
      multiply_add(sum.at[2 * pair], a, b[0], b[1]);
      multiply_add(sum.at[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

/// sum += left (16 lines, inner) right (inner, columns).
template <int inner, int columns>
DEVICE void start_adding_product(Numbers<columns>& sum, const Rounded<inner>& left, const u16* right) {
  const int lane = threadIdx.x % 32;
  const u16* place = right + lane % 16 * (columns + kPad) + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < inner / 16; ++k) {
#pragma unroll
    for (int pair = 0; pair < columns / 16; ++pair) {
      u32 b[4];
      load_matrices_transposed(b, place + k * 16 * (columns + kPad) + pair * 16);
      multiply_add(sum.at[2 * pair], left.at[k], b[0], b[1]);
      multiply_add(sum.at[2 * pair + 1], left.at[k], b[2], b[3]);
    }
  }
}
