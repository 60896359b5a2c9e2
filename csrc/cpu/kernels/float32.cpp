#if !defined(ATTN_EXT_BFLOAT16_ALONE)
#include "dtype_kernels.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

extern const DtypeKernels kFloat32;
constinit const DtypeKernels kFloat32 = dtype_kernels<Scheme<float, PlainProduct<float>>>();

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
#endif
