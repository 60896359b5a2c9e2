// The instruction sets that a call on the CPU can run on, and the one that is chosen.
#pragma once

#include <attn_ext/attn_ext.h>

#include <string>
#include <vector>

namespace attn_ext {

/// Of this build on this machine, best last; "aten", the composition over ATen ops, is always there.
ATTN_EXT_API std::vector<std::string> available_cpu_capabilities();

/// Chosen once: the best, or that of the environment variable ATTN_EXT_CPU_CAPABILITY.
/// Throws a c10::Error if that names one that this machine or build lacks.
ATTN_EXT_API const std::string& cpu_capability();

}  // namespace attn_ext
