#include "saved_draws.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>

#include "../cpu/saved_weights.h"
#include "device/windows.h"

namespace attn_ext::cuda {

namespace {

constexpr const char* kOp = "attn_ext::_sdpa_forward_saving_draws";

/// Whether a device's own kernel comes next that saves draws: no subclass, no mode, no transform.
bool can_be_saved(const SdpaArgs& args) {
  c10::DispatchKeySet keys = args.query.key_set() | args.key.key_set() | args.value.key_set();
  for (const at::Tensor* tensor : {&args.attn_mask, &args.sinks, &args.dropout_seed}) {
    keys = tensor->defined() ? keys | tensor->key_set() : keys;
  }
  const auto next = c10::impl::computeDispatchKeySet(keys, c10::after_ADInplaceOrView_keyset)
                        .remove(c10::DispatchKey::BackendSelect)  // which is always there, and has no kernel
                        .highestPriorityTypeId();
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kOp, "");
  return op.hasKernelForDispatchKey(next);
}

/// Of a query head, as if nothing were broadcast but the keys of a group.
bool are_small_beside_tensors(const SdpaArgs& args) {
  const auto query = sizes_of(args.query), key = sizes_of(args.key), value = sizes_of(args.value);
  if (!query || !key || !value) {
    return false;
  }
  const int64_t rows = (*query)[1], keys = (*key)[1], dims = (*query)[2] + (*value)[2];
  const int64_t heads = (*query)[0], key_heads = args.enable_gqa ? std::max((*key)[0], (*value)[0]) : heads;
  const int64_t numbers = rows * dims + keys * dims * key_heads / std::max(heads, int64_t{1});
  return bytes_of_draws(Window{0, 1, 0, rows, 0, keys}) <=
         numbers * static_cast<int64_t>(args.query.element_size());
}

}  // namespace

bool saves_draws(const SdpaArgs& args) {
  const bool is_plain = args.dropout_p > 0.0 && args.dropout_seed.defined() && args.dropout_seed.dim() == 0 &&
                        !args.sequences.defined() && !args.unrounded && !args.dropout_origin.has_value();
  // The gradient of a mask comes from the composition, which draws by itself.
  const bool wants_mask_grad = args.attn_mask.defined() && args.attn_mask.requires_grad();
  return is_plain && !wants_mask_grad && save_draws_for_backward() && can_be_saved(args) &&
         are_small_beside_tensors(args);
}

SdpaOutputs call_forward_saving_draws(const SdpaArgs& args) {
  using Results = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>>;
  static const auto op = find_op<DrawnCall, Results>(kOp);
  DrawnCall call{args};
  auto [output, lse, draws] = call_op(op, call.arguments());
  return {output, lse, tensor_or_undefined(draws), {}};
}

}  // namespace attn_ext::cuda
