// The public ops over packed sequences.
#pragma once

#include "../sequences.h"
#include "sdpa_composite.h"

namespace attn_ext {

/// What the public ops take after query, key, value and cu_seqlens_q; of PackedCall, or of the C++ API's
/// options.
template <class Options>
auto packed_options_of(Options& o) {
  return fields(or_none(o.cu_seqlens_k), o.dropout_p, o.is_causal, or_none(o.seqlens_q), or_none(o.seqlens_k),
                or_none(o.query_offsets), o.scale, o.enable_gqa, o.window_left, o.window_right, o.softcap,
                or_none(o.sinks));
}

/// The arguments as the schema has them.
struct PackedCall {
  at::Tensor query, key, value;           // (Tq, Hq, D), (Tk, Hkv, D), (Tk, Hkv, Dv)
  at::Tensor cu_seqlens_q, cu_seqlens_k;  // (N + 1,)
  double dropout_p = 0.0;
  bool is_causal = false;
  at::Tensor seqlens_q, seqlens_k;  // (N,)
  at::Tensor query_offsets;         // (N,)
  std::optional<double> scale;
  bool enable_gqa = false;
  std::optional<c10::SymInt> window_left, window_right;
  double softcap = 0.0;
  at::Tensor sinks;

  auto arguments() {
    return std::tuple_cat(fields(query, key, value, cu_seqlens_q), packed_options_of(*this));
  }
};

/// As a call over (heads, rows, features) of which the sequences are parts, but without them: whose results
/// lie in memory as the query does, so that transposing them back is no copy.
SdpaArgs heads_first(const PackedCall& packed);
PackedLengths lengths_of(const PackedCall& packed);

at::Tensor sdpa_packed_composite(const PackedCall& args);
TensorPair sdpa_packed_with_lse_composite(const PackedCall& args);

}  // namespace attn_ext
