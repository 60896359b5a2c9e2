# What every C++ file of the project is compiled with.

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "attn_ext needs GCC 11 or later; ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_VERSION}.")
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
  message(FATAL_ERROR "attn_ext needs Clang 14 or later; ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_VERSION}.")
endif()

get_filename_component(ATTN_EXT_ROOT "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)

function(attn_ext_compile_options target)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  target_compile_features(${target} PUBLIC cxx_std_20)
  # Messages name files (__FILE__) as they are called in the sources and in torch, not as on the building machine.
  target_compile_options(${target} PRIVATE
    -Wall -Wextra $<$<BOOL:${ATTN_EXT_WERROR}>:-Werror>
    "-fmacro-prefix-map=${ATTN_EXT_ROOT}/="
    $<$<CXX_COMPILER_ID:GNU>:-fno-canonical-system-headers>)
endfunction()

# Of what includes torch's headers. The kernels do not: they are compiled alike whatever torch they are built beside.
function(attn_ext_torch_compile_options target)
  attn_ext_compile_options(${target})
  target_compile_options(${target} PRIVATE "-fmacro-prefix-map=${ATTN_EXT_TORCH_DIR}/=torch/")
  # torch's own headers then include the operators that they use, and not all 2,000: some 2 s a file.
  target_compile_definitions(${target} PRIVATE AT_PER_OPERATOR_HEADERS)
endfunction()
