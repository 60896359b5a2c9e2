#include "dense_mask.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <numeric>

#include "huge_pages.h"

namespace attn_ext::cpu {

namespace {

/// A larger mask takes as long to be copied, into memory that is touched for the first time, as a call that
/// reads it once takes longer with rows like these.
constexpr size_t kCachedBytes = size_t{8} << 20;

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

/// Some columns of all rows, so many rows at a time that the nearest cache holds what is read of them.
template <class Element>
void turn_around(const Element* from, Element* to, const Dim& rows, const Dim& columns, int64_t begin,
                 int64_t end) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  for (int64_t row = 0; row < rows.size; row += kLine) {
    const int64_t row_end = std::min(row + kLine, rows.size);
    for (int64_t r = row; r < row_end; ++r) {
      for (int64_t c = begin; c < end; ++c) {
        to[r * rows.to + c] = from[r * rows.from + c * columns.from];
      }
    }
  }
}

template <class Element>
void copy_turned(const at::Tensor& from, const at::Tensor& to) {
  constexpr int64_t kColumns = 256, kTask = int64_t{1} << 15;  // numbers, of a task at least
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
  const int64_t grain = std::max<int64_t>(1, kTask / (rows.size * std::min(columns.size, kColumns)));
  at::parallel_for(0, planes * stretches, grain, [&](int64_t first, int64_t end) {
    for (int64_t task = first; task < end; ++task) {
      const int64_t begin = task % stretches * kColumns;
      int64_t plane = task / stretches, read = 0, written = 0;
      for (auto dim = others.rbegin(); dim != others.rend(); ++dim) {
        read += plane % dim->size * dim->from;
        written += plane % dim->size * dim->to;
        plane /= dim->size;
      }
      turn_around(source + read, target + written, rows, columns, begin,
                  std::min(begin + kColumns, columns.size));
    }
  });
}

}  // namespace

at::Tensor with_dense_rows(const at::Tensor& mask, const CallSizes& sizes) {
  if (!mask.defined() || !has_scattered_rows(mask)) {
    return mask;
  }
  const at::Tensor once = without_repeats(mask);
  const int64_t scores = sizes.batch * sizes.heads * sizes.query_len * sizes.key_len;
  const bool read_once = scores < 2 * once.numel();
  const bool overlaps = once.nbytes() > once.storage().nbytes();  // rows that share their numbers
  if (overlaps || (read_once && once.nbytes() > kCachedBytes)) {
    return mask;
  }
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
