// Memory handed out piece by piece.
#pragma once

#include <cstdint>

#include "../vector/simd.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ATTN_EXT_GUARDS_ARENAS 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define ATTN_EXT_GUARDS_ARENAS 1
#endif
#if defined(ATTN_EXT_GUARDS_ARENAS)
#include <sanitizer/asan_interface.h>
#endif

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Each piece is aligned to a cache line. Over a null base it only counts.
struct Arena {
  char* base;
  int64_t used;
};

// AddressSanitizer finds what reads or writes past a piece: there a gap follows each, poisoned.
#if defined(ATTN_EXT_GUARDS_ARENAS)
constexpr int64_t kGapBytes = 64;
ATTN_EXT_INLINE void guard(const char* piece, int64_t bytes, int64_t with_gap) {
  __asan_unpoison_memory_region(piece, static_cast<size_t>(bytes));
  __asan_poison_memory_region(piece + bytes, static_cast<size_t>(with_gap - bytes));
}
#else
constexpr int64_t kGapBytes = 0;
ATTN_EXT_INLINE void guard(const char*, int64_t, int64_t) {}
#endif

template <typename T>
ATTN_EXT_INLINE T* take(Arena& arena, int64_t count) {
  // As numbers: an offset to a null pointer is undefined.
  char* piece =
      reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(arena.base) + static_cast<uintptr_t>(arena.used));
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T)), whole = round_up(bytes, 64) + kGapBytes;
  arena.used += whole;
  if (arena.base != nullptr) guard(piece, bytes, whole);
  return reinterpret_cast<T*>(piece);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
