// The kernels of every instruction set in this build, and which of them the processor can run. Sees no torch:
// the kernel tests use it too.
#pragma once

#include <vector>

#include "kernels/interface/features.h"
#include "kernels/interface/table.h"

namespace attn_ext::cpu {

struct KernelSet {
  const char* name;
  const KernelTable* kernels;
  Features features;  // that the processor must have
};

/// Those that the processor can run, best last.
std::vector<KernelSet> supported_kernel_sets();

}  // namespace attn_ext::cpu
