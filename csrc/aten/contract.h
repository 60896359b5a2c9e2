// Products of the composition, over any broadcast, and what keeps masked NaN and Inf out of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "problem.h"

namespace attn_ext {

/// False only if a look at the data shows that every value is finite. Where looking would wait for a device,
/// or the data cannot be looked at (inside a function transform), the careful way is taken unseen.
bool may_hold_nonfinite(const at::Tensor& tensor);

/// The two last dims of a tensor, by their letters: Q rows of the query, K keys, D features.
using Letters = std::string_view;

/// Sum over the letter that `out` lacks: contract(p, "QK", v, "KD", "QD") is P·V. Lead dims broadcast without
/// a copy. A lead dim that is 1 in `lead` is summed over (its gradient came from every copy).
at::Tensor contract(const at::Tensor& left, Letters left_dims, const at::Tensor& right, Letters right_dims,
                    Letters out_dims, const Dims& lead);

/// contract, where `left` is zero at what `visible` (undefined: all is visible) hides, and `right` may hold
/// NaN and Inf: they reach only what sees them, where 0 · NaN would reach all.
at::Tensor contract_visible(const at::Tensor& left, Letters left_dims, const at::Tensor& visible,
                            const at::Tensor& right, Letters right_dims, Letters out_dims, const Dims& lead);

/// The broadcast lead dims of two tensors with two further dims.
Dims broadcast_lead(const at::Tensor& a, const at::Tensor& b);

// Undefined tensors stand for zero.
at::Tensor plus(const at::Tensor& a, const at::Tensor& b);
at::Tensor minus(const at::Tensor& a, const at::Tensor& b);
at::Tensor times(const at::Tensor& a, const at::Tensor& b);

}  // namespace attn_ext
