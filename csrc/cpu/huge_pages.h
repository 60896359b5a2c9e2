// Huge pages for large memory that is written for the first time: to touch it page by page takes longer than
// the work that fills it.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace attn_ext::cpu {

constexpr size_t kHugePage = size_t{1} << 21;

/// A hint, for the huge pages that lie wholly inside.
inline void ask_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) {
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

/// Huge pages for a new tensor where it is large.
template <class Tensor>
const Tensor& with_huge_pages(const Tensor& tensor) {
  constexpr size_t kLarge = size_t{4} << 20;
  if (tensor.nbytes() >= kLarge) {
    ask_for_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
  }
  return tensor;
}

}  // namespace attn_ext::cpu
