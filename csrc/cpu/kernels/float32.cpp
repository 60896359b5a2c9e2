#if !defined(ATTN_EXT_AMX)  // where bfloat16 alone has products of its own
#include "dtype_kernels.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

extern const DtypeKernels kFloat32;
constinit const DtypeKernels kFloat32 = dtype_kernels<Scheme<float, PlainProduct<float>>>();

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
#endif
