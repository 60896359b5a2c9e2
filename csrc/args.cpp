#include "args.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace attn_ext {

namespace {

// The adapters of args.h have the very types of the schemas, whatever function they are made of.
SdpaOutputs no_forward(const SdpaArgs&, SideOutputs) {
  return {};
}
SdpaInputs no_backward(const SdpaOutputs&, const SdpaArgs&, const at::Tensor&, const at::Tensor&, InputMask) {
  return {};
}
using ForwardSignature = std::remove_pointer_t<decltype(&forward_kernel<&no_forward>)>;
using BackwardSignature = std::remove_pointer_t<decltype(&backward_kernel<&no_backward>)>;

}  // namespace

SdpaOutputs call_forward(const SdpaArgs& args, SideOutputs wanted) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("attn_ext::_sdpa_forward", "").typed<ForwardSignature>();
  auto [output, lse, weights, key_mass] = op.call(
      args.query, args.key, args.value, optional_of(args.attn_mask), optional_of(args.sinks),
      optional_of(args.dropout_seed), args.dropout_p, args.is_causal, args.scale, args.enable_gqa,
      args.window_left, args.window_right, args.query_offset, args.softcap, wanted.weights, wanted.key_mass);
  return {output, lse, tensor_or_undefined(weights), tensor_or_undefined(key_mass)};
}

SdpaInputs call_backward(const SdpaOutputs& grads, const SdpaArgs& args, const at::Tensor& output,
                         const at::Tensor& lse, InputMask wanted) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attn_ext::_sdpa_backward", "")
                             .typed<BackwardSignature>();
  auto [query, key, value, attn_mask, sinks] =
      op.call(optional_of(grads.output), optional_of(grads.lse), optional_of(grads.weights),
              optional_of(grads.key_mass), args.query, args.key, args.value, optional_of(args.attn_mask),
              optional_of(args.sinks), optional_of(args.dropout_seed), output, lse, args.dropout_p,
              args.is_causal, args.scale, args.enable_gqa, args.window_left, args.window_right,
              args.query_offset, args.softcap, wanted.to_array());
  return {query, key, value, attn_mask, sinks};
}

}  // namespace attn_ext
