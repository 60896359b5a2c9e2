// Weights a tile at a time by kernels of our own, for what ATen's fused kernels do not have: weights and key
// mass to return, softcap, dropout, a float mask, a scale that is not positive, a band that hides all keys.
// Tensors of half precision, head dims of up to kTileDims.
//
// A launch makes the weights, and in backward the gradients of the scores, of some heads and rows; the
// products with them are cuBLAS's.
#pragma once

#include <ATen/core/Tensor.h>

#include "../args.h"

namespace attn_ext::cuda {

struct TileCall {
  at::Tensor query;           // (N, H, Lq, D), rows aligned, D and Dv as the kernels want them
  at::Tensor key;             // (N, Hkv, Lk, D)
  at::Tensor value;           // (N, Hkv, Lk, Dv)
  at::Tensor mask;            // broadcast to (N, H, Lq, Lk), as it came; undefined: none
  at::Tensor seed;            // of dropout; undefined: none
  int64_t low = 0, high = 0;  // row i sees keys i + low ... i + high
  double scale = 1.0, softcap = 0.0, dropout_p = 0.0;
};

/// Whether there are such kernels for tensors where the query is, of these head dims.
bool has_tiles(const at::Tensor& query, int64_t head_dim, int64_t value_dim, bool with_gradients);

/// (N, H, Lq) float32, without sinks.
at::Tensor tile_lse(const TileCall& call);

struct TileOutputs {
  at::Tensor output;    // (N, H, Lq, Dv)
  at::Tensor weights;   // (N, H, Lq, Lk)
  at::Tensor key_mass;  // (N, H, Lk)
};
/// `lse` with whatever else takes part in the softmax.
TileOutputs tile_forward(const TileCall& call, const at::Tensor& lse, bool wants_output, SideOutputs wanted);

struct TileGrads {
  at::Tensor query, key, value;  // of the sizes of their inputs
};
/// `delta`: rowsum(dO O) - dLse, (N, H, Lq) float32.
TileGrads tile_backward(const TileCall& call, const at::Tensor& grad_output, const at::Tensor& lse,
                        const at::Tensor& delta);

/// Of the weights of a launch, and of the scores' gradients in backward as much again.
int64_t tile_scratch_bytes(const TileCall& call);

}  // namespace attn_ext::cuda
