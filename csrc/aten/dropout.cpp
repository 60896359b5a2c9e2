#include "dropout.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <array>
#include <cmath>

namespace attn_ext {

namespace {

// Key (lo, hi) = the seed; counter (c0, row, head, batch). Column j has its draw in word (j / 16) % 4 of
// counter c0 = 16 (j / 64) + j % 16: sixteen neighbouring counters give four vectors of sixteen neighbouring
// columns.
constexpr int64_t kLanes = 16, kWords = 4, kBlockColumns = kLanes * kWords;
constexpr int64_t kLow32 = 0xFFFFFFFF;
constexpr int64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr int64_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int kRounds = 10;

using Counter = std::array<at::Tensor, kWords>;

/// High and low 32 bits of a 32 by 32 bit product; int64 wraps to the very bits of uint64.
std::array<at::Tensor, 2> multiply(const at::Tensor& a, int64_t b) {
  const at::Tensor product = a * b;
  return {product.__rshift__(32).__and__(kLow32), product.__and__(kLow32)};
}

Counter philox(Counter counter, at::Tensor key0, at::Tensor key1) {
  for (int round = 0; round < kRounds; ++round) {
    const auto [high0, low0] = multiply(counter[0], kMultiplier0);
    const auto [high1, low1] = multiply(counter[2], kMultiplier1);
    counter = {high1.__xor__(counter[1]).__xor__(key0), low1, high0.__xor__(counter[3]).__xor__(key1), low0};
    key0 = (key0 + kWeyl0).__and__(kLow32);
    key1 = (key1 + kWeyl1).__and__(kLow32);
  }
  return counter;
}

/// Flat index over the batch dims that the seed does not cover, of the dims of a score tensor and one more.
at::Tensor batch_index(const Problem& problem, int64_t seed_dims, const at::TensorOptions& options) {
  Dims shape(problem.layout.batch_dims + 5, 1);
  int64_t count = 1;
  for (int64_t dim = seed_dims; dim < problem.layout.batch_dims; ++dim) {
    shape[dim] = problem.whole_lead[dim];
    count *= problem.whole_lead[dim];
  }
  const at::Tensor index =
      at::arange(count, options) * problem.batch_step + (problem.first_batch + problem.dropout_origin[0]);
  return of_part(problem, index.view(shape));
}

/// Of the query's heads, of the same dims.
at::Tensor head_index(const Problem& problem, const at::TensorOptions& options) {
  const int64_t key_heads = problem.layout.key_heads, group = problem.layout.group;
  Dims shape(problem.layout.batch_dims, 1);
  shape.append({key_heads, group, 1, 1, 1});
  const int64_t first = problem.dropout_origin[1];
  return of_part(problem, at::arange(first, first + key_heads * group, options).view(shape));
}

}  // namespace

at::Tensor dropout_multiplier(const Problem& problem, const ChunkBounds& bounds) {
  const auto options = problem.dropout_seed.options();
  const int64_t block_begin = bounds.key_begin / kBlockColumns;
  const int64_t block_end = (bounds.key_end + kBlockColumns - 1) / kBlockColumns;
  const int64_t first_row = problem.dropout_origin[2],
                first_block = problem.dropout_origin[3] / kBlockColumns;

  // Every tensor has dims (lead, rows, blocks, lanes).
  const at::Tensor seed = problem.dropout_seed.unsqueeze(-1);
  const at::Tensor columns =
      at::arange((first_block + block_begin) * kLanes, (first_block + block_end) * kLanes, options)
          .view({block_end - block_begin, kLanes});
  const at::Tensor rows = at::arange(first_row + bounds.row_begin, first_row + bounds.row_end, options)
                              .view({bounds.rows(), 1, 1});
  const Counter words =
      philox({columns, rows, head_index(problem, options), batch_index(problem, problem.seed_dims, options)},
             seed.__and__(kLow32), seed.__rshift__(32).__and__(kLow32));

  const at::Tensor draws = at::stack(at::TensorList(words.data(), kWords), -2).flatten(-3);
  const int64_t skipped = bounds.key_begin - block_begin * kBlockColumns;
  const auto threshold = static_cast<int64_t>(std::floor(std::ldexp(problem.dropout_p, 32)));
  const at::Tensor kept = draws.narrow(-1, skipped, bounds.keys()).ge(threshold).to(problem.accumulator);
  return problem.dropout_p < 1.0 ? kept * (1.0 / (1.0 - problem.dropout_p)) : kept;
}

}  // namespace attn_ext
