// All kernels of csrc/cuda/device, in the namespace that includes this.

#include "../../csrc/cuda/device/tile_params.h"

#include "gpu_primitives.h"

#include "../../csrc/cuda/device/numbers.cu"

#if WITH_WGMMA
#include "gpu_wgmma_primitives.h"

#include "../../csrc/cuda/device/wgmma.cu"
#else
#include "../../csrc/cuda/device/mma.cu"
#endif

#include "../../csrc/cuda/device/tile.cu"

#include "../../csrc/cuda/device/attend.cu"

#include "../../csrc/cuda/device/merge.cu"

#include "../../csrc/cuda/device/draws.cu"

#include "../../csrc/cuda/device/weights.cu"

#include "../../csrc/cuda/device/grad_query.cu"

#include "../../csrc/cuda/device/grad_keys.cu"
