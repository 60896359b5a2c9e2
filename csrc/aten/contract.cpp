#include "contract.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/all.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>
#include <utility>
#include <vector>

namespace attn_ext {

bool may_hold_nonfinite(const at::Tensor& tensor) {
  const bool readable = tensor.device().is_cpu() &&
                        !tensor.key_set().has_any(c10::DispatchKeySet(
                            {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                             c10::DispatchKey::Batched, c10::DispatchKey::Python}));
  return !readable || !at::isfinite(tensor).all().item<bool>();
}

namespace {

// The letters in the order that every tensor here has them.
constexpr Letters kLetters = "QKD";

/// (lead, Q, K, D) with size 1 for the letter that the tensor lacks.
at::Tensor align(const at::Tensor& tensor, Letters dims) {
  for (size_t letter = 0; letter < kLetters.size(); ++letter) {
    if (dims.find(kLetters[letter]) == Letters::npos) {
      return tensor.unsqueeze(static_cast<int64_t>(letter) - static_cast<int64_t>(kLetters.size()));
    }
  }
  TORCH_INTERNAL_ASSERT(false, "a tensor with all three letters");
}

/// What becomes of each dim in a batched matrix product (batch, rows, inner) x (batch, inner, columns).
struct Roles {
  Dims batch, rows, columns, inner;  // dims of the aligned tensors
  Dims sum_left, sum_right;          // dims that the other side lacks, summed before the product
};

Roles roles_of(const at::Tensor& left, const at::Tensor& right, const std::vector<bool>& kept) {
  Roles roles;
  for (int64_t dim = 0; dim < left.dim(); ++dim) {
    const bool keep = kept[static_cast<size_t>(dim)];
    if (left.size(dim) == right.size(dim)) {
      (keep ? roles.batch : roles.inner).push_back(dim);
    } else if (right.size(dim) == 1) {
      (keep ? roles.rows : roles.sum_left).push_back(dim);
    } else {
      (keep ? roles.columns : roles.sum_right).push_back(dim);
    }
  }
  // A dim that was summed away is 1 on both sides.
  for (const Dims* summed : {&roles.sum_left, &roles.sum_right}) {
    roles.inner.append(summed->begin(), summed->end());
  }
  return roles;
}

int64_t product_of_sizes(const at::Tensor& tensor, const Dims& dims) {
  int64_t product = 1;
  for (const int64_t dim : dims) {
    product *= tensor.size(dim);
  }
  return product;
}

Dims joined(std::initializer_list<const Dims*> parts) {
  Dims all;
  for (const Dims* part : parts) {
    all.append(part->begin(), part->end());
  }
  return all;
}

bool is_half(const at::Tensor& tensor) {
  return attn_ext::is_half(tensor.scalar_type());
}

/// What the product is made of and summed in.
at::ScalarType sum_dtype(const at::Tensor& left, const at::Tensor& right) {
  return is_half(left) || is_half(right) ? at::kFloat : left.scalar_type();
}

/// Of matrices of which one may be of float and the other of half precision, which both are rounded to.
at::Tensor matrix_product(const at::Tensor& left, const at::Tensor& right) {
  if (!is_half(left) && !is_half(right)) {
    return at::bmm(left, right);
  }
  const auto half = (is_half(right) ? right : left).scalar_type();
  return at::bmm(left.to(half), right.to(half), at::kFloat);
}

/// Summed over what the other side lacks, in float.
at::Tensor summed_before(const at::Tensor& tensor, const Dims& dims) {
  return dims.empty()
             ? tensor
             : tensor.sum(dims, /*keepdim=*/true, is_half(tensor) ? at::kFloat : tensor.scalar_type());
}

/// As a batch of matrices of the first and of the second group of dims; `rest` is of size 1.
at::Tensor as_matrices(const at::Tensor& tensor, const Dims& batch, const Dims& first, const Dims& second,
                       const Dims& rest) {
  const int64_t batches = product_of_sizes(tensor, batch), rows = product_of_sizes(tensor, first),
                columns = product_of_sizes(tensor, second);
  return tensor.permute(joined({&batch, &first, &second, &rest})).reshape({batches, rows, columns});
}

}  // namespace

Dims broadcast_lead(const at::Tensor& a, const at::Tensor& b) {
  Dims lead;
  for (int64_t dim = 0; dim < a.dim() - 2; ++dim) {
    lead.push_back(a.size(dim) == 1 ? b.size(dim) : a.size(dim));
  }
  return lead;
}

at::Tensor contract(const at::Tensor& left_tensor, Letters left_dims, const at::Tensor& right_tensor,
                    Letters right_dims, Letters out_dims, const Dims& lead) {
  at::Tensor left = align(left_tensor, left_dims), right = align(right_tensor, right_dims);
  const Dims full = broadcast_lead(left_tensor, right_tensor);
  std::vector<bool> kept;
  for (size_t dim = 0; dim < lead.size(); ++dim) {
    kept.push_back(lead[dim] == full[dim]);
  }
  for (const char letter : kLetters) {
    kept.push_back(out_dims.find(letter) != Letters::npos);
  }
  const Roles roles = roles_of(left, right, kept);
  if (left.numel() == 0 || right.numel() == 0) {  // an empty sum is 0, also where the other side holds Inf
    Dims sizes = std::as_const(lead);
    for (const char letter : out_dims) {
      const auto dim = static_cast<int64_t>(kLetters.find(letter)) - static_cast<int64_t>(kLetters.size());
      sizes.push_back(left.size(dim) == 1 ? right.size(dim) : left.size(dim));
    }
    return at::zeros(sizes, left.options().dtype(sum_dtype(left, right)));
  }
  if (!roles.sum_left.empty() || !roles.sum_right.empty()) {  // a rounded sum would be another sum
    left = summed_before(left, roles.sum_left).to(sum_dtype(left, right));
    right = summed_before(right, roles.sum_right).to(left.scalar_type());
  }
  const at::Tensor product =
      matrix_product(as_matrices(left, roles.batch, roles.rows, roles.inner, roles.columns),
                     as_matrices(right, roles.batch, roles.inner, roles.columns, roles.rows));
  // Back to (lead, Q, K, D), where every inner dim is 1 now.
  const Dims order = joined({&roles.batch, &roles.rows, &roles.columns, &roles.inner});
  Dims sizes, back(order.size(), 0);
  for (size_t place = 0; place < order.size(); ++place) {
    const int64_t dim = order[place];
    const bool is_inner = place >= order.size() - roles.inner.size();
    sizes.push_back(is_inner ? 1 : left.size(dim) == 1 ? right.size(dim) : left.size(dim));
    back[static_cast<size_t>(dim)] = static_cast<int64_t>(place);
  }
  at::Tensor aligned = product.reshape(sizes).permute(back);
  for (size_t letter = 0; letter < kLetters.size(); ++letter) {
    if (out_dims.find(kLetters[letter]) == Letters::npos) {
      aligned = aligned.squeeze(static_cast<int64_t>(letter) - static_cast<int64_t>(kLetters.size()));
    }
  }
  return aligned;
}

namespace {

/// What NaN and Inf of `right` add to a product with `left`, which sees them where `sees` is 1: NaN, if one
/// of them is NaN or meets a 0, else the Inf of their signs.
at::Tensor sum_of_nonfinite(const at::Tensor& left, Letters left_dims, const at::Tensor& sees,
                            const at::Tensor& right, Letters right_dims, Letters out_dims, const Dims& lead) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto dtype = right.scalar_type();  // which has -1, 0 and 1
  const auto difference = [&](const at::Tensor& a, const at::Tensor& b) { return a.to(dtype) - b.to(dtype); };
  const auto count = [&](const at::Tensor& a, const at::Tensor& b) {
    return contract(a, left_dims, b, right_dims, out_dims, lead);
  };
  const at::Tensor left_sign = difference(left > 0, left < 0);
  const at::Tensor right_sign = difference(right == kInfinity, right == -kInfinity);
  const at::Tensor seen = count(sees, at::isfinite(right).logical_not().to(dtype));
  const at::Tensor infinities = count(left_sign.abs(), right_sign.abs());
  const at::Tensor sum = count(left_sign, right_sign);
  const auto where = [&](const at::Tensor& condition, double special) {
    return at::where(condition, special, 0.0).to(sum_dtype(left, right));
  };
  return where(seen > infinities, std::numeric_limits<double>::quiet_NaN()) +
         where(infinities + sum > 0, kInfinity) + where(infinities - sum > 0, -kInfinity);
}

}  // namespace

at::Tensor contract_visible(const at::Tensor& left, Letters left_dims, const at::Tensor& visible,
                            const at::Tensor& right, Letters right_dims, Letters out_dims, const Dims& lead) {
  if (!visible.defined() || left.numel() == 0 || !may_hold_nonfinite(right)) {
    return contract(left, left_dims, right, right_dims, out_dims, lead);
  }
  Dims sees_shape(static_cast<size_t>(left.dim() - visible.dim()), 1);
  sees_shape.append(visible.sizes().begin(), visible.sizes().end() - 2);
  sees_shape.append(left.sizes().end() - 2, left.sizes().end());
  const at::Tensor sees = visible.expand(sees_shape).to(left.scalar_type());
  const at::Tensor product =
      contract(left, left_dims, at::where(at::isfinite(right), right, 0.0).to(right.scalar_type()),
               right_dims, out_dims, lead);
  return product + sum_of_nonfinite(left, left_dims, sees, right, right_dims, out_dims, lead);
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
