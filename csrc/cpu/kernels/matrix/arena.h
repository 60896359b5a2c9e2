// Memory handed out piece by piece.
#pragma once

#include <cstdint>

#include "../vector/simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Each piece is aligned to a cache line. Over a null base it only counts.
struct Arena {
  char* base;
  int64_t used;
};

template <typename T>
ATTN_EXT_INLINE T* take(Arena& arena, int64_t count) {
  char* piece = arena.base + arena.used;
  arena.used += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  return reinterpret_cast<T*>(piece);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
