#include "four_dims.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/full.h>
#include <c10/util/accumulate.h>

namespace attn_ext::cuda {

namespace {

constexpr int64_t kAlignment = 16;  // bytes that a kernel loads at once

int64_t product(const Dims& sizes, size_t begin, size_t end) {
  return c10::multiply_integers(sizes.begin() + begin, sizes.begin() + end);
}

Dims with_tail_of(const Dims& lead, const at::Tensor& tensor) {
  Dims sizes(lead.begin(), lead.end());
  sizes.append(tensor.sizes().end() - 2, tensor.sizes().end());
  return sizes;
}

/// Whether nothing of the input is broadcast.
bool is_whole(const at::Tensor& result, const at::Tensor& input) {
  return result.numel() == input.numel();
}

/// Whether rows begin at multiples of kAlignment.
bool rows_are_aligned(const at::Tensor& tensor) {
  const auto element = static_cast<int64_t>(tensor.element_size());
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) * element % kAlignment != 0) {
      return false;
    }
  }
  // Of a tensor without memory (meta), where it would begin.
  const auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) +
                     static_cast<uintptr_t>(tensor.storage_offset() * element);
  return begin % kAlignment == 0;
}

}  // namespace

std::array<int64_t, 2> FourDims::sizes() const {
  return {product(lead, 0, batches), product(lead, batches, lead.size())};
}

Dims FourDims::key_lead() const {
  Dims over(lead.begin(), lead.end());
  if (keeps_groups()) {
    over.back() = 1;
  }
  return over;
}

std::optional<at::Tensor> FourDims::view_over(const at::Tensor& canonical, const Dims& over) const {
  const at::Tensor whole = canonical.expand(with_tail_of(over, canonical));
  const at::DimVector shape{product(over, 0, batches), product(over, batches, over.size()), whole.size(-2),
                            whole.size(-1)};
  if (const auto strides = at::detail::computeStride(whole.sizes(), whole.strides(), shape)) {
    return whole.as_strided(shape, *strides);
  }
  return whole.numel() == canonical.numel() ? std::optional(whole.reshape(shape)) : std::nullopt;
}

std::optional<at::Tensor> FourDims::view(const at::Tensor& canonical) const {
  return view_over(canonical, lead);
}

std::optional<at::Tensor> FourDims::view_of_whole(const at::Tensor& tensor, int64_t heads) const {
  if (lead.size() != 3 || tensor.dim() != 4 || tensor.size(0) != lead[0] || tensor.size(1) != heads) {
    return std::nullopt;
  }
  if (batches == 1) {
    return tensor;
  }
  if (batches != 3) {
    return std::nullopt;
  }
  const at::DimVector shape{lead[0] * heads, 1, tensor.size(2), tensor.size(3)};
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), shape);
  return strides ? std::optional(tensor.as_strided(shape, *strides)) : std::nullopt;
}

std::optional<at::Tensor> FourDims::query_view(const at::Tensor& tensor) const {
  const auto whole = view_of_whole(tensor, lead[lead.size() - 2] * lead.back());
  return whole ? whole : view_over(layout.of_query_heads(tensor, 2), lead);
}

std::optional<at::Tensor> FourDims::key_view(const at::Tensor& tensor) const {
  const bool repeats = !keeps_groups() && lead.back() > 1;
  const auto whole = repeats ? std::nullopt : view_of_whole(tensor, lead[lead.size() - 2]);
  return whole ? whole : view_over(layout.of_key_heads(tensor, 2), key_lead());
}

at::Tensor FourDims::back(const at::Tensor& result, const Dims& over, const at::Tensor& canonical,
                          const at::Tensor& input) const {
  const at::Tensor whole = result.reshape(with_tail_of(over, result));
  return at::sum_to(whole, canonical.sizes()).reshape(input.sizes());
}

at::Tensor FourDims::of_query_view(const at::Tensor& result, const at::Tensor& input) const {
  const at::Tensor summed = is_whole(result, input)
                                ? of_shape(result, input.sizes())
                                : back(result, lead, layout.of_query_heads(input, 2), input);
  return in_order(summed, memory_order(input, input.dim()));
}

at::Tensor FourDims::of_key_view(const at::Tensor& result, const at::Tensor& input) const {
  const at::Tensor summed = is_whole(result, input)
                                ? of_shape(result, input.sizes())
                                : back(result, key_lead(), layout.of_key_heads(input, 2), input);
  return in_order(summed, memory_order(input, input.dim()));
}

at::Tensor of_shape(const at::Tensor& tensor, at::IntArrayRef shape) {
  return tensor.sizes() == shape ? tensor : tensor.reshape(shape);
}

at::Tensor with_columns(const at::Tensor& tensor, int64_t columns, double number) {
  at::Tensor once = tensor;  // of what is broadcast
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) {
    once = tensor.stride(dim) == 0 && tensor.size(dim) > 1 ? once.narrow(dim, 0, 1) : once;
  }
  at::DimVector sizes(once.sizes().begin(), once.sizes().end());
  sizes.back() = columns;
  const at::Tensor wide = at::full(sizes, number, tensor.options());
  wide.narrow(-1, 0, tensor.size(-1)).copy_(once);
  at::DimVector whole(tensor.sizes().begin(), tensor.sizes().end());
  whole.back() = columns;
  return wide.expand(whole);
}

at::Tensor with_row_strides(const at::Tensor& tensor, int64_t step) {
  at::DimVector strides(tensor.strides().begin(), tensor.strides().end());
  bool fits = true;
  for (size_t dim = 0; dim + 1 < strides.size(); ++dim) {
    if (tensor.sizes()[dim] == 1 && strides[dim] % step != 0) {
      strides[dim] = step;
      fits = false;
    }
  }
  return fits ? tensor : tensor.as_strided(tensor.sizes(), strides);
}

at::Tensor aligned(const at::Tensor& tensor, int64_t columns) {
  if (tensor.size(-1) != columns) {
    return with_columns(tensor, columns, 0.0);
  }
  return tensor.stride(-1) == 1 && rows_are_aligned(tensor) ? tensor : with_columns(tensor, columns, 0.0);
}

}  // namespace attn_ext::cuda
