// All kernels of one instruction set: compiled once for each, with its flags and its name as namespace.
#include "backward/backward.h"
#include "forward/forward.h"
#include "interface/table.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {
namespace {

using Float64Scheme = Scheme<double, PlainProduct<double>>;
using Float32Scheme = Scheme<float, PlainProduct<float>>;
using Float16Scheme = Scheme<Float16, PlainProduct<float>>;
#if defined(ATTN_EXT_AMX)
using BFloat16Scheme = Scheme<BFloat16, AmxProduct>;
#elif defined(ATTN_EXT_HAS_PAIRS)
using BFloat16Scheme = Scheme<BFloat16, BFloat16Product>;
#else
using BFloat16Scheme = Scheme<BFloat16, PlainProduct<float>>;
#endif

}  // namespace

extern const KernelTable kKernels;
#if defined(ATTN_EXT_AMX)
// No other dtype has products of its own here, nor have few rows: kernel_sets.cpp takes them of other sets.
const KernelTable kKernels = {{{}, {}, forward_ways<BFloat16Scheme>(), {}},
                              {{}, {}, backward_ways<BFloat16Scheme>(), {}}};
#else
const KernelTable kKernels = {{forward_ways<Float64Scheme>(), forward_ways<Float32Scheme>(),
                               forward_ways<BFloat16Scheme>(), forward_ways<Float16Scheme>()},
                              {backward_ways<Float64Scheme>(), backward_ways<Float32Scheme>(),
                               backward_ways<BFloat16Scheme>(), backward_ways<Float16Scheme>()}};
#endif

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
