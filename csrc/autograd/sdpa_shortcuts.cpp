// `sdpa` and `sdpa_packed` on plain tensors that no derivative is asked of: straight to the CPU's kernels,
// `sdpa` to those of an NVIDIA GPU. Short calls take less time than a second way through the dispatcher;
// every other call is the composite, as without this file.

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "../composite/sdpa_packed_composite.h"
#include "../cpu/forward.h"
#include "../cpu/kernel_choice.h"
#include "../cuda/sdpa_cuda.h"

namespace attn_ext {

namespace {

bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

/// Whether the device's own kernel comes next: no subclass, no mode, no transform, no other device.
bool is_plain(c10::DispatchKeySet keys, c10::DispatchKey device) {
  return (keys & c10::after_ADInplaceOrView_keyset).highestPriorityTypeId() == device;
}

bool wants_derivatives(const auto&... inputs) {
  return torch::autograd::compute_requires_grad(inputs...) || (has_tangent(inputs) || ...);
}

bool wants_output_alone(c10::DispatchKeySet keys, c10::DispatchKey device, const SdpaArgs& args) {
  return args.dropout_p == 0.0 && is_plain(keys, device) &&
         !wants_derivatives(args.query, args.key, args.value, args.attn_mask, args.sinks);
}

at::Tensor sdpa_cuda(c10::DispatchKeySet keys, const SdpaArgs& args) {
  if (!wants_output_alone(keys, c10::DispatchKey::CUDA, args)) {
    return sdpa_composite(args);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return cuda::output_cuda(args);
}

at::Tensor sdpa_cpu(c10::DispatchKeySet keys, const SdpaArgs& args) {
  if (!wants_output_alone(keys, c10::DispatchKey::CPU, args)) {
    return sdpa_composite(args);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return cpu::output_cpu(args, nullptr);
}

at::Tensor sdpa_packed_cpu(c10::DispatchKeySet keys, const PackedCall& call) {
  if (call.dropout_p != 0.0 || cpu::kernels_in_use() == nullptr || !is_plain(keys, c10::DispatchKey::CPU) ||
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

TORCH_LIBRARY_IMPL(attn_ext, AutogradCUDA, m) {
  m.impl("sdpa", TORCH_FN((public_kernel_with_keys<&sdpa_cuda>)));
}

}  // namespace attn_ext
