// All kernels of one instruction set.
#include "interface/table.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

extern const DtypeKernels kFloat64, kFloat32, kBFloat16, kFloat16;  // a file each

extern const KernelTable kKernels;
#if defined(ATTN_EXT_BFLOAT16_ALONE)  // kernel_sets.cpp takes all else of another set
constinit const KernelTable kKernels = {{nullptr, nullptr, &kBFloat16, nullptr}};
#else
constinit const KernelTable kKernels = {{&kFloat64, &kFloat32, &kBFloat16, &kFloat16}};
#endif

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
