// The results of a forward pass.
#pragma once

#include <ATen/EmptyTensor.h>

#include <limits>

#include "../memory_order.h"
#include "call.h"
#include "huge_pages.h"

namespace attn_ext::cpu {

/// Through no dispatcher: all keys above the CPU's are done with.
inline at::Tensor empty_output(const CallSizes& sizes, std::initializer_list<int64_t> tail,
                               at::ScalarType dtype) {
  return at::Tensor(with_huge_pages(at::detail::empty_cpu(sizes.output_shape(tail), dtype)));
}

inline at::Tensor empty_output_like(const at::Tensor& query, const CallSizes& sizes, at::ScalarType dtype) {
  const auto shape = sizes.output_shape({sizes.query_len, sizes.value_dim});
  const auto strides = dense_strides<int64_t>(shape, memory_order(query, static_cast<int64_t>(shape.size())));
  return at::Tensor(with_huge_pages(at::detail::empty_strided_cpu(shape, strides, dtype)));
}

inline void add_output(Inputs& inputs, ForwardParams& params, const at::Tensor& output) {
  params.output = {inputs.views.writable(output), kind_of(output.scalar_type()) != params.shape.dtype};
  params.output.column_stride = 1;
}

/// What rows of no sequence are: of such the kernels know nothing.
inline void fill_gaps(bool any, const SdpaOutputs& outputs) {
  if (any) {
    outputs.output.zero_();
    if (outputs.lse.defined()) {
      outputs.lse.fill_(-std::numeric_limits<double>::infinity());
    }
  }
}

}  // namespace attn_ext::cpu
