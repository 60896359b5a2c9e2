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

constexpr int64_t kColumns = 8, kPageStride = 2100, kFirst = 256;

struct Case {
  int64_t page_rows;  // 0: one row after the other
  int64_t count, step;
};

void expect(bool holds, const char* what, const Case& c) {
  if (holds) return;
  std::printf("FAILED: %s: %ld rows a page, %ld rows, steps of %ld\n", what, static_cast<long>(c.page_rows),
              static_cast<long>(c.count), static_cast<long>(c.step));
  std::exit(1);
}

// In the pages of a pool, the last page first.
struct Rows {
  std::vector<float> memory;
  std::vector<int64_t> pages;  // as many as there are rows for
  TensorView view;
  Storage storage;

  Rows(int64_t page_rows, int64_t rows) {
    if (page_rows > 0) {
      for (int64_t page = ceil_div(rows, page_rows); page > 0; --page) pages.push_back(page - 1);
      storage.pages = pages.data();
      storage.page_rows = page_rows;
      storage.page_stride = kPageStride;
    }
    memory.resize(pages.empty() ? static_cast<size_t>(2 * rows * kColumns)
                                : pages.size() * static_cast<size_t>(kPageStride));
    view.data = memory.data();
    view.row_stride = kColumns;
    view.column_stride = 1;
  }

  const char* row(int64_t r) const {
    const float* at = memory.data() + r * kColumns;
    if (!pages.empty()) {
      at = memory.data() + pages[static_cast<size_t>(r / storage.page_rows)] * kPageStride +
           r % storage.page_rows * kColumns;
    }
    return reinterpret_cast<const char*>(at);
  }
};

// How often each address is asked for while rows are read as kernels do: steps end with a page.
std::map<const char*, int> asked_for(const PieceAhead& piece, const Case& c) {
  std::map<const char*, int> asked;
  for (int64_t done = 0, rows = 0; done < c.count; done += rows) {
    rows = std::min(c.step, c.count - done);
    if (c.page_rows > 0) rows = std::min(rows, c.page_rows - (kFirst + done) % c.page_rows);
    const RowsAhead ahead = piece.step(done);
    for (int64_t i = 0; ahead.next != nullptr && i < rows; ++i) {
      ++asked[ahead.places == nullptr ? ahead.next + i * ahead.row_bytes : ahead.places[i] + ahead.offset];
    }
  }
  return asked;
}

void asks_for_each_row(const Case& c) {
  const Rows rows(c.page_rows, kFirst + c.count);
  const StoredRows<float> stored(rows.view, rows.storage, 0, 0, 0, kColumns);
  PieceAhead piece;
  piece.begin(stored, kFirst, c.count);
  std::map<const char*, int> asked = asked_for(piece, c);
  int64_t found = 0;
  for (int64_t r = 0; r < c.count; ++r) {
    const auto row = asked.find(rows.row(kFirst + r));
    if (row == asked.end()) continue;
    ++found;
    if (c.count == 256) expect(row->second == 1, "once", c);
  }
  expect(c.count == 256 ? found == 256 : 2 * found >= c.count, "each row", c);
  expect(piece.step(c.count + 16 * PieceAhead::kPlaces).next == nullptr, "not for more", c);
}

void asks_for_nothing(int64_t count) {
  const Rows rows(0, 64);
  const StoredRows<float> stored(rows.view, rows.storage, 0, 0, 0, kColumns);
  PieceAhead piece;
  expect(piece.step(0).next == nullptr, "nothing before begin()", {0, count, 0});
  piece.begin(stored, 0, count);
  expect(piece.step(0).next == nullptr, "nothing", {0, count, 0});
}

}  // namespace
}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY

int main() {
  using namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY;
  for (const int64_t page_rows : {0, 16, 32, 48, 80, 112, 128, 256}) {
    for (const int64_t count : {1, 2, 15, 16, 17, 33, 44, 64, 100, 136, 255, 256}) {
      for (const int64_t step : {4, 8, 16, 32}) {
        if (page_rows == 0 || step == 32 || page_rows % step == 0)
          asks_for_each_row({page_rows, count, step});
      }
    }
  }
  asks_for_nothing(0);
  asks_for_nothing(-3);
}
