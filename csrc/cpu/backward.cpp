// `_sdpa_backward` on the CPU: tensors to parameters, then the kernels' rounds of tasks over the threads.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "../aten/sdpa_aten.h"
#include "call.h"
#include "fork.h"
#include "huge_pages.h"
#include "tasks.h"

namespace attn_ext::cpu {

namespace {

void run_backward(const BackwardKernels& kernels, const BackwardParams& params) {
  const int threads = useful_threads(params.shape);
  BackwardPlan plan;
  kernels.plan(params, threads, plan);
  const int64_t shared_bytes = (plan.shared_bytes + 63) / 64 * 64;
  const Scratch memory(shared_bytes + plan.thread_bytes * threads);
  for (int64_t round = 0; round < plan.rounds; ++round) {
    run_tasks(kernels.tasks(plan, round), threads, [&](int64_t task, int64_t slot) {
      kernels.run(params, plan, round, task, memory.data(),
                  memory.data() + shared_bytes + slot * plan.thread_bytes);
    });
  }
}

/// The incoming gradients, where necessary in the dtype of accumulation.
struct IncomingGrads {
  IncomingGrads(const SdpaOutputs& grads, at::ScalarType dtype)
      : output(grads.output), weights(grads.weights) {
    const auto accumulator = accumulation_dtype(dtype);
    if (grads.lse.defined()) {
      lse = grads.lse.to(accumulator).unsqueeze(-1);
    }
    if (grads.key_mass.defined()) {
      key_mass = grads.key_mass.to(accumulator).unsqueeze(-2);
    }
  }

  at::Tensor output;    // (..., Hq, Lq, Dv)
  at::Tensor weights;   // (..., Hq, Lq, Lk)
  at::Tensor lse;       // (..., Hq, Lq, 1)
  at::Tensor key_mass;  // (..., Hq, 1, Lk)
};

/// Where the kernels write: a gradient for every batch and head; those of broadcast inputs are summed
/// afterwards.
struct OutgoingGrads {
  OutgoingGrads(const SdpaArgs& args, const Inputs& inputs, InputMask wanted) {
    const CallSizes& sizes = inputs.sizes;
    const auto options = args.query.options();
    const auto accumulated = options.dtype(accumulation_dtype(args.query.scalar_type()));
    const auto shaped = [&](int64_t heads, int64_t rows, int64_t columns) {
      c10::SmallVector<int64_t, 8> shape = sizes.output_shape({rows, columns});
      if (sizes.has_heads) {
        shape[shape.size() - 3] = heads;
      }
      return with_huge_pages(at::empty(shape, options));
    };
    if (wanted.query) {
      query = shaped(sizes.heads, sizes.query_len, sizes.head_dim);
    }
    if (wanted.key) {
      key = shaped(inputs.shape.key_heads, sizes.key_len, sizes.head_dim);
    }
    if (wanted.value) {
      value = shaped(inputs.shape.key_heads, sizes.key_len, sizes.value_dim);
    }
    if (wanted.attn_mask) {
      attn_mask = with_huge_pages(at::empty(args.attn_mask.sizes(), accumulated)).zero_();
    }
    if (wanted.sinks) {
      c10::SmallVector<int64_t, 8> shape(sizes.batch_dims.begin(), sizes.batch_dims.end());
      shape.push_back(sizes.heads);
      sinks = at::zeros(shape, accumulated);
    }
  }

  at::Tensor query, key, value;
  at::Tensor attn_mask;  // in the mask's own shape
  at::Tensor sinks;      // (batch..., Hq)
};

TensorView writable(Views& views, const at::Tensor& tensor) {
  TensorView view;
  if (tensor.defined()) {
    view = views.matrix(tensor);
    view.column_stride = 1;
  }
  return view;
}

TensorView readable(Views& views, const at::Tensor& tensor) {
  return tensor.defined() ? views.matrix(tensor) : TensorView{};
}

at::Tensor in_shape_of(const at::Tensor& grad, const at::Tensor& input) {
  return grad.defined() ? grad.sum_to_size(input.sizes()).to(input.scalar_type()) : grad;
}

SdpaInputs backward_cpu(const SdpaOutputs& grads, const SdpaArgs& args, const at::Tensor& output,
                        const at::Tensor& lse, InputMask wanted) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return backward_aten(grads, args, output, lse, wanted);
  }
  const SdpaSizes checked = check_args(args);
  check_grads(grads, checked);
  Inputs inputs(args, checked);
  const IncomingGrads incoming(grads, args.query.scalar_type());
  const OutgoingGrads outgoing(args, inputs, wanted);
  const at::Tensor plain_lse = lse.contiguous();

  BackwardParams params;
  params.shape = inputs.shape;
  params.rule = inputs.rule;
  params.dropout = inputs.dropout;
  params.query = inputs.query;
  params.key = inputs.key;
  params.value = inputs.value;
  params.output = inputs.views.matrix(output);
  params.lse = plain_lse.const_data_ptr();
  params.grad_output = readable(inputs.views, incoming.output);
  params.grad_lse = readable(inputs.views, incoming.lse);
  params.grad_weights = readable(inputs.views, incoming.weights);
  params.grad_key_mass = readable(inputs.views, incoming.key_mass);
  params.grad_query = writable(inputs.views, outgoing.query);
  params.grad_key = writable(inputs.views, outgoing.key);
  params.grad_value = writable(inputs.views, outgoing.value);
  if (outgoing.attn_mask.defined()) {
    params.grad_mask = inputs.views.matrix(outgoing.attn_mask);
    params.grad_mask_size = outgoing.attn_mask.numel();
  }
  if (outgoing.sinks.defined()) {
    params.grad_sinks = outgoing.sinks.data_ptr();
  }
  run_backward(kernels_of(table->backward, args.query.scalar_type()), params);
  return {in_shape_of(outgoing.query, args.query), in_shape_of(outgoing.key, args.key),
          in_shape_of(outgoing.value, args.value), in_shape_of(outgoing.attn_mask, args.attn_mask),
          in_shape_of(outgoing.sinks, args.sinks)};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_cpu>)));
}

}  // namespace attn_ext::cpu
