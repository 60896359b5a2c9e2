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

// What is saved takes no more memory than the rows of query, key, value and output that it belongs to.
template <typename S>
bool saves_weights(const AttentionShape& shape, bool can_join) {
  if (!kReadsWeights<S> || shape.key_heads == 0) return false;
  const BackwardPath path = path_of_shape<S>(shape, can_join);
  const int64_t rows = group_size(shape) * shape.query_len;
  return (path == BackwardPath::kTiles || path == BackwardPath::kJoinedHeads ||
          path == BackwardPath::kFewKeys) &&
         writes_weights_in_passing(shape) &&
         rows * shape.key_len <= (rows + shape.key_len) * (shape.head_dim + shape.value_dim);
}

}  // namespace

extern const KernelTable kKernels;
#if defined(ATTN_EXT_AMX)
// No other dtype has products of its own here, nor have few rows: kernel_sets.cpp takes them of other sets.
const KernelTable kKernels = {{{}, {}, forward_ways<BFloat16Scheme>(), {}},
                              {{}, {}, backward_ways<BFloat16Scheme>(), {}},
                              {nullptr, nullptr, &saves_weights<BFloat16Scheme>, nullptr}};
#else
const KernelTable kKernels = {{forward_ways<Float64Scheme>(), forward_ways<Float32Scheme>(),
                               forward_ways<BFloat16Scheme>(), forward_ways<Float16Scheme>()},
                              {backward_ways<Float64Scheme>(), backward_ways<Float32Scheme>(),
                               backward_ways<BFloat16Scheme>(), backward_ways<Float16Scheme>()},
                              {&saves_weights<Float64Scheme>, &saves_weights<Float32Scheme>,
                               &saves_weights<BFloat16Scheme>, &saves_weights<Float16Scheme>}};
#endif

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
