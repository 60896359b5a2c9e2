// Tensors of a call as the fused kernels take them, (N, H, rows, features), and back. Nothing is copied to
// broadcast it.
#pragma once

#include <optional>

#include "../aten/problem.h"

namespace attn_ext::cuda {

/// Which lead dims (batch..., Hkv, G) become N, the first `batches` of them, and which H.
struct FourDims {
  Layout layout;
  Dims lead;  // of the call, after broadcasting
  size_t batches;

  /// (N, H).
  std::array<int64_t, 2> sizes() const;

  /// (lead or 1, rows, columns) -> (N, H, rows, columns), as it lies or, where that cannot be and nothing is
  /// broadcast, in a copy. Nothing where it would have to be copied to broadcast it.
  std::optional<at::Tensor> view(const at::Tensor& canonical) const;

  /// The query of a call, or what has its heads; and keys or values, whose group dim becomes one of H only if
  /// that is among N's dims.
  std::optional<at::Tensor> query_view(const at::Tensor& tensor) const;
  std::optional<at::Tensor> key_view(const at::Tensor& tensor) const;
  /// Whether H of a key_view counts key heads alone.
  bool keeps_groups() const { return batches <= static_cast<size_t>(layout.batch_dims); }

  /// The gradient of a view (N, H, rows, columns), or of an output that lies so, as that of `input`: summed
  /// over what is broadcast there, of its shape and memory order.
  at::Tensor of_query_view(const at::Tensor& result, const at::Tensor& input) const;
  at::Tensor of_key_view(const at::Tensor& result, const at::Tensor& input) const;

 private:
  Dims key_lead() const;
  /// Of a tensor (batch, heads, rows, columns) of which nothing is broadcast, if that is a view at once.
  std::optional<at::Tensor> view_of_whole(const at::Tensor& tensor, int64_t heads) const;
  std::optional<at::Tensor> view_over(const at::Tensor& canonical, const Dims& over) const;
  at::Tensor back(const at::Tensor& result, const Dims& over, const at::Tensor& canonical,
                  const at::Tensor& input) const;
};

/// Reshaped, if it is not so.
at::Tensor of_shape(const at::Tensor& tensor, at::IntArrayRef shape);

/// A copy without gaps, of `columns`, `number` in those that the tensor lacks. (Padding and concatenation may
/// put another dim than the last side by side, where that is of size 1.)
at::Tensor with_columns(const at::Tensor& tensor, int64_t columns, double number);

/// `tensor` with strides that are multiples of `step` in dims of size 1 too, where a kernel looks at them.
at::Tensor with_row_strides(const at::Tensor& tensor, int64_t step);

/// `tensor` with the last dim side by side, of `columns`, zeros where it has fewer, and every row at a
/// multiple of 16 bytes; itself where it is so.
at::Tensor aligned(const at::Tensor& tensor, int64_t columns);

}  // namespace attn_ext::cuda
