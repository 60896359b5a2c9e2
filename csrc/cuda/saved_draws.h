// Whether a forward pass on an NVIDIA GPU saves its draws of dropout for the backward pass, a bit each, which
// then draws nothing again.
#pragma once

#include "../args.h"

namespace attn_ext::cuda {

/// Of a call of which a gradient is wanted: where our own kernels may come next, and the draws take no more
/// memory than query, key, value and output together, by shapes, as if nothing were broadcast but the keys of
/// a group, and the caller allows it. False where a size is symbolic.
bool saves_draws(const SdpaArgs& args);

/// As call_forward with no side outputs; `weights` of what it returns are the draws, int32, undefined where
/// the call goes another way.
SdpaOutputs call_forward_saving_draws(const SdpaArgs& args);

/// Arguments of `_sdpa_forward_saving_draws`.
struct DrawnCall {
  SdpaArgs args;

  auto arguments() { return std::tuple_cat(tensors_of(args), scalars_of(args)); }
};

}  // namespace attn_ext::cuda
