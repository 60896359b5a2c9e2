// The internal pair as a composition of ATen ops, a chunk of query rows at a time: any device, memory
// O(chunk), and the second oracle of the tests.

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "sdpa_aten.h"

#include "backward_tile.h"
#include "contract.h"
#include "pieces.h"
#include "tile.h"

namespace attn_ext {

SdpaOutputs forward_aten(const SdpaArgs& args, SideOutputs wanted) {
  const Problem problem = make_problem(args);
  RowPieces output(-2, problem.query_len), lse(-1, problem.query_len), weights(-2, problem.query_len);
  KeySum key_mass(-1, problem.key_len);
  for_each_chunk(problem, [&](const Chunk& chunk) {
    const Tile tile = make_tile(problem, chunk);
    const at::Tensor applied = tile.applied_weights();
    output.add(contract_visible(applied, "QK", tile.visible, tile.value, "KD", "QD",
                                broadcast_lead(applied, tile.value))
                   .to(problem.dtype)
                   .expand(problem.with_tail({chunk.rows(), problem.value_dim})));
    lse.add(tile.lse.expand(problem.with_tail({chunk.rows()})));
    if (wanted.weights) {
      weights.add(pad_keys(applied.to(problem.dtype), -1, chunk, problem.key_len)
                      .expand(problem.with_tail({chunk.rows(), problem.key_len})));
    }
    if (wanted.key_mass) {
      key_mass.add(applied.sum(-2), chunk);
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
  for_each_chunk(problem, [&](const Chunk& chunk) {
    const Tile tile = make_tile(problem, chunk);
    const OutputGrads incoming = narrow_grads(problem, canonical, chunk);
    const ScoreGrads scores = score_grads(problem, tile, incoming);
    if (wanted.query) {
      sums.add_query(score_product(tile, scores.products, tile.key, "KD", "QD", query_lead, problem.scale));
    }
    if (wanted.key) {
      sums.add_key(score_product(tile, scores.products, tile.query, "QD", "KD", key_lead, problem.scale),
                   chunk);
    }
    if (wanted.value) {
      sums.add_value(value_grad(tile, tile.applied_weights(), incoming.output, value_lead), chunk);
    }
    if (wanted.attn_mask) {
      sums.add_scores(scores.scores, chunk);
    }
    if (wanted.sinks) {
      sums.add_sinks(times(tile.sink_weights.unsqueeze(-1), row_grads(scores.delta, incoming)));
    }
  });
  return sums.finish(args);
}

TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_aten>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_aten>)));
}

}  // namespace attn_ext
