// The forward pass on the CPU where nobody asks for more than the output.
#pragma once

#include "../sequences.h"

namespace attn_ext::cpu {

/// The output of `_sdpa_forward`, for callers below autograd: no lse is made. `sequences`, if any, stand for
/// those of the arguments; the composition, where no kernels are in use, takes none.
at::Tensor output_cpu(const SdpaArgs& args, const std::vector<Sequence>* sequences);

}  // namespace attn_ext::cpu
