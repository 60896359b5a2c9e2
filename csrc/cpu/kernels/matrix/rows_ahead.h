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

// The lines of rows, one after the other: in the order of memory, so that a processor that foresees such an
// order goes on by itself.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const RowsAhead& rows, int64_t bytes)
      : row_(rows.next), row_bytes_(rows.row_bytes), bytes_(bytes), near_(rows.near) {}

  template <int Lines>
  ATTN_EXT_INLINE void ask() {
    if (row_bytes_ == bytes_) {  // one long row
#pragma GCC unroll 16
      for (int i = 0; i < Lines; ++i) prefetch_line(row_ + i * 64, near_);
      row_ += Lines * 64;
      return;
    }
    for (int i = 0; i < Lines; ++i) {
      prefetch_line(row_ + at_, near_);
      at_ += 64;
      if (at_ >= bytes_) {
        at_ = 0;
        row_ += row_bytes_;
      }
    }
  }

 private:
  const char* row_ = nullptr;
  int64_t row_bytes_ = 0, bytes_ = 0, at_ = 0;
  bool near_ = false;
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
