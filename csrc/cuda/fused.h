// ATen's fused attention kernels, with one signature and one convention for all three.
#pragma once

#include <ATen/core/Tensor.h>

#include "route.h"

namespace attn_ext::cuda {

/// A call as the kernels take it: four dims, the last side by side, every row aligned to 16 bytes.
struct FusedCall {
  Backend backend;
  at::Tensor query;  // (N, H, Lq, D)
  at::Tensor key;    // (N, Hkv, keys of the range, D)
  at::Tensor value;  // (N, Hkv, keys of the range, Dv)
  at::Tensor bias;   // (N, H, Lq, keys), expanded, of the query's dtype; undefined: none
  // Where the efficient kernel is asked for lse.
  at::Tensor row_max;    // of the bias, (N, H, Lq), expanded
  bool bias_only_hides;  // it is 0 or -inf
  VisibleRange range;
  double scale;
  bool wants_lse;  // forward

  int64_t query_len() const { return query.size(2); }
};

struct FusedOutputs {
  at::Tensor output;  // (N, H, Lq, Dv), 0 in rows that see nothing
  at::Tensor lse;     // (N, H, Lq) float32, contiguous, -inf in rows that see nothing; undefined: not wanted
};
FusedOutputs fused_forward(const FusedCall& call);

struct FusedGrads {
  at::Tensor query, key, value;  // of the sizes of their inputs
  at::Tensor bias;               // (N, H, Lq, keys), where it is wanted
};
/// `rows`: what the gradient's softmax goes by, lse with whatever else takes part in it.
FusedGrads fused_backward(const FusedCall& call, const at::Tensor& grad_output, const FusedOutputs& rows,
                          bool wants_bias_grad);

}  // namespace attn_ext::cuda
