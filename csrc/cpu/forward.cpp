// `_sdpa_forward` on the CPU: tensors to parameters, then the kernels' rounds of tasks over the threads.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../aten/sdpa_aten.h"
#include "call.h"
#include "fork.h"
#include "tasks.h"

namespace attn_ext::cpu {

namespace {

void run_forward(const ForwardKernels& kernels, const ForwardParams& params) {
  const int threads = useful_threads(params.shape);
  ForwardPlan plan;
  kernels.plan(params, threads, plan);
  const Scratch shared(plan.shared_bytes), private_memory(plan.thread_bytes * threads);
  const auto own = [&](int64_t slot) { return private_memory.data() + slot * plan.thread_bytes; };
  run_tasks(plan.pack_tasks, threads,
            [&](int64_t task, int64_t) { kernels.pack(params, plan, task, shared.data()); });
  run_tasks(plan.run_tasks, threads,
            [&](int64_t task, int64_t slot) { kernels.run(params, plan, task, shared.data(), own(slot)); });
  run_tasks(plan.finish_tasks, threads, [&](int64_t task, int64_t slot) {
    kernels.finish(params, plan, task, shared.data(), own(slot));
  });
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
  const auto options = args.query.options();
  const auto accumulated = options.dtype(accumulation_dtype(dtype));

  SdpaOutputs outputs;
  outputs.output = at::empty(sizes.output_shape({sizes.query_len, sizes.value_dim}), options);
  outputs.lse = at::empty(sizes.output_shape({sizes.query_len}), accumulated);
  ForwardParams params = forward_params(inputs);
  params.output = inputs.views.matrix(outputs.output);
  params.output.column_stride = 1;
  params.lse = outputs.lse.data_ptr();
  if (wanted.weights) {
    outputs.weights = at::empty(sizes.output_shape({sizes.query_len, sizes.key_len}), options);
    params.weights = inputs.views.matrix(outputs.weights);
    params.weights.column_stride = 1;
  }
  if (wanted.key_mass) {
    outputs.key_mass = at::zeros(sizes.output_shape({sizes.key_len}), accumulated);
    params.key_mass = outputs.key_mass.data_ptr();
  }
  run_forward(kernels_of(table->forward, dtype), params);
  if (wanted.key_mass) {
    outputs.key_mass = outputs.key_mass.to(dtype);
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_cpu>)));
}

}  // namespace attn_ext::cpu
