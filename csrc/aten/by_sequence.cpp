#include "by_sequence.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>

namespace attn_ext {

void RowsOfSequences::add(const at::Tensor& piece, int64_t begin, int64_t length) {
  pieces_.push_back(piece);
  begins_.push_back(begin);
  lengths_.push_back(length);
}

at::Tensor RowsOfSequences::join() const {
  at::Tensor example;
  for (const at::Tensor& piece : pieces_) {
    example = piece.defined() ? piece : example;
  }
  if (!example.defined()) {
    return example;
  }
  std::vector<at::Tensor> parts;
  const auto fill = [&](int64_t rows, double number) {
    if (rows > 0) {
      std::vector<int64_t> shape = example.sizes().vec();
      shape[static_cast<size_t>(example.dim() + row_dim_)] = rows;
      parts.push_back(at::full(shape, number, example.options()));
    }
  };
  int64_t end = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    fill(begins_[i] - end, fill_);
    if (pieces_[i].defined()) {
      parts.push_back(pieces_[i]);
    } else {
      fill(lengths_[i], 0);
    }
    end = begins_[i] + lengths_[i];
  }
  fill(rows_ - end, fill_);
  return at::cat(parts, row_dim_);
}

}  // namespace attn_ext
