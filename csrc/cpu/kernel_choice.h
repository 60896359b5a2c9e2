// Which of the instruction sets in this build the processor has, best last, and the kernels of the one in
// use.
#pragma once

#include <string>
#include <vector>

#include "kernels/interface/table.h"

namespace attn_ext::cpu {

std::vector<std::string> available_kernels();

/// Of cpu_capability(); null where that is "aten".
const KernelTable* kernels_in_use();

}  // namespace attn_ext::cpu
