#include "dtype_kernels.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

#if defined(ATTN_EXT_AMX)
using BFloat16Scheme = Scheme<BFloat16, AmxProduct>;
#elif defined(ATTN_EXT_HAS_PAIRS)
using BFloat16Scheme = Scheme<BFloat16, BFloat16Product>;
#else
using BFloat16Scheme = Scheme<BFloat16, PlainProduct<float>>;
#endif

extern const DtypeKernels kBFloat16;
constinit const DtypeKernels kBFloat16 = dtype_kernels<BFloat16Scheme>();

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
