#include "dense_mask.h"

#include <ATen/Functions.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "call.h"
#include "huge_pages.h"
#include "tasks.h"

namespace attn_ext::cpu {

namespace {

// What is larger is not doubled. Number by number, into memory that is touched for the first time, a copy
// takes as long as a call that reads the mask once takes longer without one.
constexpr size_t kMostBytes = size_t{64} << 20, kMostByNumber = size_t{8} << 20;
constexpr double kNumberWork = 4;  // to copy one, in multiply-adds

/// A dim by its size and its strides in both tensors.
struct Dim {
  int64_t size, from, to;
};

bool has_several(const at::Tensor& mask, int64_t dim) {
  return mask.size(dim) > 1 && mask.stride(dim) != 0;
}

bool has_scattered_rows(const at::Tensor& mask) {
  return mask.dim() >= 2 && mask.numel() > 0 && has_several(mask, -1) && mask.stride(-1) != 1 &&
         has_several(mask, -2);
}

/// Without what is there by broadcasting.
at::Tensor without_repeats(const at::Tensor& mask) {
  at::Tensor once = mask;
  for (int64_t dim = 0; dim < mask.dim(); ++dim) {
    if (mask.stride(dim) == 0) {
      once = once.narrow(dim, 0, 1);
    }
  }
  return once;
}

/// Of the dims but the last the one whose numbers lie closest to each other.
int64_t closest_dim(const at::Tensor& mask) {
  int64_t closest = mask.dim() - 2;
  for (int64_t dim = 0; dim + 1 < mask.dim(); ++dim) {
    if (has_several(mask, dim) && mask.stride(dim) < mask.stride(closest)) {
      closest = dim;
    }
  }
  return closest;
}

/// Vectors that every processor has: squares of them are turned around in registers.
template <class Element>
struct Vector {
  static constexpr int kLanes = 16 / static_cast<int>(sizeof(Element));
  typedef Element Type __attribute__((vector_size(16)));
};

/// Lanes of a and b in turns, from lane `First` on.
template <class Element, int First, int... Lane>
auto in_turns(typename Vector<Element>::Type a, typename Vector<Element>::Type b,
              std::integer_sequence<int, Lane...> /*lanes*/) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (First + Lane / 2 + Lane % 2 * Vector<Element>::kLanes)...);
#else  // GCC has that from version 12 on
  using Lanes = typename Vector<Element>::Type;
  return __builtin_shuffle(a, b, Lanes{(First + Lane / 2 + Lane % 2 * Vector<Element>::kLanes)...});
#endif
}

template <class Element>
void turn_square(const Element* from, int64_t from_stride, Element* to, int64_t to_stride) {
  constexpr int kSide = Vector<Element>::kLanes, kHalf = kSide / 2;
  constexpr std::make_integer_sequence<int, kSide> kLanes;
  struct Square {
    typename Vector<Element>::Type rows[kSide];
  } square;
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) {
    std::memcpy(&square.rows[i], from + i * from_stride, sizeof(square.rows[i]));
  }
#pragma GCC unroll 4
  for (int turned = 1; turned < kSide; turned *= 2) {
    const Square before = square;
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      square.rows[2 * i] = in_turns<Element, 0>(before.rows[i], before.rows[i + kHalf], kLanes);
      square.rows[2 * i + 1] = in_turns<Element, kHalf>(before.rows[i], before.rows[i + kHalf], kLanes);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) {
    std::memcpy(to + i * to_stride, &square.rows[i], sizeof(square.rows[i]));
  }
}

/// Whether squares of vectors fit.
bool turns_squares(int64_t side, const Dim& rows, int64_t columns) {
  return rows.from == 1 && rows.size >= side && columns >= side;
}

/// body(row, column) for each square; the last overlap. RowsFirst: all rows of a column's before the next.
template <class Element, bool RowsFirst, class Body>
void each_square(int64_t rows, int64_t columns, Body body) {
  constexpr int64_t kSide = Vector<Element>::kLanes;
  const int64_t outer = RowsFirst ? columns : rows, inner = RowsFirst ? rows : columns;
  for (int64_t i = 0; i < outer; i += kSide) {
    const int64_t a = std::min(i, outer - kSide);
    for (int64_t j = 0; j < inner; j += kSide) {
      const int64_t b = std::min(j, inner - kSide);
      RowsFirst ? body(b, a) : body(a, b);
    }
  }
}

/// Some columns of all rows. What lies beside each other is read at once, into a block that the nearest cache
/// holds, as columns a power of two apart put one another out of it; columns that lie beside each other go
/// straight to where they belong.
template <class Element>
void turn_around(const Element* from, Element* to, const Dim& rows, const Dim& columns, int64_t begin,
                 int64_t end) {
  constexpr int64_t kRows = 64 / static_cast<int64_t>(sizeof(Element)), kColumns = 64;
  Element block[kRows][kColumns];
  for (int64_t row = 0; row < rows.size; row += kRows) {
    const int64_t row_count = std::min(kRows, rows.size - row);
    for (int64_t column = begin; column < end; column += kColumns) {
      const int64_t count = std::min(kColumns, end - column);
      const Element* first = from + row * rows.from + column * columns.from;
      Element* out = to + row * rows.to + column;
      const bool squares = turns_squares(Vector<Element>::kLanes, {row_count, rows.from, 0}, count);
      if (squares && columns.from <= 2 * kRows) {
        each_square<Element, false>(row_count, count, [&](int64_t r, int64_t c) {
          turn_square(first + r + c * columns.from, columns.from, out + r * rows.to + c, rows.to);
        });
        continue;
      }
      if (squares) {
        each_square<Element, true>(row_count, count, [&](int64_t r, int64_t c) {
          turn_square(first + r + c * columns.from, columns.from, &block[r][c], kColumns);
        });
      } else {
        for (int64_t c = 0; c < count; ++c) {
          for (int64_t r = 0; r < row_count; ++r) {
            block[r][c] = first[r * rows.from + c * columns.from];
          }
        }
      }
      for (int64_t r = 0; r < row_count; ++r) {
        std::memcpy(out + r * rows.to, block[r], static_cast<size_t>(count) * sizeof(Element));
      }
    }
  }
}

template <class Element>
void copy_turned(const at::Tensor& from, const at::Tensor& to) {
  constexpr int64_t kColumns = 1024;  // of a task
  const int64_t closest = closest_dim(from), last = from.dim() - 1;
  const auto dim_of = [&](int64_t dim) { return Dim{from.size(dim), from.stride(dim), to.stride(dim)}; };
  c10::SmallVector<Dim, 6> others;
  for (int64_t dim = 0; dim < last; ++dim) {
    if (dim != closest) {
      others.push_back(dim_of(dim));
    }
  }
  const Dim rows = dim_of(closest), columns = dim_of(last);
  const int64_t stretches = (columns.size + kColumns - 1) / kColumns;
  const int64_t planes = std::accumulate(others.begin(), others.end(), int64_t{1},
                                         [](int64_t count, const Dim& dim) { return count * dim.size; });
  const auto* source = static_cast<const Element*>(from.const_data_ptr());
  auto* target = static_cast<Element*>(to.mutable_data_ptr());
  const auto turn_stretch = [&](int64_t task) {
    const int64_t begin = task % stretches * kColumns;
    int64_t plane = task / stretches, read = 0, written = 0;
    for (auto dim = others.rbegin(); dim != others.rend(); ++dim) {
      read += plane % dim->size * dim->from;
      written += plane % dim->size * dim->to;
      plane /= dim->size;
    }
    turn_around(source + read, target + written, rows, columns, begin,
                std::min(begin + kColumns, columns.size));
  };
  const int threads = useful_threads(kNumberWork * static_cast<double>(from.numel()));
  run_rounds(EqualRounds<decltype(turn_stretch)>{1, planes * stretches, turn_stretch}, threads);
}

/// Of which a window lets through so many keys of each row at most.
int64_t visible_scores(const CallParams& params) {
  const AttentionShape& shape = params.shape;
  const int64_t left = params.rule.window_left, right = params.rule.window_right;
  int64_t keys = shape.key_len;
  if (left >= 0 && right >= 0) {
    keys = std::min(keys, std::min(left, keys) + std::min(right, keys) + 1);
  }
  return shape.batch * shape.query_heads * shape.query_len * keys;
}

}  // namespace

int64_t dense_mask_bytes(const at::Tensor& mask, const CallParams& params) {
  if (!mask.defined() || !has_scattered_rows(mask)) {
    return 0;
  }
  const at::Tensor once = without_repeats(mask);
  const int64_t scores = visible_scores(params);
  const bool is_hidden = scores < once.numel();
  const bool overlaps = once.nbytes() > once.storage().nbytes();  // rows that share their numbers
  const int64_t closest = closest_dim(once);
  const bool by_squares =
      turns_squares(16 / once.element_size(), {once.size(closest), once.stride(closest), 0}, once.size(-1));
  const size_t most = by_squares || scores >= 2 * once.numel() ? kMostBytes : kMostByNumber;
  return is_hidden || overlaps || once.nbytes() > most ? 0 : static_cast<int64_t>(once.nbytes());
}

at::Tensor dense_mask(const at::Tensor& mask, const CallParams& params) {
  if (dense_mask_bytes(mask, params) == 0) {
    return mask;
  }
  const at::Tensor once = without_repeats(mask);
  const at::Tensor dense = with_huge_pages(at::empty(once.sizes(), once.options()));
  switch (once.element_size()) {
    case 1:
      copy_turned<uint8_t>(once, dense);
      break;
    case 2:
      copy_turned<uint16_t>(once, dense);
      break;
    case 4:
      copy_turned<uint32_t>(once, dense);
      break;
    default:
      copy_turned<uint64_t>(once, dense);
  }
  return dense.expand(mask.sizes());
}

}  // namespace attn_ext::cpu
