// Autograd nodes are held by c10::intrusive_ptr from torch 2.13 on, by std::shared_ptr before.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

namespace attn_ext {

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)

template <class Node, class... Arguments>
auto make_node(Arguments&&... arguments) {
  return c10::make_intrusive<Node>(std::forward<Arguments>(arguments)...);
}

#else

template <class Node, class... Arguments>
auto make_node(Arguments&&... arguments) {
  return std::shared_ptr<Node>(new Node(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode);
}

#endif

}  // namespace attn_ext
