// The internal pair as a composition of ATen ops, a chunk of query rows at a time: any device, memory
// O(chunk), and the second oracle of the tests.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "sdpa_aten.h"

#include "backward_chunk.h"
#include "chunk.h"
#include "contract.h"
#include "pieces.h"

namespace attn_ext {

SdpaOutputs forward_aten(const SdpaArgs& args, SideOutputs wanted) {
  const Problem problem = make_problem(args);
  RowPieces output(-2, problem.query_len), lse(-1, problem.query_len), weights(-2, problem.query_len);
  KeySum key_mass(-1, problem.key_len);
  for_each_chunk(problem, [&](const ChunkBounds& bounds) {
    const Chunk chunk = make_chunk(problem, bounds);
    const at::Tensor applied = chunk.applied_weights();
    output.add(contract_visible(applied, "QK", chunk.visible, chunk.value, "KD", "QD",
                                broadcast_lead(applied, chunk.value))
                   .to(problem.dtype)
                   .expand(problem.with_tail({bounds.rows(), problem.value_dim})));
    lse.add(chunk.lse.expand(problem.with_tail({bounds.rows()})));
    if (wanted.weights) {
      weights.add(pad_keys(applied.to(problem.dtype), -1, bounds, problem.key_len)
                      .expand(problem.with_tail({bounds.rows(), problem.key_len})));
    }
    if (wanted.key_mass) {
      key_mass.add(applied.sum(-2), bounds);
    }
  });

  const auto finish = [&](const at::Tensor& result, std::initializer_list<int64_t> tail,
                          at::ScalarType dtype) {
    const Dims shape = problem.output_shape(tail);
    return result.defined() ? result.to(dtype).reshape(shape).contiguous()
                            : at::zeros(shape, args.query.options().dtype(dtype));
  };
  SdpaOutputs outputs;
  outputs.output = finish(output.join(), {problem.query_len, problem.value_dim}, problem.dtype);
  outputs.lse = finish(lse.join(), {problem.query_len}, problem.accumulator);
  if (wanted.weights) {
    outputs.weights = finish(weights.join(), {problem.query_len, problem.key_len}, problem.dtype);
  }
  if (wanted.key_mass) {
    const at::Tensor& total = key_mass.total();
    outputs.key_mass = finish(total.defined() ? total.expand(problem.with_tail({problem.key_len})) : total,
                              {problem.key_len}, problem.dtype);
  }
  return outputs;
}

SdpaInputs backward_aten(const SdpaOutputs& grads, const SdpaArgs& args, const at::Tensor&, const at::Tensor&,
                         InputMask wanted) {
  check_grads(grads, check_args(args));
  const Problem problem = make_problem(args);
  const OutputGrads canonical = canonical_grads(problem, grads);
  const Dims query_lead = lead_of(problem.query, 2), key_lead = lead_of(problem.key, 2),
             value_lead = lead_of(problem.value, 2);
  GradientSums sums(problem, wanted);
  for_each_chunk(problem, [&](const ChunkBounds& bounds) {
    const Chunk chunk = make_chunk(problem, bounds);
    const OutputGrads incoming = narrow_grads(problem, canonical, bounds);
    const ScoreGrads scores = score_grads(problem, chunk, incoming);
    if (wanted.query) {
      sums.add_query(score_product(chunk, scores.products, chunk.key, "KD", "QD", query_lead, problem.scale));
    }
    if (wanted.key) {
      sums.add_key(score_product(chunk, scores.products, chunk.query, "QD", "KD", key_lead, problem.scale),
                   bounds);
    }
    if (wanted.value) {
      sums.add_value(value_grad(chunk, chunk.applied_weights(), incoming.output, value_lead), bounds);
    }
    if (wanted.attn_mask) {
      sums.add_scores(scores.scores, bounds);
    }
    if (wanted.sinks) {
      sums.add_sinks(times(chunk.sink_weights.unsqueeze(-1), row_grads(scores.delta, incoming)));
    }
  });
  return sums.finish(args);
}

TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_aten>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_aten>)));
}

}  // namespace attn_ext
