// Asking for memory before it is needed, where rows lie so far apart that no processor foresees them.
#pragma once

#include <cstdint>

#include "../vector/simd.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Rows that are soon read or written; next null: none.
struct RowsAhead {
  const char* next = nullptr;
  int64_t row_bytes = 0;  // from one row to the next
  int64_t bytes = 0;      // of a row
  int64_t rows = 0;
  bool near = false;  // into the first cache, not the second
};

ATTN_EXT_INLINE void prefetch_line(const char* line, bool near) {
  if (near) {  // not by ?:, on which Clang 14 ends with a fault where it does not optimize
    __builtin_prefetch(line, 0, 3);
  } else {
    __builtin_prefetch(line, 0, 2);
  }
}

// Asks for the next of them, so few at a time that no request is turned away.
ATTN_EXT_INLINE void prefetch_some(RowsAhead& ahead, int64_t rows) {
  for (int64_t i = smaller(rows, ahead.rows); i > 0; --i) {
    for (int64_t b = 0; b < ahead.bytes; b += 64) __builtin_prefetch(ahead.next + b);
    ahead.next += ahead.row_bytes;
    --ahead.rows;
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
