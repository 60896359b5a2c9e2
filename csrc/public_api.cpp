// The functions of include/attn_ext/attn_ext.h: the public ops, through the dispatcher.

#include <attn_ext/attn_ext.h>

#include "composite/sdpa_composite.h"

namespace attn_ext {

namespace {

template <auto composite>
auto call(const char* name, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
          const SdpaOptions& options) {
  using Result = std::invoke_result_t<decltype(composite), const SdpaArgs&>;
  static const auto op = find_op<PublicCall, Result>(name);  // one for each composite, and so for each name
  return call_op(op, std::tuple_cat(fields(query, key, value), options_of(options)));
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
