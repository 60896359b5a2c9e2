// What the kernel tests share: values of every dtype, memory that ends at a guard page, Philox, and a driver.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#if defined(ATTN_EXT_KERNELS_POISON)
#include <sanitizer/asan_interface.h>
#endif

#include "kernel_sets.h"
#include "planned_call.h"
#include "turns.h"

namespace attn_ext::test {

using cpu::ScalarKind;

inline std::atomic<int> failures = 0;

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
  const int64_t in_steps = exponent == 0 ? mantissa : int64_t{1024 + mantissa} << (exponent - 1);
  return sign * static_cast<double>(in_steps) * 0x1p-24;
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

enum class Edge { kEnd, kStart };

// Memory between two pages that cannot be touched: its last byte is the last before a page, or its first byte
// the first of one. What is not written holds NaN, true or -1.
class GuardedMemory {
 public:
  explicit GuardedMemory(int64_t bytes, Edge edge = Edge::kEnd) : bytes_(static_cast<size_t>(bytes)) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t body = (bytes + page - 1) / page * page;
    mapped_ = static_cast<size_t>(body + 2 * page);
    base_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED ||
        (body > 0 && mprotect(base_ + page, static_cast<size_t>(body), PROT_READ | PROT_WRITE) != 0)) {
      std::abort();
    }
    std::memset(base_ + page, 0xff, static_cast<size_t>(body));
    data_ = base_ + page + (edge == Edge::kEnd ? body - bytes : 0);
  }
  ~GuardedMemory() { munmap(base_, mapped_); }
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_, mapped_;
  char* base_;
  char* data_;
};

// How a tensor lies in memory. `order` names its dims from the outermost to the innermost ("bhrc" is
// row-major); neighbours in the innermost lie `step` apart, and `gap` elements follow each run of it but the
// last.
struct Placement {
  const char* order = "bhrc";
  int64_t gap = 0;
  int64_t step = 1;
  Edge edge = Edge::kEnd;
};

// A tensor of four dims, (batch, head, row, column), between guard pages. A size of 1 where the logical size
// is larger broadcasts: its stride is 0.
struct Tensor {
  ScalarKind kind = ScalarKind::kNone;
  int64_t sizes[4] = {0, 0, 0, 0};
  cpu::TensorView view;
  std::shared_ptr<GuardedMemory> memory;

  Tensor() = default;
  Tensor(ScalarKind k, int64_t batch, int64_t heads, int64_t rows, int64_t columns,
         const Placement& placement = {})
      : kind(k), sizes{batch, heads, rows, columns} {
    int64_t strides[4], stride = placement.step, last = 0;
    bool empty = false;
    for (int i = 3; i >= 0; --i) {
      const char name = placement.order[i];
      const int dim = name == 'b' ? 0 : name == 'h' ? 1 : name == 'r' ? 2 : 3;
      strides[dim] = stride;
      last += (sizes[dim] - 1) * stride;
      stride = stride * sizes[dim] + (i == 3 ? placement.gap : 0);
      empty = empty || sizes[dim] == 0;
    }
    memory = std::make_shared<GuardedMemory>(empty ? 0 : (last + 1) * size_of(kind), placement.edge);
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

// Memory as kernels are given it to work in: aligned, full of NaN, and ending (but for that) at a guard page.
struct ScratchMemory {
  explicit ScratchMemory(int64_t bytes) : memory((bytes + 63) / 64 * 64) {}
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
#if defined(ATTN_EXT_KERNELS_POISON)
  ~ScratchMemory() {
    __asan_unpoison_memory_region(memory.data(), memory.bytes());
  }  // kernels leave gaps
#endif
  char* data() const {
    return memory.data();
  }
  GuardedMemory memory;
};

// Where ThreadSanitizer looks on, all cases run on several threads, and nothing is looked for but races: the
// plain loops that results are compared with would take many times as long.
#if defined(__SANITIZE_THREAD__)  // GCC's word for it
#define ATTN_EXT_THREAD_SANITIZER
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)  // Clang's
#define ATTN_EXT_THREAD_SANITIZER
#endif
#endif
#if defined(ATTN_EXT_THREAD_SANITIZER)
constexpr bool kRacesOnly = true;
#else
constexpr bool kRacesOnly = false;
#endif
constexpr int kRacingThreads = 3;

// function(task, slot) for every task, as if by `threads` threads: by threads indeed where races are looked
// for, else one after the other from both ends, to mix up their order. Threads do not take tasks from a
// counter, of which the first might find all before the others have begun: neighbouring tasks are different
// threads', and so are those that lie a round apart.
template <typename Function>
void run_tasks(int64_t count, int threads, Function function) {
#if defined(ATTN_EXT_THREAD_SANITIZER)
  std::vector<std::thread> team;
  for (int slot = 0; slot < threads; ++slot) {
    team.emplace_back([count, threads, slot, &function] {
      for (int64_t task = 0; task < count; ++task) {
        if ((task + task / threads) % threads == slot) function(task, slot);
      }
    });
  }
  for (std::thread& thread : team) thread.join();
#else
  for (int64_t i = 0; i < count; ++i) {
    const int64_t task = threads == 1 ? i : i % 2 ? count - 1 - i / 2 : i / 2;
    function(task, static_cast<int>(i % threads));
  }
#endif
}

// A round whose tasks take turns: on one thread the last chain first, those of each in their order, where no
// task may have to wait; else by `threads` threads, and not as run_tasks() mixes them up: each takes its own
// in their order.
template <typename Function>
void run_in_turn(int64_t count, const cpu::TurnsPlan& plan, int threads, Function function) {
  const int64_t lanes = plan.lanes, chain_tasks = count / plan.chains;
  check(chain_tasks * plan.chains == count, "chains are as long as each other");
  check(plan.chain_threads > 0, "a chain is work for a thread");
  std::vector<char> bytes(static_cast<size_t>(lanes + 1) * sizeof(cpu::Lanes::Lane));
  auto* const memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.data()) + 63) / 64 * 64);
  cpu::Turns turns = cpu::Lanes(memory, lanes).turns(0);
  if (threads == 1) {
    turns.wait_for = [](void* self, int64_t lane, int64_t number) {
      check(static_cast<cpu::Lanes::Lane*>(self)[lane].number >= number,
            "a task waits for one behind it, or of another chain");
    };
    for (int64_t chain = plan.chains - 1; chain >= 0; --chain) {
      for (int64_t i = 0; i < chain_tasks; ++i) function(chain * chain_tasks + i, 0, turns);
    }
    return;
  }
  std::vector<std::thread> team;
  for (int slot = 0; slot < threads; ++slot) {
    team.emplace_back([=, &function] {
      for (int64_t task = 0; task < count; ++task) {
        if ((task + task / threads) % threads == slot) function(task, slot, turns);
      }
    });
  }
  for (std::thread& thread : team) thread.join();
}

// The memory of a call, a piece of it for each thread.
class CallMemory {
 public:
  CallMemory(int64_t shared_bytes, int64_t thread_bytes, int threads) : shared_(shared_bytes) {
    check(thread_bytes % 64 == 0, "threads' memory is aligned");
    for (int slot = 0; slot < threads; ++slot) own_.push_back(std::make_unique<ScratchMemory>(thread_bytes));
  }
  char* shared() const { return shared_.data(); }
  char* own(int slot) const { return own_[static_cast<size_t>(slot)]->data(); }

 private:
  ScratchMemory shared_;
  std::vector<std::unique_ptr<ScratchMemory>> own_;
};

// Cut for `threads` threads; taken in turn by as many, or by one.
template <typename Ways, typename Params>
auto run_call(const Ways& ways, const Params& params, int threads, bool one_takes_turns = false) {
  const auto call = cpu::plan_call(ways, params, threads);
  int64_t most_tasks = 1;
  for (int64_t round = 0; round < call.plan.rounds; ++round) {
    most_tasks = std::max(most_tasks, call.tasks(round));
  }
  const int slots = static_cast<int>(std::min<int64_t>(threads, most_tasks));  // the others have no task
  const CallMemory memory(call.plan.shared_bytes, call.plan.thread_bytes, slots);
  for (int slot = 0; slot < slots; ++slot) call.begin(memory.own(slot));
  for (int64_t round = 0; round < call.plan.rounds; ++round) {
    const auto run = [&](int64_t task, int slot, const cpu::Turns& turns) {
      call.run(round, task, memory.shared(), memory.own(slot), turns);
    };
    if (const cpu::TurnsPlan turns = call.turns_of(round); turns.lanes > 0) {
      run_in_turn(call.tasks(round), turns, one_takes_turns ? 1 : threads, run);
    } else {
      run_tasks(call.tasks(round), threads, [&](int64_t task, int slot) { run(task, slot, {}); });
    }
  }
  return call.plan;
}

inline const cpu::DtypeKernels& kernels_of(const cpu::KernelTable& table, ScalarKind dtype) {
  return *table.of[dtype_row(dtype)];
}

inline cpu::ForwardPlan run_forward(const cpu::KernelTable& table, const cpu::ForwardParams& params,
                                    int threads) {
  return run_call(kernels_of(table, params.shape.dtype).forward, params, threads);
}

inline cpu::BackwardPlan run_backward(const cpu::KernelTable& table, const cpu::BackwardParams& params,
                                      int threads, bool one_takes_turns = false) {
  return run_call(kernels_of(table, params.shape.dtype).backward, params, threads, one_takes_turns);
}

// Of small cases that together go through every size: the size of dim `dim` (0 to 3) in case n of [0,
// kSizes), each of 1 to kSizes once.
constexpr int64_t kSizes = 70;

inline int64_t size_in_turn(int64_t n, int dim) {
  constexpr int64_t kSteps[] = {1, 13, 31, 47};  // prime to kSizes
  return 1 + (n * kSteps[dim] + 17 * dim) % kSizes;
}

inline const Placement kPlacements[] = {
    {"bhrc", 0, 1, Edge::kEnd},   {"bhrc", 0, 1, Edge::kStart}, {"bhrc", 3, 1, Edge::kEnd},
    {"bhrc", 5, 1, Edge::kStart}, {"bhrc", 0, 2, Edge::kEnd},   {"bhrc", 1, 3, Edge::kStart},
    {"bhcr", 0, 1, Edge::kEnd},   {"bhcr", 2, 1, Edge::kStart}, {"brhc", 1, 1, Edge::kEnd},
    {"brhc", 0, 1, Edge::kStart}, {"crbh", 1, 1, Edge::kEnd},   {"chbr", 0, 2, Edge::kStart},
    {"bhrc", 0, 4, Edge::kEnd},   {"brhc", 2, 5, Edge::kStart},
};

// Half of them, at both edges.
inline std::vector<Placement> placements_in_turn(int64_t n) {
  std::vector<Placement> chosen;
  for (size_t i = 0; i < std::size(kPlacements); ++i) {
    if ((static_cast<int64_t>(i / 2) + n) % 2 == 0) chosen.push_back(kPlacements[i]);
  }
  return chosen;
}

inline constexpr int kSkipped = 77;  // what ctest takes for "cannot be run here"

// How long a case of these sizes takes, in multiply-adds: numbers are made, read and compared, and any case
// has plans.
template <typename Case>
double work_of(const Case& c) {
  constexpr double kOfANumber = 10, kOfACase = 4e4;
  const auto dims = static_cast<double>(c.head_dim + c.value_dim);
  const auto queries = static_cast<double>(c.batch * c.query_heads * c.query_len);
  const auto keys = static_cast<double>(c.batch * c.key_heads * c.key_len);
  return queries * static_cast<double>(c.key_len) * dims + kOfANumber * (queries + keys) * dims + kOfACase;
}

// Which cases run: those whose name holds `part`; and where KERNEL_SHARE is n, an n-th of them by their work,
// others on each instruction set, so that n sets run each case once.
struct Selection {
  std::string part;
  std::vector<double> work_of_shares = {0};
  int64_t set = 0;
  bool is_whole() const { return part.empty() && work_of_shares.size() == 1; }
  // Whether the next case runs: it goes to the share that has the least to do.
  bool takes(const std::string& name, double work) {
    if (name.find(part) == std::string::npos) return false;
    const auto least = std::min_element(work_of_shares.begin(), work_of_shares.end());
    *least += work;
    return (least - work_of_shares.begin() + set) % static_cast<int64_t>(work_of_shares.size()) == 0;
  }
};

// Sets that multiply bfloat16 alone in ways of their own have the kernels of others for all else.
inline bool has_own_kernels(const cpu::KernelSet& set, ScalarKind dtype) {
  const std::string_view name = set.name;
  return (name != "avx512_bf16" && name != "amx" && name != "neon_bf16") || dtype == ScalarKind::kBFloat16;
}

// Of which each has a share of its own, built with the others or alone.
constexpr std::string_view kSets[] = {"baseline", "avx2", "avx512",   "avx512_bf16",
                                      "amx",      "neon", "neon_bf16"};

// The tests of both programs: PROGRAM CAPABILITY [part of a case's name].
template <typename Test>
int run_tests(int argc, char** argv, Test test) {
  const std::string wanted = argc > 1 ? argv[1] : "all";
  Selection selection;
  if (argc > 2) selection.part = argv[2];
  if (const char* share = std::getenv("KERNEL_SHARE")) {
    selection.work_of_shares.resize(static_cast<size_t>(std::max(1, std::atoi(share))));
  }
  bool any = false;
  for (const cpu::KernelSet& set : cpu::supported_kernel_sets()) {
    selection.set = std::find(std::begin(kSets), std::end(kSets), set.name) - std::begin(kSets);
    if (wanted != "all" && wanted != set.name) continue;
    any = true;
    const int64_t cases = test(set, selection);
    std::printf("%s: %ld cases, %d failures\n", set.name, static_cast<long>(cases), failures.load());
  }
  if (!any) std::printf("this processor cannot run %s\n", wanted.c_str());
  return !any ? kSkipped : failures != 0;
}

}  // namespace attn_ext::test
