#if !defined(ATTN_EXT_BFLOAT16_ALONE)
#include "dtype_kernels.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

extern const DtypeKernels kFloat16;
constinit const DtypeKernels kFloat16 = dtype_kernels<Scheme<Float16, PlainProduct<float>>>();

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
#endif
