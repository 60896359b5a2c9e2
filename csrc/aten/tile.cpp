#include "tile.h"

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
at::Tensor visible_by_band(const Band& band, const Chunk& chunk, const at::TensorOptions& options) {
  const auto long_options = options.dtype(at::kLong);
  const auto rows = [&] { return at::arange(chunk.row_begin, chunk.row_end, long_options).unsqueeze(-1); };
  const auto keys = [&] { return at::arange(chunk.key_begin, chunk.key_end, long_options); };
  at::Tensor visible;
  if (band.low && chunk.row_end - 1 + *band.low > chunk.key_begin) {
    visible = keys().ge(rows() + *band.low);
  }
  if (band.high && chunk.row_begin + *band.high < chunk.key_end - 1) {
    visible = and_visible(visible, keys().le(rows() + *band.high));
  }
  return visible;
}

at::Tensor mask_chunk(const Problem& problem, const Chunk& chunk) {
  return narrow_keys(narrow_rows(problem.attn_mask, chunk), chunk);
}

/// Scores with bias, -inf where not visible; fills in tile.capped and tile.visible.
at::Tensor make_scores(const Problem& problem, Tile& tile) {
  at::Tensor scores =
      contract(tile.query * problem.scale, "QD", tile.key, "KD", "QK", broadcast_lead(tile.query, tile.key));
  if (problem.softcap > 0.0) {
    scores = tile.capped = at::tanh(scores / problem.softcap) * problem.softcap;
  }
  tile.visible = visible_by_band(problem.band, tile.chunk, scores.options());
  if (problem.attn_mask.defined()) {
    const at::Tensor mask = mask_chunk(problem, tile.chunk);
    if (mask.scalar_type() == at::kBool) {
      tile.visible = and_visible(tile.visible, mask);
    } else {
      tile.visible = and_visible(tile.visible, mask.ne(-kInfinity));  // a bias of -inf is a mask
      scores = scores + mask.to(problem.accumulator);
    }
  }
  return tile.visible.defined() ? at::where(tile.visible, scores, -kInfinity).to(problem.accumulator)
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

void softmax(const Problem& problem, const at::Tensor& scores, Tile& tile) {
  const at::Tensor max = row_max(problem, scores);
  const at::Tensor exponentials = at::exp(scores - max);
  at::Tensor sum = exponentials.sum(-1, /*keepdim=*/true);
  at::Tensor sink;
  if (problem.sinks.defined()) {
    sink = at::exp(problem.sinks.unsqueeze(-1).unsqueeze(-1) - max);
    sum = sum + sink;
  }
  const at::Tensor divisor = at::where(sum == 0.0, 1.0, sum).to(problem.accumulator);
  tile.weights = tile.only_visible(exponentials / divisor);
  tile.lse = (max + sum.log()).squeeze(-1);
  if (sink.defined()) {
    tile.sink_weights = (sink / divisor).squeeze(-1);
  }
}

}  // namespace

at::Tensor Tile::applied_weights() const {
  return multiplier.defined() ? weights * multiplier : weights;
}

at::Tensor Tile::softcap_slope(double softcap) const {
  return capped.defined() ? 1.0 - (capped / softcap).square() : at::Tensor();
}

at::Tensor Tile::only_visible(const at::Tensor& scores) const {
  return visible.defined() && scores.defined() ? at::where(visible, scores, 0.0).to(scores.scalar_type())
                                               : scores;
}

at::Tensor narrow_rows(const at::Tensor& tensor, const Chunk& chunk) {
  return tensor.size(-2) == 1 ? tensor : tensor.narrow(-2, chunk.row_begin, chunk.rows());
}

at::Tensor narrow_keys(const at::Tensor& tensor, const Chunk& chunk, int64_t dim) {
  return tensor.size(dim) == 1 ? tensor : tensor.narrow(dim, chunk.key_begin, chunk.keys());
}

Tile make_tile(const Problem& problem, const Chunk& chunk) {
  Tile tile;
  tile.chunk = chunk;
  tile.query = problem.query.narrow(-2, chunk.row_begin, chunk.rows()).to(problem.accumulator);
  tile.key = problem.key.narrow(-2, chunk.key_begin, chunk.keys());
  tile.value = problem.value.narrow(-2, chunk.key_begin, chunk.keys());
  softmax(problem, make_scores(problem, tile), tile);
  if (problem.dropout_p > 0.0) {
    tile.multiplier = dropout_multiplier(problem, chunk);
  }
  return tile;
}

}  // namespace attn_ext
