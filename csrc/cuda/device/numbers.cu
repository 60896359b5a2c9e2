// What a block's threads hold in registers.
//
// A block holds lines of queries or keys, each of its warps 16 of them, and lines of the other kind pass by,
// 64 at a time. Defined from outside: HELD, how many are held.

constexpr int kHeld = HELD, kPassing = 64, kThreads = kHeld / 16 * 32;

/// Of a warp's 16 lines `columns` numbers, in blocks of 8: a thread has two of each in lines g and g + 8.
template <int columns>
struct Numbers {
  float at[columns / 8][4];
};

/// Calls `function` with block and element, of which the compiler knows both.
template <int columns, class Function>
DEVICE void each_element(Function function) {
#pragma unroll
  for (int block = 0; block < columns / 8; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      function(block, i);
    }
  }
}

template <int columns>
DEVICE void clear(Numbers<columns>& numbers) {
  each_element<columns>([&](int block, int i) { numbers.at[block][i] = 0.0f; });
}

/// Line, of those that are held, and column of element i of a block.
DEVICE int line_at(int i) {
  return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
}
DEVICE int column_at(int block, int i) {
  return block * 8 + threadIdx.x % 4 * 2 + i % 2;
}

/// Numbers rounded, as the left side of a product.
template <int inner>
struct Rounded {
  u32 at[inner / 16][4];
};

template <int inner>
DEVICE Rounded<inner> rounded(const Numbers<inner>& numbers) {
  Rounded<inner> result;
#pragma unroll
  for (int k = 0; k < inner / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&block)[4] = numbers.at[2 * k + i / 2];
      result.at[k][i] = pack(block[i % 2 * 2], block[i % 2 * 2 + 1]);
    }
  }
  return result;
}
