// Every schema of the library, and nothing else.

#include <torch/library.h>

// The argument list of the public ops; its first part is that of F.scaled_dot_product_attention.
#define ATTN_EXT_PUBLIC_ARGS                                                                      \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "         \
  "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, SymInt? window_left=None, " \
  "SymInt? window_right=None, SymInt query_offset=0, float softcap=0.0, Tensor? sinks=None"

// The internal pair takes tensors first and every argument by position (a vmap rule wants that), and the seed
// of the dropout draw as a tensor: it holds no hidden state.
#define ATTN_EXT_TENSORS \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, Tensor? dropout_seed"
#define ATTN_EXT_SCALARS                                                                  \
  "float dropout_p, bool is_causal, float? scale, bool enable_gqa, SymInt? window_left, " \
  "SymInt? window_right, SymInt query_offset, float softcap"

TORCH_LIBRARY(attn_ext, m) {
  m.def("sdpa(" ATTN_EXT_PUBLIC_ARGS ") -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("sdpa_with_weights(" ATTN_EXT_PUBLIC_ARGS ") -> (Tensor output, Tensor weights)",
        {at::Tag::nondeterministic_seeded});
  m.def("sdpa_with_lse(" ATTN_EXT_PUBLIC_ARGS ") -> (Tensor output, Tensor lse)",
        {at::Tag::nondeterministic_seeded});
  m.def("sdpa_with_key_mass(" ATTN_EXT_PUBLIC_ARGS ") -> (Tensor output, Tensor key_mass)",
        {at::Tag::nondeterministic_seeded});
  m.def("_sdpa_forward(" ATTN_EXT_TENSORS ", " ATTN_EXT_SCALARS
        ", bool need_weights, bool need_key_mass) "
        "-> (Tensor output, Tensor lse, Tensor? weights, Tensor? key_mass)");
  m.def(
      "_sdpa_backward(Tensor? grad_output, Tensor? grad_lse, Tensor? grad_weights, Tensor? "
      "grad_key_mass, " ATTN_EXT_TENSORS ", Tensor output, Tensor lse, " ATTN_EXT_SCALARS
      ", bool[5] output_mask) "
      "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_mask, Tensor grad_sinks)");
}
