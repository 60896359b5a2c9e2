// Rows of keys and values that are stored in pages, of another type, with factors or across memory, against
// the same rows one after the other: the same bits. Each page lies between guard pages of its own.
#include "support.h"

namespace attn_ext::test {
namespace {

struct Case {
  ScalarKind dtype = ScalarKind::kFloat32;
  ScalarKind stored = ScalarKind::kNone;  // none: as the query
  int64_t page_rows = 16;                 // 0: no pages
  bool across = false;                    // (heads, columns, rows) of a page
  int64_t query_len = 1, key_len = 300, head_dim = 24, value_dim = 20;
  double key_factor = 1, value_factor = 1;  // powers of two: no bit of a product changes

  double work() const { return static_cast<double>((10 + query_len) * key_len * (head_dim + value_dim)); }
  std::string name() const {
    std::string all = "stored";
    for (const int64_t number : {static_cast<int64_t>(dtype), static_cast<int64_t>(stored), page_rows,
                                 query_len, key_len, head_dim, value_dim, int64_t{across}}) {
      all += ' ';
      all += std::to_string(number);
    }
    return all;
  }
};

constexpr int64_t kHeads = 4, kKeyHeads = 2;

int64_t stored_size(ScalarKind kind) {
  return kind == ScalarKind::kInt8 || kind == ScalarKind::kFloat8E4m3 ? 1 : size_of(kind);
}

/// A number that both types hold, of the code of a small one.
double number_of(uint32_t code, ScalarKind stored) {
  const auto small = static_cast<int8_t>(code & 0xff);
  return stored == ScalarKind::kFloat8E4m3 ? std::ldexp((code & 7) + 8, static_cast<int>(code >> 3 & 7) - 7)
                                           : small / (stored == ScalarKind::kInt8 ? 1.0 : 16.0);
}

void write_stored(ScalarKind kind, char* data, int64_t i, double x, uint32_t code) {
  if (kind == ScalarKind::kInt8) {
    reinterpret_cast<int8_t*>(data)[i] = static_cast<int8_t>(x);
  } else if (kind == ScalarKind::kFloat8E4m3) {  // mantissa of 3 bits, exponent from 7
    reinterpret_cast<uint8_t*>(data)[i] = static_cast<uint8_t>((code & 7) | ((code >> 3 & 7) + 3) << 3);
  } else {
    write(kind, data, i, x);
  }
}

// Rows of both kinds with the same numbers: (heads, rows, columns) one after the other, and in pages that lie
// anywhere, the last not filled.
struct Rows {
  Tensor dense;
  std::vector<std::unique_ptr<GuardedMemory>> memory;
  std::vector<int64_t> pages;
  Tensor factors;
  cpu::TensorView view;
  cpu::Storage storage;

  Rows(const Case& c, int64_t columns, double factor, std::mt19937& generator)
      : dense(c.dtype, 1, kKeyHeads, c.key_len, columns) {
    const ScalarKind kind = c.stored == ScalarKind::kNone ? c.dtype : c.stored;
    const int64_t bytes = stored_size(kind), row = kKeyHeads * columns;
    const int64_t page_rows = c.page_rows > 0 ? c.page_rows : std::max<int64_t>(1, c.key_len);
    const int64_t count = (c.key_len + page_rows - 1) / page_rows;
    for (int64_t page = 0; page < count; ++page) {
      memory.push_back(
          std::make_unique<GuardedMemory>(page_rows * row * bytes, page % 2 ? Edge::kStart : Edge::kEnd));
    }
    std::shuffle(memory.begin(), memory.end(), generator);
    char* base = count == 0 ? nullptr : memory.front()->data();
    for (const auto& page : memory) pages.push_back((page->data() - base) / bytes);
    for (int64_t r = 0; r < c.key_len; ++r) {
      for (int64_t i = 0; i < row; ++i) {
        const uint32_t code = generator();
        const double x = number_of(code, kind);
        dense.set(0, i / columns, r, i % columns, x);
        const int64_t place = c.across ? i * page_rows + r % page_rows : r % page_rows * row + i;
        write_stored(kind, memory[static_cast<size_t>(r / page_rows)]->data(), place, x, code);
      }
    }
    view = {base, nullptr, 0, columns, row, 1};
    if (c.across) view = {base, nullptr, 0, columns * page_rows, 1, page_rows};
    storage.kind = c.stored;
    if (c.page_rows > 0) storage.pages = pages.data();
    storage.page_rows = page_rows;
    storage.page_stride = 1;
    if (factor != 1) {
      factors = Tensor(ScalarKind::kFloat32, 1, kKeyHeads, 1, 1);
      factors.fill([&] { return factor; });
      storage.scale = factors.view;
      storage.scale.batch_stride = storage.scale.row_stride = 0;
    }
  }
};

struct Results {
  Tensor output, lse;
};

cpu::ForwardParams make_params(const Case& c, const Tensor& query, Results& out) {
  out.output = Tensor(c.dtype, 1, kHeads, c.query_len, c.value_dim);
  const bool wide = c.dtype == ScalarKind::kFloat64;
  out.lse = Tensor(wide ? ScalarKind::kFloat64 : ScalarKind::kFloat32, 1, kHeads, 1, c.query_len);
  cpu::ForwardParams p;
  p.shape = {c.dtype, 1, kHeads, kKeyHeads, c.query_len, c.key_len, c.head_dim, c.value_dim};
  p.rule.scale = 0.01;
  p.rule.window_right = 0;
  p.rule.query_offset = c.key_len - c.query_len;
  p.query = query.view;
  p.output = {out.output.view};
  p.lse = out.lse.view.data;
  p.lse_stride = c.query_len;
  return p;
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.memory->bytes() == b.memory->bytes() &&
         std::memcmp(a.memory->data(), b.memory->data(), a.memory->bytes()) == 0;
}

void run(const cpu::KernelTable& table, const Case& c, int threads) {
  std::mt19937 generator(7);
  std::normal_distribution<double> normal;
  Tensor query(c.dtype, 1, kHeads, c.query_len, c.head_dim);
  query.fill([&] { return normal(generator); });
  const Rows key(c, c.head_dim, c.key_factor, generator), value(c, c.value_dim, c.value_factor, generator);

  Results expected, actual;
  cpu::ForwardParams dense = make_params(c, query, expected);
  dense.key = key.dense.view;
  dense.value = value.dense.view;
  dense.rule.scale *= c.key_factor;
  run_forward(table, dense, 1);
  for (int64_t i = 0; i < kHeads * c.query_len * c.value_dim; ++i) {
    write(c.dtype, expected.output.memory->data(), i,
          read(c.dtype, expected.output.memory->data(), i) * c.value_factor);
  }

  cpu::ForwardParams stored = make_params(c, query, actual);
  stored.key = key.view;
  stored.value = value.view;
  stored.key_storage = key.storage;
  stored.value_storage = value.storage;
  run_forward(table, stored, threads);
  check(same_bits(expected.output, actual.output), c.name() + " output");
  check(same_bits(expected.lse, actual.lse), c.name() + " lse");
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const ScalarKind dtypes[] = {ScalarKind::kFloat32, ScalarKind::kBFloat16, ScalarKind::kFloat16,
                               ScalarKind::kFloat64};
  const int64_t pages[] = {1, 3, 8, 16, 24, 256};
  const int64_t lengths[][2] = {{1, 1}, {1, 300}, {5, 37}, {17, 1100}, {20, 90}, {33, 1100}, {3, 0}, {0, 7}};
  int64_t n = 0;
  const int64_t rows_across[][2] = {{1, 300}, {5, 37}, {16, 129}, {2, 95}, {3, 1}, {20, 90}, {33, 1100}};
  for (const ScalarKind dtype : dtypes) {
    for (const int64_t page_rows : {0, 24, 64}) {
      for (const auto& length : rows_across) {
        for (const int64_t dim : {1, 7, 16, 40, 64, 67}) {
          Case c;
          c.dtype = dtype;
          c.across = true;
          c.page_rows = page_rows;
          c.query_len = length[0], c.key_len = length[1];
          c.head_dim = dim, c.value_dim = dim % 5 == 0 ? dim + 9 : dim;
          if (++n % 4 == 0) c.stored = n % 8 == 0 ? ScalarKind::kInt8 : ScalarKind::kFloat8E4m3;
          all.push_back(c);
        }
      }
    }
    for (const int64_t page_rows : pages) {
      for (const auto& length : lengths) {
        Case c;
        c.dtype = dtype;
        c.page_rows = page_rows;
        c.query_len = length[0], c.key_len = length[1];
        c.head_dim = ++n % 3 == 0 ? 64 : 1 + n * 7 % 40;
        c.value_dim = n % 4 == 0 ? 64 : 1 + n * 5 % 50;
        all.push_back(c);
        for (const ScalarKind stored : {ScalarKind::kInt8, ScalarKind::kFloat8E4m3}) {
          c.stored = stored;
          c.key_factor = n % 2 ? 0.5 : 1;
          c.value_factor = n % 3 ? 2 : 1;
          all.push_back(c);
        }
      }
    }
  }
  return all;
}

}  // namespace
}  // namespace attn_ext::test

int main(int argc, char** argv) {
  return attn_ext::test::run_tests(argc, argv, [](const auto& set, auto selection) {
    int64_t count = 0;
    for (const auto& c : attn_ext::test::cases()) {
      if (!attn_ext::test::has_own_kernels(set, c.dtype) || !selection.takes(c.name(), c.work())) continue;
      attn_ext::test::run(*set.kernels, c, attn_ext::test::kRacesOnly ? 3 : 1 + static_cast<int>(count % 3));
      ++count;
    }
    return count;
  });
}
