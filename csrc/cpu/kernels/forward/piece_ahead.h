// Asking for a whole piece of keys or values while another is read: for a row of each of many places of it at
// a time, so that several pages of memory are on their way at once.
#pragma once

#include "../matrix/stored_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Each step of as many rows as there are places asks for a row of each; half a step for those of half of
// them.
template <int64_t Places>
class PieceAhead {
 public:
  PieceAhead() = default;

  // For `count` rows from `first` on; for none where the rows of a place are not evenly apart, as in small
  // pages.
  template <typename Stored>
  PieceAhead(const StoredRows<Stored>& rows, int64_t first, int64_t count) {
    if (count <= 0) return;
    rows_ = rows.ahead(first, first + count);
    if (rows_.next == nullptr) return;
    rows_of_place_ = ceil_div(count, Places);
    row_bytes_ = rows_.row_bytes;
    rows_.row_bytes *= rows_of_place_;
    in_pages_ = rows.in_pages();
    if (in_pages_) find_places(rows, first, count);
  }

  bool asks() const { return rows_of_place_ > 0; }

  // What to ask for in the step before which `done` rows were read.
  ATTN_EXT_INLINE RowsAhead step(int64_t done) const {
    if (done / Places >= rows_of_place_) return {};
    RowsAhead ahead = rows_;
    ahead.offset = done / Places * row_bytes_;
    ahead.next += ahead.offset + done % Places * rows_.row_bytes;
    if (in_pages_) ahead.places = places_ + done % Places;
    return ahead;
  }

 private:
  // Of places that lie in a page each, a power of two of rows, as a page mostly is: of a last piece that is
  // shorter than the others some rows are not asked for.
  template <typename Stored>
  void find_places(const StoredRows<Stored>& rows, int64_t first, int64_t count) {
    int64_t each = 1;
    while (each * Places < count) each *= 2;
    rows_of_place_ = 0;
    for (int64_t i = 0; i < Places; ++i) {
      const int64_t row = first + smaller(i * each, round_down(count - 1, each));
      if (rows.in_page(row, each) < each) return;
      places_[i] = rows.ahead(row, first + count).next;
    }
    rows_of_place_ = each;
  }

  const char* places_[Places] = {};
  bool in_pages_ = false;
  RowsAhead rows_;
  int64_t row_bytes_ = 0, rows_of_place_ = 0;
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
