// Which rows PieceAhead asks for, while as many others are read in steps: each of a whole piece once,
// wherever they lie.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "kernels/forward/piece_ahead.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {
namespace {

constexpr int64_t kColumns = 8, kPageStride = 2000;

void expect(bool holds, const char* what, int64_t rows, int64_t count) {
  if (holds) return;
  std::printf("FAILED: %s, %ld rows a page, %ld rows\n", what, static_cast<long>(rows),
              static_cast<long>(count));
  std::exit(1);
}

// Rows in the pages of a pool, the last page first; page_rows 0: one after the other.
struct Rows {
  std::vector<float> memory = std::vector<float>(1 << 21);
  std::vector<int64_t> pages;
  TensorView view;
  Storage storage;

  explicit Rows(int64_t page_rows) {
    view.data = memory.data();
    view.row_stride = kColumns;
    view.column_stride = 1;
    if (page_rows == 0) return;
    for (int64_t page = 600; page > 0; --page) pages.push_back(page);
    storage.pages = pages.data();
    storage.page_rows = page_rows;
    storage.page_stride = kPageStride;
  }

  const float* row(int64_t r) const {
    if (pages.empty()) return memory.data() + r * kColumns;
    const int64_t page = pages[static_cast<size_t>(r / storage.page_rows)];
    return memory.data() + page * kPageStride + r % storage.page_rows * kColumns;
  }
};

// Steps: of so many rows.
template <int64_t Places, int64_t Step = Places>
void asks_for_each_row_once(int64_t page_rows, int64_t count) {
  constexpr int64_t kFirst = 512;
  const Rows rows(page_rows);
  const StoredRows<float> stored(rows.view, rows.storage, 0, 0, 0, kColumns);
  const PieceAhead<Places> piece(stored, kFirst, count);
  expect(piece.asks(), "asks", page_rows, count);
  std::map<const char*, int> asked;
  for (int64_t done = 0; done < round_up(count, Places); done += Step) {
    const RowsAhead ahead = piece.step(done);
    if (ahead.next == nullptr) continue;
    for (int64_t i = 0; i < Step; ++i) {
      ++asked[ahead.places == nullptr ? ahead.next + i * ahead.row_bytes : ahead.places[i] + ahead.offset];
    }
  }
  std::map<const char*, int> there;
  for (int64_t r = 0; r < count + Places; ++r) there[reinterpret_cast<const char*>(rows.row(kFirst + r))];
  for (const auto& [row, times] : asked) expect(there.count(row) == 1, "rows alone", page_rows, count);
  const bool full = count % Places == 0 && (count & (count - 1)) == 0;
  for (int64_t r = 0; r < count && (full || page_rows == 0); ++r) {
    const auto* row = reinterpret_cast<const char*>(rows.row(kFirst + r));
    expect(asked.count(row) == 1, "each row", page_rows, count);
    if (full) expect(asked[row] == 1, "once", page_rows, count);
  }
  expect(piece.step(count + 16 * Places).next == nullptr, "not for more", page_rows, count);
}

void is_silent(int64_t page_rows, int64_t count) {
  const Rows rows(page_rows);
  const StoredRows<float> stored(rows.view, rows.storage, 0, 0, 0, kColumns);
  expect(!PieceAhead<16>(stored, 0, count).asks(), "is silent", page_rows, count);
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY

int main() {
  using namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY;
  for (const int64_t page_rows : {0, 16, 32, 128}) {
    for (const int64_t count : {1, 2, 15, 16, 17, 44, 64, 100, 255, 256}) {
      asks_for_each_row_once<16>(page_rows, count);
      asks_for_each_row_once<32>(page_rows, count);
      asks_for_each_row_once<32, 16>(page_rows, count);
      asks_for_each_row_once<4>(page_rows, std::min<int64_t>(count, 64));
    }
  }
  is_silent(0, 0);
  is_silent(0, -3);
  is_silent(1, 256);
  is_silent(8, 256);   // places of 16 rows do not lie in a page
  is_silent(24, 256);  // nor do all of them here
}
