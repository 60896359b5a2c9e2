// The forward pass on the CPU where nobody asks for more than the output.
#pragma once

#include "../args.h"

namespace attn_ext::cpu {

/// The output of `_sdpa_forward`, for callers below autograd: no lse is made.
at::Tensor output_cpu(const SdpaArgs& args);

}  // namespace attn_ext::cpu
