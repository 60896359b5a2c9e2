// The internal pair as a composition of ATen ops, a chunk of query rows at a time: any device, memory
// O(chunk), and the second oracle of the tests.

#include "sdpa_aten.h"

#include <torch/library.h>

#include "backward_chunk.h"
#include "by_sequence.h"
#include "chunk.h"
#include "contract.h"
#include "pieces.h"

namespace attn_ext {

SdpaOutputs forward_aten(const SdpaArgs& args, SideOutputs wanted) {
  check_packed(args, wanted);
  if (args.sequences.defined()) {
    return forward_by_sequence(args, [](const SdpaArgs& one) { return forward_aten(one, {}); });
  }
  const Problem problem = make_problem(args, /*for_derivatives=*/false);
  WholeOutputs outputs(problem, wanted);
  for_each_part(problem, [&](const Problem& part) {
    OutputPieces pieces(part, wanted);
    for_each_chunk(part, [&](const ChunkBounds& bounds) {
      const Chunk chunk = make_chunk(part, bounds);
      const at::Tensor applied = chunk.applied_weights();
      pieces.add(bounds, weighted_values(chunk, applied, chunk.value), chunk.lse, applied);
    });
    outputs.add(part, pieces.join());
  });
  return outputs.finish(args.query.options());
}

SdpaInputs backward_aten(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted) {
  check_backward(grads, args, saved, wanted);
  if (args.sequences.defined()) {
    return backward_by_sequence(
        grads, args, saved, [&](const SdpaOutputs& incoming, const SdpaArgs& one, const SavedOutputs& own) {
          return backward_aten(incoming, one, own, wanted);
        });
  }
  const Problem problem = make_problem(args, /*for_derivatives=*/false);
  const OutputGrads canonical = canonical_grads(problem, grads);
  const GivenRows rows = canonical_rows(problem, saved);
  WholeGradients gradients(problem);
  for_each_part(problem, [&](const Problem& part) {
    const OutputGrads part_grads = of_part(part, canonical);
    const GivenRows part_rows = of_part(part, rows);
    GradientSums sums(part);
    for_each_chunk(part, [&](const ChunkBounds& bounds) {
      const GivenRows given = narrow_rows(part_rows, bounds);
      const Chunk chunk = make_chunk(part, bounds, given);
      const OutputGrads incoming = narrow_grads(part, part_grads, bounds);
      const ScoreGrads scores = score_grads(part, chunk, incoming, given.delta);
      if (wanted.query) {
        sums.add_query(query_grad(part, chunk, scores.products, chunk.key));
      }
      if (wanted.key) {
        sums.add_key(key_grad(part, chunk, scores.products, chunk.query), bounds);
      }
      if (wanted.value) {
        sums.add_value(value_grad(part, chunk, chunk.applied_weights(), incoming.output), bounds);
      }
      if (wanted.attn_mask) {
        sums.add_scores(scores.scores, bounds);
      }
      if (wanted.sinks) {
        sums.add_sinks(
            chunk.only_sinks(times(chunk.sink_weights.unsqueeze(-1), row_grads(scores.delta, incoming))));
      }
    });
    gradients.add(part, sums.join());
  });
  return gradients.finish(args, wanted);
}

TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_aten>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_aten>)));
}

}  // namespace attn_ext
