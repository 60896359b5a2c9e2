#include "tangents.h"

#include <ATen/TensorOperators.h>

#include "../cpu/fork.h"
#include "backward_tile.h"
#include "contract.h"
#include "pieces.h"
#include "tile.h"

namespace attn_ext {

namespace {

/// Tangents of the inputs in canonical layout; those of key, value and sinks in the dtype of accumulation.
struct Direction {
  at::Tensor query, key, value, attn_mask, sinks;
};

Direction canonical_direction(const Problem& problem, const SdpaInputs& direction) {
  const Layout& layout = problem.layout;
  Direction canonical;
  if (direction.query.defined()) {
    canonical.query = layout.of_query_heads(direction.query, 2);
  }
  if (direction.key.defined()) {
    canonical.key = layout.of_key_heads(direction.key, 2).to(problem.accumulator);
  }
  if (direction.value.defined()) {
    canonical.value = layout.of_key_heads(direction.value, 2).to(problem.accumulator);
  }
  if (direction.attn_mask.defined()) {
    canonical.attn_mask = layout.of_query_heads(direction.attn_mask, 2);
  }
  if (direction.sinks.defined()) {
    canonical.sinks = layout.of_query_heads(direction.sinks, 0).to(problem.accumulator);
  }
  return canonical;
}

Direction narrow_direction(const Problem& problem, const Direction& direction, const Chunk& chunk) {
  Direction narrowed;
  if (direction.query.defined()) {
    narrowed.query = direction.query.narrow(-2, chunk.row_begin, chunk.rows()).to(problem.accumulator);
  }
  if (direction.key.defined()) {
    narrowed.key = direction.key.narrow(-2, chunk.key_begin, chunk.keys());
  }
  if (direction.value.defined()) {
    narrowed.value = direction.value.narrow(-2, chunk.key_begin, chunk.keys());
  }
  if (direction.attn_mask.defined()) {
    narrowed.attn_mask = narrow_keys(narrow_rows(direction.attn_mask, chunk), chunk).to(problem.accumulator);
  }
  narrowed.sinks = direction.sinks;
  return narrowed;
}

/// The tile's tangent; ' marks tangents.
///   (scale · Q Kᵀ)' = scale (Q' Kᵀ + Q K'ᵀ)     lse' = rowsum(P ∘ S') + Psink sink'
///   P' = P ∘ (S' - lse')                         Psink' = Psink (sink' - lse')
struct TileTangent {
  at::Tensor capped;        // after softcap (lead, rows, keys)
  at::Tensor weights;       // P' (lead, rows, keys)
  at::Tensor lse;           // (lead, rows, 1)
  at::Tensor sink_weights;  // (lead, rows, 1)

  at::Tensor applied_weights(const Tile& tile) const {
    return tile.multiplier.defined() ? times(weights, tile.multiplier) : weights;
  }
};

at::Tensor column(const at::Tensor& rows) {
  return rows.defined() ? rows.unsqueeze(-1) : rows;
}

TileTangent tile_tangent(const Problem& problem, const Tile& tile, const Direction& along) {
  const auto scores_of = [&](const at::Tensor& query, const at::Tensor& key) {
    return query.defined() && key.defined()
               ? contract(query * problem.scale, "QD", key, "KD", "QK", broadcast_lead(query, key))
               : at::Tensor();
  };
  TileTangent tangent;
  tangent.capped = plus(scores_of(along.query, tile.key), scores_of(tile.query, along.key));
  if (tile.capped.defined()) {
    tangent.capped = times(tangent.capped, tile.softcap_slope(problem.softcap));
  }
  tangent.capped = tile.only_visible(tangent.capped);
  const at::Tensor scores = tile.only_visible(plus(tangent.capped, along.attn_mask));
  const at::Tensor sinks = along.sinks.defined() ? along.sinks.unsqueeze(-1).unsqueeze(-1) : at::Tensor();
  if (scores.defined()) {
    tangent.lse = (tile.weights * scores).sum(-1, /*keepdim=*/true);
  }
  tangent.lse = plus(tangent.lse, times(column(tile.sink_weights), sinks));
  tangent.weights = tile.only_visible(times(tile.weights, minus(scores, tangent.lse)));
  tangent.sink_weights = times(column(tile.sink_weights), minus(sinks, tangent.lse));
  return tangent;
}

/// Pd V, with what is masked in V kept out.
at::Tensor values(const Tile& tile, const at::Tensor& weights, const at::Tensor& value) {
  return weights.defined() && value.defined() ? contract_visible(weights, "QK", tile.visible, value, "KD",
                                                                 "QD", broadcast_lead(weights, value))
                                              : at::Tensor();
}

/// The tangents of dP, delta, dS and of dS before softcap, as in ScoreGrads.
ScoreGrads score_grad_tangents(const Problem& problem, const Tile& tile, const TileTangent& tangent,
                               const OutputGrads& grads, const OutputGrads& grad_tangents,
                               const Direction& along, const ScoreGrads& scores) {
  ScoreGrads result;
  const OutputGrads output_only{grads.output, {}, {}, {}};
  result.probabilities =
      plus(applied_weights_grad(tile.value, grad_tangents), applied_weights_grad(along.value, output_only));
  if (tile.multiplier.defined()) {
    result.probabilities = times(result.probabilities, tile.multiplier);
  }
  result.probabilities = tile.only_visible(result.probabilities);
  const at::Tensor delta_terms =
      plus(times(tangent.weights, scores.probabilities), times(tile.weights, result.probabilities));
  if (delta_terms.defined()) {
    result.delta = delta_terms.sum(-1, /*keepdim=*/true);
  }
  result.centred = plus(result.probabilities, row_grads(result.delta, grad_tangents));
  result.scores =
      tile.only_visible(plus(times(tangent.weights, scores.centred), times(tile.weights, result.centred)));
  result.products = result.scores;
  if (tile.capped.defined()) {
    // slope' = -2 capped capped' / softcap²
    const at::Tensor slope_tangent =
        times(tile.capped * (-2.0 / (problem.softcap * problem.softcap)), tangent.capped);
    result.products = tile.only_visible(
        plus(times(result.scores, tile.softcap_slope(problem.softcap)), times(scores.scores, slope_tangent)));
  }
  return result;
}

}  // namespace

SdpaOutputs forward_tangents(const SdpaArgs& args, const SdpaInputs& direction, SideOutputs wanted) {
  const cpu::OneThreadInForkedChild guard;
  const Problem problem = make_problem(args);
  const Direction canonical = canonical_direction(problem, direction);
  RowPieces output(-2, problem.query_len), lse(-1, problem.query_len), weights(-2, problem.query_len);
  KeySum key_mass(-1, problem.key_len);
  for_each_chunk(problem, [&](const Chunk& chunk) {
    const Tile tile = make_tile(problem, chunk);
    const Direction along = narrow_direction(problem, canonical, chunk);
    const TileTangent tangent = tile_tangent(problem, tile, along);
    const at::Tensor applied = tangent.applied_weights(tile);
    const at::Tensor values_tangent =
        plus(values(tile, applied, tile.value), values(tile, tile.applied_weights(), along.value));
    if (values_tangent.defined()) {
      output.add(
          values_tangent.to(problem.dtype).expand(problem.with_tail({chunk.rows(), problem.value_dim})));
    }
    if (tangent.lse.defined()) {
      lse.add(tangent.lse.squeeze(-1).expand(problem.with_tail({chunk.rows()})));
    }
    if (wanted.weights && applied.defined()) {
      weights.add(pad_keys(applied.to(problem.dtype), -1, chunk, problem.key_len)
                      .expand(problem.with_tail({chunk.rows(), problem.key_len})));
    }
    if (wanted.key_mass && applied.defined()) {
      key_mass.add(applied.sum(-2), chunk);
    }
  });
  const auto finish = [&](const at::Tensor& result, std::initializer_list<int64_t> tail,
                          at::ScalarType dtype) {
    return result.defined() ? result.to(dtype).reshape(problem.output_shape(tail)).contiguous() : result;
  };
  const at::Tensor& mass = key_mass.total();
  return {finish(output.join(), {problem.query_len, problem.value_dim}, problem.dtype),
          finish(lse.join(), {problem.query_len}, problem.accumulator),
          finish(weights.join(), {problem.query_len, problem.key_len}, problem.dtype),
          finish(mass.defined() ? mass.expand(problem.with_tail({problem.key_len})) : mass, {problem.key_len},
                 problem.dtype)};
}

SdpaInputs backward_tangents(const SdpaOutputs& grads, const SdpaArgs& args, const SdpaOutputs& grad_tangents,
                             const SdpaInputs& direction, InputMask wanted) {
  const cpu::OneThreadInForkedChild guard;
  const Problem problem = make_problem(args);
  const Direction canonical = canonical_direction(problem, direction);
  const OutputGrads all_grads = canonical_grads(problem, grads);
  const OutputGrads all_grad_tangents = canonical_grads(problem, grad_tangents);
  const Dims query_lead = lead_of(problem.query, 2), key_lead = lead_of(problem.key, 2),
             value_lead = lead_of(problem.value, 2);
  GradientSums sums(problem, wanted);
  for_each_chunk(problem, [&](const Chunk& chunk) {
    const Tile tile = make_tile(problem, chunk);
    const Direction along = narrow_direction(problem, canonical, chunk);
    const TileTangent tangent = tile_tangent(problem, tile, along);
    const OutputGrads incoming = narrow_grads(problem, all_grads, chunk);
    const OutputGrads incoming_tangents = narrow_grads(problem, all_grad_tangents, chunk);
    const ScoreGrads scores = score_grads(problem, tile, incoming);
    const ScoreGrads dot =
        score_grad_tangents(problem, tile, tangent, incoming, incoming_tangents, along, scores);
    if (wanted.query) {
      sums.add_query(
          plus(score_product(tile, dot.products, tile.key, "KD", "QD", query_lead, problem.scale),
               score_product(tile, scores.products, along.key, "KD", "QD", query_lead, problem.scale)));
    }
    if (wanted.key) {
      sums.add_key(
          plus(score_product(tile, dot.products, tile.query, "QD", "KD", key_lead, problem.scale),
               score_product(tile, scores.products, along.query, "QD", "KD", key_lead, problem.scale)),
          chunk);
    }
    if (wanted.value) {
      sums.add_value(plus(value_grad(tile, tangent.applied_weights(tile), incoming.output, value_lead),
                          value_grad(tile, tile.applied_weights(), incoming_tangents.output, value_lead)),
                     chunk);
    }
    if (wanted.attn_mask) {
      sums.add_scores(dot.scores, chunk);
    }
    if (wanted.sinks) {
      sums.add_sinks(plus(times(tangent.sink_weights, row_grads(scores.delta, incoming)),
                          times(column(tile.sink_weights), row_grads(dot.delta, incoming_tangents))));
    }
  });
  return sums.finish(args);
}

}  // namespace attn_ext
