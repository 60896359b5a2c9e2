// To be preloaded: the n-th allocation in a window fails, once, if code of a given library is on the stack.
//
// Left out is what PyTorch does not survive itself: the growth of a c10::SmallVector, which is noexcept, and
// what the destructor of an autograd node allocates.
//
// malloc and its like are replaced by functions that hand on to the C library; operator new and the tensors'
// allocator end there too. Linux with glibc.
#include <dlfcn.h>
#include <execinfo.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

std::atomic<bool> armed{false};
std::atomic<int64_t> counted{0}, failing{0};
std::atomic<bool> failed{false};
uintptr_t begin_of_code = 0, end_of_code = 0;
thread_local bool looking = false;  // the walk over the stack may allocate itself

bool in_the_library(void* frame) {
  const auto address = reinterpret_cast<uintptr_t>(frame);
  return begin_of_code <= address && address < end_of_code;
}

bool has_pytorchs_name(void* address) {
  Dl_info found;
  if (dladdr(address, &found) == 0 || found.dli_sname == nullptr) {
    return false;
  }
  return std::strstr(found.dli_sname, "SmallVectorBase") != nullptr ||
         std::strstr(found.dli_sname, "torch8autograd4NodeD") != nullptr;
}

/// The same, of addresses that were looked up before: to look for a name takes a millisecond.
bool is_pytorchs_own(void* address) {
  constexpr uintptr_t kSlots = 1 << 16;
  static std::atomic<uintptr_t> known[kSlots];
  const auto number = reinterpret_cast<uintptr_t>(address);
  auto& slot = known[(number ^ number >> 16) % kSlots];
  const uintptr_t seen = slot;
  if (seen >> 1 == number) {
    return (seen & 1) != 0;
  }
  const bool own = has_pytorchs_name(address);
  slot = number << 1 | uintptr_t{own};
  return own;
}

bool from_the_library() {
  constexpr int kFrames = 64;
  void* frames[kFrames];
  looking = true;
  const int depth = backtrace(frames, kFrames);
  looking = false;
  bool found = false;
  for (int i = 0; i < depth; ++i) {
    found = found || in_the_library(frames[i]);
    if (is_pytorchs_own(frames[i])) {
      return false;
    }
  }
  return found;
}

/// The library's own part of the stack to standard error, which is shown where the process dies.
void tell_where() {
  constexpr int kFrames = 64;
  void* frames[kFrames];
  looking = true;
  void** const end = std::remove_if(frames, frames + backtrace(frames, kFrames),
                                    [](void* frame) { return !in_the_library(frame); });
  backtrace_symbols_fd(frames, static_cast<int>(end - frames), 2);
  looking = false;
}

bool fails() {
  if (!armed.load(std::memory_order_relaxed) || looking || !from_the_library()) {
    return false;
  }
  const bool now = ++counted == failing;
  if (now) {
    failed = true;
    tell_where();
    errno = ENOMEM;
  }
  return now;
}

}  // namespace

extern "C" {

/// From here the n-th allocation under code between the two addresses fails; n = 0 fails none and counts.
void attn_ext_faults_begin(int64_t n, uintptr_t begin, uintptr_t end) {
  begin_of_code = begin;
  end_of_code = end;
  void* frames[4];
  backtrace(frames, 4);  // loads what it needs before the window opens
  counted = 0;
  failed = false;
  failing = n;
  armed = true;
}

/// How many allocations there were, negative where one of them failed.
int64_t attn_ext_faults_end() {
  armed = false;
  return failed ? -counted.load() : counted.load();
}

void* malloc(size_t size) {
  return fails() ? nullptr : __libc_malloc(size);
}

void* calloc(size_t count, size_t size) {
  return fails() ? nullptr : __libc_calloc(count, size);
}

void* realloc(void* memory, size_t size) {
  return fails() ? nullptr : __libc_realloc(memory, size);
}

void* memalign(size_t alignment, size_t size) {
  return fails() ? nullptr : __libc_memalign(alignment, size);
}

void* aligned_alloc(size_t alignment, size_t size) {
  return memalign(alignment, size);
}

int posix_memalign(void** memory, size_t alignment, size_t size) {
  void* const found = memalign(alignment, size);
  if (found == nullptr) {
    return ENOMEM;
  }
  *memory = found;
  return 0;
}

}  // extern "C"
