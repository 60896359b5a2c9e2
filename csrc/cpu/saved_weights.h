// Whether a forward pass saves its weights for the backward pass, which then makes neither scores nor
// exponentials again.
#pragma once

#include "../args.h"

namespace attn_ext::cpu {

/// Of a call of which a gradient is wanted. Follows from the lengths, the dims, the dtype, the group, and the
/// instruction set in use, and from what the caller allows; never from batch, heads or threads. False where
/// a size is symbolic.
bool saves_weights(const SdpaArgs& args);

}  // namespace attn_ext::cpu
