// The internal pair as a composition of ATen ops.
#pragma once

#include "../args.h"

namespace attn_ext {

SdpaOutputs forward_aten(const SdpaArgs& args, SideOutputs wanted);

/// What was saved is not read unless delta is given: scores and softmax are computed anew, chunk by chunk.
SdpaInputs backward_aten(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted);

}  // namespace attn_ext
