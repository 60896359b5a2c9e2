// Rows of keys and values wherever a cache stores them: one after the other or in pages, as elements or in a
// narrower type. What a product reads are elements, so that no bit of a result depends on where they came
// from; but a few rows of bfloat16 that a matrix unit would multiply are read as floats from a narrower type.
#pragma once

#include "../vector/convert.h"
#include "across.h"
#include "gather.h"
#include "matrix.h"
#include "rows_ahead.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// f(Type{}) for the type in which rows are stored.
template <typename Element, typename F>
ATTN_EXT_INLINE void with_stored_type(ScalarKind kind, F f) {
  if constexpr (sizeof(Element) == 1) {  // rows of the narrowest types are read as they are
    f(Element{});
  } else {
    switch (kind) {
      case ScalarKind::kInt8:
        return f(int8_t{});
      case ScalarKind::kFloat8E4m3:
        return f(Float8E4m3{});
      case ScalarKind::kBFloat16:
        return f(BFloat16{});
      case ScalarKind::kFloat16:
        return f(Float16{});
      case ScalarKind::kFloat32:
        return f(float{});
      default:
        return f(Element{});
    }
  }
}

template <typename Element, typename Stored>
ATTN_EXT_INLINE void copy_elements(const Stored* from, int64_t count, Element* to) {
  if constexpr (std::is_same_v<Element, Stored>) {
    memcpy(to, from, static_cast<size_t>(count) * sizeof(Element));
  } else {
    using T = Compute<Element>;
    int64_t i = 0;
    if constexpr (std::is_same_v<T, float>) {
      for (; i + kLanes<T> <= count; i += kLanes<T>) store_element(to + i, load_compute(from + i));
      if (i < count) {
        Stored rest[kLanes<T>] = {};
        memcpy(rest, from + i, static_cast<size_t>(count - i) * sizeof(Stored));
        store_element_partial(to + i, load_compute(rest), count - i);
      }
    } else {
      for (; i < count; ++i) to[i] = static_cast<T>(to_compute(from[i]));
    }
  }
}

// How a type is named that rows can be read as where they lie.
template <typename Element>
constexpr ScalarKind kStoredKind = std::is_same_v<Element, int8_t>       ? ScalarKind::kInt8
                                   : std::is_same_v<Element, Float8E4m3> ? ScalarKind::kFloat8E4m3
                                                                         : ScalarKind::kNone;

// Rows of smaller pages are copied: they are read in place too few at a time.
constexpr int64_t kSmallestPage = 8;

template <typename Element>
class StoredRows {
 public:
  // Columns [column, column + columns) of the rows of a key head.
  StoredRows(const TensorView& view, const Storage& storage, int64_t batch, int64_t head, int64_t column,
             int64_t columns)
      : view_(view), storage_(storage), batch_(batch), head_(head), column_(column), columns_(columns) {}

  int64_t columns() const { return columns_; }
  bool in_pages() const { return storage_.pages != nullptr; }
  bool is_converted() const { return storage_.kind != kStoredKind<Element>; }

  // From row `first` on, as many of `count` rows as lie in one page, or all where there are none.
  int64_t in_page(int64_t first, int64_t count) const {
    return in_pages() ? smaller(count, storage_.page_rows - first % storage_.page_rows) : count;
  }

  // Whether the elements of a column are neighbours, and those of a row are not.
  bool lie_across() const { return lies_across(view_); }

  // Whether the rows are elements, row_stride apart.
  bool lie_in_place(int64_t first, int64_t count) const {
    return !is_converted() && in_page(first, count) == count;
  }

  // Where they lie; lie_in_place() of all that is read.
  Matrix<Element> in_place(int64_t first, int64_t count) const {
    return {element<Element>(first), view_.row_stride, view_.column_stride, count, columns_};
  }

  // Where they lie, or else copied to `buffer`.
  Matrix<Element> rows(int64_t first, int64_t count, Element* buffer) const {
    if (lie_in_place(first, count)) return in_place(first, count);
    copy(first, count, count, buffer);
    return {buffer, columns_, 1, count, columns_};
  }

  // `count` rows, and zero up to `padded` rows, dense in `to`. Memory is asked for what lies `distance` rows
  // ahead, up to row `end`.
  void copy(int64_t first, int64_t count, int64_t padded, Element* to, int64_t distance = 0,
            int64_t end = 0) const;

  // Whether each row begins where the one before it ends, but for pages.
  bool are_dense() const { return view_.row_stride == columns_; }

  // Rows to ask memory for while others are read in place. The pages end with row `end`.
  RowsAhead ahead(int64_t row, int64_t end) const {
    if (view_.column_stride != 1 || is_converted() ||
        (in_pages() && (row >= end || storage_.page_rows < kSmallestPage)))
      return {};
    constexpr int64_t kBytes = sizeof(Element);
    return {reinterpret_cast<const char*>(element<Element>(row)), view_.row_stride * kBytes};
  }

 private:
  template <typename Stored>
  void copy_row(const Stored* from, Element* to) const {
    const int64_t stride = view_.column_stride;
    if (stride == 1) return copy_elements(from, columns_, to);
    if constexpr (std::is_same_v<Element, Stored>) {
      gather_row(from, stride, columns_, to);
    } else {
      for (int64_t c = 0; c < columns_; ++c) copy_elements(from + c * stride, 1, to + c);
    }
  }

  template <typename Stored>
  const Stored* element(int64_t row) const {
    int64_t page = 0;
    if (in_pages()) {
      page = storage_.pages[row / storage_.page_rows] * storage_.page_stride;
      row %= storage_.page_rows;
    }
    return row_pointer<const Stored>(view_, batch_, head_, row) + page + column_ * view_.column_stride;
  }

  const TensorView& view_;
  const Storage& storage_;
  const int64_t batch_, head_, column_, columns_;
};

template <typename Element>
__attribute__((noinline)) void StoredRows<Element>::copy(int64_t first, int64_t count, int64_t padded,
                                                         Element* to, int64_t distance, int64_t end) const {
  with_stored_type<Element>(storage_.kind, [&](auto example) {
    using Stored = decltype(example);
    for (int64_t r = 0; r < count;) {
      const int64_t together = in_page(first + r, count - r);
      const Stored* from = element<Stored>(first + r);
      if constexpr (std::is_same_v<Element, Stored>) {
        if (lie_across()) {
          copy_across<Element>({from, view_.column_stride, together, columns_}, to, distance > 0);
          r += together;
          to += together * columns_;
          continue;
        }
      }
      if constexpr (std::is_same_v<Element, Stored>) {
        if (are_dense() && view_.column_stride == 1 && first + r + distance >= end) {
          memcpy(to, from, static_cast<size_t>(together * columns_) * sizeof(Element));
          r += together;
          to += together * columns_;
          continue;
        }
      }
      for (int64_t i = 0; i < together; ++i, ++r, from += view_.row_stride, to += columns_) {
        if (first + r + distance < end) {
          prefetch_row(element<Stored>(first + r + distance), view_.column_stride, columns_);
        }
        copy_row(from, to);
      }
    }
  });
  memset(to, 0, static_cast<size_t>((padded - count) * columns_) * sizeof(Element));
}

// Whether rows are stored as their view says.
ATTN_EXT_INLINE bool is_plain(const Storage& storage) {
  return storage.kind == ScalarKind::kNone && storage.pages == nullptr && storage.scale.data == nullptr;
}

// The factors of rows [first, first + count) of a key head. A page is looked up once for all its rows: a
// division for each would cost a fifth of the time that an int8 cache takes.
template <typename T>
inline void row_factors(const Storage& storage, int64_t head, int64_t first, int64_t count, T* out) {
  const int64_t stride = storage.scale.row_stride, page_rows = storage.page_rows;
  for (int64_t r = first, next; r < first + count; r = next) {
    int64_t page = 0, row = r;
    next = first + count;
    if (storage.pages != nullptr) {
      const int64_t index = r / page_rows;
      page = storage.pages[index];
      row = r - index * page_rows;
      next = smaller(next, r + page_rows - row);
    }
    const float* factors = row_pointer<const float>(storage.scale, page, head, row);
    for (int64_t i = 0; i < next - r; ++i) out[r - first + i] = factors[i * stride];
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
