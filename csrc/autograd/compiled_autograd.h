// What makes a node known to compiled autograd.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "../unboxed.h"

namespace attn_ext {

// Compiled autograd asks a node twice: what it holds, which numbers make a graph of its own; and then, with
// placeholders in the place of what it holds, for a call of a function over all of that, which goes into the
// graph. A node is written for it as
//   Held                        what it holds, unpacked; fields(held, f) calls f for each
//   run(incoming, held)         the gradients
//   visit(node, tensor, scalar) what it has saved: tensor(saved variable, is output), scalar(number)

template <class Node>
void collect_into(torch::dynamo::autograd::CompiledNodeArgs& collected, const Node& node) {
  Node::visit(
      node,
      [&](const torch::autograd::SavedVariable& variable, bool is_output) {
        collected.collect(variable, is_output);
      },
      [&](const auto& number) { collected.collect(number); });
}

/// Which of the node's gradients are asked for.
inline std::vector<bool> wanted_of(const torch::autograd::Node& node, size_t count) {
  std::vector<bool> wanted;
  for (size_t i = 0; i < count; ++i) {
    wanted.push_back(node.task_should_compute_output(i));
  }
  return wanted;
}

/// A field as it goes through Python: an undefined tensor is None there.
template <class T>
struct Packed {
  using Type = T;
};
template <>
struct Packed<at::Tensor> {
  using Type = std::optional<at::Tensor>;
};

const auto& packable(const auto& field) {
  return field;
}
inline std::optional<at::Tensor> packable(const at::Tensor& tensor) {
  return optional_of(tensor);
}

template <class Node>
torch::autograd::variable_list run_packed(const torch::autograd::variable_list& incoming,
                                          const std::vector<at::IValue>& packed) {
  torch::dynamo::autograd::PackedArgs arguments(packed);
  typename Node::Held held;
  Node::Held::fields(held, [&]<class T>(T& field) {
    auto argument = arguments.unpack<typename Packed<T>::Type>();
    if constexpr (std::is_same_v<T, at::Tensor>) {
      field = tensor_or_undefined(argument);
    } else {
      field = std::move(argument);
    }
  });
  return Node::run(incoming, held);
}

template <class Node>
torch::autograd::variable_list call_packed(Node& node, const torch::autograd::variable_list& incoming,
                                           torch::dynamo::autograd::SwapSavedVariables& saved) {
  Node::visit(
      node, [&](torch::autograd::SavedVariable& variable, bool) { saved.before(variable); },
      [&](auto& number) { saved.before(number); });
  typename Node::Held held = node.hold();
  torch::dynamo::autograd::PackedArgs arguments;
  std::vector<at::TypePtr> types;
  Node::Held::fields(held, [&]<class T>(T& field) {
    using Type = typename Packed<T>::Type;
    arguments.pack<Type>(packable(field));
    types.push_back(torch::dynamo::autograd::IValuePacker<Type>::packed_type());
  });
  const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
  static const std::string function =  // known to Python from the first call on
      compiler->bind_function(saved.get_py_compiler(), node.name(), run_packed<Node>, types);
  using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
  torch::autograd::variable_list result = compiler->call_function(
      saved.get_py_compiler(), "apply_functional", function, incoming, arguments.vec(),
      torch::dynamo::autograd::IValuePacker<Metadata>::pack(
          torch::dynamo::autograd::get_input_metadata(node.next_edges())));
  Node::visit(
      node, [&](torch::autograd::SavedVariable& variable, bool) { saved.after(variable); },
      [&](auto& number) { saved.after(number); });
  return result;
}

}  // namespace attn_ext
