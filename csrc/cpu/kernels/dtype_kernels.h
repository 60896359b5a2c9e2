// All kernels of one dtype and one instruction set, whose flags it is compiled with and whose name is the
// namespace: a file for each dtype, so that they are compiled at once.
#pragma once

#include "backward/backward.h"
#include "forward/forward.h"
#include "interface/table.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

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

template <typename S>
constexpr DtypeKernels dtype_kernels() {
  return {forward_ways<S>(), backward_ways<S>(), &saves_weights<S>};
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
