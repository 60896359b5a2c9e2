// The functions of include/attn_ext/attn_ext.h: the public ops, through the dispatcher.

#include <ATen/core/dispatch/Dispatcher.h>
#include <attn_ext/attn_ext.h>

#include "composite/sdpa_composite.h"

namespace attn_ext {

namespace {

template <auto composite>
auto call(const char* name, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
          const SdpaOptions& options) {
  using Signature = std::remove_pointer_t<decltype(&public_kernel<composite>)>;
  static const auto op =  // one for each composite, and so for each name
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
  return op.call(query, key, value, options.attn_mask, options.dropout_p, options.is_causal, options.scale,
                 options.enable_gqa, options.window_left, options.window_right, options.query_offset,
                 options.softcap, options.sinks);
}

}  // namespace

at::Tensor sdpa(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                const SdpaOptions& options) {
  return call<&sdpa_composite>("attn_ext::sdpa", query, key, value, options);
}

std::tuple<at::Tensor, at::Tensor> sdpa_with_weights(const at::Tensor& query, const at::Tensor& key,
                                                     const at::Tensor& value, const SdpaOptions& options) {
  return call<&sdpa_with_weights_composite>("attn_ext::sdpa_with_weights", query, key, value, options);
}

std::tuple<at::Tensor, at::Tensor> sdpa_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, const SdpaOptions& options) {
  return call<&sdpa_with_lse_composite>("attn_ext::sdpa_with_lse", query, key, value, options);
}

std::tuple<at::Tensor, at::Tensor> sdpa_with_key_mass(const at::Tensor& query, const at::Tensor& key,
                                                      const at::Tensor& value, const SdpaOptions& options) {
  return call<&sdpa_with_key_mass_composite>("attn_ext::sdpa_with_key_mass", query, key, value, options);
}

}  // namespace attn_ext
