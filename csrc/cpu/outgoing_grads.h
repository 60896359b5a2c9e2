// The gradients that a backward pass gives, in the shapes of the inputs.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "../args.h"
#include "../memory_order.h"
#include "huge_pages.h"
#include "tasks.h"
#include "tensor_view.h"

namespace attn_ext::cpu {

/// The view's elements from a batch on.
inline TensorView from_batch(TensorView view, int64_t batch, int64_t element_bytes) {
  if (view.batch_offsets != nullptr) {
    view.batch_offsets += batch;
  } else if (view.data != nullptr) {
    view.data = static_cast<char*>(view.data) + batch * view.batch_stride * element_bytes;
  }
  return view;
}

/// The gradient of query, key or value. Where the input is broadcast over batch or heads, the kernels write
/// those of a slice of the batch at a time, unrounded, and they are added up in the input's own shape: batch
/// after batch and head after head, whatever the slices and the threads.
class OutgoingGrad {
 public:
  OutgoingGrad(const at::Tensor& input, at::ScalarType dtype, bool wanted, Views& views,
               const CallSizes& sizes, int64_t heads, int64_t columns)
      : heads_(heads),
        matrix_size_(input.size(-2) * columns),
        dtype_(dtype),
        is_wide_(dtype != input.scalar_type()) {
    if (!wanted) {
      return;
    }
    is_sum_ = input.numel() != sizes.batch * heads * matrix_size_;
    const auto options = input.options().dtype(dtype_);
    const auto accumulated = options.dtype(accumulation_dtype(dtype_));
    order_ = memory_order(input, input.dim());
    grad_ = is_sum_ ? at::zeros(input.sizes(), accumulated)
                    : with_huge_pages(at::empty_strided(
                          input.sizes(), dense_strides<int64_t>(input.sizes(), order_), options));
    view_ = views.writable(grad_);
    view_.column_stride = 1;
  }

  /// Of a batch, 0 where nothing is added up.
  int64_t slice_bytes() const { return is_sum_ ? heads_ * matrix_size_ * grad_.element_size() : 0; }

  /// Zero in what the kernels write to, where rows belong to no sequence.
  void zero_gaps(bool any) const {
    if (any && grad_.defined()) {
      (is_sum_ ? slice_ : grad_).zero_();
    }
  }

  void make_slice(int64_t batches, int64_t columns) {
    if (!is_sum_) {
      return;
    }
    slice_ = at::empty({batches, heads_, matrix_size_}, grad_.options());
    slice_view_.data = slice_.mutable_data_ptr();
    slice_view_.batch_stride = heads_ * matrix_size_;
    slice_view_.head_stride = matrix_size_;
    slice_view_.row_stride = columns;
    slice_view_.column_stride = 1;
    slice_view_.wide = true;
  }

  /// Where the kernels write the gradients of a slice that begins with this batch.
  ResultView slice_from(int64_t batch) const {
    if (is_sum_ || !grad_.defined()) {
      return slice_view_;
    }
    return {from_batch(view_, batch, grad_.element_size()), is_wide_};
  }

  void add_slice(int64_t batch, int64_t batches, int threads) const {
    if (is_sum_) {
      dtype_ == at::kDouble ? add<double>(batch, batches, threads) : add<float>(batch, batches, threads);
    }
  }

  at::Tensor result() const { return is_sum_ ? in_order(grad_.to(dtype_), order_) : grad_; }

 private:
  /// A task takes some elements of a head's matrix through all of the slice, of all heads where these have
  /// one sum.
  template <class T>
  void add(int64_t batch, int64_t batches, int threads) const {
    const int64_t spans = (matrix_size_ + kSpan - 1) / kSpan;
    const int64_t heads_apart = view_.head_stride != 0 ? heads_ : 1;
    const TensorView to = from_batch(view_, batch, sizeof(T));
    const auto add_span = [&](int64_t task) {
      const int64_t begin = task % spans * kSpan, end = std::min(begin + kSpan, matrix_size_);
      for (int64_t b = 0; b < batches; ++b) {
        const int64_t offset = to.batch_offsets != nullptr ? to.batch_offsets[b] : b * to.batch_stride;
        for (int64_t h = task / spans; h < heads_; h += heads_apart) {
          T* sum = static_cast<T*>(to.data) + offset + h * to.head_stride;
          const T* grad = static_cast<const T*>(slice_view_.data) + (b * heads_ + h) * matrix_size_;
          for (int64_t i = begin; i < end; ++i) {
            sum[i] += grad[i];
          }
        }
      }
    };
    run_rounds(EqualRounds<decltype(add_span)>{1, heads_apart * spans, add_span}, threads);
  }

  static constexpr int64_t kSpan = 2048;  // elements, which stay in the nearest cache

  int64_t heads_, matrix_size_;
  at::ScalarType dtype_;
  bool is_wide_;
  bool is_sum_ = false;
  MemoryOrder order_;
  at::Tensor grad_;  // in the input's own shape; a sum is contiguous until it is handed out
  TensorView view_;  // of it
  at::Tensor slice_;
  ResultView slice_view_;
};

/// The gradients of sinks, (sequences, batch, Hq), in the shape of the sinks and in their own dtype.
inline at::Tensor sum_sinks(Views& views, const CallSizes& sizes, const at::Tensor& grads,
                            const at::Tensor& sinks) {
  if (!grads.defined()) {
    return grads;
  }
  const at::Tensor sum = at::zeros(sinks.sizes(), grads.options());
  const TensorView view = views.per_head(sum);
  void* sums = sum.mutable_data_ptr();
  const auto add = [&](auto* to, const auto* from) {
    for (int64_t i = 0; i < grads.size(0) * sizes.batch; ++i) {
      const int64_t b = i % sizes.batch;
      const int64_t offset = view.batch_offsets != nullptr ? view.batch_offsets[b] : b * view.batch_stride;
      for (int64_t h = 0; h < sizes.heads; ++h) {
        to[offset + h * view.head_stride] += from[i * sizes.heads + h];
      }
    }
  };
  grads.scalar_type() == at::kDouble ? add(static_cast<double*>(sums), grads.const_data_ptr<double>())
                                     : add(static_cast<float*>(sums), grads.const_data_ptr<float>());
  return sum;
}

}  // namespace attn_ext::cpu
