// On AMD's processors from Zen 5 on oneDNN takes half of MKL's time; others were not measured, and keep what
// F.linear does. The op that torch has for it knows neither autograd nor subclasses, so it is for plain
// calls.

#include "linear.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>

#include "../cpu/kernels/interface/amd_cpu.h"

namespace attn_ext {

namespace {

using LinearPointwise = at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                                   const std::optional<at::Tensor>& bias, std::string_view post_op,
                                   c10::List<std::optional<at::Scalar>> scalars,
                                   std::optional<std::string_view> algorithm);

constexpr char kLinearPointwise[] =
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) "
    "-> Tensor Y";

/// None in a torch without oneDNN, or with another such op: it is torch's own, and may change.
const std::optional<c10::TypedOperatorHandle<LinearPointwise>>& onednn_op() {
  static const auto op = [] {
    const auto handle = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    const bool is_known = handle && c10::str(handle->schema()) == kLinearPointwise;
    return is_known ? std::optional(handle->typed<LinearPointwise>()) : std::nullopt;
  }();
  return op;
}

/// Nothing but the CPU's own kernel would see a call: no mode, tracer, transform or autocast is active.
bool calls_are_plain() {
  return c10::default_included_set.has_all(c10::impl::tls_local_dispatch_key_set().included_) &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}

bool is_plain(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kPlain({c10::DispatchKey::CPU, c10::DispatchKey::ADInplaceOrView,
                                        c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU});
  return kPlain.has_all(tensor.key_set()) && tensor.scalar_type() == at::kFloat &&
         !(tensor.requires_grad() && at::GradMode::is_enabled()) && !tensor._fw_grad(0).defined();
}

/// From some 2 million multiply-adds on; for one row, or fewer of them, MKL is quicker to begin.
bool are_many(int64_t rows, int64_t in_features, int64_t out_features) {
  constexpr int64_t kFewRows = 4;
  constexpr int64_t kMultiplyAdds = int64_t{1} << 21;
  return rows >= kFewRows && rows * in_features >= kMultiplyAdds / out_features;
}

/// What oneDNN reads right: of a bias it knows no strides, and rows that overlap it refuses. Of shapes that
/// do not go together at::linear says what is wrong.
bool lie_well(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return input.dim() > 0 && input.is_non_overlapping_and_dense() && weight.dim() == 2 &&
         weight.is_contiguous() && weight.numel() > 0 && input.size(-1) == weight.size(1) &&
         (!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous()));
}

bool is_for_onednn(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  static const bool pays = cpu::is_zen5_or_later() && onednn_op().has_value();
  return pays && is_plain(input) && is_plain(weight) && (!bias || is_plain(*bias)) &&
         lie_well(input, weight, bias) &&
         are_many(input.numel() / weight.size(1), weight.size(1), weight.size(0)) &&
         at::globalContext().userEnabledMkldnn() && calls_are_plain();
}

}  // namespace

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (is_for_onednn(input, weight, bias)) {
    return onednn_op()->call(input, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
  }
  return at::linear(input, weight, bias);
}

}  // namespace attn_ext
