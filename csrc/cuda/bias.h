// A mask, and the band beside it, as the bias that the fused kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include "route.h"

namespace attn_ext::cuda {

inline constexpr int64_t kBiasAlignment = 16;  // elements between the rows of a bias

/// (Lq, keys), True where the band lets through.
at::Tensor visible_by(const VisibleRange& range, int64_t query_len, const at::TensorOptions& options);

enum class BiasRows { kAnywhere, kAligned, kAlignedCopy };  // aligned: 16 elements apart, or a multiple

/// (lead or 1, Lq or 1, keys): a mask of the range's keys, with `visible` in it where that is defined, in the
/// query's dtype with -inf where it hides. The mask itself where it is so, unless a copy is wanted.
at::Tensor make_bias(const at::Tensor& mask, const at::Tensor& visible, at::ScalarType dtype, int64_t keys,
                     BiasRows rows);

}  // namespace attn_ext::cuda
