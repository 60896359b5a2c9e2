// Attention over all keys from attention over parts of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace attn_ext {

/// Of the same query rows: outputs (..., Dv) and their lse (...), each over keys of its own.
///   lse = log sum_i exp(lse_i),  output = sum_i exp(lse_i - lse) output_i
std::tuple<at::Tensor, at::Tensor> merge_partials_composite(at::TensorList outputs, at::TensorList lses);

}  // namespace attn_ext
