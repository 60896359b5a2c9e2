// Tensors of any rank, strides and broadcast as the kernels see them: nothing is copied or expanded.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../checks.h"
#include "kernels/interface/params.h"

namespace attn_ext::cpu {

ScalarKind kind_of(at::ScalarType dtype);

/// A call's sizes in plain numbers, its batch dims flattened.
struct CallSizes {
  explicit CallSizes(const SdpaSizes& sizes);

  c10::SmallVector<int64_t, 5> batch_dims;
  int64_t batch, heads, key_heads, query_len, key_len, head_dim, value_dim;
  bool has_heads;

  /// (batch..., heads, tail...), without heads where query, key and value are matrices.
  c10::SmallVector<int64_t, 8> output_shape(std::initializer_list<int64_t> tail) const;
};

/// Makes views and owns the tables of batch offsets that some of them need. A TensorView serves for what is
/// read and for what is written: only memory of a view made by `writable` may be written to.
class Views {
 public:
  explicit Views(const CallSizes& sizes) : sizes_(sizes) {}

  /// Of (..., heads, rows, columns): dims that are missing or of size 1 broadcast, by a stride of 0.
  TensorView matrix(const at::Tensor& tensor);
  TensorView writable(const at::Tensor& tensor);
  /// Of (..., heads), as sinks are.
  TensorView per_head(const at::Tensor& tensor);

 private:
  /// `tail` dims follow the batch dims.
  void set_batch(TensorView& view, const at::Tensor& tensor, int64_t tail);

  const CallSizes& sizes_;
  std::vector<std::vector<int64_t>> tables_;  // what lies in them stays where it is
};

}  // namespace attn_ext::cpu
