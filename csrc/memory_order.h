// In which order the dims of a result lie in memory: as those of the input that it follows, so that
// transposing back what the caller had transposed is no copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

namespace attn_ext {

/// Dims, outermost first; always with the features, the last dim, innermost.
using MemoryOrder = c10::SmallVector<int64_t, 8>;

/// As they are counted.
MemoryOrder contiguous_order(int64_t dims);

/// That of a result of `dims` dims which broadcasts from `input`: by falling strides. Dims whose strides say
/// nothing, because they are broadcast or of size 1, keep their place.
MemoryOrder memory_order(const at::Tensor& input, int64_t dims);

inline int64_t at_least_one(int64_t size) {
  return size > 1 ? size : 1;
}
inline c10::SymInt at_least_one(const c10::SymInt& size) {
  return size.max(1);
}

/// The strides of a tensor without gaps.
template <class Int>
c10::SmallVector<Int, 8> dense_strides(c10::ArrayRef<Int> sizes, const MemoryOrder& order) {
  c10::SmallVector<Int, 8> strides(sizes.size(), 1);
  Int step = 1;
  for (size_t place = order.size(); place-- > 0;) {
    const auto dim = static_cast<size_t>(order[place]);
    strides[dim] = step;
    step = step * at_least_one(sizes[dim]);
  }
  return strides;
}

/// `tensor` without gaps; itself where it lies so.
at::Tensor in_order(const at::Tensor& tensor, const MemoryOrder& order);

}  // namespace attn_ext
