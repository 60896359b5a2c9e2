// A call made ready for the kernels: parameters over the tensors' own memory.
#pragma once

#include "kernel_choice.h"
#include "tensor_view.h"

namespace attn_ext::cpu {

/// What forward and backward share: everything but the outputs and their gradients.
struct Inputs {
  Inputs(const SdpaArgs& args, const SdpaSizes& sizes);
  Inputs(const Inputs&) = delete;  // views point into it

  /// Lets the kernels read a copy of the mask where that is worth it (dense_mask.h).
  void make_mask_dense(const at::Tensor& given) {
    if (given.defined()) {
      copy_scattered(given);
    }
  }

  CallSizes sizes;
  Views views;
  at::Tensor mask;   // that the rule's view points into, if it is a copy
  at::Tensor seeds;  // one for each block of the batch that a seed covers
  CallParams params;

 private:
  void copy_scattered(const at::Tensor& given);
};

/// A pass's parameters, with what the inputs say filled in.
template <class Params>
Params params_over(const Inputs& inputs) {
  Params params;
  static_cast<CallParams&>(params) = inputs.params;
  return params;
}

inline const DtypeKernels& kernels_of(const KernelTable& table, at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return *table.of[kFloat64Kernels];
    case at::kFloat:
      return *table.of[kFloat32Kernels];
    case at::kBFloat16:
      return *table.of[kBFloat16Kernels];
    default:
      return *table.of[kFloat16Kernels];
  }
}

/// What a call of which all is visible takes, in multiply-adds.
double work_of(const AttentionShape& shape);

/// 1 where starting threads would take longer than so many multiply-adds.
int useful_threads(double work);

}  // namespace attn_ext::cpu
