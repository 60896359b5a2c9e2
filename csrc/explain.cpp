#include "explain.h"

#include <sstream>

#include "aten/problem.h"
#include "capability.h"

namespace attn_ext {

namespace {

int64_t converted_bytes(const at::Tensor& tensor, at::ScalarType accumulator) {
  return tensor.scalar_type() == accumulator
             ? 0
             : tensor.numel() * static_cast<int64_t>(at::elementSize(accumulator));
}

std::string reason(const at::Tensor& query) {
  std::ostringstream text;
  if (query.device().is_cpu()) {
    text << "the composition over ATen ops, a chunk of query rows at a time";
  } else {
    text << "device " << query.device() << ": the composition over ATen ops serves every device but the CPU";
  }
  return text.str();
}

}  // namespace

Explanation explain(const SdpaArgs& args) {
  const Problem problem = make_problem(args);
  int64_t lead = 1;
  for (const int64_t size : problem.lead) {
    lead *= size;
  }
  const int64_t rows = std::min(rows_per_chunk(problem), problem.query_len);
  const auto element = static_cast<int64_t>(at::elementSize(problem.accumulator));
  // Scores, their exponentials and the weights; a draw of dropout is of int64, four words and their products.
  const int64_t score_tensors = 3 * element + (problem.dropout_p > 0.0 ? 8 * 8 : 0);
  return {.path = "aten",
          .capability = args.query.device().is_cpu() ? cpu_capability() : args.query.device().str(),
          .block_rows = rows,
          .block_keys = problem.key_len,
          .packed_bytes = converted_bytes(args.key, problem.accumulator) +
                          converted_bytes(args.value, problem.accumulator),
          .scratch_bytes = lead * rows * problem.key_len * score_tensors,
          .reason = reason(args.query)};
}

}  // namespace attn_ext
