// Results put together from chunks, without writing in place where autograd keeps a record of it.
// An undefined piece stands for zero; a sum of nothing is undefined.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <vector>

#include "problem.h"

namespace attn_ext {

/// A result with rows of its own for every chunk.
///
/// Where no derivative is recorded, the pieces are written into one tensor at once: small results kept
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

/// A result put together from the parts of a call. Parts that fall on the same place, because the result is
/// that of an input that is broadcast over what lies between them, are added up.
class PartSum {
 public:
  PartSum() = default;
  /// `lead`: the result's own lead dims, 1 where it is broadcast.
  explicit PartSum(at::IntArrayRef lead) : lead_(lead.begin(), lead.end()) {}

  /// (lead dims of the part or 1, tail...)
  void add(const Problem& part, const at::Tensor& piece);
  at::Tensor total() const;

 private:
  Dims lead_;
  at::Tensor whole_;                      // written in place, where nobody looks on; else
  std::map<int64_t, at::Tensor> pieces_;  // by the place where they begin, the lead dims flat
};

/// The outputs (or their tangents) of a part.
class OutputPieces {
 public:
  OutputPieces(const Problem& problem, SideOutputs wanted);

  /// Of a chunk: Pd V (lead, rows, Dv), lse (lead, rows), and Pd (lead, rows, keys), the lead dims broadcast.
  void add(const ChunkBounds& bounds, const at::Tensor& values, const at::Tensor& lse,
           const at::Tensor& weights);

  /// (lead, ...); what no chunk added to is undefined.
  SdpaOutputs join() const;

 private:
  const Problem& problem_;
  SideOutputs wanted_;
  RowPieces output_, lse_, weights_;
  KeySum key_mass_;
};

/// The outputs (or their tangents) of a call.
class WholeOutputs {
 public:
  WholeOutputs(const Problem& problem, SideOutputs wanted);

  void add(const Problem& part, const SdpaOutputs& outputs);

  /// In the shapes and dtypes of the outputs; what no part added to is undefined, or made of `zeros`.
  SdpaOutputs finish(const std::optional<at::TensorOptions>& zeros = std::nullopt) const;

 private:
  const Problem& problem_;
  SideOutputs wanted_;
  PartSum output_, lse_, weights_, key_mass_;
};

/// (..., keys of the chunk, ...) -> (..., Lk, ...), zero at the other keys.
at::Tensor pad_keys(const at::Tensor& part, int64_t key_dim, const ChunkBounds& bounds, int64_t key_len);

/// Sum of `tensor` over the dims that are 1 in `shape` (as many dims).
at::Tensor sum_down_to(const at::Tensor& tensor, at::IntArrayRef shape);

}  // namespace attn_ext
