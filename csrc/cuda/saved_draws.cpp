#include "saved_draws.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <attn_ext/attn_ext.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>

#include "device/windows.h"

namespace attn_ext::cuda {

namespace {

constexpr const char* kOp = "attn_ext::_sdpa_forward_saving_draws";

bool is_matrix_of_known_sizes(const at::Tensor& tensor) {
  return !tensor.is_nested() && tensor.dim() >= 2 &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

/// Whether a device's own kernel comes next that saves draws: no subclass, no mode, no transform.
bool can_be_saved(const at::Tensor& query) {
  const auto next = c10::impl::computeDispatchKeySet(query.key_set(), c10::after_ADInplaceOrView_keyset)
                        .remove(c10::DispatchKey::BackendSelect)  // which is always there, and has no kernel
                        .highestPriorityTypeId();
  return c10::Dispatcher::singleton().findSchemaOrThrow(kOp, "").hasKernelForDispatchKey(next);
}

}  // namespace

bool saves_draws(const SdpaArgs& args) {
  const bool is_plain = args.dropout_p > 0.0 && args.dropout_seed.defined() && args.dropout_seed.dim() == 0 &&
                        !args.sequences.defined() && !args.unrounded && !args.dropout_origin.has_value();
  if (!is_plain || !save_weights_for_backward() || !is_matrix_of_known_sizes(args.query) ||
      !is_matrix_of_known_sizes(args.key) || !is_matrix_of_known_sizes(args.value) ||
      !can_be_saved(args.query)) {
    return false;
  }
  const int64_t len = args.query.size(-2),
                heads = args.query.numel() / std::max(len * args.query.size(-1), int64_t{1});
  const int64_t numbers =
      args.query.numel() + args.key.numel() + args.value.numel() + heads * len * args.value.size(-1);
  return bytes_of_draws(Window{0, heads, 0, len, 0, args.key.size(-2)}) <=
         numbers * static_cast<int64_t>(args.query.element_size());
}

SdpaOutputs call_forward_saving_draws(const SdpaArgs& args) {
  using Results = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>>;
  static const auto op = find_op<DrawnCall, Results>(kOp);
  DrawnCall call{args};
  auto [output, lse, draws] = call_op(op, call.arguments());
  return {.output = output, .lse = lse, .weights = draws.value_or(at::Tensor())};
}

}  // namespace attn_ext::cuda
