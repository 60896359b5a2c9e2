// Scores and softmax of one chunk of query rows: what forward, backward and tangents all start from.
#pragma once

#include "problem.h"

namespace attn_ext {

/// S = softcap(scale · Q Kᵀ) + bias over what is visible;  P = exp(S - lse), lse = log(sum_j exp S + exp
/// sink).
struct Chunk {
  ChunkBounds bounds;
  at::Tensor query;         // (lead, rows, D)
  at::Tensor key, value;    // (lead, keys, D), (lead, keys, Dv)
  at::Tensor capped;        // softcap(scale · Q Kᵀ) (lead, rows, keys); undefined without softcap
  at::Tensor visible;       // bool, broadcasts to (lead, rows, keys); undefined where all is visible
  at::Tensor takes_part;    // visible, and not in a row whose scores are all -inf; undefined as above
  at::Tensor weights;       // P (lead, rows, keys), before dropout, 0 where not visible
  at::Tensor lse;           // (lead, rows), -inf for a row that sees nothing
  at::Tensor sink_weights;  // exp(sink - lse) (lead, rows); undefined without sinks
  at::Tensor has_sink;      // bool (lead, 1, 1); undefined without sinks or where none is -inf
  at::Tensor multiplier;    // of dropout (lead, rows, keys); undefined without dropout

  /// The weights that are applied: P after dropout.
  at::Tensor applied_weights() const;
  /// dcapped / dscore = 1 - (capped / softcap)²; undefined without softcap.
  at::Tensor softcap_slope(double softcap) const;
  /// 0 wherever the key takes no part in the row, whatever `scores` holds there.
  at::Tensor only_partaking(const at::Tensor& scores) const;
  /// What belongs to the sink (lead, rows, 1), 0 where that is -inf, which is none, whatever `terms` holds
  /// there.
  at::Tensor only_sinks(const at::Tensor& terms) const;
};

/// What is known of rows over all keys, of which a chunk has a part, in (lead, rows). Undefined: its keys are
/// all, and what there is to know follows from them.
struct GivenRows {
  at::Tensor lse, delta;
};

/// Rows of a (lead, Lq or 1, columns) tensor, keys of a (lead, rows, Lk or 1) tensor: broadcast dims stay 1.
at::Tensor narrow_rows(const at::Tensor& tensor, const ChunkBounds& bounds);
at::Tensor narrow_keys(const at::Tensor& tensor, const ChunkBounds& bounds, int64_t dim = -1);

/// Pd V (lead, rows, Dv), with what is masked in V kept out; undefined where a factor is.
at::Tensor weighted_values(const Chunk& chunk, const at::Tensor& weights, const at::Tensor& value);

Chunk make_chunk(const Problem& problem, const ChunkBounds& bounds, const GivenRows& given = {});

}  // namespace attn_ext
