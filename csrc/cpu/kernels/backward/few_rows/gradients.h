// FewRowsBlock: from P and dS of a step to the gradients.
#pragma once

#include "../../matrix/finite.h"
#include "../../matrix/multiply.h"
#include "../store_rows.h"
#include "block.h"
#include "in_registers.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// What the NaN and Inf of the rows give to the keys that they see.
template <typename S>
void FewRowsBlock<S>::add_bad_rows(const KeySide& side, Range keys) const {
  const int64_t count = params_.shape.query_len;
  for (int64_t first = 0; first < rows_; first += count) {
    add_nonfinite(
        rows_of_head(side.rows, first / count, side.dim), keys.end - keys.begin,
        [&](int64_t j, int64_t i) { return is_seen(first + i, keys.begin + j); },
        [&](int64_t j, int64_t i) { return side.left[(first + i) * kStepKeys + j]; },
        [&](int64_t j, int64_t c, Vec<T> sum, int64_t present) {
          add_row(s_.out + j * padded_dim<S>(side.dim) + c, 1, sum, present);
        });
  }
}

// Into the caller's tensor.
template <typename S>
void FewRowsBlock<S>::store_key_side(const KeySide& side, const ResultView& grad, Range keys) const {
  constexpr int64_t kSize = sizeof(Element);
  const int64_t dim = side.dim, padded = padded_dim<S>(dim), width = panel_width_of<S>(dim);
  const int64_t count = keys.end - keys.begin;
  // Past the caches by whole lines: a line that is written in part has to be read first.
  const bool staged = streamed_ && !grad.wide && grad.row_stride == dim && grad.column_stride == 1 &&
                      dim * kSize % kLineBytes != 0;
  if (!side.has_bad_rows && writes_from_registers(grad, rows_)) {
    Element* to = row_pointer<Element>(grad, unit_.batch, unit_.key_head, keys.begin);
    OuterProduct<S> product{side.left, side.right, padded, to, grad.row_stride, count, dim, side.scale};
    if (!staged) return write_outer(product, rows_, streamed_ && streams_from_registers<S>(grad, to, dim));
    product.to = staged_at(s_.stage, to);
    write_outer(product, rows_, false);
    return stream_rows(product.to, to, count * dim);
  }
  MultiplyArgs<PlainProduct<T>> args{};
  args.rows = count;
  args.columns = dim;
  args.depth = rows_;
  args.left = side.left;
  args.left_stride = 1;
  args.left_step = kStepKeys;
  args.right = {side.right, padded, width};
  args.right_width = width;
  args.out = s_.out;
  args.out_stride = padded;
  multiply<PlainProduct<T>, false>(args);
  if (side.has_bad_rows) add_bad_rows(side, keys);
  if (staged) {
    Element* to = row_pointer<Element>(grad, unit_.batch, unit_.key_head, keys.begin);
    return stream_gradient_rows<S>(s_.out, padded, to, count, dim, side.scale, s_.stage);
  }
  const HeadGradient<S> result{grad, unit_.batch, unit_.key_head, dim, side.scale, streamed_};
  result.write(s_.out, padded, keys);
}

// dQ += dS K. A key that is not finite must not meet the rows that do not see it.
template <typename S>
void FewRowsBlock<S>::add_grad_query(const Matrix<Element>& key, int64_t first_key, bool finite) const {
  const int64_t padded = padded_dim<S>(key.columns);
  if (finite && key.column_stride == 1 && rows_ <= kRegisterRows) {
    return add_keys<S>({grads_, key.data, key.row_stride, key.rows, key.columns, s_.grad_query, padded},
                       rows_);
  }
  MultiplyArgs<PlainProduct<T>> args{};
  args.rows = rows_;
  args.columns = key.columns;
  args.depth = key.rows;
  args.left = grads_;
  args.left_stride = kStepKeys;
  args.right_width = panel_width_of<S>(key.columns);
  args.out = s_.grad_query;
  args.out_stride = padded;
  if constexpr (std::is_same_v<Element, T>) {
    if (key.column_stride == 1 && key.columns == padded)
      args.right = {key.data, key.row_stride, args.right_width};
  }
  if (args.right.data == nullptr) {
    pack_rows<PlainProduct<T>>(key, 0, key.rows, s_.key_rows, padded);
    args.right = {s_.key_rows, padded, args.right_width};
  }
  if (finite) return multiply<PlainProduct<T>, true>(args);
  args.rows = args.depth = 1;
  const T* keys = args.right.data;
  for (int64_t r = 0; r < rows_; ++r) {
    for (int64_t j = 0; j < key.rows; ++j) {
      args.left = grads_ + r * kStepKeys + j;
      args.right.data = keys + j * args.right.row_stride;
      args.out = s_.grad_query + r * padded;
      if (is_seen(r, first_key + j)) multiply<PlainProduct<T>, true>(args);
    }
  }
}

template <typename S>
void FewRowsBlock<S>::store_key_sides(Range keys) const {
  const AttentionShape& shape = params_.shape;
  if (params_.grad_output.data == nullptr) {
    clear_key_side(params_.grad_value, keys, shape.value_dim);
  } else if (params_.grad_value.data != nullptr) {
    store_key_side({weights_, s_.grad_rows, params_.grad_output, bad_grads_, shape.value_dim, 1},
                   params_.grad_value, keys);
  }
  if (params_.grad_key.data != nullptr) {
    store_key_side({grads_, s_.query_rows, params_.query, bad_queries_, shape.head_dim,
                    static_cast<T>(params_.rule.scale)},
                   params_.grad_key, keys);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
