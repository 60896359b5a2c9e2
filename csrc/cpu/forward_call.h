// A forward call made ready for the kernels: parameters over the tensors' own memory, and a plan.
#pragma once

#include "kernel_choice.h"
#include "tensor_view.h"

namespace attn_ext::cpu {

/// Everything but the outputs; what backward shares.
struct Inputs {
  Inputs(const SdpaArgs& args, const SdpaSizes& sizes);
  Inputs(const Inputs&) = delete;  // views point into it

  CallSizes sizes;
  Views views;
  at::Tensor seeds;  // one for each block of the batch that a seed covers
  AttentionShape shape;
  ScoreRule rule;
  DropoutRule dropout;
  TensorView query, key, value;
};

ForwardParams forward_params(const Inputs& inputs);

const ForwardKernels& forward_kernels(const KernelTable& table, at::ScalarType dtype);

/// 1 where starting threads would take longer than the work.
int useful_threads(const AttentionShape& shape);

}  // namespace attn_ext::cpu
