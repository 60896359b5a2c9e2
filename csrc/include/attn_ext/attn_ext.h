// attn_ext for C++ programs. Linking the library registers torch.ops.attn_ext too, for scripted modules.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

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

}  // namespace attn_ext
