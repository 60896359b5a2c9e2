// The internal pair on NVIDIA GPUs: ATen's fused kernels wherever they can be had, else our own, else the
// composition.
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

#include "../aten/by_sequence.h"
#include "../aten/sdpa_aten.h"
#include "plan.h"
#include "saved_draws.h"
#include "sdpa_cuda.h"

namespace attn_ext::cuda {

namespace {

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

/// (N, H, Lq, Dv and more) in the shape and memory order of the call's output.
at::Tensor as_output(const at::Tensor& output, const Problem& problem) {
  const at::Tensor narrowed =
      output.size(-1) == problem.value_dim ? output : output.narrow(-1, 0, problem.value_dim);
  return in_order(of_shape(narrowed, problem.output_shape({problem.query_len, problem.value_dim})),
                  problem.output_order);
}

SdpaOutputs forward(const SdpaArgs& args, SideOutputs wanted, bool wants_lse);

SdpaOutputs forward_by_tiles(const SdpaArgs& args, const Plan& plan, SideOutputs wanted) {
  const Problem& problem = plan.problem;
  const auto [batches, heads] = plan.dims.sizes();
  SdpaOutputs outputs;
  const bool has_sides = wanted.weights || wanted.key_mass;
  if (has_sides && problem.softcap == 0.0 && problem.dropout_p == 0.0) {  // the rest by a fused kernel
    outputs = forward(args, {}, /*wants_lse=*/true);
  } else {
    const TileOutputs made = tile_forward(plan.tiles);
    FusedOutputs rows{made.output, made.lse};
    if (args.sinks.defined()) {
      take_sinks(args, plan, rows);
    }
    outputs.output = as_output(rows.output, problem);
    outputs.lse = of_shape(rows.lse, problem.output_shape({problem.query_len}));
  }
  if (!has_sides) {
    return outputs;
  }
  const at::Tensor lse = of_shape(outputs.lse, {batches, heads, problem.query_len});
  const TileSides sides = tile_sides(plan.tiles, lse, wanted);
  if (wanted.weights) {
    outputs.weights = of_shape(sides.weights, problem.output_shape({problem.query_len, problem.key_len}));
  }
  if (wanted.key_mass) {
    outputs.key_mass = of_shape(sides.key_mass, problem.output_shape({problem.key_len}));
  }
  return outputs;
}

SdpaOutputs forward_saving_draws(const SdpaArgs& args) {
  Plan plan = make_plan(args, {.wants_lse = true});
  if (plan.backend != Backend::kTiles) {
    return forward(args, {}, /*wants_lse=*/true);
  }
  plan.tiles.draws = make_draws(plan.tiles);
  SdpaOutputs outputs = forward_by_tiles(args, plan, {});
  outputs.weights = plan.tiles.draws;
  return outputs;
}

SdpaOutputs forward(const SdpaArgs& args, SideOutputs wanted, bool wants_lse) {
  check_packed(args, wanted);
  if (args.sequences.defined()) {
    return forward_by_sequence(args, [&](const SdpaArgs& one) { return forward(one, {}, wants_lse); });
  }
  const Plan plan = make_plan(args, {.sides = wanted, .wants_lse = wants_lse || args.sinks.defined()});
  if (plan.backend == Backend::kComposition) {
    return forward_aten(args, wanted);
  }
  if (plan.backend == Backend::kTiles) {
    return forward_by_tiles(args, plan, wanted);
  }
  FusedOutputs fused = fused_forward(plan.call);
  if (args.sinks.defined()) {
    take_sinks(args, plan, fused);
  }
  SdpaOutputs outputs;
  outputs.output = as_output(fused.output, plan.problem);
  if (wants_lse) {
    outputs.lse = of_shape(fused.lse, plan.problem.output_shape({plan.problem.query_len})).contiguous();
  }
  return outputs;
}

std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>> forward_and_draws(const DrawnCall& call) {
  const SdpaOutputs outputs = forward_saving_draws(call.args);
  return {outputs.output, outputs.lse, optional_of(outputs.weights)};
}

SdpaOutputs forward_with_lse(const SdpaArgs& args, SideOutputs wanted) {
  return forward(args, wanted, /*wants_lse=*/true);
}

/// (N, H, Lq, Dv), zeros where none comes in.
at::Tensor grad_of_output(const SdpaOutputs& grads, const Plan& plan) {
  const Problem& problem = plan.problem;
  const auto [batches, heads] = plan.dims.sizes();
  return grads.output.defined() ? *plan.dims.query_view(grads.output)
                                : at::zeros({batches, heads, problem.query_len, problem.value_dim},
                                            grads.lse.options().dtype(problem.dtype));
}

/// (N, H, Lq, columns): the incoming gradients of output and lse, in the columns of the plan's value.
at::Tensor joined_grads(const SdpaOutputs& grads, const Plan& plan) {
  const int64_t columns = plan.call.value.size(-1);
  const at::Tensor output = grad_of_output(grads, plan);
  if (!grads.lse.defined()) {
    return aligned(output, columns);
  }
  const auto [batches, heads] = plan.dims.sizes();
  const at::Tensor lse = grads.lse.reshape({batches, heads, plan.problem.query_len, 1}).to(at::kFloat);
  const at::Tensor rounded = lse.to(plan.problem.dtype);
  const at::Tensor rest = (lse - rounded.to(at::kFloat)).to(plan.problem.dtype);
  return aligned(at::cat({output, rounded, rest}, -1), columns);
}

/// rowsum(dO O) - dLse, (N, H, Lq) float32.
at::Tensor delta_of(const at::Tensor& grad_output, const at::Tensor& output, const at::Tensor& grad_lse) {
  // What comes in at a row that sees nothing reaches nothing, NaN neither.
  const at::Tensor delta =
      at::where(output == 0, 0.0, grad_output.to(at::kFloat) * output).to(at::kFloat).sum(-1);
  return grad_lse.defined() ? delta - grad_lse.reshape(delta.sizes()) : delta;
}

/// -sum over rows of exp(sink - lse) delta, of the sinks' own shape.
at::Tensor sinks_grad(const SdpaArgs& args, const Plan& plan, const at::Tensor& lse,
                      const at::Tensor& delta) {
  const at::Tensor sinks = sinks_of(args, plan);
  // Without a sink there is nothing, whatever the row has.
  const at::Tensor terms = at::where(sinks == -kInfinity, 0.0, at::exp(sinks - lse) * -delta).to(at::kFloat);
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

/// Of views of the query, the keys that a kernel has been given and their values; the bias.
struct ViewGrads {
  at::Tensor query, key, value, bias;
};

ViewGrads fused_grads(const SdpaOutputs& grads, const Plan& plan, const at::Tensor& output,
                      const at::Tensor& lse, bool wants_bias_grad) {
  const FusedOutputs rows{aligned(output, plan.call.value.size(-1)), lse};
  const FusedGrads fused = fused_backward(plan.call, joined_grads(grads, plan), rows, wants_bias_grad);
  const VisibleRange& range = plan.call.range;
  const auto of_all_keys = [&](const at::Tensor& grad) {
    return range.keys() == plan.problem.key_len
               ? grad
               : at::constant_pad_nd(grad, {0, 0, range.key_begin, plan.problem.key_len - range.key_end}, 0);
  };
  return {fused.query, of_all_keys(fused.key), of_all_keys(fused.value), fused.bias};
}

SdpaInputs backward_of_one(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                           InputMask wanted) {
  const Plan plan =
      make_plan(args, {.is_backward = true,
                       .takes_grads_of_sides = grads.weights.defined() || grads.key_mass.defined(),
                       .takes_lse_grad = grads.lse.defined(),
                       .wants_bias_grad = wanted.attn_mask,
                       .has_delta = saved.delta.defined()});
  if (plan.backend == Backend::kComposition) {
    return backward_aten(grads, args, saved, wanted);
  }
  const Problem& problem = plan.problem;
  const auto [batches, heads] = plan.dims.sizes();
  const at::Tensor output = *plan.dims.query_view(saved.output);
  const at::Tensor lse = of_shape(saved.lse, {batches, heads, problem.query_len}).contiguous();
  at::Tensor delta;
  ViewGrads views;
  if (plan.is_fused()) {
    views = fused_grads(grads, plan, output, lse, wanted.attn_mask);
    if (wanted.sinks) {
      delta = delta_of(grad_of_output(grads, plan), output, grads.lse);
    }
  } else {
    TileCall tiles = plan.tiles;
    if (saved.has_draws()) {
      TORCH_CHECK(static_cast<int64_t>(saved.weights.nbytes()) == bytes_of_draws(tiles),
                  "attn_ext: expected draws of ", bytes_of_draws(tiles), " bytes, but got ",
                  saved.weights.nbytes());
      tiles.draws = saved.weights;
    }
    const int64_t dims = tiles.value.size(-1);
    const at::Tensor grad_lse =
        grads.lse.defined() ? of_shape(grads.lse, lse.sizes()).to(at::kFloat).contiguous() : at::Tensor();
    const TileGrads made =
        tile_backward(tiles, with_row_strides(aligned(grad_of_output(grads, plan), dims), dims),
                      with_row_strides(aligned(output, dims), dims), lse, grad_lse);
    views = {made.query, made.key, made.value, {}};
    delta = made.delta;
  }
  const auto columns = [](const at::Tensor& grad, int64_t count) {
    return grad.size(-1) == count ? grad : grad.narrow(-1, 0, count);
  };
  SdpaInputs gradients;
  if (wanted.query) {
    gradients.query = plan.dims.of_query_view(columns(views.query, problem.head_dim), args.query);
  }
  if (wanted.key) {
    gradients.key = plan.dims.of_key_view(columns(views.key, problem.head_dim), args.key);
  }
  if (wanted.value) {
    gradients.value = plan.dims.of_key_view(columns(views.value, problem.value_dim), args.value);
  }
  if (wanted.attn_mask) {
    gradients.attn_mask = mask_grad(args, plan, views.bias);
  }
  if (wanted.sinks) {
    gradients.sinks = sinks_grad(args, plan, lse, delta);
  }
  return gradients;
}

SdpaInputs backward(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                    InputMask wanted) {
  check_backward(grads, args, saved, wanted);
  if (!args.sequences.defined()) {
    return backward_of_one(grads, args, saved, wanted);
  }
  return backward_by_sequence(grads, args, saved,
                              [&](const SdpaOutputs& incoming, const SdpaArgs& one, const SavedOutputs& own) {
                                return backward_of_one(incoming, one, own, wanted);
                              });
}

}  // namespace

at::Tensor output_cuda(const SdpaArgs& args) {
  return forward(args, {}, /*wants_lse=*/false).output;
}

TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_with_lse>)));
  m.impl("_sdpa_forward_saving_draws", TORCH_FN((Unboxed<DrawnCall>::kernel<&forward_and_draws>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward>)));
}

}  // namespace attn_ext::cuda
