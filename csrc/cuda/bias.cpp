#include "bias.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/log.h>
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
                     BiasRows rows) {
  const bool is_bool = mask.scalar_type() == at::kBool;
  at::DimVector sizes(mask.sizes().begin(), mask.sizes().end());
  sizes.back() = keys;
  if (visible.defined()) {
    sizes[sizes.size() - 2] = visible.size(-2);
  }
  const bool is_bias = !is_bool && !visible.defined() && mask.size(-1) == keys && mask.stride(-1) == 1;
  const bool fits =
      rows == BiasRows::kAnywhere || (rows == BiasRows::kAligned && bias_rows_are_aligned(mask));
  if (is_bias && fits) {
    return mask;
  }
  at::DimVector padded = sizes;
  padded.back() = rounded_up(keys, kBiasAlignment);
  at::Tensor bias = at::empty(padded, mask.options().dtype(dtype));
  if (padded.back() != keys) {
    // The efficient kernel, which wants alignment, drops what comes of numbers between the rows, NaN as well;
    // of cuDNN that is not known.
    if (rows == BiasRows::kAnywhere) {
      bias.narrow(-1, keys, padded.back() - keys).zero_();
    }
    bias = bias.narrow(-1, 0, keys);
  }
  if (is_bool) {
    // log(True) is 0 and log(False) is -inf, by one kernel.
    const at::Tensor sees = visible.defined() ? mask.logical_and(visible) : mask;
    at::log_out(bias, sees.sizes() == sizes ? sees : sees.expand(sizes));
  } else {
    bias.copy_(mask);
    if (visible.defined()) {
      bias.masked_fill_(visible.logical_not(), -kInfinity);
    }
  }
  return bias;
}

}  // namespace attn_ext::cuda
