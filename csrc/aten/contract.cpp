#include "contract.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/all.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/where.h>

#include <limits>
#include <string>

namespace attn_ext {

namespace {

/// False only if a look at the data shows that every value is finite. Where looking would wait for a device, or
/// the data cannot be looked at (inside a function transform), the careful way is taken unseen.
bool may_hold_nonfinite(const at::Tensor& tensor) {
  const bool readable =
      tensor.device().is_cpu() && !tensor.key_set().has_any(c10::DispatchKeySet(
                                      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                       c10::DispatchKey::Python}));
  return !readable || !at::isfinite(tensor).all().item<bool>();
}

std::string equation(Letters left, Letters right, Letters out, const std::string& lead,
                     const std::string& out_lead) {
  std::string text;
  text.append(lead).append(left).append(",").append(lead).append(right).append("->");
  return text.append(out_lead).append(out);
}

}  // namespace

Dims broadcast_lead(const at::Tensor& a, const at::Tensor& b) {
  Dims lead;
  for (int64_t dim = 0; dim < a.dim() - 2; ++dim) {
    lead.push_back(a.size(dim) == 1 ? b.size(dim) : a.size(dim));
  }
  return lead;
}

at::Tensor contract(const at::Tensor& left, Letters left_dims, const at::Tensor& right, Letters right_dims,
                    Letters out_dims, const Dims& lead) {
  std::string letters, kept;
  const Dims full = broadcast_lead(left, right);
  for (size_t dim = 0; dim < lead.size(); ++dim) {
    letters.push_back(static_cast<char>('a' + dim));
    if (lead[dim] == full[dim]) {
      kept.push_back(letters.back());
    }
  }
  at::Tensor product = at::einsum(equation(left_dims, right_dims, out_dims, letters, kept), {left, right});
  for (size_t dim = 0; dim < lead.size(); ++dim) {
    if (lead[dim] != full[dim]) {
      product = product.unsqueeze(static_cast<int64_t>(dim));
    }
  }
  return product;
}

at::Tensor finite_or_zero(const at::Tensor& tensor) {
  return may_hold_nonfinite(tensor) ? at::where(at::isfinite(tensor), tensor, 0.0).to(tensor.scalar_type())
                                    : tensor;
}

at::Tensor contract_visible(const at::Tensor& left, Letters left_dims, const at::Tensor& visible,
                            const at::Tensor& right, Letters right_dims, Letters out_dims, const Dims& lead) {
  if (!visible.defined() || !may_hold_nonfinite(right)) {
    return contract(left, left_dims, right, right_dims, out_dims, lead);
  }
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Dims left_shape(visible.sizes().begin(), visible.sizes().end() - 2);
  left_shape.append(left.sizes().end() - 2, left.sizes().end());
  const at::Tensor sees = visible.expand(left_shape).to(left.scalar_type());
  at::Tensor product =
      contract(left, left_dims, finite_or_zero(right), right_dims, out_dims, lead);
  const auto show = [&](const at::Tensor& is_special, double special) {
    const at::Tensor count =
        contract(sees, left_dims, is_special.to(left.scalar_type()), right_dims, out_dims, lead);
    product = product + at::where(count > 0, special, 0.0).to(left.scalar_type());
  };
  show(at::isnan(right), std::numeric_limits<double>::quiet_NaN());
  show(right == kInfinity, kInfinity);
  show(right == -kInfinity, -kInfinity);
  return product;
}

at::Tensor plus(const at::Tensor& a, const at::Tensor& b) {
  return !a.defined() ? b : !b.defined() ? a : a + b;
}

at::Tensor minus(const at::Tensor& a, const at::Tensor& b) {
  return !b.defined() ? a : !a.defined() ? -b : a - b;
}

at::Tensor times(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() ? a * b : at::Tensor();
}

}  // namespace attn_ext
