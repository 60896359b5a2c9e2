#include "pieces.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include "contract.h"

namespace attn_ext {

at::Tensor RowPieces::join(int64_t row_dim) const {
  return pieces_.empty() ? at::Tensor() : pieces_.size() == 1 ? pieces_.front() : at::cat(pieces_, row_dim);
}

void KeySum::add(const at::Tensor& part, const Chunk& chunk) {
  if (part.defined()) {
    total_ = plus(total_, pad_keys(part, key_dim_, chunk, key_len_));
  }
}

at::Tensor pad_keys(const at::Tensor& part, int64_t key_dim, const Chunk& chunk, int64_t key_len) {
  if (chunk.keys() == key_len) {
    return part;
  }
  std::vector<int64_t> pad(-2 * key_dim, 0);
  pad[pad.size() - 2] = chunk.key_begin;
  pad[pad.size() - 1] = key_len - chunk.key_end;
  return at::constant_pad_nd(part, pad, 0);
}

at::Tensor sum_down_to(const at::Tensor& tensor, at::IntArrayRef shape) {
  Dims dims;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (shape[dim] == 1 && tensor.size(dim) != 1) {
      dims.push_back(dim);
    }
  }
  return dims.empty() ? tensor : tensor.sum(dims, /*keepdim=*/true);
}

}  // namespace attn_ext
