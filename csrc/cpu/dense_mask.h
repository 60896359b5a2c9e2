// Masks whose columns are not neighbours in memory: a bias with its heads innermost, as embeddings of
// relative positions are, or a transposed one. Each batch that shares a row reads it again, and one head
// after the other goes through the others' numbers; so a copy with neighbouring columns is made, in forward
// and again in backward, unless the mask is large or mostly hidden.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/interface/params.h"

namespace attn_ext::cpu {

/// What a copy takes; 0 where there is none.
int64_t dense_mask_bytes(const at::Tensor& mask, const CallParams& params);

/// The copy, or the mask itself. Dims that broadcast stay so.
at::Tensor dense_mask(const at::Tensor& mask, const CallParams& params);

}  // namespace attn_ext::cpu
