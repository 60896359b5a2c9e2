// The forward pass on NVIDIA GPUs where no derivative and no side output is asked for.
#pragma once

#include "../args.h"

namespace attn_ext::cuda {

/// Below autograd. Without dropout.
at::Tensor output_cuda(const SdpaArgs& args);

}  // namespace attn_ext::cuda
