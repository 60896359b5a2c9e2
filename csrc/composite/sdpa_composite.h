// The four public ops as choices over `_sdpa_forward`.
#pragma once

#include "../args.h"

namespace attn_ext {

using TensorPair = std::tuple<at::Tensor, at::Tensor>;

at::Tensor sdpa_composite(const SdpaArgs& args);
TensorPair sdpa_with_weights_composite(const SdpaArgs& args);
TensorPair sdpa_with_lse_composite(const SdpaArgs& args);
TensorPair sdpa_with_key_mass_composite(const SdpaArgs& args);

}  // namespace attn_ext
