// Where dS goes that is the mask's gradient.
#pragma once

#include "../interface/params.h"
#include "../matrix/matrix.h"
#include "../vector/convert.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Sums over whatever the mask broadcasts over, or (view not wide) numbers that are written once, rounded.
template <typename S>
class MaskGrad {
 public:
  using T = typename S::Accum;

  MaskGrad() = default;  // not wanted
  // data: the caller's, or another copy of the sums. Sets: nothing has been added to them.
  MaskGrad(const ResultView& view, void* data, bool sets = false)
      : view_(&view), data_(data), column_stride_(view.column_stride), wide_(view.wide), sets_(sets) {}

  bool wanted() const { return data_ != nullptr; }
  bool sets() const { return sets_; }
  void* data() const { return data_; }
  const ResultView& view() const { return *view_; }
  int64_t place(int64_t batch, int64_t head, int64_t row, int64_t key) const {
    return row_offset(*view_, batch, head, row) + key * column_stride_;
  }

  // Sums of keys that are neighbours, or null: for these, or where they are not, there is put().
  T* sums(int64_t place) const {
    return wide_ && column_stride_ == 1 ? static_cast<T*>(data_) + place : nullptr;
  }

  // dS of one row and up to kLane keys, the first of them at `place`; the mask has keys.
  ATTN_EXT_INLINE void put(int64_t place, Vec<T> grads, int64_t count) const {
    if (wide_) {
      T* sums = static_cast<T*>(data_) + place;
      if (!sets_) return add_row(sums, column_stride_, grads, count);
      grads += Vec<T>{};  // as if added to 0, which -0 is not
      return count == S::kLane ? store(sums, grads) : store_partial(sums, grads, count);
    }
    auto* to = static_cast<typename S::Element*>(data_) + place;
    count == S::kLane ? store_element(to, grads) : store_element_partial(to, grads, count);
  }

  // dS of one row and `count` keys.
  ATTN_EXT_INLINE void put_row(int64_t place, const T* grads, int64_t count) const {
    if (column_stride_ == 0) {
      Vec<T> sum = {};
      for (int64_t j = 0; j < count; j += S::kLane) sum += load(grads + j);
      static_cast<T*>(data_)[place] += lane_sum<T>(sum);
      return;
    }
    int64_t j = 0;
    for (; j + S::kLane <= count; j += S::kLane) put(place + j * column_stride_, load(grads + j), S::kLane);
    if (j < count) put(place + j * column_stride_, load(grads + j), count - j);
  }

 private:
  const ResultView* view_ = nullptr;
  void* data_ = nullptr;
  int64_t column_stride_ = 0;  // of the view, where every vector asks for it
  bool wide_ = true;
  bool sets_ = false;  // of sums, whose columns are neighbours then
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
