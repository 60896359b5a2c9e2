// Attention by kernels of our own (device/), a tile of scores at a time, for what ATen's fused kernels do not
// have: weights and key mass to return, softcap, dropout, a float mask, a scale that is not positive, a band
// that hides all keys. Tensors of half precision, head dims of up to kTileDims.
#pragma once

#include <ATen/core/Tensor.h>

#include "../args.h"
#include "device/ops.h"

namespace attn_ext::cuda {

/// Whether there are such kernels for tensors where the query is, of these head dims.
bool has_tiles(const at::Tensor& query, int64_t head_dim, int64_t value_dim, bool is_backward);

struct TileOutputs {
  at::Tensor output;  // (N, H, Lq, Dv)
  at::Tensor lse;     // (N, H, Lq) float32, without sinks
};
TileOutputs tile_forward(const TileCall& call);

/// Those of dropout, all of them, to be given in a call: int32 words.
at::Tensor make_draws(const TileCall& call);
int64_t bytes_of_draws(const TileCall& call);

struct TileSides {
  at::Tensor weights;   // (N, H, Lq, Lk)
  at::Tensor key_mass;  // (N, H, Lk)
};
/// `lse` with whatever else takes part in the softmax.
TileSides tile_sides(const TileCall& call, const at::Tensor& lse, SideOutputs wanted);

struct TileGrads {
  at::Tensor query, key, value;  // of the sizes of their inputs
  at::Tensor delta;              // rowsum(dO O) - dLse, (N, H, Lq) float32
};
/// `output` and `grad_output` (N, H, Lq, Dv), rows aligned; `grad_lse` undefined: none.
TileGrads tile_backward(const TileCall& call, const at::Tensor& grad_output, const at::Tensor& output,
                        const at::Tensor& lse, const at::Tensor& grad_lse);

}  // namespace attn_ext::cuda
