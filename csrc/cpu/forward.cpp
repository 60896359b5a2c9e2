// `_sdpa_forward` on the CPU: tensors to parameters, then the kernels' rounds of tasks over the threads.

#include "forward.h"

#include <torch/library.h>

#include "../aten/sdpa_aten.h"
#include "call.h"
#include "fork.h"
#include "kernels/interface/memory_ahead.h"
#include "outputs.h"
#include "packed.h"
#include "planned_call.h"
#include "tasks.h"

namespace attn_ext::cpu {

namespace {

ForwardParams params_of(const Inputs& inputs) {
  auto params = params_over<ForwardParams>(inputs);
  params.most_bytes_head_by_head = most_bytes_head_by_head();
  return params;
}

void run_forward(const KernelTable& table, at::ScalarType dtype, const ForwardParams& params) {
  const int threads = useful_threads(work_of(params.shape));
  run_call(plan_call(kernels_of(table, dtype).forward, params, threads), threads);
}

void run_packed_forward(const KernelTable& table, const SdpaArgs& args, const ForwardParams& params,
                        const std::vector<Sequence>& sequences, const SdpaOutputs& outputs) {
  fill_gaps(has_gaps(sequences, &Sequence::query_len, params.shape.query_len), outputs);
  const int64_t count = std::ssize(sequences);
  std::vector<ForwardParams> problems;
  problems.reserve(sequences.size());
  for (int64_t i = 0; i < count; ++i) {
    problems.push_back(of_sequence(params, sequences[static_cast<size_t>(i)], i, count));
  }
  run_problems(kernels_of(table, args.query.scalar_type()).forward, problems);
}

SdpaOutputs forward_cpu(const SdpaArgs& args, SideOutputs wanted) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return forward_aten(args, wanted);
  }
  check_packed(args, wanted);
  Inputs inputs(args, check_args(args));
  inputs.make_mask_dense(args.attn_mask);
  const CallSizes& sizes = inputs.sizes;
  const auto dtype = args.query.scalar_type();
  const auto accumulated = accumulation_dtype(dtype);

  SdpaOutputs outputs;
  outputs.output = empty_output_like(args.query, sizes, output_dtype(args));
  outputs.lse = empty_output(sizes, {sizes.query_len}, lse_dtype(args));
  ForwardParams params = params_of(inputs);
  add_output(inputs, params, outputs.output);
  if (lse_dtype(args) == accumulated) {
    params.lse = outputs.lse.mutable_data_ptr();
  } else {
    params.double_lse = outputs.lse.mutable_data_ptr<double>();
  }
  params.lse_stride = sizes.query_len;
  if (wanted.weights) {
    outputs.weights = empty_output(sizes, {sizes.query_len, sizes.key_len}, dtype);
    params.weights = inputs.views.writable(outputs.weights);
    params.weights.column_stride = 1;
  }
  if (wanted.key_mass) {
    outputs.key_mass = empty_output(sizes, {sizes.key_len}, accumulated).zero_();
    params.key_mass = outputs.key_mass.mutable_data_ptr();
  }
  if (args.sequences.defined()) {
    run_packed_forward(*table, args, params, sequences_of(args), outputs);
    return outputs;
  }
  run_forward(*table, dtype, params);
  if (wanted.key_mass) {
    outputs.key_mass = outputs.key_mass.to(dtype);
  }
  return outputs;
}

}  // namespace

at::Tensor output_cpu(const SdpaArgs& args, const std::vector<Sequence>* sequences) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return forward_aten(args, {}).output;
  }
  Inputs inputs(args, check_args(args));
  inputs.make_mask_dense(args.attn_mask);
  const CallSizes& sizes = inputs.sizes;
  const auto dtype = args.query.scalar_type();
  at::Tensor output = empty_output_like(args.query, sizes, dtype);
  ForwardParams params = params_of(inputs);
  add_output(inputs, params, output);
  if (sequences != nullptr) {
    run_packed_forward(*table, args, params, *sequences, {output, {}, {}, {}});
  } else {
    run_forward(*table, dtype, params);
  }
  return output;
}

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_cpu>)));
}

}  // namespace attn_ext::cpu
