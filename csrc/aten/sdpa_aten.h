// The internal pair as a composition of ATen ops.
#pragma once

#include "../args.h"

namespace attn_ext {

SdpaOutputs forward_aten(const SdpaArgs& args, SideOutputs wanted);

/// `output` and `lse` are not read: scores and softmax are computed anew, chunk by chunk.
SdpaInputs backward_aten(const SdpaOutputs& grads, const SdpaArgs& args, const at::Tensor& output,
                         const at::Tensor& lse, InputMask wanted);

}  // namespace attn_ext
