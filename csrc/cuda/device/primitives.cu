// What the kernels say in the machine's own words. tests/csrc/gpu.h has the same for a machine without a GPU.

#define DEVICE __device__ __forceinline__
#define kInfinity __int_as_float(0x7f800000)
#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(HELD * 2, blocks)

DEVICE u16* shared_memory() {
  extern __shared__ __align__(1024) u16 shared[];
  return shared;
}

/// (As a product of u64 it would cost an addition more.)
DEVICE u64 wide_product(u32 a, u32 b) {
  u64 product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

/// Subnormal results are 0: to keep them would cost four instructions more.
DEVICE float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

DEVICE float reciprocal(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
}

DEVICE u32 address_of(const void* shared) {
  return (u32)__cvta_generic_to_shared(shared);
}

/// Into shared memory, in its own time; zeros where there is nothing.
DEVICE void copy_16_bytes(u16* to, const u16* from, int there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address_of(to)), "l"(from),
               "r"(there ? 16 : 0));
}

DEVICE void copy_4_bytes(void* to, const void* from, int there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address_of(to)), "l"(from),
               "r"(there ? 4 : 0));
}

DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Four matrices of 8 rows of 16 bytes; lane l names row l % 8 of matrix l / 8 and gets two numbers of row l
/// / 4 of each.
DEVICE void load_matrices(u32 (&r)[4], const u16* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address_of(shared)));
}

/// The same, of each the two numbers of column l / 4.
DEVICE void load_matrices_transposed(u32 (&r)[4], const u16* shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address_of(shared)));
}

/// c += a b of 16 x 16 and 16 x 8 numbers.
DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if IS_BFLOAT16
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE u32 pack(float low, float high) {
  u32 both;
#if IS_BFLOAT16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
  return both;
}

DEVICE float unpack(u16 number) {
#if IS_BFLOAT16
  return __uint_as_float((u32)number << 16);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number));
  return wide;
#endif
}
