#include "memory_order.h"

#include <c10/core/SymBool.h>

#include <numeric>
#include <optional>
#include <utility>

namespace attn_ext {

namespace {

/// A dim's stride, where it says something of the order.
std::optional<c10::SymInt> telling_stride(const at::Tensor& input, int64_t dim) {
  if (dim < 0 || TORCH_GUARD_OR_FALSE(input.sym_size(dim).sym_eq(1)) ||
      TORCH_GUARD_OR_FALSE(input.sym_stride(dim).sym_eq(0))) {
    return std::nullopt;
  }
  return input.sym_stride(dim);
}

bool is_less(const c10::SymInt& a, const c10::SymInt& b) {
  return TORCH_GUARD_OR_FALSE(a.sym_lt(b));
}

}  // namespace

MemoryOrder contiguous_order(int64_t dims) {
  MemoryOrder order(static_cast<size_t>(dims));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

MemoryOrder memory_order(const at::Tensor& input, int64_t dims) {
  MemoryOrder order = contiguous_order(dims);
  if (!input.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && input.is_contiguous()) {
    return order;
  }
  c10::SmallVector<std::optional<c10::SymInt>, 8> strides;
  for (int64_t dim = 0; dim < dims; ++dim) {
    strides.push_back(telling_stride(input, dim - dims + input.dim()));
  }
  // Insertion: a dim moves outwards past those of smaller strides, and past what says nothing on its way.
  for (size_t from = 1; from + 1 < order.size(); ++from) {
    size_t place = from;
    for (size_t next = from; next-- > 0;) {
      const auto& outer = strides[static_cast<size_t>(order[next])];
      const auto& moving = strides[static_cast<size_t>(order[place])];
      if (!moving) {
        break;
      }
      if (!outer) {
        continue;
      }
      if (!is_less(*outer, *moving)) {
        break;
      }
      std::swap(order[next], order[place]);
      place = next;
    }
  }
  return order;
}

namespace {

/// Whether the tensor lies so, without gaps.
bool is_in_order(const at::Tensor& tensor, const MemoryOrder& order) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  int64_t step = 1;
  for (size_t place = order.size(); place-- > 0;) {
    const auto dim = static_cast<size_t>(order[place]);
    if (sizes[dim] != 1 && strides[dim] != step) {
      return false;
    }
    step *= at_least_one(sizes[dim]);
  }
  return true;
}

}  // namespace

at::Tensor in_order(const at::Tensor& tensor, const MemoryOrder& order) {
  if (!tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && is_in_order(tensor, order)) {
    return tensor;
  }
  MemoryOrder back = contiguous_order(static_cast<int64_t>(order.size()));
  for (size_t place = 0; place < order.size(); ++place) {
    back[static_cast<size_t>(order[place])] = static_cast<int64_t>(place);
  }
  return tensor.permute(order).contiguous().permute(back);
}

}  // namespace attn_ext
