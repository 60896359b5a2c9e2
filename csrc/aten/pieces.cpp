#include "pieces.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/new_empty.h>
#include <ATen/ops/new_zeros.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "contract.h"

namespace attn_ext {

namespace {

/// Whether nobody keeps a record of what is written in place: no derivative, and no tensor subclass. Tensors
/// of function transforms may be written to as well, where they are made of each other.
bool is_plain(const at::Tensor& piece) {
  const bool observed =
      piece.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Batched, c10::DispatchKey::Python}));
  return !observed && !piece.requires_grad() && !piece._fw_grad(/*level=*/0).defined();
}

}  // namespace

void RowPieces::add(const at::Tensor& piece) {
  if (!piece.defined()) {
    return;
  }
  const int64_t rows = piece.size(row_dim_);
  if (rows == rows_ || !pieces_.empty() || !is_plain(piece)) {
    pieces_.push_back(piece);
    return;
  }
  if (!whole_.defined()) {
    Dims shape(piece.sizes().begin(), piece.sizes().end());
    shape[shape.size() + row_dim_] = rows_;
    whole_ = piece.new_empty(shape);
  }
  whole_.narrow(row_dim_, filled_, rows).copy_(piece);
  filled_ += rows;
}

at::Tensor RowPieces::join() const {
  if (whole_.defined() || pieces_.empty()) {
    return whole_;
  }
  return pieces_.size() == 1 ? pieces_.front() : at::cat(pieces_, row_dim_);
}

void KeySum::add(const at::Tensor& part, const ChunkBounds& bounds) {
  if (part.defined()) {
    total_ = plus(total_, pad_keys(part, key_dim_, bounds, key_len_));
  }
}

void PartSum::add(const Problem& part, const at::Tensor& piece) {
  if (!piece.defined()) {
    return;
  }
  Dims shape = std::as_const(lead_);
  shape.append(piece.sizes().begin() + static_cast<int64_t>(lead_.size()), piece.sizes().end());
  if (piece.sizes() != at::IntArrayRef(shape) && pieces_.empty() && is_plain(piece)) {
    if (!whole_.defined()) {
      whole_ = piece.new_zeros(shape);
    }
    of_part(part, whole_).add_(piece);
    return;
  }
  int64_t place = 0;
  for (size_t dim = 0; dim < lead_.size(); ++dim) {
    place = place * lead_[dim] + (lead_[dim] == 1 ? 0 : part.lead_begin[dim]);
  }
  pieces_[place] = plus(pieces_[place], piece);
}

at::Tensor PartSum::total() const {
  if (whole_.defined() || pieces_.empty()) {
    return whole_;
  }
  if (pieces_.size() == 1) {
    return pieces_.begin()->second;
  }
  const auto lead_dims = static_cast<int64_t>(lead_.size());
  std::vector<at::Tensor> flat;  // in order of their places
  for (const auto& [place, piece] : pieces_) {
    flat.push_back(piece.flatten(0, lead_dims - 1));
  }
  const at::Tensor joined = at::cat(flat, 0);
  Dims shape = std::as_const(lead_);
  shape.append(joined.sizes().begin() + 1, joined.sizes().end());
  return joined.reshape(shape);
}

OutputPieces::OutputPieces(const Problem& problem, SideOutputs wanted)
    : problem_(problem),
      wanted_(wanted),
      output_(-2, problem.query_len),
      lse_(-1, problem.query_len),
      weights_(-2, problem.query_len),
      key_mass_(-1, problem.key_len) {}

void OutputPieces::add(const ChunkBounds& bounds, const at::Tensor& values, const at::Tensor& lse,
                       const at::Tensor& weights) {
  if (values.defined()) {
    output_.add(
        values.to(problem_.output_dtype).expand(problem_.with_tail({bounds.rows(), problem_.value_dim})));
  }
  if (lse.defined()) {
    lse_.add(lse.expand(problem_.with_tail({bounds.rows()})));
  }
  if (wanted_.weights && weights.defined()) {
    weights_.add(pad_keys(weights.to(problem_.dtype), -1, bounds, problem_.key_len)
                     .expand(problem_.with_tail({bounds.rows(), problem_.key_len})));
  }
  if (wanted_.key_mass && weights.defined()) {
    key_mass_.add(weights.sum(-2), bounds);
  }
}

SdpaOutputs OutputPieces::join() const {
  const at::Tensor& mass = key_mass_.total();
  return {output_.join(), lse_.join(), weights_.join(),
          mass.defined() ? mass.expand(problem_.with_tail({problem_.key_len})) : mass};
}

WholeOutputs::WholeOutputs(const Problem& problem, SideOutputs wanted)
    : problem_(problem),
      wanted_(wanted),
      output_(problem.lead),
      lse_(problem.lead),
      weights_(problem.lead),
      key_mass_(problem.lead) {}

void WholeOutputs::add(const Problem& part, const SdpaOutputs& outputs) {
  output_.add(part, outputs.output);
  lse_.add(part, outputs.lse);
  weights_.add(part, outputs.weights);
  key_mass_.add(part, outputs.key_mass);
}

SdpaOutputs WholeOutputs::finish(const std::optional<at::TensorOptions>& zeros) const {
  const auto finish_one = [&](const at::Tensor& result, std::initializer_list<int64_t> tail,
                              at::ScalarType dtype, const MemoryOrder& order) {
    const Dims shape = problem_.output_shape(tail);
    if (!result.defined() && !zeros) {
      return result;
    }
    const at::Tensor sum = result.defined() ? result.to(dtype) : at::zeros(shape, zeros->dtype(dtype));
    return in_order(sum.reshape(shape), order);
  };
  const auto dims = static_cast<int64_t>(problem_.output_order.size());
  const MemoryOrder rows = contiguous_order(dims - 1), matrices = contiguous_order(dims);
  SdpaOutputs outputs;
  outputs.output = finish_one(output_.total(), {problem_.query_len, problem_.value_dim},
                              problem_.output_dtype, problem_.output_order);
  outputs.lse = finish_one(lse_.total(), {problem_.query_len}, problem_.lse_dtype, rows);
  if (wanted_.weights) {
    outputs.weights =
        finish_one(weights_.total(), {problem_.query_len, problem_.key_len}, problem_.dtype, matrices);
  }
  if (wanted_.key_mass) {
    outputs.key_mass = finish_one(key_mass_.total(), {problem_.key_len}, problem_.dtype, rows);
  }
  return outputs;
}

at::Tensor pad_keys(const at::Tensor& part, int64_t key_dim, const ChunkBounds& bounds, int64_t key_len) {
  if (bounds.keys() == key_len) {
    return part;
  }
  std::vector<int64_t> pad(-2 * key_dim, 0);
  pad[pad.size() - 2] = bounds.key_begin;
  pad[pad.size() - 1] = key_len - bounds.key_end;
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
