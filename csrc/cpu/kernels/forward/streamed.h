// QueryBlock: scores and values for a handful of query rows, bound by reading keys and values once: nothing
// is packed, and rows are read where they lie, in the order in which they lie.
#pragma once

#include "../matrix/row_dots.h"
#include "../matrix/rows_ahead.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// So far ahead of what is being read, memory is asked for what comes next: into the second cache, as the
// first can wait for too few lines at a time.
constexpr int64_t kPrefetchBytes = 16384;

// Rows of `dim` elements that kPrefetchBytes hold, in whole vectors of keys.
template <typename S>
ATTN_EXT_INLINE int64_t prefetch_distance(int64_t dim) {
  return round_up(kPrefetchBytes / larger(1, dim * static_cast<int64_t>(sizeof(typename S::Element))),
                  S::kLane);
}

// Row `next` of `rows`, or, where a run has ended before, what is read after it: rows of `after`, of which
// the first is read when the run ends.
template <typename Element>
ATTN_EXT_INLINE RowsAhead rows_ahead(const Matrix<Element>& rows, int64_t next, int64_t run_end,
                                     const Matrix<Element>& after) {
  constexpr int64_t kBytes = sizeof(Element);
  const Matrix<Element>& m = next < run_end ? rows : after;
  const Element* data = m.data + (next < run_end ? next : next - run_end) * m.row_stride;
  return {reinterpret_cast<const char*>(data), m.row_stride * kBytes};
}

// S (rows, keys) = Q . K^T, a vector of keys at a time.
template <typename S>
void QueryBlock<S>::stream_scores(int64_t band) {
  const Matrix<Element> key =
      rows_of<Element>(params_.key, batch_, key_head_, block_key_, block_count_, params_.shape.head_dim);
  const Element* value = row_pointer<const Element>(params_.value, batch_, key_head_, block_key_);
  const int64_t distance = prefetch_distance<S>(key.columns);
  for (int64_t i = 0; i < run_count_; ++i) {
    const Range run = runs_[i];
    // After the last key come the values.
    const Matrix<Element> after{value + run.begin * params_.value.row_stride, params_.value.row_stride, 1, 0,
                                0};
    for (int64_t j = run.begin; j < run.end; j += S::kLane) {
      RowsAhead ahead;
      if (band == 0) ahead = rows_ahead(key, j + distance, run.end, after);
      Matrix<Element> rows = key;
      rows.data += j * key.row_stride;
      if (key.column_stride != 1 || j + S::kLane > key.rows) {
        gather_block(key, j, S::kLane, 0, key.columns, s_.key_rows);
        rows.data = s_.key_rows;
        rows.row_stride = key.columns;
      }
      each_few_rows<S>(band, band + band_rows(band), [&](auto count, int64_t r) {
        dot_rows<S, decltype(count)::value>(s_.query + r * s_.query_stride, s_.query_stride, rows, ahead,
                                            score_row(band, r) + j, s_.score_stride);
        ahead = {};
      });
    }
  }
}

// Of out (Rows, Dv) (+)= left (Rows, depth) . rows (depth, Dv) the columns from `column` on: Vectors * lanes
// of them, or the `columns` that are left.
template <typename S>
struct StreamArgs {
  int64_t depth;  // in operands
  const typename S::Operand* left;
  int64_t left_stride;
  const typename S::Element* rows;
  int64_t row_stride;
  RowsAhead ahead;
  int64_t column, columns;
  typename S::Accum* out;
  int64_t out_stride;
  bool fresh;
};

template <typename S, int Rows, int Vectors, bool Partial>
void stream_product(const StreamArgs<S>& args) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  constexpr int kWidth = kLanes<T>;
  constexpr int64_t kBytes = Vectors * kWidth * static_cast<int64_t>(sizeof(Element));
  T* out = args.out + args.column;
  const int64_t out_stride = args.out_stride;
  Vec<T> sums[Rows][Vectors] = {};
  if (!args.fresh) {
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load(out + r * out_stride + v * kWidth);
    }
  }
  const Operand* left = args.left;
  const Element* row = args.rows + args.column;
  const char* next = args.ahead.next;
  if (next != nullptr) next += args.column * static_cast<int64_t>(sizeof(Element));
  const int64_t stride = args.row_stride;
  for (int64_t k = 0; k < args.depth; ++k, row += S::kDepth * stride) {
    if (next != nullptr) {
#pragma GCC unroll 2
      for (int d = 0; d < S::kDepth; ++d, next += args.ahead.row_bytes) {
#pragma GCC unroll 8
        for (int64_t b = 0; b < kBytes; b += 64) __builtin_prefetch(next + b, 0, 2);
      }
    }
    Vec<Operand> value[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      value[v] = Partial ? load_row_operands_partial<typename S::Product>(row, stride, args.columns)
                         : load_row_operands<typename S::Product>(row + v * kWidth, stride);
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Vec<Operand> weight = broadcast(left[r * args.left_stride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = S::Product::step(weight, value[v], sums[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(out + r * out_stride + v * kWidth, sums[r][v]);
  }
}

template <typename S, int Rows>
ATTN_EXT_INLINE void stream_columns(const StreamArgs<S>& args, int64_t vectors) {
  constexpr int kThree = kTileVectors >= 3 ? 3 : 1, kFour = kTileVectors >= 4 ? 4 : 1;
  static constexpr void (*kTable[])(const StreamArgs<S>&) = {
      stream_product<S, Rows, 1, true>, stream_product<S, Rows, 1, false>, stream_product<S, Rows, 2, false>,
      stream_product<S, Rows, kThree, false>, stream_product<S, Rows, kFour, false>};
  kTable[vectors](args);
}

// O (rows, Dv) = P (rows, keys) . V (keys, Dv), some keys at a time.
template <typename S>
void QueryBlock<S>::stream_values(int64_t band) {
  const Matrix<Element> value =
      rows_of<Element>(params_.value, batch_, key_head_, block_key_, block_count_, params_.shape.value_dim);
  // After the last value come the keys of the next piece.
  const Matrix<Element> after{
      row_pointer<const Element>(params_.key, batch_, key_head_, block_key_ + block_count_),
      params_.key.row_stride, 1, 0, 0};
  const int64_t distance = prefetch_distance<S>(value.columns);
  StreamArgs<S> args{};
  args.fresh = true;
  BadRows bad;
  bad.count = 0;
  for (int64_t i = 0; i < run_count_; ++i) {
    const Range run = runs_[i];
    for (int64_t j = run.begin; j < run.end; j += kStreamKeys, args.fresh = false) {
      const Range keys{j, smaller(j + kStreamKeys, smaller(run.end, block_count_))};
      args.depth = depth_of<Product>(keys.end - j);
      args.rows = value.data + j * value.row_stride;
      args.row_stride = value.row_stride;
      args.ahead = {};
      if (band == 0) args.ahead = rows_ahead(value, j + distance, run.end, after);
      if (careful_ || value.column_stride != 1 || j + args.depth * S::kDepth > value.rows) {
        gather_values(value, keys, bad);
        args.rows = s_.value_rows;
        args.row_stride = value.columns;
        args.ahead = {};
      }
      each_few_rows<S>(band, band + band_rows(band), [&](auto count, int64_t r) {
        stream_rows<decltype(count)::value>(band, r, j, args);
        args.ahead = {};
      });
      if (bad.count > 0) add_bad_values(band, 0, values_of(0, value.columns, keys), bad, keys.begin);
    }
  }
  if (!args.fresh) memset(s_.tile_started, 1, static_cast<size_t>(rows_));
}

// For `Rows` rows from `row` on and the keys from `key` on, that args.rows holds.
template <typename S>
template <int Rows>
void QueryBlock<S>::stream_rows(int64_t band, int64_t row, int64_t key, StreamArgs<S>& args) {
  const int64_t value_dim = params_.shape.value_dim;
  args.left = reinterpret_cast<const Operand*>(score_row(band, row)) + key / S::kDepth;
  args.left_stride = s_.score_stride;
  args.out = s_.output + row * s_.output_stride;
  args.out_stride = s_.output_stride;
  for (args.column = 0; args.column < value_dim;) {
    args.columns = value_dim - args.column;
    const int64_t vectors = smaller(args.columns / S::kLane, kTileVectors);
    stream_columns<S, Rows>(args, vectors);
    args.column += larger(vectors, 1) * S::kLane;
  }
}

template <typename S>
void QueryBlock<S>::keep_weights(int64_t band) const {
  const AttentionShape& shape = params_.shape;
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    const int64_t row = (batch_ * shape.query_heads + s_.row_head[r]) * shape.query_len + s_.row_index[r];
    T* to = kept_weights_ + row * kept_stride_ + block_key_;
    fill_span(to, 0, round_up(block_count_, S::kLane), static_cast<T>(0));
    for (int64_t i = 0; i < run_count_; ++i) {
      memcpy(to + runs_[i].begin, score_row(band, r) + runs_[i].begin,
             static_cast<size_t>(runs_[i].end - runs_[i].begin) * sizeof(T));
    }
  }
}

// Copies the values of `keys`, and zero for the keys that fill up the last operand. In careful mode NaN and
// Inf are left out, and noted.
template <typename S>
void QueryBlock<S>::gather_values(const Matrix<Element>& value, Range keys, BadRows& bad) const {
  const int64_t width = value.columns, rows = round_up(keys.end - keys.begin, S::kDepth);
  gather_block(value, keys.begin, rows, 0, width, s_.value_rows);
  if (!careful_) return;
  const Matrix<Element> copy{s_.value_rows, width, 1, rows, width};
  find_bad_rows(copy, bad);
  finite_only(copy, s_.value_rows);
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
