# attn_ext::torch and attn_ext::torch_python: torch's headers and libraries, taken from its folder.
#
# find_package(Torch) is not used: that of a CUDA build of torch fails on a machine without the CUDA toolkit,
# of which nothing is needed here.

# attn_ext_find_torch(fallbacks...): looks in ATTN_EXT_TORCH_DIR, or, where that is not set, beside the
# TorchConfig.cmake that CMAKE_PREFIX_PATH or Torch_DIR leads to, in the fallbacks, and in the python3 on PATH.
# Sets ATTN_EXT_TORCH_DIR and ATTN_EXT_TORCH_VERSION. Where ATTN_EXT_TORCH_LINK is set, torch is named by a link there.
function(attn_ext_find_torch)
  set(candidates "${ATTN_EXT_TORCH_DIR}")
  if(NOT ATTN_EXT_TORCH_DIR)
    find_path(config_dir TorchConfig.cmake HINTS "${Torch_DIR}" PATH_SUFFIXES share/cmake/Torch Torch NO_CACHE)
    if(config_dir)
      get_filename_component(beside_config "${config_dir}/../../.." ABSOLUTE)
    endif()
    execute_process(
      COMMAND python3 -c "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
      OUTPUT_VARIABLE of_python OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(candidates ${beside_config} ${ARGN} ${of_python})
  endif()

  set(dir)
  foreach(candidate IN LISTS candidates)
    foreach(header headeronly/version.h csrc/api/include/torch/version.h)
      if(NOT dir AND EXISTS "${candidate}/include/torch/${header}")
        set(dir "${candidate}")
        set(version_header "${candidate}/include/torch/${header}")
      endif()
    endforeach()
  endforeach()
  if(NOT dir)
    list(JOIN candidates ", " looked)
    message(FATAL_ERROR "attn_ext found no torch (looked in: ${looked}): pass -DATTN_EXT_TORCH_DIR=<the folder "
                        "with torch's include/ and lib/>, or -DCMAKE_PREFIX_PATH=<torch.utils.cmake_prefix_path>.")
  endif()
  if(ATTN_EXT_TORCH_LINK)
    get_filename_component(real "${dir}" REALPATH)
    get_filename_component(linked "${ATTN_EXT_TORCH_LINK}" REALPATH)
    if(NOT linked STREQUAL real)
      file(CREATE_LINK "${real}" "${ATTN_EXT_TORCH_LINK}" SYMBOLIC)
    endif()
    set(dir "${ATTN_EXT_TORCH_LINK}")
  endif()
  file(STRINGS "${version_header}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." version)
  set(ATTN_EXT_TORCH_DIR "${dir}" PARENT_SCOPE)
  set(ATTN_EXT_TORCH_VERSION "${version}" PARENT_SCOPE)

  if(TARGET attn_ext::torch)
    return()
  endif()
  add_library(attn_ext::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(attn_ext::torch SYSTEM INTERFACE
    "${dir}/include" "${dir}/include/torch/csrc/api/include")
  # The one ABI of std::string that torch 2.11 and later are built with.
  target_compile_definitions(attn_ext::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
  # libtorch.so holds no symbol; it is what brings in the libraries of the other devices.
  target_link_libraries(attn_ext::torch INTERFACE
    "${dir}/lib/libtorch_cpu.so" "${dir}/lib/libc10.so"
    "-Wl,--push-state,--no-as-needed,${dir}/lib/libtorch.so,--pop-state")
  add_library(attn_ext::torch_python INTERFACE IMPORTED GLOBAL)
  target_link_libraries(attn_ext::torch_python INTERFACE attn_ext::torch "${dir}/lib/libtorch_python.so")
endfunction()
