// The kernels of every instruction set in this build.
#pragma once

#include "backward.h"
#include "forward.h"

namespace attn_ext::cpu {

enum { kFloat64Kernels, kFloat32Kernels, kBFloat16Kernels, kFloat16Kernels, kKernelDtypes };

struct DtypeKernels {
  ForwardWays forward;
  BackwardWays backward;
  // Whether weights are worth saving from the forward pass, which has the same bits whether or not it writes
  // them, for a backward pass that else makes them again; can_join: in which nothing tells the rows of a
  // group's heads apart.
  bool (*saves_weights)(const AttentionShape&, bool can_join);
};

struct KernelTable {
  const DtypeKernels* of[kKernelDtypes];  // nullptr: the set has none of its own
};

// One for each instruction set that CMake compiles; the names are those of the table in CMake.
namespace baseline {
extern const KernelTable kKernels;
}
namespace avx2 {
extern const KernelTable kKernels;
}
namespace avx512 {
extern const KernelTable kKernels;
}
namespace avx512_bf16 {
extern const KernelTable kKernels;
}
namespace amx {
extern const KernelTable kKernels;
}
namespace neon {
extern const KernelTable kKernels;
}
namespace neon_bf16 {
extern const KernelTable kKernels;
}

}  // namespace attn_ext::cpu
