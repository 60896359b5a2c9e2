// Derivatives of the internal pair: reverse mode by a node each, forward mode by the tangents of csrc/aten.
//
// With f the forward pass and g(x, ct) = grad_x <ct, f(x)> its backward pass, the backward of g needs nothing
// new: for an incoming u, its gradient in ct is the tangent of f along u, and (second derivatives commute)
// its gradient in x is the tangent of g along u. Both are compositions of ATen ops, differentiable to any
// order.

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "../args.h"
#include "../aten/tangents.h"
#include "../checks.h"
#include "../cpu/saved_weights.h"
#include "../cuda/saved_draws.h"
#include "compiled_autograd.h"
#include "node_compat.h"

namespace attn_ext {

namespace {

using torch::autograd::collect_next_edges;
using torch::autograd::compute_requires_grad;
using torch::autograd::SavedVariable;
using torch::autograd::set_history;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

/// SdpaArgs between forward and backward.
class SavedArgs {
 public:
  void save(const SdpaArgs& args) {
    scalars_ = args;
    for (at::Tensor* tensor : {&scalars_.query, &scalars_.key, &scalars_.value, &scalars_.attn_mask,
                               &scalars_.sinks, &scalars_.dropout_seed, &scalars_.sequences}) {
      tensor->reset();
    }
    query_ = SavedVariable(args.query, false);
    key_ = SavedVariable(args.key, false);
    value_ = SavedVariable(args.value, false);
    attn_mask_ = SavedVariable(args.attn_mask, false);
    sinks_ = SavedVariable(args.sinks, false);
    dropout_seed_ = SavedVariable(args.dropout_seed, false);
    sequences_ = SavedVariable(args.sequences, false);
  }

  SdpaArgs unpack() const {
    SdpaArgs args = scalars_;
    args.query = query_.unpack();
    args.key = key_.unpack();
    args.value = value_.unpack();
    args.attn_mask = attn_mask_.unpack();
    args.sinks = sinks_.unpack();
    args.dropout_seed = dropout_seed_.unpack();
    args.sequences = sequences_.unpack();
    return args;
  }

  void release() {
    for (SavedVariable* variable :
         {&query_, &key_, &value_, &attn_mask_, &sinks_, &dropout_seed_, &sequences_}) {
      variable->reset_data();
    }
  }

  /// tensor(saved variable) and scalar(number) for everything that is saved.
  template <class Self, class OfTensor, class OfScalar>
  static void visit(Self& self, OfTensor tensor, OfScalar scalar) {
    for (auto* variable : {&self.query_, &self.key_, &self.value_, &self.attn_mask_, &self.sinks_,
                           &self.dropout_seed_, &self.sequences_}) {
      tensor(*variable);
    }
    std::apply([&](auto&... number) { (scalar(number), ...); }, scalars_of(self.scalars_));
    std::apply([&](auto&... number) { (scalar(number), ...); }, part_fields(self.scalars_));
  }

 private:
  SdpaArgs scalars_;
  SavedVariable query_, key_, value_, attn_mask_, sinks_, dropout_seed_, sequences_;
};

/// f for every field of the arguments.
template <class F>
void args_fields(SdpaArgs& args, F f) {
  for (at::Tensor* tensor : {&args.query, &args.key, &args.value, &args.attn_mask, &args.sinks,
                             &args.dropout_seed, &args.sequences}) {
    f(*tensor);
  }
  std::apply([&](auto&... number) { (f(number), ...); }, scalars_of(args));
  std::apply([&](auto&... number) { (f(number), ...); }, part_fields(args));
}

/// Undefined where there is none.
at::Tensor tangent_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor._fw_grad(/*level=*/0) : at::Tensor();
}

SdpaInputs tangents_of(const SdpaArgs& args) {
  return {tangent_of(args.query), tangent_of(args.key), tangent_of(args.value), tangent_of(args.attn_mask),
          tangent_of(args.sinks)};
}

SdpaOutputs tangents_of(const SdpaOutputs& grads) {
  return {tangent_of(grads.output), tangent_of(grads.lse), tangent_of(grads.weights),
          tangent_of(grads.key_mass)};
}

at::Tensor primal_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor._fw_primal(/*level=*/0) : tensor;
}

SdpaArgs primals_of(SdpaArgs args) {
  for (at::Tensor* tensor : {&args.query, &args.key, &args.value, &args.attn_mask, &args.sinks}) {
    *tensor = primal_of(*tensor);
  }
  return args;
}

SdpaOutputs primals_of(const SdpaOutputs& grads) {
  return {primal_of(grads.output), primal_of(grads.lse), primal_of(grads.weights), primal_of(grads.key_mass)};
}

void set_tangent(const at::Tensor& primal, const at::Tensor& tangent) {
  if (primal.defined() && tangent.defined()) {
    primal._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
}

/// A float mask and sinks are differentiable, a bool mask is not.
at::Tensor if_differentiable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_floating_point() ? tensor : at::Tensor();
}

torch::autograd::edge_list input_edges(const SdpaArgs& args) {
  return collect_next_edges(args.query, args.key, args.value, if_differentiable(args.attn_mask), args.sinks);
}

bool inputs_require_grad(const SdpaArgs& args) {
  return compute_requires_grad(args.query, args.key, args.value, args.attn_mask, args.sinks);
}

/// As of a call whose results have the dtypes of its inputs, as the gradients of these have to.
SdpaArgs rounded(SdpaArgs args) {
  args.unrounded = false;
  return args;
}

/// Gradients of the gradients: the node behind `_sdpa_backward`.
/// Its inputs are those of the op that carry derivatives: grads (4), then query, key, value, attn_mask,
/// sinks. `output` and `lse`, which the op takes beside them, are functions of these and have no derivative
/// of their own.
struct SdpaBackwardBackward : public torch::autograd::Node {
  std::string name() const override { return "SdpaBackwardBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    args.release();
    for (SavedVariable* variable : {&grad_output, &grad_lse, &grad_weights, &grad_key_mass}) {
      variable->reset_data();
    }
  }

  struct Held {
    SdpaArgs args;
    SdpaOutputs grads;
    std::vector<bool> wanted;  // of grads (4), then of the inputs (5)

    template <class F>
    static void fields(Held& held, F f) {
      args_fields(held.args, f);
      for (at::Tensor* grad :
           {&held.grads.output, &held.grads.lse, &held.grads.weights, &held.grads.key_mass}) {
        f(*grad);
      }
      f(held.wanted);
    }
  };

  Held hold() const {
    return {args.unpack(),
            {grad_output.unpack(), grad_lse.unpack(), grad_weights.unpack(), grad_key_mass.unpack()},
            wanted_of(*this, 9)};
  }

  static variable_list run(const variable_list& incoming, const Held& held) {
    const SdpaInputs direction{incoming[0], incoming[1], incoming[2], incoming[3], incoming[4]};
    variable_list result(9);
    if (!direction.any_defined()) {
      return result;
    }
    const auto& [args, grads, wanted] = held;
    if (wanted[0] || wanted[1] || wanted[2] || wanted[3]) {
      const SideOutputs sides{grads.weights.defined(), grads.key_mass.defined()};
      const SdpaOutputs along = forward_tangents(args, direction, sides);
      result[0] = grads.output.defined() ? along.output : at::Tensor();
      result[1] = grads.lse.defined() ? along.lse : at::Tensor();
      result[2] = along.weights;
      result[3] = along.key_mass;
    }
    const InputMask inputs{wanted[4], wanted[5], wanted[6], wanted[7], wanted[8]};
    if (wanted[4] || wanted[5] || wanted[6] || wanted[7] || wanted[8]) {
      std::tie(result[4], result[5], result[6], result[7], result[8]) =
          backward_tangents(grads, args, {}, direction, inputs).to_tuple();
    }
    return result;
  }

  variable_list apply(variable_list&& incoming) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return run(incoming, hold());
  }

  void compiled_args(CompiledNodeArgs& collected) const override { collect_into(collected, *this); }

  variable_list apply_with_saved(const variable_list& incoming, SwapSavedVariables& saved) override {
    return call_packed(*this, incoming, saved);
  }

  template <class Self, class OfTensor, class OfScalar>
  static void visit(Self& self, OfTensor tensor, OfScalar scalar) {
    SavedArgs::visit(
        self.args, [&](auto& variable) { tensor(variable, false); }, scalar);
    for (auto* variable : {&self.grad_output, &self.grad_lse, &self.grad_weights, &self.grad_key_mass}) {
      tensor(*variable, false);
    }
  }

  SavedArgs args;
  SavedVariable grad_output, grad_lse, grad_weights, grad_key_mass;
};

/// With a given delta, of which what the other parts of the call put into it is not known here.
SdpaInputs backward_of_part(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                            InputMask wanted) {
  constexpr const char* kRefusal =
      "attn_ext: expected no derivative of _sdpa_backward with a given delta, which is not of its inputs "
      "alone";
  TORCH_CHECK(!tangents_of(args).any_defined() && !tangents_of(grads).any_defined() &&
                  !tangent_of(saved.lse).defined() && !tangent_of(saved.delta).defined(),
              kRefusal);
  const SdpaInputs result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grads, args, saved, wanted);
  }();
  if (inputs_require_grad(args) ||
      compute_requires_grad(grads.output, grads.lse, grads.weights, grads.key_mass, saved.lse, saved.delta)) {
    const auto node = make_node<torch::autograd::Error>(
        kRefusal, collect_next_edges(grads.output, grads.lse, grads.weights, grads.key_mass, args.query,
                                     args.key, args.value, if_differentiable(args.attn_mask), args.sinks,
                                     saved.lse, saved.delta));
    set_history({result.query, result.key, result.value, result.attn_mask, result.sinks}, node);
  }
  return result;
}

SdpaInputs backward_autograd(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                             InputMask wanted) {
  if (saved.delta.defined()) {
    return backward_of_part(grads, args, saved, wanted);
  }
  decltype(make_node<SdpaBackwardBackward>()) node;
  if (inputs_require_grad(args) ||
      compute_requires_grad(grads.output, grads.lse, grads.weights, grads.key_mass)) {
    node = make_node<SdpaBackwardBackward>();
    auto edges = collect_next_edges(grads.output, grads.lse, grads.weights, grads.key_mass);
    for (auto& edge : input_edges(args)) {
      edges.push_back(std::move(edge));
    }
    node->set_next_edges(std::move(edges));
    node->args.save(rounded(args));
    node->grad_output = SavedVariable(grads.output, false);
    node->grad_lse = SavedVariable(grads.lse, false);
    node->grad_weights = SavedVariable(grads.weights, false);
    node->grad_key_mass = SavedVariable(grads.key_mass, false);
  }
  const SdpaInputs result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(grads, args, saved, wanted);
  }();
  if (node) {
    set_history({result.query, result.key, result.value, result.attn_mask, result.sinks}, node);
  }
  const SdpaInputs input_tangents = tangents_of(args);
  const SdpaOutputs grad_tangents = tangents_of(grads);
  if (input_tangents.any_defined() || grad_tangents.any_defined()) {
    const SdpaInputs along =
        backward_tangents(primals_of(grads), primals_of(args), grad_tangents, input_tangents, wanted);
    set_tangent(result.query, along.query);
    set_tangent(result.key, along.key);
    set_tangent(result.value, along.value);
    set_tangent(result.attn_mask, along.attn_mask);
    set_tangent(result.sinks, along.sinks);
  }
  return result;
}

/// The node behind `_sdpa_forward`.
struct SdpaBackward : public torch::autograd::Node {
  std::string name() const override { return "SdpaBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    args.release();
    for (SavedVariable* variable : {&output, &lse, &weights}) {
      variable->reset_data();
    }
  }

  struct Held {
    SdpaArgs args;
    SavedOutputs saved;
    std::vector<bool> wanted;  // of the inputs

    template <class F>
    static void fields(Held& held, F f) {
      args_fields(held.args, f);
      for (at::Tensor* tensor : {&held.saved.output, &held.saved.lse, &held.saved.weights}) {
        f(*tensor);
      }
      f(held.wanted);
    }
  };

  Held hold() {
    return {args.unpack(),
            {output.unpack(getptr()), lse.unpack(getptr()), {}, weights.unpack()},
            wanted_of(*this, 5)};
  }

  static variable_list run(const variable_list& incoming, const Held& held) {
    const auto& [args, saved, wanted] = held;
    const auto dtype = args.query.scalar_type();
    // The backward pass takes what a rounded call gives.
    const auto as = [&held](const at::Tensor& tensor, at::ScalarType type) {
      return held.args.unrounded && tensor.defined() ? tensor.to(type) : tensor;
    };
    const auto accumulated = accumulation_dtype(dtype);
    const SdpaOutputs grads{as(incoming[0], dtype), as(incoming[1], accumulated), incoming[2], incoming[3]};
    variable_list result(5);
    if (!grads.any_defined()) {
      return result;
    }
    const InputMask inputs{wanted[0], wanted[1], wanted[2], wanted[3], wanted[4]};
    const SavedOutputs rounded_outputs{
        as(saved.output, dtype), as(saved.lse, accumulated), {}, saved.weights};
    std::tie(result[0], result[1], result[2], result[3], result[4]) =
        call_backward(grads, rounded(args), rounded_outputs, inputs).to_tuple();
    return result;
  }

  variable_list apply(variable_list&& incoming) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return run(incoming, hold());
  }

  void compiled_args(CompiledNodeArgs& collected) const override { collect_into(collected, *this); }

  variable_list apply_with_saved(const variable_list& incoming, SwapSavedVariables& saved) override {
    return call_packed(*this, incoming, saved);
  }

  template <class Self, class OfTensor, class OfScalar>
  static void visit(Self& self, OfTensor tensor, OfScalar scalar) {
    SavedArgs::visit(
        self.args, [&](auto& variable) { tensor(variable, false); }, scalar);
    tensor(self.output, true);
    tensor(self.lse, true);
    tensor(self.weights, false);
  }

  SavedArgs args;
  SavedVariable output, lse;
  SavedVariable weights;  // or draws; undefined: not saved
};

SdpaOutputs forward_autograd(const SdpaArgs& args, SideOutputs wanted) {
  decltype(make_node<SdpaBackward>()) node;
  if (inputs_require_grad(args)) {
    node = make_node<SdpaBackward>();
    node->set_next_edges(input_edges(args));
    node->args.save(args);
  }
  // What the caller is handed is his: he may write into it.
  const bool may_save = node && !wanted.weights && !wanted.key_mass;
  const bool saves_weights = may_save && cpu::saves_weights(args);
  const bool saves_draws = may_save && cuda::saves_draws(args);
  SdpaOutputs result = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return saves_draws ? cuda::call_forward_saving_draws(args)
                       : call_forward(args, {wanted.weights || saves_weights, wanted.key_mass});
  }();
  if (saves_weights || saves_draws) {
    node->weights = SavedVariable(result.weights, false);
    result.weights.reset();
  }
  if (node) {
    set_history({result.output, result.lse, result.weights, result.key_mass}, node);
    node->output = SavedVariable(result.output, true);
    node->lse = SavedVariable(result.lse, true);
  }
  const SdpaInputs tangents = tangents_of(args);
  if (tangents.any_defined()) {
    const SdpaOutputs along = forward_tangents(primals_of(args), tangents, wanted);
    set_tangent(result.output, along.output);
    set_tangent(result.lse, along.lse);
    set_tangent(result.weights, along.weights);
    set_tangent(result.key_mass, along.key_mass);
  }
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, Autograd, m) {
  m.impl("_sdpa_forward", TORCH_FN((forward_kernel<&forward_autograd>)));
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_autograd>)));
}

}  // namespace attn_ext
