// What wgmma.cu says in the machine's own words; after numbers.cu.

#if IS_BFLOAT16
#define ATTN_EXT_TYPES "f32.bf16.bf16"
#else
#define ATTN_EXT_TYPES "f32.f16.f16"
#endif

// The numbers of eight blocks of eight columns, as operands.
#define ATTN_EXT_BLOCK(c, b) "+f"(c.at[b][0]), "+f"(c.at[b][1]), "+f"(c.at[b][2]), "+f"(c.at[b][3])
#define ATTN_EXT_BLOCKS(c, b)                                                                         \
  ATTN_EXT_BLOCK(c, b), ATTN_EXT_BLOCK(c, b + 1), ATTN_EXT_BLOCK(c, b + 2), ATTN_EXT_BLOCK(c, b + 3), \
      ATTN_EXT_BLOCK(c, b + 4), ATTN_EXT_BLOCK(c, b + 5), ATTN_EXT_BLOCK(c, b + 6), ATTN_EXT_BLOCK(c, b + 7)
#define ATTN_EXT_FIRST_32                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ATTN_EXT_LAST_32                                                                                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/// Of a number that all lanes have in common, which the compiler need not believe otherwise.
DEVICE int same_in_warp(int number) {
  return __shfl_sync(0xffffffffu, number, 0);
}

/// What copies have written, to the matrix units as well.
DEVICE void show_copies_to_matrix_units() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Nothing that is done to numbers may be moved over this.
DEVICE void settle(Numbers<64>& c) {
  asm volatile("" : ATTN_EXT_BLOCKS(c, 0)::"memory");
}
DEVICE void settle(Numbers<128>& c) {
  asm volatile("" : ATTN_EXT_BLOCKS(c, 0), ATTN_EXT_BLOCKS(c, 8)::"memory");
}

template <int columns>
DEVICE void begin_products(Numbers<columns>& c) {
  settle(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

DEVICE void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

DEVICE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/// c = a b^T, or with `adds` c += a b^T: 64 lines and `columns` lines of 16 numbers in shared memory.
DEVICE void multiply_tiles(Numbers<64>& c, u64 a, u64 b, int adds) {
  asm volatile(
      "{ .reg .pred adds; setp.ne.b32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16." ATTN_EXT_TYPES " {" ATTN_EXT_FIRST_32
      "}, %32, %33, adds, 1, 1, 0, 0; }"
      : ATTN_EXT_BLOCKS(c, 0)
      : "l"(a), "l"(b), "r"(adds));
}
DEVICE void multiply_tiles(Numbers<128>& c, u64 a, u64 b, int adds) {
  asm volatile(
      "{ .reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16." ATTN_EXT_TYPES " {" ATTN_EXT_FIRST_32 ", " ATTN_EXT_LAST_32
      "}, %64, %65, adds, 1, 1, 0, 0; }"
      : ATTN_EXT_BLOCKS(c, 0), ATTN_EXT_BLOCKS(c, 8)
      : "l"(a), "l"(b), "r"(adds));
}

/// c += a b: 64 lines of 16 numbers in registers, 16 lines of `columns` numbers in shared memory.
DEVICE void multiply_rounded(Numbers<64>& c, const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16." ATTN_EXT_TYPES " {" ATTN_EXT_FIRST_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : ATTN_EXT_BLOCKS(c, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
DEVICE void multiply_rounded(Numbers<128>& c, const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16." ATTN_EXT_TYPES " {" ATTN_EXT_FIRST_32
               ", " ATTN_EXT_LAST_32 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : ATTN_EXT_BLOCKS(c, 0), ATTN_EXT_BLOCKS(c, 8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
