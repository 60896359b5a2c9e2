// Shapes and dtypes of the results, for meta and fake tensors with symbolic sizes.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "../checks.h"

namespace attn_ext {

namespace {

SdpaOutputs forward_meta(const SdpaArgs& args, SideOutputs wanted) {
  const SdpaSizes sizes = check_args(args);
  const auto options = args.query.options();
  const auto accumulated = options.dtype(accumulation_dtype(args.query.scalar_type()));
  SdpaOutputs outputs;
  outputs.output = at::empty_symint(sizes.with_tail({sizes.query_len, sizes.value_dim}), options);
  outputs.lse = at::empty_symint(sizes.with_tail({sizes.query_len}), accumulated);
  if (wanted.weights) {
    outputs.weights = at::empty_symint(sizes.with_tail({sizes.query_len, sizes.key_len}), options);
  }
  if (wanted.key_mass) {
    outputs.key_mass = at::empty_symint(sizes.with_tail({sizes.key_len}), options);
  }
  return outputs;
}

at::Tensor empty_gradient(const at::Tensor& input, bool wanted) {
  return wanted ? at::empty_symint(input.sym_sizes(), input.options()) : at::Tensor();
}

SdpaInputs backward_meta(const SdpaOutputs& grads, const SdpaArgs& args, const at::Tensor& output,
                         const at::Tensor& lse, InputMask wanted) {
  check_backward(grads, args, output, lse, wanted);
  return {empty_gradient(args.query, wanted.query), empty_gradient(args.key, wanted.key),
          empty_gradient(args.value, wanted.value), empty_gradient(args.attn_mask, wanted.attn_mask),
          empty_gradient(args.sinks, wanted.sinks)};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, Meta, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_meta>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_meta>)));
}

}  // namespace attn_ext
