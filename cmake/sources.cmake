# Every source file of the build.

set(ATTN_EXT_SOURCES
  csrc/schema.cpp
  csrc/args.cpp
  csrc/checks.cpp
  csrc/memory_order.cpp
  csrc/autograd/sdpa_autograd.cpp
  csrc/autograd/sdpa_autograd_cpu.cpp
  csrc/autocast/sdpa_autocast.cpp
  csrc/meta/sdpa_meta.cpp
  csrc/composite/sdpa_composite.cpp
  csrc/aten/problem.cpp
  csrc/aten/contract.cpp
  csrc/aten/dropout.cpp
  csrc/aten/chunk.cpp
  csrc/aten/pieces.cpp
  csrc/aten/backward_chunk.cpp
  csrc/aten/tangents.cpp
  csrc/aten/sdpa_aten.cpp
  csrc/cpu/tensor_view.cpp
  csrc/cpu/kernel_choice.cpp
  csrc/cpu/kernel_sets.cpp
  csrc/cpu/call.cpp
  csrc/cpu/fork.cpp
  csrc/cpu/openmp.cpp
  csrc/cpu/forward.cpp
  csrc/cpu/backward.cpp
  csrc/capability.cpp
  csrc/explain.cpp
  csrc/public_api.cpp)

# Compiled once per instruction set (capabilities.cmake).
set(ATTN_EXT_KERNEL_SOURCES
  csrc/cpu/kernels/kernels.cpp)

set(ATTN_EXT_BENCHMARK_SOURCES
  csrc/benchmark/peak.cpp)

set(ATTN_EXT_PYTHON_SOURCES
  csrc/python/calls.cpp
  csrc/python/module.cpp)
