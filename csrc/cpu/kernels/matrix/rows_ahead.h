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
  // Where each row begins, `offset` bytes before what is asked for; null: row_bytes apart, from `next` on.
  const char* const* places = nullptr;
  int64_t offset = 0;

  ATTN_EXT_INLINE const char* row(int64_t i) const {
    return places != nullptr ? places[i] + offset : next + i * row_bytes;
  }
};

ATTN_EXT_INLINE void prefetch_line(const char* line, bool near) {
  if (near) {  // not by ?:, on which Clang 14 ends with a fault where it does not optimize
    __builtin_prefetch(line, 0, 3);
  } else {
    __builtin_prefetch(line, 0, 2);
  }
}

// Asks for a line of each of `Rows` rows from `first` on that lie in places of their own, `byte` bytes behind
// where they begin: into the second cache, of which there is enough where places are.
template <int Rows>
ATTN_EXT_INLINE void prefetch_places(const RowsAhead& ahead, int64_t first, int64_t byte) {
#pragma GCC unroll 16
  for (int i = 0; i < Rows; ++i) __builtin_prefetch(ahead.places[first + i] + ahead.offset + byte, 0, 2);
}

// Asks for the next of them, so few at a time that no request is turned away.
ATTN_EXT_INLINE void prefetch_some(RowsAhead& ahead, int64_t rows) {
  for (int64_t i = smaller(rows, ahead.rows); i > 0; --i) {
    for (int64_t b = 0; b < ahead.bytes; b += 64) prefetch_line(ahead.next + b, ahead.near);
    ahead.next += ahead.row_bytes;
    --ahead.rows;
  }
}

// Asks for lines of rows while others are read: one after the other, in the order of memory, so that a
// processor that foresees such an order goes on by itself; or those that are named.
class LinesAhead {
 public:
  LinesAhead() = default;
  LinesAhead(const RowsAhead& rows, int64_t bytes) : rows_(rows), bytes_(bytes) {}

  // Asks for Rows * Lines lines; where rows lie in places of their own, for those of the rows from `row` on
  // that lie `byte` bytes behind their begin.
  template <int Rows, int Lines>
  ATTN_EXT_INLINE void ask(int64_t row, int64_t byte) {
    if (rows_.places == nullptr) return ask_in_order<Rows * Lines>();
#pragma GCC unroll 2
    for (int i = 0; i < Lines; ++i) prefetch_places<Rows>(rows_, row, byte + 64 * i);
  }

 private:
  template <int Lines>
  ATTN_EXT_INLINE void ask_in_order() {
    if (rows_.row_bytes == bytes_) {  // one long row
#pragma GCC unroll 16
      for (int i = 0; i < Lines; ++i) prefetch_line(rows_.next + i * 64, rows_.near);
      rows_.next += Lines * 64;
      return;
    }
    for (int i = 0; i < Lines; ++i) {
      prefetch_line(rows_.next + at_, rows_.near);
      at_ += 64;
      if (at_ >= bytes_) {
        at_ = 0;
        rows_.next += rows_.row_bytes;
      }
    }
  }

  RowsAhead rows_;
  int64_t bytes_ = 0, at_ = 0;
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
