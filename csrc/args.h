// One struct of named arguments, from the schema to the tile, and the two ways between struct and schema:
// `PublicKernel<f>`, `ForwardKernel<f>`, `BackwardKernel<f>` make a registrable kernel of a function over the
// struct; `call_forward`, `call_backward` call the internal ops through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <tuple>

namespace attn_ext {

using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor tensor_or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() ? *tensor : at::Tensor();
}

inline OptionalTensor optional_of(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

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
  double dropout_p = 0.0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  std::optional<c10::SymInt> window_left;
  std::optional<c10::SymInt> window_right;
  c10::SymInt query_offset = 0;
  double softcap = 0.0;
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
SdpaInputs call_backward(const SdpaOutputs& grads, const SdpaArgs& args, const at::Tensor& output,
                         const at::Tensor& lse, InputMask wanted);

/// What the schemas list, by name.
inline SdpaArgs make_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const OptionalTensor& attn_mask, const OptionalTensor& sinks,
                          const OptionalTensor& dropout_seed, double dropout_p, bool is_causal,
                          std::optional<double> scale, bool enable_gqa,
                          const std::optional<c10::SymInt>& window_left,
                          const std::optional<c10::SymInt>& window_right, const c10::SymInt& query_offset,
                          double softcap) {
  return {.query = query,
          .key = key,
          .value = value,
          .attn_mask = tensor_or_undefined(attn_mask),
          .sinks = tensor_or_undefined(sinks),
          .dropout_seed = tensor_or_undefined(dropout_seed),
          .dropout_p = dropout_p,
          .is_causal = is_causal,
          .scale = scale,
          .enable_gqa = enable_gqa,
          .window_left = window_left,
          .window_right = window_right,
          .query_offset = query_offset,
          .softcap = softcap};
}

/// The arguments of a public op.
inline SdpaArgs public_args(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                            std::optional<double> scale, bool enable_gqa,
                            const std::optional<c10::SymInt>& window_left,
                            const std::optional<c10::SymInt>& window_right, const c10::SymInt& query_offset,
                            double softcap, const OptionalTensor& sinks) {
  return make_args(query, key, value, attn_mask, sinks, std::nullopt, dropout_p, is_causal, scale, enable_gqa,
                   window_left, window_right, query_offset, softcap);
}

/// Kernel of a public op: `function` is Result(const SdpaArgs&).
template <auto function>
auto public_kernel(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                   std::optional<double> scale, bool enable_gqa, std::optional<c10::SymInt> window_left,
                   std::optional<c10::SymInt> window_right, c10::SymInt query_offset, double softcap,
                   const OptionalTensor& sinks) {
  return function(public_args(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                              window_left, window_right, query_offset, softcap, sinks));
}

/// As public_kernel; `function` is Result(DispatchKeySet, const SdpaArgs&).
template <auto function>
auto public_kernel_with_keys(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const OptionalTensor& attn_mask, double dropout_p,
                             bool is_causal, std::optional<double> scale, bool enable_gqa,
                             std::optional<c10::SymInt> window_left, std::optional<c10::SymInt> window_right,
                             c10::SymInt query_offset, double softcap, const OptionalTensor& sinks) {
  return function(keys, public_args(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                                    window_left, window_right, query_offset, softcap, sinks));
}

/// Kernel of `_sdpa_forward`: `function` is SdpaOutputs(const SdpaArgs&, SideOutputs).
template <auto function>
std::tuple<at::Tensor, at::Tensor, OptionalTensor, OptionalTensor> forward_kernel(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& sinks, const OptionalTensor& dropout_seed, double dropout_p, bool is_causal,
    std::optional<double> scale, bool enable_gqa, std::optional<c10::SymInt> window_left,
    std::optional<c10::SymInt> window_right, c10::SymInt query_offset, double softcap, bool need_weights,
    bool need_key_mass) {
  const SdpaArgs args = make_args(query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal,
                                  scale, enable_gqa, window_left, window_right, query_offset, softcap);
  return function(args, SideOutputs{need_weights, need_key_mass}).to_tuple();
}

/// Kernel of `_sdpa_backward`: `function` is
/// SdpaInputs(const SdpaOutputs& grads, const SdpaArgs&, const Tensor& output, const Tensor& lse, InputMask).
template <auto function>
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward_kernel(
    const OptionalTensor& grad_output, const OptionalTensor& grad_lse, const OptionalTensor& grad_weights,
    const OptionalTensor& grad_key_mass, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const OptionalTensor& attn_mask, const OptionalTensor& sinks,
    const OptionalTensor& dropout_seed, const at::Tensor& output, const at::Tensor& lse, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa, std::optional<c10::SymInt> window_left,
    std::optional<c10::SymInt> window_right, c10::SymInt query_offset, double softcap,
    std::array<bool, 5> output_mask) {
  const SdpaOutputs grads{tensor_or_undefined(grad_output), tensor_or_undefined(grad_lse),
                          tensor_or_undefined(grad_weights), tensor_or_undefined(grad_key_mass)};
  const SdpaArgs args = make_args(query, key, value, attn_mask, sinks, dropout_seed, dropout_p, is_causal,
                                  scale, enable_gqa, window_left, window_right, query_offset, softcap);
  return function(grads, args, output, lse, InputMask::from_array(output_mask)).to_tuple();
}

}  // namespace attn_ext
