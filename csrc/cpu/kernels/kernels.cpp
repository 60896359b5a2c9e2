// All kernels of one instruction set: compiled once for each, with its flags and its name as namespace.
#include "backward_tasks.h"
#include "forward_tasks.h"
#include "table.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {
namespace {

template <typename S>
constexpr ForwardKernels forward_kernels() {
  return {ForwardTasks<S>::plan, ForwardTasks<S>::pack, ForwardTasks<S>::run, ForwardTasks<S>::finish};
}

template <typename S>
constexpr BackwardKernels backward_kernels() {
  return {BackwardTasks<S>::plan, BackwardTasks<S>::tasks, BackwardTasks<S>::run};
}

using Float64Scheme = Scheme<double, PlainProduct<double>, 11>;
using Float32Scheme = Scheme<float, PlainProduct<float>, 5>;
using Float16Scheme = Scheme<Float16, PlainProduct<float>, 5>;
#if defined(__AVX512BF16__)
using BFloat16Scheme = Scheme<BFloat16, BFloat16Product, 5>;
#else
using BFloat16Scheme = Scheme<BFloat16, PlainProduct<float>, 5>;
#endif

}  // namespace

extern const KernelTable kKernels;
const KernelTable kKernels = {{forward_kernels<Float64Scheme>(), forward_kernels<Float32Scheme>(),
                               forward_kernels<BFloat16Scheme>(), forward_kernels<Float16Scheme>()},
                              {backward_kernels<Float64Scheme>(), backward_kernels<Float32Scheme>(),
                               backward_kernels<BFloat16Scheme>(), backward_kernels<Float16Scheme>()}};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
