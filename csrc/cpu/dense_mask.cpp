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

constexpr size_t kMostBytes = size_t{64} << 20;  // of a copy: what is larger is not doubled
constexpr double kNumberWork = 4;                // to copy one, in multiply-adds

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
  return __builtin_shufflevector(a, b, (First + Lane / 2 + Lane % 2 * Vector<Element>::kLanes)...);
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

/// Some columns of all rows. What lies beside each other is read at once, into a square that the nearest
/// cache holds: columns a power of two apart put one another out of it.
template <class Element>
void turn_around(const Element* from, Element* to, const Dim& rows, const Dim& columns, int64_t begin,
                 int64_t end) {
  constexpr int64_t kRows = 64 / static_cast<int64_t>(sizeof(Element)), kColumns = 64,
                    kStep = Vector<Element>::kLanes;
  if (rows.from == 1 && rows.size >= kStep && end - begin >= kStep) {  // the last squares overlap
    for (int64_t first = begin; first < end; first += kColumns) {
      for (int64_t r = 0; r < rows.size; r += kStep) {
        const int64_t row = std::min(r, rows.size - kStep);
        for (int64_t c = first; c < std::min(end, first + kColumns); c += kStep) {
          const int64_t column = std::min(c, end - kStep);
          turn_square(from + row + column * columns.from, columns.from, to + row * rows.to + column, rows.to);
        }
      }
    }
    return;
  }
  Element square[kRows][kColumns];
  for (int64_t row = 0; row < rows.size; row += kRows) {
    const int64_t row_count = std::min(kRows, rows.size - row);
    for (int64_t column = begin; column < end; column += kColumns) {
      const int64_t count = std::min(kColumns, end - column);
      const Element* first = from + row * rows.from + column * columns.from;
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t r = 0; r < row_count; ++r) {
          square[r][c] = first[r * rows.from + c * columns.from];
        }
      }
      for (int64_t r = 0; r < row_count; ++r) {
        std::memcpy(to + (row + r) * rows.to + column, square[r],
                    static_cast<size_t>(count) * sizeof(Element));
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
  return is_hidden || overlaps || once.nbytes() > kMostBytes ? 0 : static_cast<int64_t>(once.nbytes());
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
