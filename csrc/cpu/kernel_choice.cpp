#include "kernel_choice.h"

#include "../capability.h"
#include "kernel_sets.h"

namespace attn_ext::cpu {

std::vector<std::string> available_kernels() {
  std::vector<std::string> names;
  for (const KernelSet& set : supported_kernel_sets()) {
    names.emplace_back(set.name);
  }
  return names;
}

const KernelTable* kernels_in_use() {
  static const KernelTable* const kernels = []() -> const KernelTable* {
    for (const KernelSet& set : supported_kernel_sets()) {
      if (cpu_capability() == set.name) {
        return set.kernels;
      }
    }
    return nullptr;
  }();
  return kernels;
}

}  // namespace attn_ext::cpu
