// `_sdpa_forward` on the CPU: tensors to parameters, then the kernels' rounds of tasks over the threads.

#include "forward.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "../aten/sdpa_aten.h"
#include "../memory_order.h"
#include "call.h"
#include "fork.h"
#include "huge_pages.h"
#include "planned_call.h"
#include "tasks.h"

namespace attn_ext::cpu {

namespace {

void run_forward(const KernelTable& table, at::ScalarType dtype, const ForwardParams& params) {
  const int threads = useful_threads(params.shape);
  run_rounds(plan_call(kernels_of(table.forward, dtype), params, threads), threads);
}

/// Through no dispatcher: all keys above the CPU's are done with.
at::Tensor empty_output(const CallSizes& sizes, std::initializer_list<int64_t> tail, at::ScalarType dtype) {
  return at::Tensor(with_huge_pages(at::detail::empty_cpu(sizes.output_shape(tail), dtype)));
}

at::Tensor empty_output_like(const at::Tensor& query, const CallSizes& sizes) {
  const auto shape = sizes.output_shape({sizes.query_len, sizes.value_dim});
  const auto strides = dense_strides<int64_t>(shape, memory_order(query, static_cast<int64_t>(shape.size())));
  return at::Tensor(with_huge_pages(at::detail::empty_strided_cpu(shape, strides, query.scalar_type())));
}

void add_output(Inputs& inputs, ForwardParams& params, const at::Tensor& output) {
  params.output = inputs.views.writable(output);
  params.output.column_stride = 1;
}

SdpaOutputs forward_cpu(const SdpaArgs& args, SideOutputs wanted) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return forward_aten(args, wanted);
  }
  Inputs inputs(args, check_args(args));
  const CallSizes& sizes = inputs.sizes;
  const auto dtype = args.query.scalar_type();
  const auto accumulated = accumulation_dtype(dtype);

  SdpaOutputs outputs;
  outputs.output = empty_output_like(args.query, sizes);
  outputs.lse = empty_output(sizes, {sizes.query_len}, accumulated);
  auto params = params_over<ForwardParams>(inputs);
  add_output(inputs, params, outputs.output);
  params.lse = outputs.lse.mutable_data_ptr();
  if (wanted.weights) {
    outputs.weights = empty_output(sizes, {sizes.query_len, sizes.key_len}, dtype);
    params.weights = inputs.views.writable(outputs.weights);
    params.weights.column_stride = 1;
  }
  if (wanted.key_mass) {
    outputs.key_mass = empty_output(sizes, {sizes.key_len}, accumulated).zero_();
    params.key_mass = outputs.key_mass.mutable_data_ptr();
  }
  run_forward(*table, dtype, params);
  if (wanted.key_mass) {
    outputs.key_mass = outputs.key_mass.to(dtype);
  }
  return outputs;
}

}  // namespace

at::Tensor output_cpu(const SdpaArgs& args) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return forward_aten(args, {}).output;
  }
  Inputs inputs(args, check_args(args));
  const CallSizes& sizes = inputs.sizes;
  const auto dtype = args.query.scalar_type();
  at::Tensor output = empty_output_like(args.query, sizes);
  auto params = params_over<ForwardParams>(inputs);
  add_output(inputs, params, output);
  run_forward(*table, dtype, params);
  return output;
}

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_cpu>)));
}

}  // namespace attn_ext::cpu
