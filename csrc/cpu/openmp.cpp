#include "openmp.h"

#include <dlfcn.h>

#include <optional>

namespace attn_ext::cpu {

namespace {

/// A program may hold several runtimes, as where Intel's libiomp5 is preloaded. The linker gave torch the
/// first one in the search order that has the name in the version that GCC asks for, and so does this. A name
/// without its version may be another library's.
void* find_parallel() {
#if defined(__GLIBC__)
  if (void* const parallel = dlvsym(RTLD_DEFAULT, "GOMP_parallel", "GOMP_4.0")) {
    return parallel;
  }
#endif
  return dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

/// All from the library that has the entry: who is thread 0 in another runtime is not in this one.
std::optional<OpenMpRuntime> find_runtime() {
  void* const parallel = find_parallel();
  Dl_info info;
  if (parallel == nullptr || dladdr(parallel, &info) == 0) {
    return std::nullopt;
  }
  void* const library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return std::nullopt;
  }
  const OpenMpRuntime runtime{reinterpret_cast<decltype(OpenMpRuntime::parallel)>(parallel),
                              reinterpret_cast<int (*)()>(dlsym(library, "omp_get_thread_num")),
                              reinterpret_cast<int (*)()>(dlsym(library, "omp_get_num_threads")),
                              reinterpret_cast<int (*)(int)>(dlsym(library, "omp_pause_resource_all"))};
  if (runtime.thread_num == nullptr || runtime.num_threads == nullptr) {
    dlclose(library);
    return std::nullopt;
  }
  return runtime;  // with its library, which stays
}

}  // namespace

const OpenMpRuntime* openmp_runtime() {
  static const std::optional<OpenMpRuntime> runtime = find_runtime();
  return runtime ? &*runtime : nullptr;
}

}  // namespace attn_ext::cpu
