// Results put together from chunks, without writing in place: what autograd and vmap want.
// An undefined piece stands for zero; a sum of nothing is undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "problem.h"

namespace attn_ext {

/// A result with rows of its own for every chunk.
///
/// Where autograd and vmap do not look on, the pieces are written into one tensor at once: small results kept
/// between the large temporaries of the chunks would leave holes in the heap that nothing fits into again.
class RowPieces {
 public:
  RowPieces(int64_t row_dim, int64_t rows) : row_dim_(row_dim), rows_(rows) {}

  void add(const at::Tensor& piece);
  at::Tensor join() const;

 private:
  int64_t row_dim_, rows_;
  int64_t filled_ = 0;
  at::Tensor whole_;
  std::vector<at::Tensor> pieces_;
};

/// A result to which every chunk adds at its keys, along `key_dim`.
class KeySum {
 public:
  KeySum(int64_t key_dim, int64_t key_len) : key_dim_(key_dim), key_len_(key_len) {}

  void add(const at::Tensor& part, const ChunkBounds& bounds);
  const at::Tensor& total() const { return total_; }

 private:
  int64_t key_dim_, key_len_;
  at::Tensor total_;
};

/// The outputs (or their tangents).
class OutputPieces {
 public:
  OutputPieces(const Problem& problem, SideOutputs wanted);

  /// Of a chunk: Pd V (lead, rows, Dv), lse (lead, rows), and Pd (lead, rows, keys), the lead dims broadcast.
  void add(const ChunkBounds& bounds, const at::Tensor& values, const at::Tensor& lse,
           const at::Tensor& weights);

  /// In the shapes and dtypes of the outputs; what no chunk added to is undefined, or made of `zeros`.
  SdpaOutputs join(const std::optional<at::TensorOptions>& zeros = std::nullopt) const;

 private:
  const Problem& problem_;
  SideOutputs wanted_;
  RowPieces output_, lse_, weights_;
  KeySum key_mass_;
};

/// (..., keys of the chunk, ...) -> (..., Lk, ...), zero at the other keys.
at::Tensor pad_keys(const at::Tensor& part, int64_t key_dim, const ChunkBounds& bounds, int64_t key_len);

/// Sum of `tensor` over the dims that are 1 in `shape` (as many dims).
at::Tensor sum_down_to(const at::Tensor& tensor, at::IntArrayRef shape);

}  // namespace attn_ext
