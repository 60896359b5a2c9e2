// Every schema of the library, and nothing else.

#include <torch/library.h>

// The argument list of the public ops; its first part is that of F.scaled_dot_product_attention.
#define ATTN_EXT_PUBLIC_ARGS                                                                      \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "         \
  "bool is_causal=False, *, float? scale=None, bool enable_gqa=False, SymInt? window_left=None, " \
  "SymInt? window_right=None, SymInt query_offset=0, float softcap=0.0, Tensor? sinks=None"

// As the public ops, of sequences that lie one after the other.
#define ATTN_EXT_PACKED_ARGS                                                                                 \
  "Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, "                 \
  "float dropout_p=0.0, bool is_causal=False, *, Tensor? seqlens_q=None, Tensor? seqlens_k=None, "           \
  "Tensor? query_offsets=None, float? scale=None, bool enable_gqa=False, SymInt? window_left=None, SymInt? " \
  "window_right=None, float softcap=0.0, Tensor? sinks=None"

// Of sequences whose keys and values lie in pages of a cache. For inference: there are no gradients.
#define ATTN_EXT_PAGED_ARGS                                                                       \
  "Tensor query, Tensor key_pages, Tensor value_pages, Tensor block_table, Tensor seqlens_k, "    \
  "Tensor? cu_seqlens_q=None, bool is_causal=True, *, float? scale=None, bool enable_gqa=False, " \
  "SymInt? window_left=None, SymInt? window_right=None, float softcap=0.0, Tensor? sinks=None, "  \
  "Tensor? key_scale=None, Tensor? value_scale=None"

// The internal pair takes tensors first and every argument by position (a vmap rule wants that), and the seed
// of the dropout draw as a tensor: it holds no hidden state. `sequences` is what `_packed_sequences` gives.
#define ATTN_EXT_TENSORS                                                                             \
  "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, Tensor? dropout_seed, " \
  "Tensor? sequences"
#define ATTN_EXT_SCALARS                                                                  \
  "float dropout_p, bool is_causal, float? scale, bool enable_gqa, SymInt? window_left, " \
  "SymInt? window_right, SymInt query_offset, float softcap"

// A call may be a part of a whole one, over some of its rows, heads or keys: `dropout_origin` is the place
// (batch, head, row, column) of its first element in the draws of the whole; `unrounded` leaves the output,
// or the gradients, in the dtype of accumulation, and lse in float64. In backward `delta`, rowsum(P dP) over
// all keys, says that lse is that over all keys too; `output` is not read then. `weights`, those of the
// forward pass, may be read in place of being made again: not with dropout, which is in them. With dropout
// they are its draws, int32, as `_sdpa_forward_saving_draws` gives them on an NVIDIA GPU.
#define ATTN_EXT_PART ", SymInt[]? dropout_origin=None, bool unrounded=False"

#define ATTN_EXT_TILE                                                                                \
  "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed, Tensor? draws, float scale, " \
  "float softcap, float dropout_p, int low, int high, int first_batch, int batch_step"

TORCH_LIBRARY(attn_ext, m) {
  m.def("sdpa(" ATTN_EXT_PUBLIC_ARGS ") -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("sdpa_with_weights(" ATTN_EXT_PUBLIC_ARGS ") -> (Tensor output, Tensor weights)",
        {at::Tag::nondeterministic_seeded});
  m.def("sdpa_with_lse(" ATTN_EXT_PUBLIC_ARGS ") -> (Tensor output, Tensor lse)",
        {at::Tag::nondeterministic_seeded});
  m.def("sdpa_with_key_mass(" ATTN_EXT_PUBLIC_ARGS ") -> (Tensor output, Tensor key_mass)",
        {at::Tag::nondeterministic_seeded});
  m.def("sdpa_packed(" ATTN_EXT_PACKED_ARGS ") -> Tensor", {at::Tag::nondeterministic_seeded});
  m.def("sdpa_packed_with_lse(" ATTN_EXT_PACKED_ARGS ") -> (Tensor output, Tensor lse)",
        {at::Tag::nondeterministic_seeded});
  m.def("sdpa_paged(" ATTN_EXT_PAGED_ARGS ") -> Tensor");
  m.def("sdpa_paged_with_lse(" ATTN_EXT_PAGED_ARGS ") -> (Tensor output, Tensor lse)");
  m.def(
      "cache_write_(Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor key, Tensor value, "
      "Tensor slot_mapping, *, Tensor? key_scale=None, Tensor? value_scale=None) -> ()");
  m.def("_cache_zeros(int[] size, *, ScalarType? dtype=None, Device? device=None) -> Tensor");
  m.def("merge_partials(Tensor[] outputs, Tensor[] lses) -> (Tensor output, Tensor lse)");
  m.def(
      "_packed_sequences(Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqlens_q, Tensor? seqlens_k, "
      "Tensor? query_offsets, SymInt query_rows, SymInt key_rows) -> Tensor");
  m.def("_sequence_numbers(Tensor sequences) -> int[]");
  m.def("_sdpa_forward(" ATTN_EXT_TENSORS ", " ATTN_EXT_SCALARS
        ", bool need_weights, bool need_key_mass" ATTN_EXT_PART
        ") -> (Tensor output, Tensor lse, Tensor? weights, Tensor? key_mass)");
  m.def("_sdpa_forward_saving_draws(" ATTN_EXT_TENSORS ", " ATTN_EXT_SCALARS
        ") -> (Tensor output, Tensor lse, Tensor? draws)");
  // Kernels for NVIDIA GPUs (csrc/cuda/tiles.h); of weights those of `heads` heads from `first_head` on,
  // counted over the batch as well, and `rows` rows from `row_begin` on.
  m.def("_tile_draws(" ATTN_EXT_TILE ") -> Tensor");
  m.def("_tile_attend(" ATTN_EXT_TILE ") -> (Tensor output, Tensor lse)");
  m.def("_tile_weights(" ATTN_EXT_TILE
        ", Tensor lse, int first_head, int heads, int row_begin, int rows) -> Tensor");
  m.def("_tile_grads(" ATTN_EXT_TILE
        ", Tensor grad_output, Tensor output, Tensor lse, Tensor? grad_lse) -> (Tensor grad_query, Tensor "
        "grad_key, Tensor grad_value, Tensor delta)");
  m.def(
      "_sdpa_backward(Tensor? grad_output, Tensor? grad_lse, Tensor? grad_weights, Tensor? "
      "grad_key_mass, " ATTN_EXT_TENSORS ", Tensor? output, Tensor lse, " ATTN_EXT_SCALARS
      ", bool[5] output_mask" ATTN_EXT_PART
      ", Tensor? delta=None, Tensor? weights=None) -> (Tensor grad_query, Tensor grad_key, Tensor "
      "grad_value, Tensor "
      "grad_attn_mask, Tensor grad_sinks)");
}
