#include "sdpa_composite.h"

#include <ATen/ops/randint.h>
#include <torch/library.h>

#include <limits>

#include "../checks.h"

namespace attn_ext {

namespace {

/// The one place where random state is read: a draw from the device's own generator keys the whole call.
SdpaOutputs forward(SdpaArgs args, SideOutputs wanted) {
  if (args.dropout_p > 0.0) {
    check_args(args, Seed::kNotYetDrawn);  // a call that is refused draws nothing
    args.dropout_seed =
        at::randint(std::numeric_limits<int64_t>::max(), {}, args.query.options().dtype(at::kLong));
  }
  return call_forward(args, wanted);
}

}  // namespace

at::Tensor sdpa_composite(const SdpaArgs& args) {
  return forward(args, {}).output;
}

TensorPair sdpa_with_weights_composite(const SdpaArgs& args) {
  auto outputs = forward(args, {.weights = true});
  return {outputs.output, outputs.weights};
}

TensorPair sdpa_with_lse_composite(const SdpaArgs& args) {
  auto outputs = forward(args, {});
  return {outputs.output, outputs.lse};
}

TensorPair sdpa_with_key_mass_composite(const SdpaArgs& args) {
  auto outputs = forward(args, {.key_mass = true});
  return {outputs.output, outputs.key_mass};
}

namespace {

void register_composites(torch::Library& m) {
  m.impl("sdpa", TORCH_FN((public_kernel<&sdpa_composite>)));
  m.impl("sdpa_with_weights", TORCH_FN((public_kernel<&sdpa_with_weights_composite>)));
  m.impl("sdpa_with_lse", TORCH_FN((public_kernel<&sdpa_with_lse_composite>)));
  m.impl("sdpa_with_key_mass", TORCH_FN((public_kernel<&sdpa_with_key_mass_composite>)));
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CompositeImplicitAutograd, m) {
  register_composites(m);
}

// Under vmap too a public op is its composite; without this the per-sample fallback would take it.
TORCH_LIBRARY_IMPL(attn_ext, FuncTorchBatched, m) {
  register_composites(m);
}

}  // namespace attn_ext
