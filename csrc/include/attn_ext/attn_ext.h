// attn_ext for C++ programs. Linking the library registers torch.ops.attn_ext too, for scripted modules.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#if defined(_WIN32)
#define ATTN_EXT_API
#else
#define ATTN_EXT_API __attribute__((visibility("default")))
#endif

namespace attn_ext {

/// The arguments beside query, key and value; names and meaning are those of the Python ops:
///   attn_ext::sdpa(query, key, value, {.is_causal = true, .enable_gqa = true})
struct SdpaOptions {
  /// Broadcasts to (..., Hq, Lq, Lk). Bool: true = takes part. Floating: added to the scaled scores.
  std::optional<at::Tensor> attn_mask = std::nullopt;
  /// In [0, 1]; acts whenever it is not 0.
  double dropout_p = 0.0;
  /// Key j is visible to query i iff j <= i + query_offset.
  bool is_causal = false;
  /// nullopt: 1 / sqrt(D).
  std::optional<double> scale = std::nullopt;
  /// Hq may be a multiple of Hkv: query head h reads key head h / (Hq / Hkv).
  bool enable_gqa = false;
  /// i + query_offset - window_left <= j <= i + query_offset + window_right; nullopt: open.
  std::optional<int64_t> window_left = std::nullopt;
  std::optional<int64_t> window_right = std::nullopt;
  int64_t query_offset = 0;
  /// c > 0: a scaled score s becomes c tanh(s / c), before the mask.
  double softcap = 0.0;
  /// (Hq,): a learned score a head that takes part in the softmax and has no value.
  std::optional<at::Tensor> sinks = std::nullopt;
};

/// softmax(scale · query keyᵀ + mask) value.
/// query (..., Hq, Lq, D), key (..., Hkv, Lk, D), value (..., Hkv, Lk, Dv) -> (..., Hq, Lq, Dv).
/// Throws c10::Error for arguments that do not fit.
ATTN_EXT_API at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                             const SdpaOptions& options = {});

/// (output, weights (..., Hq, Lq, Lk)), weights after dropout.
ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> sdpa_with_weights(const at::Tensor& query,
                                                                  const at::Tensor& key,
                                                                  const at::Tensor& value,
                                                                  const SdpaOptions& options = {});

/// (output, lse (..., Hq, Lq)), the natural log of the sum of exp(score).
ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> sdpa_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                              const at::Tensor& value,
                                                              const SdpaOptions& options = {});

/// (output, key_mass (..., Hq, Lk)), the weights summed over the queries.
ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> sdpa_with_key_mass(const at::Tensor& query,
                                                                   const at::Tensor& key,
                                                                   const at::Tensor& value,
                                                                   const SdpaOptions& options = {});

/// The arguments of packed sequences beside query, key, value and cu_seqlens_q.
struct SdpaPackedOptions {
  /// (N + 1,): where each sequence begins in key and value; nullopt: where it does in query.
  std::optional<at::Tensor> cu_seqlens_k = std::nullopt;
  double dropout_p = 0.0;
  /// Key j of a sequence is visible to its query i iff j <= i + its query offset.
  bool is_causal = false;
  /// (N,): how many rows a sequence has; nullopt: all up to the next one.
  std::optional<at::Tensor> seqlens_q = std::nullopt;
  std::optional<at::Tensor> seqlens_k = std::nullopt;
  /// (N,); nullopt: the last query of a sequence stands at its last key.
  std::optional<at::Tensor> query_offsets = std::nullopt;
  /// These are those of SdpaOptions.
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
  std::optional<int64_t> window_left = std::nullopt;
  std::optional<int64_t> window_right = std::nullopt;
  double softcap = 0.0;
  std::optional<at::Tensor> sinks = std::nullopt;
};

/// Attention of sequences that lie one after the other, each of which sees its own keys alone.
/// query (Tq, Hq, D), key (Tk, Hkv, D), value (Tk, Hkv, Dv), cu_seqlens_q (N + 1,) int32 or int64
/// -> (Tq, Hq, Dv), 0 in rows of no sequence.
ATTN_EXT_API at::Tensor sdpa_packed(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                    const at::Tensor& cu_seqlens_q, const SdpaPackedOptions& options = {});

/// (output, lse (Hq, Tq)), -inf in rows of no sequence.
ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> sdpa_packed_with_lse(const at::Tensor& query,
                                                                     const at::Tensor& key,
                                                                     const at::Tensor& value,
                                                                     const at::Tensor& cu_seqlens_q,
                                                                     const SdpaPackedOptions& options = {});

/// The arguments of attention over pages beside the tensors that it cannot do without.
struct SdpaPagedOptions {
  /// (N + 1,): where the query rows of each sequence begin; nullopt: each has one.
  std::optional<at::Tensor> cu_seqlens_q = std::nullopt;
  /// Key j of a sequence is visible to its query i iff j <= i + keys - queries.
  bool is_causal = true;
  /// These are those of SdpaOptions.
  std::optional<double> scale = std::nullopt;
  bool enable_gqa = false;
  std::optional<int64_t> window_left = std::nullopt;
  std::optional<int64_t> window_right = std::nullopt;
  double softcap = 0.0;
  std::optional<at::Tensor> sinks = std::nullopt;
  /// Factors of keys and values, float: (), (Hkv,) or (P, page, Hkv, 1).
  std::optional<at::Tensor> key_scale = std::nullopt;
  std::optional<at::Tensor> value_scale = std::nullopt;
};

/// Attention of new queries to keys and values in pages of a cache; there is no gradient.
/// query (Tq, Hq, D), key_pages (P, page, Hkv, D), value_pages (P, page, Hkv, Dv), block_table (N, most
/// pages), seqlens_k (N,) -> (Tq, Hq, Dv), 0 in rows of no sequence.
ATTN_EXT_API at::Tensor sdpa_paged(const at::Tensor& query, const at::Tensor& key_pages,
                                   const at::Tensor& value_pages, const at::Tensor& block_table,
                                   const at::Tensor& seqlens_k, const SdpaPagedOptions& options = {});

/// (output, lse (Hq, Tq)), -inf in rows of no sequence.
ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> sdpa_paged_with_lse(
    const at::Tensor& query, const at::Tensor& key_pages, const at::Tensor& value_pages,
    const at::Tensor& block_table, const at::Tensor& seqlens_k, const SdpaPagedOptions& options = {});

/// Writes key (T, Hkv, D) and value (T, Hkv, Dv) to slots of the pages; slot s is row s % page of page
/// s / page, -1 is not written.
ATTN_EXT_API void cache_write_(const at::Tensor& key_pages, const at::Tensor& value_pages,
                               const at::Tensor& key, const at::Tensor& value, const at::Tensor& slot_mapping,
                               const std::optional<at::Tensor>& key_scale = std::nullopt,
                               const std::optional<at::Tensor>& value_scale = std::nullopt);

/// Attention over all keys from outputs (..., Dv) and lses (...) over parts of them: (output, lse).
ATTN_EXT_API std::tuple<at::Tensor, at::Tensor> merge_partials(const std::vector<at::Tensor>& outputs,
                                                               const std::vector<at::Tensor>& lses);

/// Whether this thread's calls that a gradient is wanted of may save their weights (..., Hq, Lq, Lk) for the
/// backward pass, where that is faster and takes no more memory than query, key, value and output together;
/// on an NVIDIA GPU the draws of dropout, a bit each, as was last said in any thread.
/// True at first, unless the environment variable ATTN_EXT_SAVE_WEIGHTS is 0.
ATTN_EXT_API bool save_weights_for_backward();
ATTN_EXT_API void set_save_weights_for_backward(bool enabled);

}  // namespace attn_ext
