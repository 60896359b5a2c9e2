#include "bias.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

namespace attn_ext::cuda {

namespace {

/// Whether rows begin at multiples of so many elements.
bool bias_rows_are_aligned(const at::Tensor& mask) {
  const auto bytes = kBiasAlignment * static_cast<int64_t>(mask.element_size());
  bool fits = reinterpret_cast<uintptr_t>(mask.storage().data()) % 16 == 0 &&
              mask.storage_offset() % kBiasAlignment == 0;
  for (int64_t dim = 0; dim + 1 < mask.dim(); ++dim) {
    const int64_t stride = mask.size(dim) > 1 ? mask.stride(dim) : 0;
    fits = fits && stride * static_cast<int64_t>(mask.element_size()) % bytes == 0;
  }
  return fits;
}

}  // namespace

at::Tensor visible_by(const VisibleRange& range, int64_t query_len, const at::TensorOptions& options) {
  const auto numbers = options.dtype(at::kLong);
  const at::Tensor rows = at::arange(query_len, numbers).unsqueeze(-1),
                   keys = at::arange(range.keys(), numbers);
  const at::Tensor visible = range.band.high ? keys.le(rows + *range.band.high)
                                             : at::ones({query_len, range.keys()}, options.dtype(at::kBool));
  return range.band.low ? visible.logical_and(keys.ge(rows + *range.band.low)) : visible;
}

at::Tensor make_bias(const at::Tensor& mask, const at::Tensor& visible, at::ScalarType dtype, int64_t keys,
                     bool wants_alignment) {
  const bool is_bool = mask.scalar_type() == at::kBool;
  at::DimVector sizes(mask.sizes().begin(), mask.sizes().end());
  sizes.back() = keys;
  if (visible.defined()) {
    sizes[sizes.size() - 2] = visible.size(-2);
  }
  const bool is_bias = !is_bool && !visible.defined() && mask.size(-1) == keys && mask.stride(-1) == 1;
  if (is_bias && (!wants_alignment || bias_rows_are_aligned(mask))) {
    return mask;
  }
  at::DimVector padded = sizes;
  padded.back() = rounded_up(keys, kBiasAlignment);
  const at::Tensor bias =
      at::full(padded, is_bool ? -kInfinity : 0.0, mask.options().dtype(dtype)).narrow(-1, 0, keys);
  if (is_bool) {
    bias.masked_fill_(visible.defined() ? mask.logical_and(visible) : mask, 0.0);
  } else {
    bias.copy_(mask);
    if (visible.defined()) {
      bias.masked_fill_(visible.logical_not(), -kInfinity);
    }
  }
  return bias;
}

at::Tensor rows_that_see(const at::Tensor& bias) {
  return at::amax(bias, -1) != -kInfinity;
}

}  // namespace attn_ext::cuda
