// The numbers of a tensor of lengths or places.
#pragma once

#include <ATen/core/Tensor.h>

namespace attn_ext {

/// The numbers of a tensor of either integer dtype.
class Integers {
 public:
  explicit Integers(const at::Tensor& tensor)
      : tensor_((tensor.is_cpu() ? tensor : tensor.cpu()).contiguous()) {
    is_long_ = tensor_.scalar_type() == at::kLong;
    data_ = tensor_.const_data_ptr();
  }
  int64_t operator[](int64_t i) const {
    return is_long_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

 private:
  at::Tensor tensor_;
  const void* data_;
  bool is_long_;
};

}  // namespace attn_ext
