// `sdpa` and `sdpa_packed` on plain CPU tensors that no derivative is asked of: straight to the kernels.
// Short calls take less time than a second way through the dispatcher; every other call is the composite, as
// without this file.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "../composite/sdpa_packed_composite.h"
#include "../cpu/forward.h"
#include "../cpu/kernel_choice.h"

namespace attn_ext {

namespace {

bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

/// Whether the CPU's own kernel comes next: no subclass, no mode, no transform, no other device.
bool is_plain(c10::DispatchKeySet keys) {
  return (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == c10::DispatchKey::CPU;
}

bool wants_derivatives(const auto&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...) || (has_tangent(inputs) || ...);
}

at::Tensor sdpa_cpu(c10::DispatchKeySet keys, const SdpaArgs& args) {
  if (args.dropout_p != 0.0 || !is_plain(keys) ||
      wants_derivatives(args.query, args.key, args.value, args.attn_mask, args.sinks)) {
    return sdpa_composite(args);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return cpu::output_cpu(args, nullptr);
}

at::Tensor sdpa_packed_cpu(c10::DispatchKeySet keys, const PackedCall& call) {
  if (call.dropout_p != 0.0 || cpu::kernels_in_use() == nullptr || !is_plain(keys) ||
      wants_derivatives(call.query, call.key, call.value, call.sinks)) {
    return sdpa_packed_composite(call);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const SdpaArgs args = heads_first(call);
  const std::vector<Sequence> sequences = sequences_of(lengths_of(call));
  return cpu::output_cpu(args, &sequences).transpose(0, 1);
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, AutogradCPU, m) {
  m.impl("sdpa_packed", TORCH_FN((Unboxed<PackedCall>::kernel_with_keys<&sdpa_packed_cpu>)));
  m.impl("sdpa", TORCH_FN((public_kernel_with_keys<&sdpa_cpu>)));
}

}  // namespace attn_ext
