// The functions of include/attn_ext/attn_ext.h: the public ops, through the dispatcher.

#include <attn_ext/attn_ext.h>

#include "composite/merge_partials.h"
#include "composite/sdpa_composite.h"
#include "composite/sdpa_packed_composite.h"
#include "paged/call.h"

namespace attn_ext {

namespace {

template <auto composite>
auto call(const char* name, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
          const SdpaOptions& options) {
  using Result = std::invoke_result_t<decltype(composite), const SdpaArgs&>;
  static const auto op = find_op<PublicCall, Result>(name);  // one for each composite, and so for each name
  return call_op(op, std::tuple_cat(fields(query, key, value), options_of(options)));
}

template <auto composite>
auto call_packed(const char* name, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                 const at::Tensor& cu_seqlens_q, const SdpaPackedOptions& options) {
  using Result = std::invoke_result_t<decltype(composite), const PackedCall&>;
  static const auto op = find_op<PackedCall, Result>(name);
  return call_op(op, std::tuple_cat(fields(query, key, value, cu_seqlens_q), packed_options_of(options)));
}

template <class Result>
Result call_paged(const char* name, const at::Tensor& query, const at::Tensor& key_pages,
                  const at::Tensor& value_pages, const at::Tensor& block_table, const at::Tensor& seqlens_k,
                  const SdpaPagedOptions& options) {
  static const auto op = find_op<PagedCall, Result>(name);
  return call_op(op, std::tuple_cat(fields(query, key_pages, value_pages, block_table, seqlens_k),
                                    paged_options_of(options)));
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

at::Tensor sdpa_packed(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const at::Tensor& cu_seqlens_q, const SdpaPackedOptions& options) {
  return call_packed<&sdpa_packed_composite>("attn_ext::sdpa_packed", query, key, value, cu_seqlens_q,
                                             options);
}

std::tuple<at::Tensor, at::Tensor> sdpa_packed_with_lse(const at::Tensor& query, const at::Tensor& key,
                                                        const at::Tensor& value,
                                                        const at::Tensor& cu_seqlens_q,
                                                        const SdpaPackedOptions& options) {
  return call_packed<&sdpa_packed_with_lse_composite>("attn_ext::sdpa_packed_with_lse", query, key, value,
                                                      cu_seqlens_q, options);
}

at::Tensor sdpa_paged(const at::Tensor& query, const at::Tensor& key_pages, const at::Tensor& value_pages,
                      const at::Tensor& block_table, const at::Tensor& seqlens_k,
                      const SdpaPagedOptions& options) {
  return call_paged<at::Tensor>("attn_ext::sdpa_paged", query, key_pages, value_pages, block_table, seqlens_k,
                                options);
}

std::tuple<at::Tensor, at::Tensor> sdpa_paged_with_lse(const at::Tensor& query, const at::Tensor& key_pages,
                                                       const at::Tensor& value_pages,
                                                       const at::Tensor& block_table,
                                                       const at::Tensor& seqlens_k,
                                                       const SdpaPagedOptions& options) {
  return call_paged<TensorPair>("attn_ext::sdpa_paged_with_lse", query, key_pages, value_pages, block_table,
                                seqlens_k, options);
}

void cache_write_(const at::Tensor& key_pages, const at::Tensor& value_pages, const at::Tensor& key,
                  const at::Tensor& value, const at::Tensor& slot_mapping,
                  const std::optional<at::Tensor>& key_scale, const std::optional<at::Tensor>& value_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attn_ext::cache_write_", "")
                             .typed<decltype(cache_write_)>();
  op.call(key_pages, value_pages, key, value, slot_mapping, key_scale, value_scale);
}

std::tuple<at::Tensor, at::Tensor> merge_partials(const std::vector<at::Tensor>& outputs,
                                                  const std::vector<at::Tensor>& lses) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("attn_ext::merge_partials", "")
                             .typed<decltype(merge_partials_composite)>();
  return op.call(outputs, lses);
}

}  // namespace attn_ext
