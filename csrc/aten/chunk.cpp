#include "chunk.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "contract.h"
#include "dropout.h"

namespace attn_ext {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor and_visible(const at::Tensor& a, const at::Tensor& b) {
  return !a.defined() ? b : a.logical_and(b);
}

/// (rows, keys) of what the band lets through, undefined where that is the whole chunk.
at::Tensor visible_by_band(const Band& band, const ChunkBounds& bounds, const at::TensorOptions& options) {
  const auto long_options = options.dtype(at::kLong);
  const auto rows = [&] { return at::arange(bounds.row_begin, bounds.row_end, long_options).unsqueeze(-1); };
  const auto keys = [&] { return at::arange(bounds.key_begin, bounds.key_end, long_options); };
  at::Tensor visible;
  if (band.low && bounds.row_end - 1 + *band.low > bounds.key_begin) {
    visible = keys().ge(rows() + *band.low);
  }
  if (band.high && bounds.row_begin + *band.high < bounds.key_end - 1) {
    visible = and_visible(visible, keys().le(rows() + *band.high));
  }
  return visible;
}

at::Tensor mask_of(const Problem& problem, const ChunkBounds& bounds) {
  return narrow_keys(narrow_rows(problem.attn_mask, bounds), bounds);
}

/// Scores with bias, -inf where not visible; fills in chunk.capped and chunk.visible.
at::Tensor make_scores(const Problem& problem, Chunk& chunk) {
  const bool scales_query = problem.factors == problem.accumulator;
  at::Tensor scores = contract(scales_query ? chunk.query * problem.scale : chunk.query, "QD", chunk.key,
                               "KD", "QK", broadcast_lead(chunk.query, chunk.key));
  if (!scales_query) {
    scores = scores * problem.scale;
  }
  if (problem.softcap > 0.0) {
    scores = chunk.capped = at::tanh(scores / problem.softcap) * problem.softcap;
  }
  chunk.visible = visible_by_band(problem.band, chunk.bounds, scores.options());
  if (problem.attn_mask.defined()) {
    const at::Tensor mask = mask_of(problem, chunk.bounds);
    if (mask.scalar_type() == at::kBool) {
      chunk.visible = and_visible(chunk.visible, mask);
    } else {
      chunk.visible = and_visible(chunk.visible, mask.ne(-kInfinity));  // a bias of -inf is a mask
      scores = scores + mask.to(problem.accumulator);
    }
  }
  return chunk.visible.defined() ? at::where(chunk.visible, scores, -kInfinity).to(problem.accumulator)
                                 : scores;
}

/// (lead, rows, 1); 0 where a row sees nothing, so that exp(-inf - 0) = 0 and no NaN arises.
at::Tensor row_max(const Problem& problem, const at::Tensor& scores) {
  at::Tensor max = problem.sinks.defined() ? problem.sinks.unsqueeze(-1).unsqueeze(-1) : at::Tensor();
  if (scores.size(-1) > 0) {
    const at::Tensor over_keys = at::amax(scores.detach(), -1, /*keepdim=*/true);
    max = max.defined() ? at::maximum(max.detach(), over_keys) : over_keys;
  } else if (!max.defined()) {
    return at::zeros({}, scores.options());
  }
  return at::where(max == -kInfinity, 0.0, max.detach()).to(scores.scalar_type());
}

void softmax(const Problem& problem, const at::Tensor& scores, Chunk& chunk) {
  const at::Tensor max = row_max(problem, scores);
  const at::Tensor exponentials = at::exp(scores - max);
  at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  at::Tensor sink;
  if (problem.sinks.defined()) {
    sink = at::exp(problem.sinks.unsqueeze(-1).unsqueeze(-1) - max);
    sum = sum + sink;
  }
  const at::Tensor divisor = at::where(sum == 0.0, 1.0, sum).to(problem.accumulator);
  const at::Tensor lse = at::where(max == kInfinity, max, max.to(problem.lse_dtype) + sum.log());
  chunk.takes_part = may_hold_nonfinite(lse) ? and_visible(chunk.visible, lse.ne(-kInfinity)) : chunk.visible;
  chunk.weights = chunk.only_partaking(exponentials / divisor);
  chunk.lse = lse.squeeze(-1);
  if (sink.defined()) {
    chunk.sink_weights = (sink / divisor).squeeze(-1);
  }
}

/// The weights by a given lse. They sum up to 1 at most: where an lse is so far from 0 that its dtype does
/// not hold more than the largest score, what is known is that sum.
void softmax_by_lse(const Problem& problem, const at::Tensor& scores, const at::Tensor& given, Chunk& chunk) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const at::Tensor lse = at::where(given == kInfinity, kNan, given).to(given.scalar_type());
  chunk.takes_part = may_hold_nonfinite(given)
                         ? and_visible(chunk.visible, given.ne(-kInfinity).unsqueeze(-1))
                         : chunk.visible;
  const at::Tensor weights = chunk.only_partaking(at::exp(scores - lse.unsqueeze(-1)));
  chunk.weights = (weights / weights.sum(-1, /*keepdim=*/true).clamp_min(1)).to(problem.accumulator);
  chunk.weights = chunk.only_partaking(chunk.weights);
  chunk.lse = given;
  if (problem.sinks.defined()) {
    chunk.sink_weights = at::exp(problem.sinks.unsqueeze(-1) - lse).to(problem.accumulator);
  }
}

}  // namespace

at::Tensor Chunk::applied_weights() const {
  return multiplier.defined() ? weights * multiplier : weights;
}

at::Tensor Chunk::softcap_slope(double softcap) const {
  return capped.defined() ? 1.0 - (capped / softcap).square() : at::Tensor();
}

at::Tensor Chunk::only_partaking(const at::Tensor& scores) const {
  return takes_part.defined() && scores.defined()
             ? at::where(takes_part, scores, 0.0).to(scores.scalar_type())
             : scores;
}

at::Tensor Chunk::only_sinks(const at::Tensor& terms) const {
  return terms.defined() && has_sink.defined() ? at::where(has_sink, terms, 0.0).to(terms.scalar_type())
                                               : terms;
}

at::Tensor narrow_rows(const at::Tensor& tensor, const ChunkBounds& bounds) {
  return tensor.size(-2) == 1 ? tensor : tensor.narrow(-2, bounds.row_begin, bounds.rows());
}

at::Tensor narrow_keys(const at::Tensor& tensor, const ChunkBounds& bounds, int64_t dim) {
  return tensor.size(dim) == 1 ? tensor : tensor.narrow(dim, bounds.key_begin, bounds.keys());
}

at::Tensor weighted_values(const Chunk& chunk, const at::Tensor& weights, const at::Tensor& value) {
  return weights.defined() && value.defined() ? contract_visible(weights, "QK", chunk.visible, value, "KD",
                                                                 "QD", broadcast_lead(weights, value))
                                              : at::Tensor();
}

Chunk make_chunk(const Problem& problem, const ChunkBounds& bounds, const GivenRows& given) {
  Chunk chunk;
  chunk.bounds = bounds;
  chunk.query = problem.query.narrow(-2, bounds.row_begin, bounds.rows()).to(problem.factors);
  chunk.key = problem.key.narrow(-2, bounds.key_begin, bounds.keys());
  chunk.value = problem.value.narrow(-2, bounds.key_begin, bounds.keys());
  const at::Tensor scores = make_scores(problem, chunk);
  given.lse.defined() ? softmax_by_lse(problem, scores, given.lse, chunk) : softmax(problem, scores, chunk);
  if (problem.sinks.defined() && may_hold_nonfinite(problem.sinks)) {
    chunk.has_sink = problem.sinks.ne(-kInfinity).unsqueeze(-1).unsqueeze(-1);
  }
  if (problem.dropout_p > 0.0) {
    chunk.multiplier = dropout_multiplier(problem, bounds);
  }
  return chunk;
}

}  // namespace attn_ext
