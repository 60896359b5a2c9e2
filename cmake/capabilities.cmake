# The kernels are compiled once for each instruction set from the same sources.
# A set has the same name here, in its C++ namespace, in the kernel table and in ATTN_EXT_CPU_CAPABILITY.

# What each set may use stands in csrc/cpu/kernels/interface/features.h as well, and does not compile where it differs.

# These come after the user's CXXFLAGS: whatever those allow, as -march=native does, is taken back first. What -march
# does not take back are extensions switched on one by one; all of AVX goes with SSE3.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  set(baseline -march=x86-64 -mno-sse3 -mno-popcnt -mno-bmi -mno-bmi2 -mno-lzcnt -mno-movbe)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(baseline -march=armv8-a)  # NEON too, as far as compilers make it of plain vectors
else()
  set(baseline)
endif()

# Intel processors from Skylake to Cascade Lake decode a loop anew each time around where its jump back crosses or ends
# at 32 bytes, as chance will have it (docs/trials.md): the assembler keeps jumps from there. GCC's is another program.
set(jumps)
if(NOT CMAKE_SCRIPT_MODE_FILE AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  include(CheckCXXCompilerFlag)
  foreach(flag IN ITEMS -Wa,-mbranches-within-32B-boundaries -mbranches-within-32B-boundaries)
    string(MAKE_C_IDENTIFIER "ATTN_EXT_HAS${flag}" has_flag)
    check_cxx_compiler_flag(${flag} ${has_flag})
    if(${has_flag})
      set(jumps ${flag})
      break()
    endif()
  endforeach()
endif()

set(avx2 ${baseline} ${jumps} -mavx2 -mfma -mf16c -mpopcnt)
set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd)
set(avx512_bf16 ${avx512} -mavx512bf16 -DATTN_EXT_BFLOAT16_ALONE)
set(amx ${avx512_bf16} -DATTN_EXT_AMX)

set(neon ${baseline} -DATTN_EXT_NEON)
set(neon_bf16 -march=armv8.2-a+bf16 -DATTN_EXT_NEON -DATTN_EXT_BFLOAT16_ALONE)

# A set whose instructions multiply bfloat16 and nothing else has kernels of bfloat16 alone (ATTN_EXT_BFLOAT16_ALONE);
# those of other dtypes it takes from this one (csrc/cpu/kernel_sets.cpp).
set(avx512_bf16_takes avx512)
set(amx_takes avx512)
set(neon_bf16_takes neon)

set(ATTN_EXT_KERNEL_SETS "" CACHE STRING "Of the instruction sets, those to build; empty: all")

# attn_ext_add_kernels(target sources...): adds the objects TARGET_kernels_SET of every set that this processor
# family has, whose names the global property ATTN_EXT_CAPABILITIES then lists.
# Baseline comes first, so that the linker takes an inline function's plain copy where several sets emit it.
macro(attn_ext_add_kernels target)
  #                                 name          processors       compiler flags
  attn_ext_add_capability(${target} baseline      ".*"             "${baseline}"      ${ARGN})
  attn_ext_add_capability(${target} avx2          "x86_64|AMD64"   "${avx2}"          ${ARGN})
  attn_ext_add_capability(${target} avx512        "x86_64|AMD64"   "${avx512}"        ${ARGN})
  attn_ext_add_capability(${target} avx512_bf16   "x86_64|AMD64"   "${avx512_bf16}"   ${ARGN})
  attn_ext_add_capability(${target} amx           "x86_64|AMD64"   "${amx}"           ${ARGN})
  attn_ext_add_capability(${target} neon          "aarch64|arm64"  "${neon}"          ${ARGN})
  attn_ext_add_capability(${target} neon_bf16     "aarch64|arm64"  "${neon_bf16}"     ${ARGN})
endmacro()

function(attn_ext_add_capability target name processors flags)
  if(NOT ARGN OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(${processors})$")
    return()
  endif()
  if(ATTN_EXT_KERNEL_SETS AND NOT name IN_LIST ATTN_EXT_KERNEL_SETS)
    return()
  endif()
  if(DEFINED ${name}_takes AND NOT TARGET ${target}_kernels_${${name}_takes})
    message(FATAL_ERROR "ATTN_EXT_KERNEL_SETS has ${name} and not ${${name}_takes}, whose kernels ${name} takes for all "
                        "dtypes but bfloat16: add ${${name}_takes}.")
  endif()
  set(objects ${target}_kernels_${name})
  add_library(${objects} OBJECT ${ARGN})
  attn_ext_compile_options(${objects})
  target_compile_definitions(${objects} PRIVATE ATTN_EXT_CPU_CAPABILITY=${name})
  # Kernels throw nothing, and what would unwind them is a symbol that all sets share.
  target_compile_options(${objects} PRIVATE -fno-exceptions)
  # GCC warns of its own AVX-512 headers, and of vectors in the ABI of functions that are all inlined.
  target_compile_options(${objects} PRIVATE ${flags}
    $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi;-Wno-uninitialized;-Wno-maybe-uninitialized>)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:${objects}>)
  target_compile_definitions(${target} PRIVATE ATTN_EXT_HAS_${name})
  get_property(capabilities GLOBAL PROPERTY ATTN_EXT_CAPABILITIES)
  list(APPEND capabilities ${name})
  list(REMOVE_DUPLICATES capabilities)
  set_property(GLOBAL PROPERTY ATTN_EXT_CAPABILITIES ${capabilities})
endfunction()
