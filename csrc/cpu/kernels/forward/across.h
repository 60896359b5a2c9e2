// QueryBlock: scores of keys, and products with values, that lie across memory, where they lie: for a handful
// of query rows, with the bits of those whose rows lie side by side.
#pragma once

#include "../interface/memory_ahead.h"
#include "../matrix/across_product.h"
#include "../matrix/row_dots.h"
#include "../matrix/shared_dots.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Of keys, so many are asked for ahead: some lines of each column.
template <typename Element>
constexpr int64_t kKeysAhead = 256 / static_cast<int64_t>(sizeof(Element));

// Of values, so far ahead: some squares of columns.
constexpr int64_t kValueBytesAhead = 16384;

// Whether keys are multiplied where they lie. They are copied where many columns are a large power of two
// apart, so that lines that are asked for put one another out of the second cache.
template <typename S>
bool QueryBlock<S>::multiplies_keys_across(const StoredRows<Element>& keys) const {
  const int64_t bytes = params_.key.column_stride * static_cast<int64_t>(sizeof(Element));
  return keys.lie_across() && keys.lie_in_place(0, params_.shape.key_len) &&
         (bytes & -bytes) * keys.columns() <= columns_to_ask_for();
}

// A panel at a time; which key is the first that is left.
template <typename S>
int64_t QueryBlock<S>::scores_across(int64_t band, const StoredRows<Element>& keys, Range run) const {
  const Matrix<Element> m = keys.in_place(block_key_, block_count_);
  SharedDotsArgs<S> args{};
  args.depth = ceil_div(m.columns, S::kDepth);
  args.left_stride = s_.query_stride;
  args.out_stride = s_.score_stride;
  int64_t j = run.begin;
  for (; j + kSharedPanel<S> <= smaller(run.end, block_count_); j += kSharedPanel<S>) {
    KeysAcross<S> panel{m.data + j, m.column_stride, m.columns, band == 0 ? kKeysAhead<Element> : 0};
    each_few_rows<S>(band, band + band_rows(band), [&](auto count, int64_t r) {
      args.left = s_.query + r * s_.query_stride;
      args.out = score_row(band, r) + j;
      shared_dots<S, decltype(count)::value, 2>(args, panel);
      panel.ahead = 0;
    });
  }
  return j;
}

template <typename S>
bool QueryBlock<S>::multiplies_values_across(const StoredRows<Element>& values) const {
  return kMultipliesAcross<S> && !careful_ && rows_ <= kMostRowsAcross<S> && values.lie_across() &&
         values.lie_in_place(0, params_.shape.key_len);
}

// Some columns at a time.
template <typename S>
void QueryBlock<S>::values_across(int64_t band, const StoredRows<Element>& values, Range keys,
                                  bool fresh) const {
  if constexpr (kMultipliesAcross<S>) {
    const int64_t count = smaller(keys.end, block_count_) - keys.begin;
    const Matrix<Element> m = values.in_place(block_key_ + keys.begin, count);
    const int64_t bytes = S::kLane * count * static_cast<int64_t>(sizeof(Element));
    const int64_t blocks = ceil_div(m.columns, S::kLane), blocks_ahead = larger(1, kValueBytesAhead / bytes);
    AcrossProduct<S> args{};
    args.left_stride = s_.score_stride;
    args.out_stride = s_.output_stride;
    args.fresh = fresh;
    for (int64_t c = 0; c < m.columns; c += S::kLane) {
      // After the last columns come those of the next keys.
      const int64_t later = c / S::kLane + blocks_ahead;
      const int64_t ahead = (later % blocks * S::kLane - c) * m.column_stride + later / blocks * count;
      args.right = {m.data + c * m.column_stride, m.column_stride, count, m.columns - c};
      args.ahead = ahead;
      each_few_rows<S>(band, band + band_rows(band), [&](auto rows, int64_t r) {
        constexpr int kRows = decltype(rows)::value;
        args.left = reinterpret_cast<const Operand*>(score_row(band, r)) + keys.begin / S::kDepth;
        args.out = s_.output + r * s_.output_stride + c;
        const bool whole = args.right.columns >= S::kLane;
        whole ? multiply_across<S, kRows, false>(args) : multiply_across<S, kRows, true>(args);
        args.ahead = 0;
      });
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
