// Packed sequences by calls of their own, whose results are put together without writing in place: what
// autograd and vmap want.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>

#include "../checks.h"
#include "../memory_order.h"
#include "../sequences.h"
#include "contract.h"

namespace attn_ext {

/// Results of sequences in rows of their own, the rows in between filled with a number.
class RowsOfSequences {
 public:
  RowsOfSequences(int64_t row_dim, int64_t rows, double fill) : row_dim_(row_dim), rows_(rows), fill_(fill) {}

  /// Rows from `begin` on; undefined stands for zero.
  void add(const at::Tensor& piece, int64_t begin, int64_t length);
  /// Undefined where every piece is.
  at::Tensor join() const;

 private:
  int64_t row_dim_, rows_;
  double fill_;
  std::vector<at::Tensor> pieces_;
  std::vector<int64_t> begins_, lengths_;
};

/// At least one, be it empty: what results of none look like, results of an empty one show.
inline std::vector<Sequence> some_sequences_of(const SdpaArgs& args) {
  std::vector<Sequence> sequences = sequences_of(args);
  if (sequences.empty()) {
    sequences.emplace_back();
  }
  return sequences;
}

/// Outputs, or their tangents, of `forward(args of a sequence, its place)`.
template <class Forward>
SdpaOutputs outputs_by_sequence(const SdpaArgs& args, double lse_in_gaps, Forward forward) {
  const std::vector<Sequence> sequences = some_sequences_of(args);
  const auto count = static_cast<int64_t>(sequences.size());
  const int64_t rows = args.query.size(-2);
  RowsOfSequences output(-2, rows, 0), lse(-1, rows, lse_in_gaps);
  for (int64_t i = 0; i < count; ++i) {
    const Sequence& sequence = sequences[static_cast<size_t>(i)];
    const SdpaOutputs one = forward(one_sequence(args, sequence, i, count), sequence);
    output.add(one.output, sequence.query_begin, sequence.query_len);
    lse.add(one.lse, sequence.query_begin, sequence.query_len);
  }
  return {output.join(), lse.join(), {}, {}};
}

/// Gradients, or their tangents, of `backward(args of a sequence, its place)`.
template <class Backward>
SdpaInputs gradients_by_sequence(const SdpaArgs& args, Backward backward) {
  const std::vector<Sequence> sequences = some_sequences_of(args);
  const auto count = static_cast<int64_t>(sequences.size());
  const int64_t rows = args.query.size(-2), keys = args.key.size(-2);
  RowsOfSequences query(-2, rows, 0), key(-2, keys, 0), value(-2, keys, 0);
  at::Tensor sinks;
  for (int64_t i = 0; i < count; ++i) {
    const Sequence& sequence = sequences[static_cast<size_t>(i)];
    SdpaArgs one = one_sequence(args, sequence, i, count);
    if (one.sinks.defined()) {
      one.sinks = one.sinks.to(accumulation_dtype(args.query.scalar_type()));  // summed before it is rounded
    }
    const SdpaInputs gradients = backward(one, sequence);
    query.add(gradients.query, sequence.query_begin, sequence.query_len);
    key.add(gradients.key, sequence.key_begin, sequence.key_len);
    value.add(gradients.value, sequence.key_begin, sequence.key_len);
    sinks = plus(sinks, gradients.sinks);
  }
  return {query.join(),
          key.join(),
          value.join(),
          {},
          sinks.defined() ? sinks.to(gradient_dtype(args, args.sinks)) : sinks};
}

/// The rows of a sequence of what comes in for the outputs.
inline SdpaOutputs of_sequence(const SdpaOutputs& grads, const Sequence& sequence) {
  const auto narrow = [&](const at::Tensor& grad, int64_t row_dim) {
    return grad.defined() ? grad.narrow(row_dim, sequence.query_begin, sequence.query_len) : grad;
  };
  return {narrow(grads.output, -2), narrow(grads.lse, -1), {}, {}};
}

/// The same of what was saved.
inline SavedOutputs of_sequence(const SavedOutputs& saved, const Sequence& sequence) {
  const auto rows = [&](const at::Tensor& tensor, int64_t row_dim) {
    return tensor.defined() ? tensor.narrow(row_dim, sequence.query_begin, sequence.query_len) : tensor;
  };
  return {saved.delta.defined() ? at::Tensor() : rows(saved.output, -2),
          rows(saved.lse, -1),
          rows(saved.delta, -1),
          {}};
}

/// The same of a direction in which the inputs move.
inline SdpaInputs of_sequence(const SdpaInputs& direction, const Sequence& sequence) {
  const auto narrow = [](const at::Tensor& tangent, int64_t begin, int64_t length) {
    return tangent.defined() ? tangent.narrow(-2, begin, length) : tangent;
  };
  return {narrow(direction.query, sequence.query_begin, sequence.query_len),
          narrow(direction.key, sequence.key_begin, sequence.key_len),
          narrow(direction.value, sequence.key_begin, sequence.key_len),
          {},
          direction.sinks};
}

/// A forward pass over packed sequences, of `forward(args of a sequence)`.
template <class Forward>
SdpaOutputs forward_by_sequence(const SdpaArgs& args, Forward forward) {
  check_args(args);
  constexpr double kNothingSeen = -std::numeric_limits<double>::infinity();
  SdpaOutputs outputs = outputs_by_sequence(
      args, kNothingSeen, [&](const SdpaArgs& one, const Sequence&) { return forward(one); });
  outputs.output = in_order(outputs.output, memory_order(args.query, outputs.output.dim()));
  return outputs;
}

/// The backward pass, of `backward(grads, args, saved)` of a sequence.
template <class Backward>
SdpaInputs backward_by_sequence(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                                Backward backward) {
  SdpaInputs gradients = gradients_by_sequence(args, [&](const SdpaArgs& one, const Sequence& sequence) {
    return backward(of_sequence(grads, sequence), one, of_sequence(saved, sequence));
  });
  const auto lay_out = [](at::Tensor& gradient, const at::Tensor& input) {
    gradient = gradient.defined() ? in_order(gradient, memory_order(input, input.dim())) : gradient;
  };
  lay_out(gradients.query, args.query);
  lay_out(gradients.key, args.key);
  lay_out(gradients.value, args.value);
  return gradients;
}

}  // namespace attn_ext
