#include "explain.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <sstream>

#include "aten/problem.h"
#include "capability.h"
#include "cpu/call.h"
#include "cpu/dense_mask.h"
#include "cpu/fork.h"
#include "cpu/planned_call.h"
#include "cpu/saved_weights.h"
#include "cuda/plan.h"
#include "cuda/saved_draws.h"

namespace attn_ext {

namespace {

int64_t converted_bytes(const at::Tensor& tensor, at::ScalarType accumulator) {
  return tensor.scalar_type() == accumulator
             ? 0
             : tensor.numel() * static_cast<int64_t>(at::elementSize(accumulator));
}

std::string why_composition(const at::Tensor& query) {
  std::ostringstream text;
  if (query.device().is_cpu()) {
    text << "ATTN_EXT_CPU_CAPABILITY=aten: the composition over ATen ops, a chunk of query rows at a time";
  } else {
    text << "device " << query.device()
         << ": the composition over ATen ops serves every device but the CPU and NVIDIA's GPUs";
  }
  return text.str();
}

Explanation explain_composition(const SdpaArgs& args, const std::string& reason) {
  const Problem problem = describe(args, Seed::kNotYetDrawn);
  const ChunkSizes chunk = chunk_sizes(problem);
  int64_t lead = 1;
  for (const int64_t size : chunk.lead) {
    lead *= size;
  }
  const int64_t rows = std::min(chunk.rows, problem.query_len);
  const auto element = static_cast<int64_t>(at::elementSize(problem.accumulator));
  // Scores, their exponentials and the weights; a draw of dropout is of int64, four words and their products.
  const int64_t score_tensors = 3 * element + (problem.dropout_p > 0.0 ? 8 * 8 : 0);
  return {.path = "aten",
          .capability = args.query.device().is_cpu() ? cpu_capability() : args.query.device().str(),
          .block_rows = rows,
          .block_keys = problem.key_len,
          .packed_bytes = args.query.is_cuda() ? 0
                                               : converted_bytes(args.key, problem.accumulator) +
                                                     converted_bytes(args.value, problem.accumulator),
          .scratch_bytes = lead * rows * problem.key_len * score_tensors,
          .saved_bytes = 0,
          .reason = reason};
}

int64_t bytes_unless_in(const at::Tensor& made, const at::Tensor& given) {
  return made.defined() && !made.is_alias_of(given) ? static_cast<int64_t>(made.storage().nbytes()) : 0;
}

struct PathText {
  const char* name;
  const char* why;
};

PathText text_of(cpu::ForwardPath path) {
  switch (path) {
    case cpu::ForwardPath::kWholeRows:
      return {"whole-row", "all keys fit one block: softmax over whole rows"};
    case cpu::ForwardPath::kOnline:
      return {"online", "many keys: blocks of them with a running maximum and sum"};
    case cpu::ForwardPath::kSplit:
      return {"split", "few query rows, many keys: pieces of the keys apart, then merged"};
    case cpu::ForwardPath::kUnitRows:
      return {"unit-rows",
              "a handful of query rows, by a matrix unit: keys and values are read once, in place or packed"};
    default:
      return {"few-rows", "a handful of query rows: keys and values are read once, in place or packed"};
  }
}

bool wants_grad(const SdpaArgs& args) {
  return torch::autograd::compute_requires_grad(args.query, args.key, args.value, args.attn_mask, args.sinks);
}

/// Of the weights, as the call's node would save them.
int64_t saved_bytes(const SdpaArgs& args, const cpu::AttentionShape& shape) {
  return wants_grad(args) && cpu::saves_weights(args)
             ? shape.batch * shape.query_heads * shape.query_len * shape.key_len * args.query.element_size()
             : 0;
}

SdpaArgs with_seed(SdpaArgs args) {
  if (args.dropout_p > 0.0) {
    args.dropout_seed =
        at::zeros({}, args.query.options().dtype(at::kLong));  // as good as any: nothing is drawn
  }
  return args;
}

Explanation explain_kernels(const SdpaArgs& given, const cpu::KernelTable& table) {
  const SdpaArgs args = with_seed(given);
  const cpu::OneThreadInForkedChild guard;
  const cpu::Inputs inputs(args, check_args(args));
  const auto params = cpu::params_over<cpu::ForwardParams>(inputs);
  const int threads = cpu::useful_threads(cpu::work_of(params.shape));
  const cpu::ForwardPlan plan =
      cpu::plan_call(cpu::kernels_of(table, args.query.scalar_type()).forward, params, threads).plan;
  const PathText text = text_of(plan.path);
  return {.path = text.name,
          .capability = cpu_capability(),
          .block_rows = plan.block_rows,
          .block_keys = plan.block_keys,
          .packed_bytes = plan.packed_bytes,
          .scratch_bytes = plan.shared_bytes - plan.packed_bytes + plan.thread_bytes * threads +
                           cpu::dense_mask_bytes(args.attn_mask, params),
          .saved_bytes = saved_bytes(args, params.shape),
          .reason = text.why};
}

constexpr const char* kOneThread =
    "; on one thread: this process was forked inside a parallel region, whose threads stayed in the parent";

}  // namespace

Explanation explain_gpu(const SdpaArgs& given) {
  const SdpaArgs args = with_seed(given);
  const cuda::Plan plan = cuda::make_plan(args, {});
  if (plan.backend == cuda::Backend::kComposition) {
    return explain_composition(args, "the composition over ATen ops: " + plan.reason);
  }
  const bool is_fused = plan.is_fused();
  const auto made = [&](const at::Tensor& of_fused, const at::Tensor& of_tiles, const at::Tensor& given_one) {
    return given_one.defined() ? bytes_unless_in(is_fused ? of_fused : of_tiles, given_one) : 0;
  };
  return {.path = cuda::name_of(plan.backend),
          .capability = args.query.device().str(),
          .block_rows = plan.problem.query_len,
          .block_keys = is_fused ? plan.call.range.keys() : plan.problem.key_len,
          .packed_bytes = made(plan.call.query, plan.tiles.query, args.query) +
                          made(plan.call.key, plan.tiles.key, args.key) +
                          made(plan.call.value, plan.tiles.value, args.value) +
                          made(plan.call.bias, plan.tiles.mask, args.attn_mask),
          .scratch_bytes = 0,
          .saved_bytes =
              !is_fused && wants_grad(args) && cuda::saves_draws(args) ? cuda::bytes_of_draws(plan.tiles) : 0,
          .reason = is_fused ? "a fused kernel of ATen's, in blocks of its own"
                             : "a kernel of attn_ext's own, in blocks of its own: " + plan.reason};
}

Explanation explain(const SdpaArgs& args) {
  const cpu::KernelTable* table = cpu::kernels_in_use();
  const bool on_cpu = args.query.device().is_cpu();
  Explanation explanation = args.query.device().is_cuda() ? explain_gpu(args)
                            : table != nullptr && on_cpu
                                ? explain_kernels(args, *table)
                                : explain_composition(args, why_composition(args.query));
  if (on_cpu && cpu::only_one_thread_is_safe()) {
    explanation.reason += kOneThread;
  }
  return explanation;
}

}  // namespace attn_ext
