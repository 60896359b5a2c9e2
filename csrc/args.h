// One struct of named arguments, from the schema to the chunk, and the two ways between struct and schema:
// `public_kernel<f>`, `forward_kernel<f>`, `backward_kernel<f>` make a registrable kernel of a function over
// the struct; `call_forward`, `call_backward` call the internal ops through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <tuple>

#include "unboxed.h"

namespace attn_ext {

/// The arguments of every op. A tensor that was not given is undefined.
struct SdpaArgs {
  at::Tensor query;      // (..., Hq, Lq, D)
  at::Tensor key;        // (..., Hkv, Lk, D)
  at::Tensor value;      // (..., Hkv, Lk, Dv)
  at::Tensor attn_mask;  // broadcasts to (..., Hq, Lq, Lk)
  at::Tensor sinks;      // (Hq,), or with batch dims in front
  // int64. Its dims cover the leading batch dims (size 1 or that dim's); usually it has none. Within what one
  // seed covers, draws are indexed by (batch, head, row, column).
  at::Tensor dropout_seed;
  // int64 (N, 5), a row a Sequence (sequences.h): the lengths of query and key hold N sequences, of which
  // each sees its own keys alone. Undefined: one sequence.
  at::Tensor sequences;
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  std::optional<c10::SymInt> window_left;
  std::optional<c10::SymInt> window_right;
  c10::SymInt query_offset = 0;
  double softcap = 0.0;
  // Of a call that is a part of a whole one (the internal ops alone): where its first element lies in the
  // draws, (batch, head, row, column), and whether its output, or its gradients, stay in the dtype of
  // accumulation, to be added to those of the other parts.
  OptionalSymInts dropout_origin;
  bool unrounded = false;
  // Not of any schema. Batch b counts as b * batch_step + first_batch in the draws, of one sequence of many.
  int64_t first_batch = 0;
  int64_t batch_step = 1;
};

/// Which outputs are wanted beside output and lse.
struct SideOutputs {
  bool weights = false;
  bool key_mass = false;
};

/// What a forward pass returns, and the gradients or tangents of that. What was not asked for is undefined.
struct SdpaOutputs {
  at::Tensor output;    // (..., Hq, Lq, Dv)
  at::Tensor lse;       // (..., Hq, Lq)
  at::Tensor weights;   // (..., Hq, Lq, Lk)
  at::Tensor key_mass;  // (..., Hq, Lk)

  std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>> to_tuple() const {
    return {output, lse, optional_of(weights), optional_of(key_mass)};
  }
  bool any_defined() const {
    return output.defined() || lse.defined() || weights.defined() || key_mass.defined();
  }
};

/// What a backward pass takes of a forward pass.
struct SavedOutputs {
  at::Tensor output;  // (..., Hq, Lq, Dv); not read where delta is given
  at::Tensor lse;     // (..., Hq, Lq), the dtype of accumulation; with delta float64, too
  // (..., Hq, Lq), rowsum(P dP) over all keys, of which the call's may be a part. Given, lse is over all keys
  // too, and says what the weights are. Else both are the call's own.
  at::Tensor delta;
  // (..., Hq, Lq, Lk), the query's dtype, without dropout; with it on an NVIDIA GPU its draws, int32 words as
  // the kernels there have them. Undefined: made again.
  at::Tensor weights;

  bool has_draws() const { return weights.defined() && weights.scalar_type() == at::kInt; }
};

/// The differentiable inputs, or their gradients or tangents. What is absent is undefined.
struct SdpaInputs {
  at::Tensor query, key, value, attn_mask, sinks;

  std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> to_tuple() const {
    return {query, key, value, attn_mask, sinks};
  }
  bool any_defined() const {
    return query.defined() || key.defined() || value.defined() || attn_mask.defined() || sinks.defined();
  }
};

/// Which of the inputs want a gradient.
struct InputMask {
  bool query = false, key = false, value = false, attn_mask = false, sinks = false;

  std::array<bool, 5> to_array() const { return {query, key, value, attn_mask, sinks}; }
  static InputMask from_array(std::array<bool, 5> mask) {
    return {mask[0], mask[1], mask[2], mask[3], mask[4]};
  }
};

/// The internal ops, through the dispatcher.
SdpaOutputs call_forward(const SdpaArgs& args, SideOutputs wanted);
SdpaInputs call_backward(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted);

// The schemas' arguments by name and in order: this is the one place in C++ that lists them.

/// What the public ops take after query, key and value; of SdpaArgs, or of the C++ API's options.
template <class Options>
auto options_of(Options& o) {
  return fields(or_none(o.attn_mask), o.dropout_p, o.is_causal, o.scale, o.enable_gqa, o.window_left,
                o.window_right, o.query_offset, o.softcap, or_none(o.sinks));
}

template <class Args>
auto tensors_of(Args& a) {
  return fields(a.query, a.key, a.value, or_none(a.attn_mask), or_none(a.sinks), or_none(a.dropout_seed),
                or_none(a.sequences));
}

template <class Args>
auto scalars_of(Args& a) {
  return fields(a.dropout_p, a.is_causal, a.scale, a.enable_gqa, a.window_left, a.window_right,
                a.query_offset, a.softcap);
}

/// What makes a call a part of another.
template <class Args>
auto part_fields(Args& a) {
  return fields(a.dropout_origin, a.unrounded);
}

template <class Args, class Wanted>
auto forward_fields(Args& args, Wanted& wanted) {
  return std::tuple_cat(tensors_of(args), scalars_of(args), fields(wanted.weights, wanted.key_mass),
                        part_fields(args));
}

template <class Grads, class Args, class Saved, class Wanted>
auto backward_fields(Grads& grads, Args& args, Saved& saved, Wanted& wanted) {
  return std::tuple_cat(
      fields(or_none(grads.output), or_none(grads.lse), or_none(grads.weights), or_none(grads.key_mass)),
      tensors_of(args), fields(or_none(saved.output), saved.lse), scalars_of(args), fields(wanted),
      part_fields(args), fields(or_none(saved.delta), or_none(saved.weights)));
}

// A call of a public op, of `_sdpa_forward`, and of `_sdpa_backward`.

struct PublicCall {
  SdpaArgs args;

  auto arguments() { return std::tuple_cat(fields(args.query, args.key, args.value), options_of(args)); }
};

struct ForwardCall {
  SdpaArgs args;
  SideOutputs wanted;

  auto arguments() { return forward_fields(args, wanted); }
};

struct BackwardCall {
  SdpaOutputs grads;
  SdpaArgs args;
  SavedOutputs saved;
  std::array<bool, 5> wanted;

  auto arguments() { return backward_fields(grads, args, saved, wanted); }
};

namespace adapted {

template <auto function>
auto run_public(const PublicCall& call) {
  return function(call.args);
}

template <auto function>
auto run_public_with_keys(c10::DispatchKeySet keys, const PublicCall& call) {
  return function(keys, call.args);
}

template <auto function>
auto run_forward(const ForwardCall& call) {
  return function(call.args, call.wanted).to_tuple();
}

template <auto function>
auto run_backward(const BackwardCall& call) {
  return function(call.grads, call.args, call.saved, InputMask::from_array(call.wanted)).to_tuple();
}

}  // namespace adapted

/// Kernel of a public op: `function` is Result(const SdpaArgs&).
template <auto function>
inline constexpr auto public_kernel = &Unboxed<PublicCall>::kernel<&adapted::run_public<function>>;

/// As public_kernel; `function` is Result(DispatchKeySet, const SdpaArgs&).
template <auto function>
inline constexpr auto public_kernel_with_keys =
    &Unboxed<PublicCall>::kernel_with_keys<&adapted::run_public_with_keys<function>>;

/// Kernel of `_sdpa_forward`: `function` is SdpaOutputs(const SdpaArgs&, SideOutputs).
template <auto function>
inline constexpr auto forward_kernel = &Unboxed<ForwardCall>::kernel<&adapted::run_forward<function>>;

/// Kernel of `_sdpa_backward`: `function` is
/// SdpaInputs(const SdpaOutputs& grads, const SdpaArgs&, const SavedOutputs&, InputMask).
template <auto function>
inline constexpr auto backward_kernel = &Unboxed<BackwardCall>::kernel<&adapted::run_backward<function>>;

}  // namespace attn_ext
