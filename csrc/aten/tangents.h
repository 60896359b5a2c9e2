// Forward-mode derivatives of the internal pair, as compositions of ATen ops over query chunks; by the
// symmetry of second derivatives they are the double backward too. Undefined tensors stand for zero tangents,
// and a result that is zero for that reason is undefined.
#pragma once

#include "../args.h"

namespace attn_ext {

/// Tangents of the outputs along `direction`.
SdpaOutputs forward_tangents(const SdpaArgs& args, const SdpaInputs& direction, SideOutputs wanted);

/// Tangents of the input gradients that `_sdpa_backward` gives for `grads`, along `grad_tangents` and
/// `direction`.
SdpaInputs backward_tangents(const SdpaOutputs& grads, const SdpaArgs& args, const SdpaOutputs& grad_tangents,
                             const SdpaInputs& direction, InputMask wanted);

}  // namespace attn_ext
