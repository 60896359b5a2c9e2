#include "sdpa_packed_composite.h"

#include <torch/library.h>

#include "../checks.h"
#include "../sequences.h"
#include "sdpa_composite.h"

namespace attn_ext {

namespace {

at::Tensor heads_first(const at::Tensor& tensor, const char* name, const char* shape) {
  TORCH_CHECK(tensor.dim() == 3, "attn_ext: expected ", name, " to have 3 dimensions ", shape,
              ", but got shape ", tensor.sym_sizes());
  check_storage(tensor, name);
  return tensor.transpose(0, 1);
}

}  // namespace

SdpaArgs heads_first(const PackedCall& packed) {
  SdpaArgs args;
  args.query = heads_first(packed.query, "query", "(query rows, heads, head dim)");
  args.key = heads_first(packed.key, "key", "(key rows, heads, head dim)");
  args.value = heads_first(packed.value, "value", "(key rows, heads, value dim)");
  args.sinks = packed.sinks;
  args.dropout_p = packed.dropout_p;
  args.is_causal = packed.is_causal;
  args.scale = packed.scale;
  args.enable_gqa = packed.enable_gqa;
  args.window_left = packed.window_left;
  args.window_right = packed.window_right;
  args.softcap = packed.softcap;
  return args;
}

PackedLengths lengths_of(const PackedCall& packed) {
  TORCH_CHECK(packed.cu_seqlens_q.device() == packed.query.device(),
              "attn_ext: expected cu_seqlens_q on the same device as query (", packed.query.device(),
              "), but got ", packed.cu_seqlens_q.device());
  return {packed.cu_seqlens_q,  packed.cu_seqlens_k,      packed.seqlens_q,      packed.seqlens_k,
          packed.query_offsets, packed.query.sym_size(0), packed.key.sym_size(0)};
}

namespace {

SdpaArgs with_sequences(const PackedCall& packed) {
  SdpaArgs args = heads_first(packed);
  args.sequences = packed_sequences(lengths_of(packed));
  return args;
}

}  // namespace

at::Tensor sdpa_packed_composite(const PackedCall& args) {
  return sdpa_composite(with_sequences(args)).transpose(0, 1);
}

TensorPair sdpa_packed_with_lse_composite(const PackedCall& args) {
  auto [output, lse] = sdpa_with_lse_composite(with_sequences(args));
  return {output.transpose(0, 1), lse};
}

namespace {

void register_packed_composites(torch::Library& m) {
  m.impl("sdpa_packed", TORCH_FN((Unboxed<PackedCall>::kernel<&sdpa_packed_composite>)));
  m.impl("sdpa_packed_with_lse", TORCH_FN((Unboxed<PackedCall>::kernel<&sdpa_packed_with_lse_composite>)));
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CompositeImplicitAutograd, m) {
  register_packed_composites(m);
}

TORCH_LIBRARY_IMPL(attn_ext, FuncTorchBatched, m) {
  register_packed_composites(m);
}

}  // namespace attn_ext
