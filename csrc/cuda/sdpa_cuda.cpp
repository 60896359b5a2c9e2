// The internal pair on NVIDIA GPUs: ATen's fused kernels wherever they can be had, else the composition.
//
// A sink takes part in the softmax and has no value: with lse' = log(exp lse + exp sink), the output is that
// without sinks times exp(lse - lse'), and every gradient follows from lse' in the place of lse.
//
// An incoming gradient of lse adds dLse to each dP of its row. So it comes in as one of the output, in a
// column where every value is 1 and the output counts as 0: it reaches dP and not the row's delta.

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "../aten/sdpa_aten.h"
#include "plan.h"
#include "sdpa_cuda.h"

namespace attn_ext::cuda {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor of_shape(const at::Tensor& tensor, at::IntArrayRef shape) {
  return tensor.sizes() == shape ? tensor : tensor.reshape(shape);
}

/// (N, H, 1) float32.
at::Tensor sinks_of(const SdpaArgs& args, const Plan& plan) {
  const auto [batches, heads] = plan.dims.sizes();
  return plan.problem.layout.of_query_heads(args.sinks, 0)
      .expand(plan.problem.lead)
      .reshape({batches, heads, 1})
      .to(at::kFloat);
}

void take_sinks(const SdpaArgs& args, const Plan& plan, FusedOutputs& outputs) {
  const at::Tensor lse = at::logaddexp(outputs.lse, sinks_of(args, plan));
  const at::Tensor left = at::exp(outputs.lse - lse);
  // Of a row that sees neither keys nor a sink the difference is NaN.
  outputs.output.mul_(at::where(outputs.lse == -kInfinity, 0.0, left).to(at::kFloat).unsqueeze(-1));
  outputs.lse = lse;
}

SdpaOutputs forward(const SdpaArgs& args, SideOutputs wanted, bool wants_lse) {
  const Plan plan = make_plan(args, {.sides = wanted, .wants_lse = wants_lse || args.sinks.defined()});
  if (!plan.is_fused()) {
    return forward_aten(args, wanted);
  }
  FusedOutputs fused = fused_forward(plan.call);
  if (args.sinks.defined()) {
    take_sinks(args, plan, fused);
  }
  const Problem& problem = plan.problem;
  if (fused.output.size(-1) != problem.value_dim) {
    fused.output = fused.output.narrow(-1, 0, problem.value_dim);
  }
  SdpaOutputs outputs;
  outputs.output =
      in_order(of_shape(fused.output, problem.output_shape({problem.query_len, problem.value_dim})),
               problem.output_order);
  if (wants_lse) {
    outputs.lse = of_shape(fused.lse, problem.output_shape({problem.query_len})).contiguous();
  }
  return outputs;
}

SdpaOutputs forward_with_lse(const SdpaArgs& args, SideOutputs wanted) {
  return forward(args, wanted, /*wants_lse=*/true);
}

/// (N, H, Lq, columns): the incoming gradients of output and lse, in the columns of the plan's value.
at::Tensor joined_grads(const SdpaOutputs& grads, const Plan& plan) {
  const Problem& problem = plan.problem;
  const auto [batches, heads] = plan.dims.sizes();
  const int64_t columns = plan.call.value.size(-1);
  const at::Tensor output =
      grads.output.defined()
          ? *plan.dims.query_view(grads.output)
          : at::zeros({batches, heads, problem.query_len, problem.value_dim}, plan.call.query.options());
  if (!grads.lse.defined()) {
    return aligned(output, columns);
  }
  const at::Tensor lse = grads.lse.reshape({batches, heads, problem.query_len, 1}).to(at::kFloat);
  const at::Tensor rounded = lse.to(problem.dtype);
  const at::Tensor rest = (lse - rounded.to(at::kFloat)).to(problem.dtype);
  return aligned(at::cat({output, rounded, rest}, -1), columns);
}

/// sum over rows of exp(sink - lse) (dLse - rowsum(dO O)), of the sinks' own shape.
at::Tensor sinks_grad(const SdpaArgs& args, const Plan& plan, const at::Tensor& grad_output,
                      const FusedOutputs& rows, const at::Tensor& grad_lse) {
  const auto [batches, heads] = plan.dims.sizes();
  at::Tensor row_grads = -(grad_output.to(at::kFloat) * rows.output).sum(-1);
  if (grad_lse.defined()) {
    row_grads = row_grads + grad_lse.reshape({batches, heads, plan.problem.query_len});
  }
  const at::Tensor sinks = sinks_of(args, plan);
  const at::Tensor weights = at::exp(sinks - rows.lse);
  // Without a sink there is nothing, whatever the row has.
  const at::Tensor terms = at::where(sinks == -kInfinity, 0.0, weights * row_grads).to(at::kFloat);
  const at::Tensor canonical = plan.problem.layout.of_query_heads(args.sinks, 0);
  return at::sum_to(terms.sum(-1).reshape(at::IntArrayRef(plan.problem.lead)), canonical.sizes())
      .reshape(args.sinks.sizes())
      .to(args.sinks.scalar_type());
}

/// Of the mask's own shape; columns of keys that the band hides from all rows are 0.
at::Tensor mask_grad(const SdpaArgs& args, const Plan& plan, const at::Tensor& bias_grad) {
  const Problem& problem = plan.problem;
  const at::Tensor canonical = problem.layout.of_query_heads(args.attn_mask, 2);
  at::DimVector sizes(problem.lead.begin(), problem.lead.end());
  sizes.push_back(problem.query_len);
  sizes.push_back(plan.call.range.keys());
  at::Tensor whole = bias_grad.reshape(sizes);
  at::DimVector target(canonical.sizes().begin(), canonical.sizes().end());
  target.back() = canonical.size(-1) == 1 ? 1 : plan.call.range.keys();
  whole = at::sum_to(whole, target);
  if (canonical.size(-1) != whole.size(-1)) {
    whole =
        at::constant_pad_nd(whole, {plan.call.range.key_begin, problem.key_len - plan.call.range.key_end}, 0);
  }
  return whole.reshape(args.attn_mask.sizes()).to(args.attn_mask.scalar_type()).contiguous();
}

SdpaInputs backward(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                    InputMask wanted) {
  check_backward(grads, args, saved, wanted);
  const Plan plan =
      make_plan(args, {.is_backward = true,
                       .takes_grads_of_sides = grads.weights.defined() || grads.key_mass.defined(),
                       .takes_lse_grad = grads.lse.defined(),
                       .wants_bias_grad = wanted.attn_mask,
                       .has_delta = saved.delta.defined()});
  if (!plan.is_fused()) {
    return backward_aten(grads, args, saved, wanted);
  }
  const Problem& problem = plan.problem;
  const VisibleRange& range = plan.call.range;
  const auto [batches, heads] = plan.dims.sizes();
  const at::Tensor grad_output = joined_grads(grads, plan);
  const at::Tensor output = *plan.dims.query_view(saved.output);
  const FusedOutputs rows{aligned(output, plan.call.value.size(-1)),
                          of_shape(saved.lse, {batches, heads, problem.query_len}).contiguous()};
  FusedGrads fused = fused_backward(plan.call, grad_output, rows, wanted.attn_mask);

  const auto columns = [](const at::Tensor& grad, int64_t count) {
    return grad.size(-1) == count ? grad : grad.narrow(-1, 0, count);
  };
  const auto all_keys = [&](const at::Tensor& grad) {
    return range.keys() == problem.key_len
               ? grad
               : at::constant_pad_nd(grad, {0, 0, range.key_begin, problem.key_len - range.key_end}, 0);
  };
  SdpaInputs gradients;
  if (wanted.query) {
    gradients.query = plan.dims.of_query_view(columns(fused.query, problem.head_dim), args.query);
  }
  if (wanted.key) {
    gradients.key = plan.dims.of_key_view(all_keys(columns(fused.key, problem.head_dim)), args.key);
  }
  if (wanted.value) {
    gradients.value = plan.dims.of_key_view(all_keys(columns(fused.value, problem.value_dim)), args.value);
  }
  if (wanted.attn_mask) {
    gradients.attn_mask = mask_grad(args, plan, fused.bias);
  }
  if (wanted.sinks) {
    gradients.sinks =
        sinks_grad(args, plan, columns(grad_output, problem.value_dim), {output, rows.lse}, grads.lse);
  }
  return gradients;
}

}  // namespace

at::Tensor output_cuda(const SdpaArgs& args) {
  return forward(args, {}, /*wants_lse=*/false).output;
}

TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_with_lse>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward>)));
}

}  // namespace attn_ext::cuda
