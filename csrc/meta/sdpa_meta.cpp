// Shapes and dtypes of the results, for meta and fake tensors with symbolic sizes.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "../checks.h"
#include "../memory_order.h"

namespace attn_ext {

namespace {

at::Tensor empty_in_order_of(const at::Tensor& input, c10::SymIntArrayRef sizes, at::ScalarType dtype) {
  const MemoryOrder order = memory_order(input, static_cast<int64_t>(sizes.size()));
  return at::empty_strided_symint(sizes, dense_strides<c10::SymInt>(sizes, order),
                                  input.options().dtype(dtype));
}

SdpaOutputs forward_meta(const SdpaArgs& args, SideOutputs wanted) {
  const SdpaSizes sizes = check_args(args);
  check_packed(args, wanted);
  const auto options = args.query.options();
  SdpaOutputs outputs;
  outputs.output =
      empty_in_order_of(args.query, sizes.with_tail({sizes.query_len, sizes.value_dim}), output_dtype(args));
  outputs.lse = at::empty_symint(sizes.with_tail({sizes.query_len}), options.dtype(lse_dtype(args)));
  if (wanted.weights) {
    outputs.weights = at::empty_symint(sizes.with_tail({sizes.query_len, sizes.key_len}), options);
  }
  if (wanted.key_mass) {
    outputs.key_mass = at::empty_symint(sizes.with_tail({sizes.key_len}), options);
  }
  return outputs;
}

SdpaInputs backward_meta(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted) {
  check_backward(grads, args, saved, wanted);
  const auto gradient_in_order = [&](const at::Tensor& input, bool is_wanted) {
    return is_wanted ? empty_in_order_of(input, input.sym_sizes(), gradient_dtype(args, input))
                     : at::Tensor();
  };
  const auto empty_gradient = [&](const at::Tensor& input, bool is_wanted) {
    return is_wanted ? at::empty_symint(input.sym_sizes(), input.options().dtype(gradient_dtype(args, input)))
                     : at::Tensor();
  };
  return {gradient_in_order(args.query, wanted.query), gradient_in_order(args.key, wanted.key),
          gradient_in_order(args.value, wanted.value), empty_gradient(args.attn_mask, wanted.attn_mask),
          empty_gradient(args.sinks, wanted.sinks)};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, Meta, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_meta>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_meta>)));
}

}  // namespace attn_ext
