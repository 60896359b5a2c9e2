#include "tangents.h"

#include <ATen/TensorOperators.h>

#include "../checks.h"
#include "../cpu/fork.h"
#include "backward_chunk.h"
#include "by_sequence.h"
#include "chunk.h"
#include "contract.h"
#include "pieces.h"

namespace attn_ext {

namespace {

/// A traced tensor of symbolic sizes as one of plain numbers, by which the chunks are cut: the trace is then
/// good for these alone.
at::Tensor specialized(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return tensor;
  }
  const auto numbers = [](c10::SymIntArrayRef symbols) {
    Dims plain;
    for (const c10::SymInt& symbol : symbols) {
      plain.push_back(symbol.guard_int(__FILE__, __LINE__));
    }
    return plain;
  };
  return tensor.as_strided(numbers(tensor.sym_sizes()), numbers(tensor.sym_strides()),
                           tensor.sym_storage_offset().guard_int(__FILE__, __LINE__));
}

SdpaInputs specialized(const SdpaInputs& inputs) {
  return {specialized(inputs.query), specialized(inputs.key), specialized(inputs.value),
          specialized(inputs.attn_mask), specialized(inputs.sinks)};
}

SdpaOutputs specialized(const SdpaOutputs& outputs) {
  return {specialized(outputs.output), specialized(outputs.lse), specialized(outputs.weights),
          specialized(outputs.key_mass)};
}

SdpaArgs specialized(SdpaArgs args) {
  for (at::Tensor* tensor :
       {&args.query, &args.key, &args.value, &args.attn_mask, &args.sinks, &args.dropout_seed}) {
    *tensor = specialized(*tensor);
  }
  return args;
}

/// Tangents of the inputs in canonical layout; those of key, value and sinks in the dtype of accumulation.
struct Direction {
  at::Tensor query, key, value, attn_mask, sinks;
};

/// Nobody has looked at tangents before they come here, or asked whether their memory is there.
void check_storages(const SdpaInputs& direction) {
  const auto check = [](const at::Tensor& tangent, const char* name) {
    if (tangent.defined()) {
      check_storage(tangent, name);
    }
  };
  check(direction.query, "the tangent of query");
  check(direction.key, "the tangent of key");
  check(direction.value, "the tangent of value");
  check(direction.attn_mask, "the tangent of attn_mask");
  check(direction.sinks, "the tangent of sinks");
}

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

Direction of_part(const Problem& part, const Direction& direction) {
  return {of_part(part, direction.query), of_part(part, direction.key), of_part(part, direction.value),
          of_part(part, direction.attn_mask), of_part(part, direction.sinks)};
}

Direction narrow_direction(const Problem& problem, const Direction& direction, const ChunkBounds& bounds) {
  Direction narrowed;
  if (direction.query.defined()) {
    narrowed.query = direction.query.narrow(-2, bounds.row_begin, bounds.rows()).to(problem.accumulator);
  }
  if (direction.key.defined()) {
    narrowed.key = direction.key.narrow(-2, bounds.key_begin, bounds.keys());
  }
  if (direction.value.defined()) {
    narrowed.value = direction.value.narrow(-2, bounds.key_begin, bounds.keys());
  }
  if (direction.attn_mask.defined()) {
    narrowed.attn_mask =
        narrow_keys(narrow_rows(direction.attn_mask, bounds), bounds).to(problem.accumulator);
  }
  narrowed.sinks = direction.sinks;
  return narrowed;
}

/// The chunk's tangent; ' marks tangents.
///   (scale · Q Kᵀ)' = scale (Q' Kᵀ + Q K'ᵀ)     lse' = rowsum(P ∘ S') + Psink sink'
///   P' = P ∘ (S' - lse')                         Psink' = Psink (sink' - lse')
struct ChunkTangent {
  at::Tensor capped;        // after softcap (lead, rows, keys)
  at::Tensor weights;       // P' (lead, rows, keys)
  at::Tensor lse;           // (lead, rows, 1)
  at::Tensor sink_weights;  // (lead, rows, 1)

  at::Tensor applied_weights(const Chunk& chunk) const {
    return chunk.multiplier.defined() ? times(weights, chunk.multiplier) : weights;
  }
};

at::Tensor column(const at::Tensor& rows) {
  return rows.defined() ? rows.unsqueeze(-1) : rows;
}

ChunkTangent chunk_tangent(const Problem& problem, const Chunk& chunk, const Direction& along) {
  const auto scores_of = [&](const at::Tensor& query, const at::Tensor& key) {
    return query.defined() && key.defined()
               ? contract(query * problem.scale, "QD", key, "KD", "QK", broadcast_lead(query, key))
               : at::Tensor();
  };
  ChunkTangent tangent;
  tangent.capped = plus(scores_of(along.query, chunk.key), scores_of(chunk.query, along.key));
  if (chunk.capped.defined()) {
    tangent.capped = times(tangent.capped, chunk.softcap_slope(problem.softcap));
  }
  tangent.capped = chunk.only_partaking(tangent.capped);
  const at::Tensor scores = chunk.only_partaking(plus(tangent.capped, along.attn_mask));
  const at::Tensor sinks = along.sinks.defined() ? along.sinks.unsqueeze(-1).unsqueeze(-1) : at::Tensor();
  if (scores.defined()) {
    tangent.lse = (chunk.weights * scores).sum(-1, /*keepdim=*/true);
  }
  tangent.lse = plus(tangent.lse, chunk.only_sinks(times(column(chunk.sink_weights), sinks)));
  tangent.weights = chunk.only_partaking(times(chunk.weights, minus(scores, tangent.lse)));
  tangent.sink_weights = times(column(chunk.sink_weights), minus(sinks, tangent.lse));
  return tangent;
}

/// The tangents of dP, delta, dS and of dS before softcap, as in ScoreGrads.
ScoreGrads score_grad_tangents(const Problem& problem, const Chunk& chunk, const ChunkTangent& tangent,
                               const OutputGrads& grads, const OutputGrads& grad_tangents,
                               const Direction& along, const ScoreGrads& scores) {
  ScoreGrads result;
  const OutputGrads output_only{grads.output, {}, {}, {}};
  result.probabilities =
      plus(applied_weights_grad(chunk.value, grad_tangents), applied_weights_grad(along.value, output_only));
  if (chunk.multiplier.defined()) {
    result.probabilities = times(result.probabilities, chunk.multiplier);
  }
  result.probabilities = chunk.only_partaking(result.probabilities);
  const at::Tensor delta_terms =
      plus(times(tangent.weights, scores.probabilities), times(chunk.weights, result.probabilities));
  if (delta_terms.defined()) {
    result.delta = delta_terms.sum(-1, /*keepdim=*/true);
  }
  result.centred = plus(result.probabilities, row_grads(result.delta, grad_tangents));
  result.scores = chunk.only_partaking(
      plus(times(tangent.weights, scores.centred), times(chunk.weights, result.centred)));
  result.products = result.scores;
  if (chunk.capped.defined()) {
    // slope' = -2 capped capped' / softcap²
    const at::Tensor slope_tangent =
        times(chunk.capped * (-2.0 / (problem.softcap * problem.softcap)), tangent.capped);
    result.products = chunk.only_partaking(plus(times(result.scores, chunk.softcap_slope(problem.softcap)),
                                                times(scores.scores, slope_tangent)));
  }
  return result;
}

}  // namespace

SdpaOutputs forward_tangents(const SdpaArgs& args, const SdpaInputs& direction, SideOutputs wanted) {
  check_storages(direction);
  if (args.sequences.defined()) {
    return outputs_by_sequence(args, 0, [&](const SdpaArgs& one, const Sequence& sequence) {
      return forward_tangents(one, of_sequence(direction, sequence), wanted);
    });
  }
  const cpu::OneThreadInForkedChild guard;
  const Problem problem = make_problem(specialized(args), /*for_derivatives=*/true);
  const Direction canonical = canonical_direction(problem, specialized(direction));
  WholeOutputs outputs(problem, wanted);
  for_each_part(problem, [&](const Problem& part) {
    const Direction direction_of_part = of_part(part, canonical);
    OutputPieces pieces(part, wanted);
    for_each_chunk(part, [&](const ChunkBounds& bounds) {
      const Chunk chunk = make_chunk(part, bounds);
      const Direction along = narrow_direction(part, direction_of_part, bounds);
      const ChunkTangent tangent = chunk_tangent(part, chunk, along);
      const at::Tensor applied = tangent.applied_weights(chunk);
      const at::Tensor values = plus(weighted_values(chunk, applied, chunk.value),
                                     weighted_values(chunk, chunk.applied_weights(), along.value));
      pieces.add(bounds, values, tangent.lse.defined() ? tangent.lse.squeeze(-1) : tangent.lse, applied);
    });
    outputs.add(part, pieces.join());
  });
  return outputs.finish();
}

SdpaInputs backward_tangents(const SdpaOutputs& grads, const SdpaArgs& args, const SdpaOutputs& grad_tangents,
                             const SdpaInputs& direction, InputMask wanted) {
  check_storages(direction);
  if (args.sequences.defined()) {
    return gradients_by_sequence(args, [&](const SdpaArgs& one, const Sequence& sequence) {
      return backward_tangents(of_sequence(grads, sequence), one, of_sequence(grad_tangents, sequence),
                               of_sequence(direction, sequence), wanted);
    });
  }
  const cpu::OneThreadInForkedChild guard;
  const SdpaArgs plain_args = specialized(args);
  const Problem problem = make_problem(plain_args, /*for_derivatives=*/true);
  const Direction canonical = canonical_direction(problem, specialized(direction));
  const OutputGrads all_grads = canonical_grads(problem, specialized(grads));
  const OutputGrads all_grad_tangents = canonical_grads(problem, specialized(grad_tangents));
  WholeGradients gradients(problem);
  for_each_part(problem, [&](const Problem& part) {
    const Direction direction_of_part = of_part(part, canonical);
    const OutputGrads part_grads = of_part(part, all_grads);
    const OutputGrads part_grad_tangents = of_part(part, all_grad_tangents);
    GradientSums sums(part);
    for_each_chunk(part, [&](const ChunkBounds& bounds) {
      const Chunk chunk = make_chunk(part, bounds);
      const Direction along = narrow_direction(part, direction_of_part, bounds);
      const ChunkTangent tangent = chunk_tangent(part, chunk, along);
      const OutputGrads incoming = narrow_grads(part, part_grads, bounds);
      const OutputGrads incoming_tangents = narrow_grads(part, part_grad_tangents, bounds);
      const ScoreGrads scores = score_grads(part, chunk, incoming);
      const ScoreGrads dot =
          score_grad_tangents(part, chunk, tangent, incoming, incoming_tangents, along, scores);
      if (wanted.query) {
        sums.add_query(plus(query_grad(part, chunk, dot.products, chunk.key),
                            query_grad(part, chunk, scores.products, along.key)));
      }
      if (wanted.key) {
        sums.add_key(plus(key_grad(part, chunk, dot.products, chunk.query),
                          key_grad(part, chunk, scores.products, along.query)),
                     bounds);
      }
      if (wanted.value) {
        sums.add_value(plus(value_grad(part, chunk, tangent.applied_weights(chunk), incoming.output),
                            value_grad(part, chunk, chunk.applied_weights(), incoming_tangents.output)),
                       bounds);
      }
      if (wanted.attn_mask) {
        sums.add_scores(dot.scores, bounds);
      }
      if (wanted.sinks) {
        sums.add_sinks(chunk.only_sinks(
            plus(times(tangent.sink_weights, row_grads(scores.delta, incoming)),
                 times(column(chunk.sink_weights), row_grads(dot.delta, incoming_tangents)))));
      }
    });
    gradients.add(part, sums.join());
  });
  return gradients.finish(plain_args, wanted);
}

}  // namespace attn_ext
