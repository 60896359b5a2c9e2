// The kernels of this folder's .cu files: each compiled when it is first needed, once for each device, dtype
// and pair of head dims, by the compiler that PyTorch brings for its own (NVRTC), and launched on its current
// stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace attn_ext::cuda {

#include "tile_params.h"

inline constexpr int64_t kTileDims = 128;     // at most, of query and value
inline constexpr int64_t kTileDimsStep = 16;  // of which they are multiples
inline constexpr int64_t kKeysOfBlock = 512;  // of draws.cu and weights.cu, as in tile.cu

enum class TileKernel : int { kAttend, kMerge, kDraws, kWeights, kGradQuery, kGradKeys };

/// What a kernel is compiled for.
struct TileDims {
  int64_t head_dim, value_dim;
  c10::ScalarType dtype;  // half precision
  bool has_dropout = false;
};

/// Whether the device has the matrix units and the memory, and PyTorch the compiler.
bool has_tile_kernel(TileKernel kernel, const TileDims& dims, c10::Device device);

/// Of a device.
int64_t processors_of(c10::Device device);

/// How many rows or keys a block holds.
int64_t lines_held(TileKernel kernel, const TileDims& dims, c10::Device device);

struct TileGrid {
  int64_t x, y = 1, z = 1;
};

void launch_tile_kernel(TileKernel kernel, const TileParams& params, const TileDims& dims,
                        const TileGrid& grid, c10::Device device);

}  // namespace attn_ext::cuda
