// What the kernel tests share: values of every dtype, memory that ends at a guard page, Philox, and a driver.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "table.h"

namespace attn_ext::test {

using cpu::ScalarKind;

inline int failures = 0;

inline void check(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 20) std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

inline int64_t size_of(ScalarKind kind) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return 8;
    case ScalarKind::kFloat32:
      return 4;
    case ScalarKind::kBool:
      return 1;
    default:
      return 2;
  }
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline double half_to_double(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
}

inline uint16_t double_to_half(double x) {
  if (std::isnan(x)) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(x);
  if (a >= 65520) return sign | 0x7c00;
  if (a < std::ldexp(1.0, -14)) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(a, 24)));
  int exponent;
  std::frexp(a, &exponent);
  const auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(a, 11 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + mantissa - 1024));
}

inline double read(ScalarKind kind, const void* data, int64_t i) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return static_cast<const double*>(data)[i];
    case ScalarKind::kFloat32:
      return static_cast<const float*>(data)[i];
    case ScalarKind::kBFloat16:
      return from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
    case ScalarKind::kFloat16:
      return half_to_double(static_cast<const uint16_t*>(data)[i]);
    default:
      return static_cast<const uint8_t*>(data)[i];
  }
}

inline void write(ScalarKind kind, void* data, int64_t i, double x) {
  switch (kind) {
    case ScalarKind::kFloat64:
      static_cast<double*>(data)[i] = x;
      break;
    case ScalarKind::kFloat32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case ScalarKind::kBFloat16: {
      const uint32_t bits = bits_of(static_cast<float>(x));
      static_cast<uint16_t*>(data)[i] =
          std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
      break;
    }
    case ScalarKind::kFloat16:
      static_cast<uint16_t*>(data)[i] = double_to_half(x);
      break;
    default:
      static_cast<uint8_t*>(data)[i] = x != 0;
  }
}

// Memory whose last byte is the last before a page that cannot be touched.
class GuardedMemory {
 public:
  explicit GuardedMemory(int64_t bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t body = (bytes + page - 1) / page * page;
    mapped_ = static_cast<size_t>(body + page);
    base_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + body, static_cast<size_t>(page), PROT_NONE) != 0)
      std::abort();
    data_ = base_ + body - bytes;
  }
  ~GuardedMemory() { munmap(base_, mapped_); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  void* data() const { return data_; }

 private:
  size_t mapped_;
  char* base_;
  char* data_;
};

// A tensor of four dims, (batch, head, row, column), laid out in the order of `layout` ("bhrc" is dense
// row-major). A size of 1 where the logical size is larger broadcasts: its stride is 0.
struct Tensor {
  ScalarKind kind = ScalarKind::kNone;
  int64_t sizes[4] = {0, 0, 0, 0};
  cpu::TensorView view;
  std::shared_ptr<GuardedMemory> memory;

  Tensor() = default;
  Tensor(ScalarKind k, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
         const char* layout = "bhrc")
      : kind(k), sizes{batch, heads, rows, columns} {
    int64_t strides[4], stride = 1;
    for (int i = 3; i >= 0; --i) {
      const int dim = layout[i] == 'b' ? 0 : layout[i] == 'h' ? 1 : layout[i] == 'r' ? 2 : 3;
      strides[dim] = stride;
      stride *= sizes[dim];
    }
    memory = std::make_shared<GuardedMemory>(stride * size_of(kind));
    view = {memory->data(), nullptr, strides[0], strides[1], strides[2], strides[3]};
    if (batch == 1) view.batch_stride = 0;
    if (heads == 1) view.head_stride = 0;
  }

  int64_t index(int64_t b, int64_t h, int64_t r, int64_t c) const {
    return b * view.batch_stride + h * view.head_stride + r * view.row_stride + c * view.column_stride;
  }
  double at(int64_t b, int64_t h, int64_t r, int64_t c) const {
    return read(kind, view.data, index(b, h, r, c));
  }
  void set(int64_t b, int64_t h, int64_t r, int64_t c, double x) {
    write(kind, view.data, index(b, h, r, c), x);
  }

  template <typename Value>
  void fill(Value value) {
    for (int64_t b = 0; b < sizes[0]; ++b)
      for (int64_t h = 0; h < sizes[1]; ++h)
        for (int64_t r = 0; r < sizes[2]; ++r)
          for (int64_t c = 0; c < sizes[3]; ++c) set(b, h, r, c, value());
  }

  // Makes dims of size 1 stand for any size.
  void broadcast_ones() {
    if (sizes[0] == 1) view.batch_stride = 0;
    if (sizes[1] == 1) view.head_stride = 0;
    if (sizes[2] == 1) view.row_stride = 0;
    if (sizes[3] == 1) view.column_stride = 0;
  }
};

inline uint32_t philox_draw(uint64_t seed, uint32_t batch, uint32_t head, uint32_t row, uint32_t column) {
  uint32_t c[4] = {(column >> 6) * 16 + (column & 15), row, head, batch};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0], p1 = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key1;
    c[0] = n0;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = n2;
    c[3] = static_cast<uint32_t>(p0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return c[(column >> 4) & 3];
}

inline int dtype_row(ScalarKind kind) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return cpu::kFloat64Kernels;
    case ScalarKind::kFloat32:
      return cpu::kFloat32Kernels;
    case ScalarKind::kBFloat16:
      return cpu::kBFloat16Kernels;
    default:
      return cpu::kFloat16Kernels;
  }
}

struct AlignedMemory {
  explicit AlignedMemory(int64_t bytes)
      : data(std::aligned_alloc(64, static_cast<size_t>((bytes + 127) / 64 * 64))) {
    std::memset(data, 0xff,
                static_cast<size_t>((bytes + 127) / 64 * 64));  // NaN: what is not written must not matter
  }
  ~AlignedMemory() { std::free(data); }
  AlignedMemory(const AlignedMemory&) = delete;
  AlignedMemory& operator=(const AlignedMemory&) = delete;
  void* data;
};

// The rounds of a forward call, as if by `threads` threads; tasks are taken from both ends to mix up their
// order.
inline cpu::ForwardPlan run_forward(const cpu::KernelTable& table, const cpu::ForwardParams& params,
                                    int threads) {
  const cpu::ForwardKernels& kernels = table.forward[dtype_row(params.shape.dtype)];
  cpu::ForwardPlan plan{};
  kernels.plan(params, threads, plan);
  AlignedMemory shared(plan.shared_bytes), scratch(plan.thread_bytes);
  const auto order = [&](int64_t i, int64_t count) {
    return threads > 1 && i % 2 ? count - 1 - i / 2 : threads > 1 ? i / 2 : i;
  };
  for (int64_t i = 0; i < plan.pack_tasks; ++i)
    kernels.pack(params, plan, order(i, plan.pack_tasks), shared.data);
  for (int64_t i = 0; i < plan.run_tasks; ++i) {
    kernels.run(params, plan, order(i, plan.run_tasks), shared.data, scratch.data);
  }
  for (int64_t i = 0; i < plan.finish_tasks; ++i) {
    kernels.finish(params, plan, order(i, plan.finish_tasks), shared.data, scratch.data);
  }
  return plan;
}

// The same for a backward call.
inline cpu::BackwardPlan run_backward(const cpu::KernelTable& table, const cpu::BackwardParams& params,
                                      int threads) {
  const cpu::BackwardKernels& kernels = table.backward[dtype_row(params.shape.dtype)];
  cpu::BackwardPlan plan{};
  kernels.plan(params, threads, plan);
  AlignedMemory shared(plan.shared_bytes), scratch(plan.thread_bytes);
  for (int64_t round = 0; round < plan.rounds; ++round) {
    const int64_t count = kernels.tasks(plan, round);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t task = threads == 1 ? i : i % 2 ? count - 1 - i / 2 : i / 2;
      kernels.run(params, plan, round, task, shared.data, scratch.data);
    }
  }
  return plan;
}

struct NamedTable {
  const char* name;
  const cpu::KernelTable* table;
};

// The instruction sets that this machine can run.
inline std::vector<NamedTable> runnable_tables() {
  std::vector<NamedTable> tables = {{"baseline", &cpu::baseline::kKernels}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back({"avx2", &cpu::avx2::kKernels});
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back({"avx512", &cpu::avx512::kKernels});
    if (__builtin_cpu_supports("avx512bf16")) tables.push_back({"avx512_bf16", &cpu::avx512_bf16::kKernels});
  }
#endif
  return tables;
}

}  // namespace attn_ext::test
