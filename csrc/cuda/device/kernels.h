// The kernels of weights.cu: compiled when they are first needed, once for each device, dtype and pair of
// head dims, with gradients and without, by the compiler that PyTorch brings for its own (NVRTC), and
// launched on its current stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace attn_ext::cuda {

#include "weights_params.h"

inline constexpr int64_t kTileRows = 128, kTileKeys = 128;
inline constexpr int64_t kTileDims = 128;     // at most, of query and value
inline constexpr int64_t kTileDimsStep = 16;  // of which they are multiples

/// The head dims that a kernel is compiled for.
struct TileDims {
  int64_t head_dim, value_dim;
  c10::ScalarType dtype;  // half precision
};

/// Whether the device has the matrix units and the memory, and PyTorch the compiler.
bool has_tile_kernels(const TileDims& dims, bool with_gradients, c10::Device device);

/// lse of `heads` heads, over N as well, into `row_sums`.
void launch_row_sums(const WeightsParams& params, const TileDims& dims, int64_t heads, c10::Device device);

/// Weights, and with `delta` the gradients of scores, of so many heads of a launch.
void launch_weights(const WeightsParams& params, const TileDims& dims, int64_t heads, c10::Device device);

}  // namespace attn_ext::cuda
