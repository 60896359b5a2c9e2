// The product of a module's packed projections.
#pragma once

#include <ATen/core/Tensor.h>

namespace attn_ext {

/// F.linear. Of torch's two libraries of products in float32, MKL and oneDNN, it asks the faster one where no
/// gradient is wanted; F.linear always asks MKL.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

}  // namespace attn_ext
