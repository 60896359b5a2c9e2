# Every source file of the build.

set(ATTN_EXT_SOURCES
  csrc/schema.cpp
  csrc/args.cpp
  csrc/checks.cpp
  csrc/memory_order.cpp
  csrc/sequences.cpp
  csrc/autograd/sdpa_autograd.cpp
  csrc/autograd/sdpa_shortcuts.cpp
  csrc/autocast/sdpa_autocast.cpp
  csrc/meta/sdpa_meta.cpp
  csrc/paged/check.cpp
  csrc/paged/gather.cpp
  csrc/paged/memory.cpp
  csrc/paged/ops.cpp
  csrc/paged/write.cpp
  csrc/composite/merge_partials.cpp
  csrc/composite/sdpa_composite.cpp
  csrc/composite/sdpa_packed_composite.cpp
  csrc/aten/problem.cpp
  csrc/aten/contract.cpp
  csrc/aten/dropout.cpp
  csrc/aten/chunk.cpp
  csrc/aten/pieces.cpp
  csrc/aten/backward_chunk.cpp
  csrc/aten/by_sequence.cpp
  csrc/aten/tangents.cpp
  csrc/aten/sdpa_aten.cpp
  csrc/cpu/tensor_view.cpp
  csrc/cpu/kernel_choice.cpp
  csrc/cpu/saved_weights.cpp
  csrc/cpu/kernel_sets.cpp
  csrc/cpu/call.cpp
  csrc/cpu/dense_mask.cpp
  csrc/cpu/fork.cpp
  csrc/cpu/openmp.cpp
  csrc/cpu/forward.cpp
  csrc/cpu/backward.cpp
  csrc/cpu/paged.cpp
  csrc/cuda/route.cpp
  csrc/cuda/saved_draws.cpp
  csrc/cuda/bias.cpp
  csrc/cuda/four_dims.cpp
  csrc/cuda/fused.cpp
  csrc/cuda/plan.cpp
  csrc/cuda/tiles.cpp
  csrc/cuda/device/kernels.cpp
  csrc/cuda/device/ops.cpp
  csrc/cuda/sdpa_cuda.cpp
  csrc/capability.cpp
  csrc/explain.cpp
  csrc/task_times.cpp
  csrc/public_api.cpp)

# Compiled once per instruction set (capabilities.cmake).
set(ATTN_EXT_KERNEL_SOURCES
  csrc/cpu/kernels/kernels.cpp)

set(ATTN_EXT_BENCHMARK_SOURCES
  csrc/benchmark/peak.cpp)

set(ATTN_EXT_PYTHON_SOURCES
  csrc/python/calls.cpp
  csrc/python/linear.cpp
  csrc/python/module.cpp)
