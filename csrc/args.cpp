#include "args.h"

namespace attn_ext {

SdpaOutputs call_forward(const SdpaArgs& args, SideOutputs wanted) {
  static const auto op = find_op<ForwardCall, decltype(SdpaOutputs().to_tuple())>("attn_ext::_sdpa_forward");
  auto [output, lse, weights, key_mass] = call_op(op, forward_fields(args, wanted));
  return {output, lse, tensor_or_undefined(weights), tensor_or_undefined(key_mass)};
}

SdpaInputs call_backward(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted) {
  static const auto op = find_op<BackwardCall, decltype(SdpaInputs().to_tuple())>("attn_ext::_sdpa_backward");
  const std::array<bool, 5> mask = wanted.to_array();
  auto [query, key, value, attn_mask, sinks] = call_op(op, backward_fields(grads, args, saved, mask));
  return {query, key, value, attn_mask, sinks};
}

}  // namespace attn_ext
