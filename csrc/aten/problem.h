// A call in the one layout that the composition works in.
//
// Every tensor becomes a view (batch..., Hkv, G, rows, columns) with G the query heads that share a key head,
// and size 1 wherever it is broadcast: nothing is copied to expand it, and a grouped head is one more
// broadcast dim. The lead dims are (batch..., Hkv, G).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "../checks.h"
#include "../memory_order.h"

namespace attn_ext {

using Dims = c10::SmallVector<int64_t, 8>;

/// Key j takes part in row i only if i + low <= j <= i + high: causality and window as one.
struct Band {
  std::optional<int64_t> low, high;
};

/// What makes the canonical view of a tensor of this call.
struct Layout {
  int64_t batch_dims;
  int64_t key_heads, group;
  bool has_heads;  // of the outputs

  /// (..., heads of the query or 1, tail...) -> (batch..., Hkv, G, tail...)
  at::Tensor of_query_heads(const at::Tensor& tensor, int64_t tail_dims) const;
  /// (..., Hkv or 1, tail...) -> (batch..., Hkv, 1, tail...)
  at::Tensor of_key_heads(const at::Tensor& tensor, int64_t tail_dims) const;
};

struct Problem {
  Layout layout;
  Dims lead;        // sizes of (batch..., Hkv, G) after broadcasting
  Dims whole_lead;  // the same; of a part of a call, the call's
  Dims lead_begin;  // where a part begins in the lead dims of the call
  bool on_cpu;
  int64_t query_len, key_len, head_dim, value_dim;
  at::ScalarType dtype;        // of query, key, value
  at::ScalarType accumulator;  // of scores, softmax and sums
  // Of the factors of products, which are summed in `accumulator` either way: the dtype of accumulation, or
  // the inputs' own where a GPU's matrix units multiply these; then weights and their gradients are rounded
  // to it.
  at::ScalarType factors;
  at::ScalarType output_dtype, lse_dtype;
  double scale, softcap, dropout_p;
  Band band;
  MemoryOrder output_order;  // of its dims as the caller has them

  // In the dtype of factors (key and value: once for all chunks), undefined where absent.
  at::Tensor query;                 // (lead, Lq, D), still in its own dtype: converted a chunk at a time
  at::Tensor key, value;            // (lead, Lk, D), (lead, Lk, Dv)
  at::Tensor attn_mask;             // (lead, Lq or 1, Lk or 1), in its own dtype
  at::Tensor sinks;                 // (lead)
  at::Tensor dropout_seed;          // (seed dims, 1...) of as many dims as a score tensor
  int64_t seed_dims = 0;            // the leading batch dims that the seed covers
  int64_t first_batch, batch_step;  // of the draws, as in SdpaArgs
  Origin dropout_origin;            // the same

  /// (lead, tail...)
  Dims with_tail(std::initializer_list<int64_t> tail) const;
  /// The shape of an output: lead dims as the caller has them, then tail.
  Dims output_shape(std::initializer_list<int64_t> tail) const;
};

/// The call in numbers, without its tensors.
Problem describe(const SdpaArgs& args, Seed seed = Seed::kGiven);
/// `for_derivatives`: of what is computed with it derivatives may be recorded.
Problem make_problem(const SdpaArgs& args, bool for_derivatives);

/// What of a (lead, ...) tensor of the call belongs to a part of it: broadcast dims stay 1, undefined stays
/// so.
at::Tensor of_part(const Problem& part, const at::Tensor& tensor);

/// How much is worked on at once: as many heads and batches as keep a few rows' scores in bounds, then as
/// many rows, whatever the length of the query.
struct ChunkSizes {
  Dims lead;
  int64_t rows;
};
ChunkSizes chunk_sizes(const Problem& problem);

/// The call's part that begins at `begin` and is of `sizes` in the lead dims, or of what is left there.
Problem part_of(const Problem& problem, const Dims& begin, const Dims& sizes);
/// On to the next part, the last dim first; false after the last part.
bool advance(Dims& begin, const Dims& sizes, const Dims& lead);

template <class Function>
void for_each_part(const Problem& problem, Function function) {
  const Dims sizes = chunk_sizes(problem).lead;
  if (sizes == problem.lead) {
    return function(problem);
  }
  Dims begin(sizes.size(), 0);
  do {
    function(part_of(problem, begin, sizes));
  } while (advance(begin, sizes, problem.lead));
}

/// Rows of the query, and the only keys that the band lets them see.
struct ChunkBounds {
  int64_t row_begin, row_end, key_begin, key_end;

  int64_t rows() const { return row_end - row_begin; }
  int64_t keys() const { return key_end - key_begin; }
};

template <class Function>
void for_each_chunk(const Problem& problem, Function function) {
  const int64_t step = chunk_sizes(problem).rows;
  for (int64_t begin = 0; begin < problem.query_len; begin += step) {
    const int64_t end = std::min(begin + step, problem.query_len);
    int64_t key_begin = problem.band.low ? std::max<int64_t>(begin + *problem.band.low, 0) : 0;
    int64_t key_end =
        problem.band.high ? std::min(end + *problem.band.high, problem.key_len) : problem.key_len;
    if (key_begin >= key_end) {
      key_begin = key_end = 0;
    }
    function(ChunkBounds{begin, end, key_begin, key_end});
  }
}

}  // namespace attn_ext
