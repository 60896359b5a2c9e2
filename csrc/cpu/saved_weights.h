// Whether a forward pass saves its weights for the backward pass, which then makes neither scores nor
// exponentials again.
#pragma once

#include <array>
#include <optional>

#include "../args.h"

namespace attn_ext {

/// Heads, rows and columns; none where they are not known, or the tensor is not even a matrix.
std::optional<std::array<int64_t, 3>> sizes_of(const at::Tensor& tensor);

/// As save_weights_for_backward(), of a GPU's draws of dropout, whatever the thread: a checkpointed call is
/// made again in a thread of autograd's, which has to do as the first one did.
bool save_draws_for_backward();

}  // namespace attn_ext

namespace attn_ext::cpu {

/// Of a call of which a gradient is wanted. Follows from the lengths, the dims, the dtype, the group, and the
/// instruction set in use, and from what the caller allows; never from batch, heads or threads. False where
/// a size is symbolic.
bool saves_weights(const SdpaArgs& args);

}  // namespace attn_ext::cpu
