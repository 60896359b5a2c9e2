// The public ops over pages: an implementation a backend, and no gradient.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "../checks.h"
#include "../cpu/paged.h"
#include "../memory_order.h"
#include "call.h"

namespace attn_ext {

namespace {

SdpaOutputs paged_meta(const PagedCall& call, bool) {
  const SdpaArgs args = check_paged(call);
  const SdpaSizes sizes = check_args(args);
  const auto shape = sizes.with_tail({sizes.query_len, sizes.value_dim});
  const auto options = call.query.options();
  SdpaOutputs outputs;
  const auto order = memory_order(args.query, 3);
  outputs.output =
      at::empty_strided_symint(shape, dense_strides<c10::SymInt>(c10::SymIntArrayRef(shape), order), options);
  outputs.lse = at::empty_symint(sizes.with_tail({sizes.query_len}),
                                 options.dtype(accumulation_dtype(call.query.scalar_type())));
  return outputs;
}

SdpaOutputs paged_composite(const PagedCall& call, bool) {
  return paged_aten(call);
}

/// (rows, heads, features), as the query.
template <auto backend>
at::Tensor output_of(const PagedCall& call) {
  return backend(call, false).output.transpose(0, 1);
}
template <auto backend>
TensorPair output_and_lse_of(const PagedCall& call) {
  const SdpaOutputs outputs = backend(call, true);
  return {outputs.output.transpose(0, 1), outputs.lse};
}

template <auto backend>
void register_paged(torch::Library& m) {
  m.impl("sdpa_paged", TORCH_FN((Unboxed<PagedCall>::kernel<&output_of<backend>>)));
  m.impl("sdpa_paged_with_lse", TORCH_FN((Unboxed<PagedCall>::kernel<&output_and_lse_of<backend>>)));
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  register_paged<&cpu::paged_cpu>(m);
}
TORCH_LIBRARY_IMPL(attn_ext, Meta, m) {
  register_paged<&paged_meta>(m);
}
TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  register_paged<&paged_composite>(m);
}

// Backward says that there is none.
TORCH_LIBRARY_IMPL(attn_ext, Autograd, m) {
  m.impl("sdpa_paged", torch::autograd::autogradNotImplementedFallback());
  m.impl("sdpa_paged_with_lse", torch::autograd::autogradNotImplementedFallback());
  m.impl("cache_write_", torch::CppFunction::makeFallthrough());  // a cache is no part of a graph
}
}  // namespace attn_ext
