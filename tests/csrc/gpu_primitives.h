// csrc/cuda/device/primitives.cu, by gpu.h; read after tile_params.h, once for each IS_BFLOAT16.

inline u16* shared_memory() {
  return reinterpret_cast<u16*>(gpu::running->shared.data());
}

inline u64 wide_product(u32 a, u32 b) {
  return static_cast<u64>(a) * b;
}

inline float power_of_two(float x) {
  return std::exp2(x);
}

inline float reciprocal(float x) {
  return 1.0F / x;
}

inline u32 address_of(const void* shared) {
  return static_cast<u32>(static_cast<const u8*>(shared) - gpu::running->shared.data());
}

/// In the thread's own time.
inline void copy_bytes(void* to, const void* from, size_t bytes, int there) {
  gpu::self().copies.begin([=] {
    if (there) {
      std::memcpy(to, from, bytes);
    } else {
      std::memset(to, 0, bytes);
    }
  });
}
inline void copy_16_bytes(u16* to, const u16* from, int there) {
  copy_bytes(to, from, 16, there);
}
inline void copy_4_bytes(void* to, const void* from, int there) {
  copy_bytes(to, from, 4, there);
}

inline void wait_for_copies() {
  gpu::self().copies.end_group();
  gpu::self().copies.wait(0);
}

inline float unpack(u16 number) {
  return IS_BFLOAT16 ? gpu::from_bfloat16(number) : gpu::from_half(number);
}

inline u32 pack(float low, float high) {
  const auto narrow = [](float x) -> u32 { return IS_BFLOAT16 ? gpu::to_bfloat16(x) : gpu::to_half(x); };
  return narrow(low) | narrow(high) << 16;
}

/// A lane gets of each matrix two numbers, of what `row` and `column` of a pair name for it.
template <class Row, class Column>
void load_four(u32 (&r)[4], const u16* shared, Row row, Column column) {
  const auto& given = gpu::exchange([&](gpu::Exchange& to) { to.addresses[gpu::lane()] = shared; });
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto number = [&](int i) -> u32 {
      return static_cast<const u16*>(given.addresses[matrix * 8 + row(i)])[column(i)];
    };
    r[matrix] = number(0) | number(1) << 16;
  }
}

inline void load_matrices(u32 (&r)[4], const u16* shared) {
  const int lane = gpu::lane();
  load_four(
      r, shared, [&](int) { return lane / 4; }, [&](int i) { return lane % 4 * 2 + i; });
}

inline void load_matrices_transposed(u32 (&r)[4], const u16* shared) {
  const int lane = gpu::lane();
  load_four(
      r, shared, [&](int i) { return lane % 4 * 2 + i; }, [&](int) { return lane / 4; });
}

/// A lane has of a the rows g and g + 8 at columns 2 t, 2 t + 1 and 8 beyond, of b the columns g at rows of
/// these numbers, and of c rows g and g + 8 at columns 2 t and 2 t + 1, with g = lane / 4 and t = lane % 4.
inline void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const int lane = gpu::lane();
  const auto& given =
      gpu::exchange([&](gpu::Exchange& to) { to.numbers[lane] = {a[0], a[1], a[2], a[3], b0, b1}; });
  const auto number = [&](int of, int word, int half) {
    return unpack(static_cast<u16>(given.numbers[of][word] >> (16 * half)));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = 0.0F;
    for (int k = 0; k < 16; ++k) {
      const int t = k % 8 / 2;
      sum += number(row % 8 * 4 + t, row / 8 + k / 8 * 2, k % 2) * number(column * 4 + t, 4 + k / 8, k % 2);
    }
    c[i] += sum;
  }
}
