// Autocast to the lower-precision dtype, as F.scaled_dot_product_attention does; one template, both devices.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "../composite/sdpa_packed_composite.h"

namespace attn_ext {

namespace {

constexpr c10::DispatchKeySet kAutocastKeys({c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});

/// A float32 bias or sink is good as it is with every query dtype; float64 is left alone, as autocast does.
at::Tensor cast_addend(at::ScalarType dtype, const at::Tensor& tensor, c10::DeviceType device) {
  const bool cast = tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kFloat;
  return cast ? at::autocast::cached_cast(dtype, tensor, device) : tensor;
}

/// Args is SdpaArgs or PackedCall.
template <auto composite, c10::DeviceType device, class Args>
auto autocast(const Args& args) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
  Args lower = args;
  lower.query = at::autocast::cached_cast(dtype, args.query, device);
  lower.key = at::autocast::cached_cast(dtype, args.key, device);
  lower.value = at::autocast::cached_cast(dtype, args.value, device);
  lower.sinks = cast_addend(lower.query.scalar_type(), args.sinks, device);
  if constexpr (requires { lower.attn_mask; }) {
    lower.attn_mask = cast_addend(lower.query.scalar_type(), args.attn_mask, device);
  }
  return composite(lower);
}

template <auto composite, c10::DeviceType device>
constexpr auto kPublic = public_kernel<&autocast<composite, device, SdpaArgs>>;
template <auto composite, c10::DeviceType device>
constexpr auto kPacked = &Unboxed<PackedCall>::kernel<&autocast<composite, device, PackedCall>>;

template <c10::DeviceType device>
void register_autocast(torch::Library& m) {
  m.impl("sdpa", TORCH_FN((kPublic<&sdpa_composite, device>)));
  m.impl("sdpa_with_weights", TORCH_FN((kPublic<&sdpa_with_weights_composite, device>)));
  m.impl("sdpa_with_lse", TORCH_FN((kPublic<&sdpa_with_lse_composite, device>)));
  m.impl("sdpa_with_key_mass", TORCH_FN((kPublic<&sdpa_with_key_mass_composite, device>)));
  m.impl("sdpa_packed", TORCH_FN((kPacked<&sdpa_packed_composite, device>)));
  m.impl("sdpa_packed_with_lse", TORCH_FN((kPacked<&sdpa_packed_with_lse_composite, device>)));
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, AutocastCPU, m) {
  register_autocast<c10::DeviceType::CPU>(m);
}
TORCH_LIBRARY_IMPL(attn_ext, AutocastCUDA, m) {
  register_autocast<c10::DeviceType::CUDA>(m);
}

}  // namespace attn_ext
