#include "backward_chunk.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include "contract.h"

namespace attn_ext {

namespace {

/// Of a (lead, rows, columns) tensor.
Dims lead_of(const at::Tensor& canonical) {
  return Dims(canonical.sizes().begin(), canonical.sizes().end() - 2);
}

at::Tensor score_product(const Chunk& chunk, const at::Tensor& scores, const at::Tensor& factor,
                         Letters factor_dims, Letters out_dims, const Dims& lead, double scale) {
  if (!scores.defined() || !factor.defined()) {
    return {};
  }
  return contract_visible(scores, "QK", chunk.visible, factor, factor_dims, out_dims, lead) * scale;
}

}  // namespace

OutputGrads canonical_grads(const Problem& problem, const SdpaOutputs& grads) {
  const auto canonical = [&](const at::Tensor& grad, int64_t tail_dims) {
    return grad.defined() ? problem.layout.of_query_heads(grad, tail_dims) : grad;
  };
  return {canonical(grads.output, 2), canonical(grads.lse, 1), canonical(grads.weights, 2),
          canonical(grads.key_mass, 1)};
}

GivenRows canonical_rows(const Problem& problem, const SavedOutputs& saved) {
  if (!saved.delta.defined()) {
    return {};
  }
  return {problem.layout.of_query_heads(saved.lse, 1), problem.layout.of_query_heads(saved.delta, 1)};
}

GivenRows of_part(const Problem& part, const GivenRows& rows) {
  return {of_part(part, rows.lse), of_part(part, rows.delta)};
}

GivenRows narrow_rows(const GivenRows& rows, const ChunkBounds& bounds) {
  const auto narrow = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.narrow(-1, bounds.row_begin, bounds.rows()) : tensor;
  };
  return {narrow(rows.lse), narrow(rows.delta)};
}

OutputGrads of_part(const Problem& part, const OutputGrads& grads) {
  return {of_part(part, grads.output), of_part(part, grads.lse), of_part(part, grads.weights),
          of_part(part, grads.key_mass)};
}

OutputGrads narrow_grads(const Problem& problem, const OutputGrads& grads, const ChunkBounds& bounds) {
  OutputGrads narrowed;
  const auto dtype = problem.accumulator;
  if (grads.output.defined()) {
    narrowed.output = grads.output.narrow(-2, bounds.row_begin, bounds.rows()).to(problem.factors);
  }
  if (grads.lse.defined()) {
    narrowed.lse = grads.lse.narrow(-1, bounds.row_begin, bounds.rows()).to(dtype);
  }
  if (grads.weights.defined()) {
    narrowed.weights = grads.weights.narrow(-2, bounds.row_begin, bounds.rows())
                           .narrow(-1, bounds.key_begin, bounds.keys())
                           .to(dtype);
  }
  if (grads.key_mass.defined()) {
    narrowed.key_mass = grads.key_mass.narrow(-1, bounds.key_begin, bounds.keys()).to(dtype);
  }
  return narrowed;
}

at::Tensor applied_weights_grad(const at::Tensor& value, const OutputGrads& grads) {
  at::Tensor grad;
  if (grads.output.defined() && value.defined()) {
    grad = contract(grads.output, "QD", value, "KD", "QK", broadcast_lead(grads.output, value));
  }
  grad = plus(grad, grads.weights);
  return grads.key_mass.defined() ? plus(grad, grads.key_mass.unsqueeze(-2)) : grad;
}

at::Tensor row_grads(const at::Tensor& delta, const OutputGrads& grads) {
  return minus(grads.lse.defined() ? grads.lse.unsqueeze(-1) : at::Tensor(), delta);
}

ScoreGrads score_grads(const Problem& problem, const Chunk& chunk, const OutputGrads& grads,
                       const at::Tensor& delta) {
  ScoreGrads result;
  result.probabilities = applied_weights_grad(chunk.value, grads);
  if (chunk.multiplier.defined()) {
    result.probabilities = times(result.probabilities, chunk.multiplier);
  }
  result.probabilities = chunk.only_partaking(result.probabilities);
  if (delta.defined()) {
    result.delta = delta.unsqueeze(-1);
  } else if (result.probabilities.defined()) {
    result.delta = (chunk.weights * result.probabilities).sum(-1, /*keepdim=*/true);
  }
  result.centred = plus(result.probabilities, row_grads(result.delta, grads));
  result.scores = chunk.only_partaking(times(chunk.weights, result.centred));
  const at::Tensor slope = chunk.softcap_slope(problem.softcap);
  result.products = slope.defined() ? chunk.only_partaking(times(result.scores, slope)) : result.scores;
  return result;
}

at::Tensor query_grad(const Problem& problem, const Chunk& chunk, const at::Tensor& scores,
                      const at::Tensor& key) {
  return score_product(chunk, scores, key, "KD", "QD", lead_of(problem.query), problem.scale);
}

at::Tensor key_grad(const Problem& problem, const Chunk& chunk, const at::Tensor& scores,
                    const at::Tensor& query) {
  return score_product(chunk, scores, query, "QD", "KD", lead_of(problem.key), problem.scale);
}

at::Tensor value_grad(const Problem& problem, const Chunk& chunk, const at::Tensor& weights,
                      const at::Tensor& grad) {
  return weights.defined() && grad.defined()
             ? contract_visible(weights, "QK", chunk.visible, grad, "QD", "KD", lead_of(problem.value))
             : at::Tensor();
}

GradientSums::GradientSums(const Problem& problem)
    : problem_(problem),
      query_(-2, problem.query_len),
      mask_rows_(-2, problem.query_len),
      key_(-2, problem.key_len),
      value_(-2, problem.key_len) {}

void GradientSums::add_scores(const at::Tensor& grad, const ChunkBounds& bounds) {
  if (!grad.defined()) {
    return;
  }
  const at::Tensor part = sum_down_to(grad, problem_.attn_mask.sizes());
  const at::Tensor padded =
      problem_.attn_mask.size(-1) == 1 ? part : pad_keys(part, -1, bounds, problem_.key_len);
  if (problem_.attn_mask.size(-2) == 1) {
    mask_sum_ = plus(mask_sum_, padded);
  } else {
    mask_rows_.add(padded);
  }
}

void GradientSums::add_sinks(const at::Tensor& grad) {
  if (grad.defined()) {
    sinks_ = plus(sinks_, sum_down_to(grad.sum({-2, -1}), problem_.sinks.sizes()));
  }
}

SdpaInputs GradientSums::join() const {
  return {query_.join(), key_.total(), value_.total(), mask_sum_.defined() ? mask_sum_ : mask_rows_.join(),
          sinks_};
}

WholeGradients::WholeGradients(const Problem& problem)
    : query_(lead_of(problem.query)),
      key_(lead_of(problem.key)),
      value_(lead_of(problem.value)),
      attn_mask_(problem.attn_mask.defined() ? PartSum(lead_of(problem.attn_mask)) : PartSum()),
      sinks_(problem.sinks.defined() ? PartSum(problem.sinks.sizes()) : PartSum()) {}

void WholeGradients::add(const Problem& part, const SdpaInputs& gradients) {
  query_.add(part, gradients.query);
  key_.add(part, gradients.key);
  value_.add(part, gradients.value);
  attn_mask_.add(part, gradients.attn_mask);
  sinks_.add(part, gradients.sinks);
}

SdpaInputs WholeGradients::finish(const SdpaArgs& args, InputMask wanted) const {
  const auto finish_one = [&](const PartSum& parts, const at::Tensor& input, bool is_wanted,
                              const MemoryOrder& order) {
    if (!is_wanted) {
      return at::Tensor();
    }
    const at::Tensor sum = parts.total();
    const auto dtype = gradient_dtype(args, input);
    return in_order(sum.defined() ? sum.to(dtype).reshape(input.sizes())
                                  : at::zeros(input.sizes(), input.options().dtype(dtype)),
                    order);
  };
  const auto as_input = [](const at::Tensor& input) { return memory_order(input, input.dim()); };
  const auto contiguous = [](const at::Tensor& input) {
    return contiguous_order(input.defined() ? input.dim() : 0);
  };
  return {finish_one(query_, args.query, wanted.query, as_input(args.query)),
          finish_one(key_, args.key, wanted.key, as_input(args.key)),
          finish_one(value_, args.value, wanted.value, as_input(args.value)),
          finish_one(attn_mask_, args.attn_mask, wanted.attn_mask, contiguous(args.attn_mask)),
          finish_one(sinks_, args.sinks, wanted.sinks, contiguous(args.sinks))};
}

}  // namespace attn_ext
