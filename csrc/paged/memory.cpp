// Memory for a cache, before anything is written to it.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../cpu/huge_pages.h"

namespace attn_ext {

namespace {

/// Zeros. Rows of a cache are read from all over it: with small pages of memory that takes a sixth longer.
at::Tensor cache_zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                       std::optional<at::Device> device) {
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  const at::Tensor memory = at::empty(size, options);
  return memory.is_cpu() ? cpu::with_huge_pages(memory).zero_() : memory.zero_();
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CompositeExplicitAutograd, m) {
  m.impl("_cache_zeros", TORCH_FN(cache_zeros));
}
TORCH_LIBRARY_IMPL(attn_ext, BackendSelect, m) {
  m.impl("_cache_zeros", TORCH_FN(cache_zeros));
}

}  // namespace attn_ext
