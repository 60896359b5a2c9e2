// Asking for a whole piece of keys or values while another is read: for a row of each of many places of it at
// a time, so that several pages of memory are on their way at once.
#pragma once

#include "../matrix/stored_rows.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// As large as this at most, all keys or values of a piece are asked for before it is its turn.
constexpr int64_t kPieceAheadBytes = 1 << 17;

// While row r is read, row r / kPlaces of place r % kPlaces is asked for; before begin(), nothing is.
class PieceAhead {
 public:
  static constexpr int64_t kPlaces = 16;
  static constexpr int64_t kMostRows = 32;  // that are read in a step
  // What the rows of a page have to be a multiple of: each place of a piece of up to kPlaces times as many
  // rows then lies in one page.
  static constexpr int64_t kPageStep = 16;

  // For `count` rows from `first` on, a multiple of kPageStep.
  template <typename Stored>
  void begin(const StoredRows<Stored>& rows, int64_t first, int64_t count) {
    if (count <= 0) return;
    row_bytes_ = rows.ahead(first, first + count).row_bytes;
    // In pages a power of two: of a piece that is shorter than the others up to half is not asked for.
    int64_t each = rows.in_pages() ? 1 : ceil_div(count, kPlaces);
    while (each * kPlaces < count) each *= 2;
    for (int64_t i = 0; i < kPlaces; ++i) {
      const int64_t row = first + smaller(i * each, round_down(count - 1, each));
      const char* place = rows.ahead(row, first + count).next;
      if (place == nullptr) return;
      // A step that is longer, or does not begin with the first place, goes on with the places' next rows.
      for (int64_t next = 0; i + next * kPlaces < kPlaces + kMostRows; ++next) {
        places_[i + next * kPlaces] = place + next * row_bytes_;
      }
    }
    rows_of_place_ = each;
  }

  // What to ask for in the step before which `done` rows were read.
  ATTN_EXT_INLINE RowsAhead step(int64_t done) const {
    RowsAhead ahead;
    if (done / kPlaces >= rows_of_place_) return ahead;
    ahead.places = places_ + done % kPlaces;
    ahead.offset = done / kPlaces * row_bytes_;
    ahead.next = ahead.places[0] + ahead.offset;
    return ahead;
  }

 private:
  int64_t row_bytes_ = 0, rows_of_place_ = 0;
  const char* places_[kPlaces + kMostRows];  // not cleared, which the smallest calls would feel
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
