#if !defined(ATTN_EXT_BFLOAT16_ALONE)
#include "dtype_kernels.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

extern const DtypeKernels kFloat64;
constinit const DtypeKernels kFloat64 = dtype_kernels<Scheme<double, PlainProduct<double>>>();

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
#endif
