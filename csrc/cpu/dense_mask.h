// Masks whose columns are not neighbours in memory: a bias with its heads innermost, as embeddings of
// relative positions are, or a transposed one.
#pragma once

#include "tensor_view.h"

namespace attn_ext::cpu {

/// The mask, or a copy with neighbouring columns: every row is read by each batch that shares it, and by one
/// head after the other, which all would go through the others' numbers. Dims that broadcast stay so. A large
/// one that is read once is not copied.
at::Tensor with_dense_rows(const at::Tensor& mask, const CallSizes& sizes);

}  // namespace attn_ext::cpu
