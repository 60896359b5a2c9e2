// Attention over pages on the CPU.
#pragma once

#include "../paged/call.h"

namespace attn_ext::cpu {

/// lse undefined unless wanted.
SdpaOutputs paged_cpu(const PagedCall& call, bool wants_lse);

}  // namespace attn_ext::cpu
