# The kernels are compiled once for each instruction set from the same sources.
# A set has the same name here, in its C++ namespace, in the kernel table and in ATTN_EXT_CPU_CAPABILITY.

set(avx2 -mavx2 -mfma -mf16c)
set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl)

# attn_ext_add_kernels(target sources...): adds the objects of every set that this processor family has.
# Baseline comes first, so that the linker takes an inline function's plain copy where several sets emit it.
macro(attn_ext_add_kernels target)
  #                       name         processors      ATen's vectors  compiler flags
  attn_ext_add_capability(baseline     ".*"            DEFAULT         ""                          ${ARGN})
  attn_ext_add_capability(avx2         "x86_64|AMD64"  AVX2            "${avx2}"                   ${ARGN})
  attn_ext_add_capability(avx512       "x86_64|AMD64"  AVX512          "${avx512}"                 ${ARGN})
  attn_ext_add_capability(avx512_bf16  "x86_64|AMD64"  AVX512          "${avx512};-mavx512bf16"    ${ARGN})
endmacro()

function(attn_ext_add_capability name processors vectors flags)
  if(NOT ARGN OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(${processors})$")
    return()
  endif()
  set(objects attn_ext_kernels_${name})
  add_library(${objects} OBJECT ${ARGN})
  attn_ext_compile_options(${objects})
  target_include_directories(${objects} PRIVATE csrc)
  target_link_libraries(${objects} PRIVATE attn_ext::torch)
  # CPU_CAPABILITY names the inline namespace of ATen's vectors: one for each set, so that none is shared.
  target_compile_definitions(${objects} PRIVATE
    ATTN_EXT_CAPABILITY=${name} CPU_CAPABILITY=${name} CPU_CAPABILITY_${vectors})
  target_compile_options(${objects} PRIVATE ${flags})
  target_sources(attn_ext PRIVATE $<TARGET_OBJECTS:${objects}>)
  target_compile_definitions(attn_ext PRIVATE ATTN_EXT_HAS_${name})
endfunction()
