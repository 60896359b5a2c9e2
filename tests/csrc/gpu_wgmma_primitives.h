// csrc/cuda/device/wgmma_primitives.cu, by gpu.h; read after numbers.cu.

inline void show_copies_to_matrix_units() {}

/// Number at `column` of line `line` of what a tile's description says; across: the other way around.
inline float number_at(u64 tile, int line, int column, bool across) {
  const auto bytes = [&](int shift) { return static_cast<u32>(tile >> shift & 0x3fff) << 4; };
  const u32 start = bytes(0), panels_apart = bytes(16), squares_apart = bytes(32);
  u32 at = across ? start + line / 64 * panels_apart + column / 8 * squares_apart + column % 8 * 128 +
                        line % 64 * 2
                  : start + line / 8 * squares_apart + line % 8 * 128 + column * 2;
  at ^= (at >> 7 & 7) << 4;
  u16 number;
  std::memcpy(&number, &gpu::running->shared.at(at), 2);
  return unpack(number);
}

inline int same_in_warp(int number) {
  const auto& given =
      gpu::exchange([&](gpu::Exchange& to) { to.words[gpu::lane()] = static_cast<u32>(number); });
  return static_cast<int>(given.words[0]);
}

template <int columns>
void begin_products(Numbers<columns>&) {}
template <int columns>
void settle(Numbers<columns>&) {}
inline void end_products() {
  gpu::self().products.end_group();
}
inline void wait_for_products() {
  gpu::self().products.wait(0);
}

template <int columns, class Left>
void multiply(Numbers<columns>& c, u64 b, bool across, Left left) {
  for (int block = 0; block < columns / 8; ++block) {
    for (int i = 0; i < 4; ++i) {
      float sum = 0.0F;
      for (int k = 0; k < 16; ++k) {
        sum += left(i, k) * number_at(b, column_at(block, i), k, across);
      }
      c.at[block][i] += sum;
    }
  }
}

template <int columns>
void multiply_tiles(Numbers<columns>& c, u64 a, u64 b, int adds) {
  gpu::self().products.begin([&c, a, b, adds] {
    if (!adds) {
      clear(c);
    }
    multiply(c, b, false, [&](int i, int k) { return number_at(a, line_at(i) % 64, k, false); });
  });
}

template <int columns>
void multiply_rounded(Numbers<columns>& c, const u32 (&a)[4], u64 b) {
  const int lane = gpu::lane();
  const auto& given = gpu::exchange([&](gpu::Exchange& to) { to.numbers[lane] = {a[0], a[1], a[2], a[3]}; });
  std::array<std::array<u32, 6>, 4> four;  // of the lanes that have this one's rows
  std::copy_n(given.numbers.begin() + lane / 4 * 4, 4, four.begin());
  gpu::self().products.begin([&c, four, b] {
    multiply(c, b, true, [&](int i, int k) {
      const u32 word = four[k % 8 / 2][i / 2 + k / 8 * 2];
      return unpack(static_cast<u16>(word >> (k % 2 * 16)));
    });
  });
}
