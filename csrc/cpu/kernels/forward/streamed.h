// QueryBlock: scores and values for a handful of query rows, bound by reading keys and values once: nothing
// is packed, and rows are read where they lie, in the order in which they lie.
#pragma once

#include "../interface/memory_ahead.h"
#include "../matrix/row_dots.h"
#include "../matrix/rows_ahead.h"
#include "across.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// So far ahead of what is being read, memory is asked for what comes next: into the second cache, which on
// most processors can wait for more lines at a time than the first, or near, into that.
constexpr int64_t kPrefetchBytes = 16384, kNearPrefetchBytes = 8192;

struct Distance {
  int64_t rows;  // whole vectors of keys
  bool near;
};

// Of rows a power of two apart, few have room in the first cache; and what lies behind short ones is nothing
// that should take it.
template <int64_t Lane, typename Stored>
ATTN_EXT_INLINE Distance prefetch_distance(const StoredRows<Stored>& stored, int64_t key_len) {
  const int64_t row_bytes = larger(1, stored.columns() * static_cast<int64_t>(sizeof(Stored)));
  const bool near = stored.are_dense() && key_len * row_bytes > kNearPrefetchBytes && asks_into_first_cache();
  return {round_up((near ? kNearPrefetchBytes : kPrefetchBytes) / row_bytes, Lane), near};
}

// By so few query rows at most: more compute for longer than they read.
constexpr int64_t kPieceAheadRows = 16;

static_assert(kStreamKeys <= PieceAhead::kMostRows);

ATTN_EXT_INLINE bool lies_in_places(const TensorView& view, const Storage& storage) {
  return view.column_stride == 1 &&
         (storage.pages == nullptr || storage.page_rows % PieceAhead::kPageStep == 0);
}

// Whether the values of the piece, and then the keys of the next one, are asked for in many places at a time:
// where all of it is seen, and the rows of heads are not between each other.
template <typename S>
template <typename Stored>
bool QueryBlock<S>::asks_for_pieces() const {
  if (!in_pieces_) return false;
  const int64_t dim = params_.shape.head_dim;
  const bool whole = run_count_ == 1 && runs_[0].begin == 0 && runs_[0].end >= block_count_;
  const bool alike = dim == params_.shape.value_dim &&
                     params_.key_storage.kind == params_.value_storage.kind &&
                     lies_in_places(params_.key, params_.key_storage) &&
                     lies_in_places(params_.value, params_.value_storage);
  return whole && alike && !plan_.pieces.heads_together && rows_ <= kPieceAheadRows &&
         block_count_ * dim * static_cast<int64_t>(sizeof(Stored)) <= kPieceAheadBytes &&
         asks_in_many_places();
}

// The keys that lie behind the values of this piece, where memory is asked for in order: of the next piece,
// or of the next head.
template <typename S>
typename QueryBlock<S>::KeyPlace QueryBlock<S>::keys_after() const {
  const int64_t head = key_head_ + 1, key = block_key_ + block_count_;
  if (!plan_.pieces.heads_together) return {key_head_, key};
  return head < params_.shape.key_heads ? KeyPlace{head, block_key_} : KeyPlace{0, key};
}

// body(Stored{}) for the type that rows are read as: that of a narrow cache, which is widened in registers,
// to floats or to pairs, both of which hold its numbers; else elements.
template <typename S, typename Body>
ATTN_EXT_INLINE void with_streamed_type(const Storage& storage, Body body) {
  if constexpr (S::Product::kInRegisters && !std::is_same_v<typename S::Operand, double>) {
    if (storage.kind == ScalarKind::kInt8) return body(int8_t{});
    if (storage.kind == ScalarKind::kFloat8E4m3) return body(Float8E4m3{});
  }
  body(typename S::Element{});
}

template <typename S>
void QueryBlock<S>::stream_scores(int64_t band) {
  with_streamed_type<S>(params_.key_storage, [&](auto type) { stream_scores_of<decltype(type)>(band); });
}

// What is not finite is looked for among elements.
template <typename S>
void QueryBlock<S>::stream_values(int64_t band) {
  if (careful_) return stream_values_of<Element>(band);
  with_streamed_type<S>(params_.value_storage, [&](auto type) { stream_values_of<decltype(type)>(band); });
}

template <typename S>
template <typename Stored>
void QueryBlock<S>::ask_for_next_keys(PieceAhead& piece) const {
  piece.begin(stored_keys<Stored>(next_head_), next_keys_.begin, next_keys_.end - next_keys_.begin);
}

// S (rows, keys) = Q . K^T, a vector of keys at a time.
template <typename S>
template <typename Stored>
void QueryBlock<S>::stream_scores_of(int64_t band) {
  const StoredRows<Stored> keys = stored_keys<Stored>(key_head_);
  const StoredRows<Stored> values = stored_values<Stored>(0, params_.shape.value_dim);
  const int64_t key_len = params_.shape.key_len;
  const Distance distance = prefetch_distance<S::kLane>(keys, key_len);
  const bool in_pieces = asks_for_pieces<Stored>();
  PieceAhead piece;
  if (in_pieces && band == 0) piece.begin(values, block_key_, block_count_);
  Range copied{0, 0};
  for (int64_t i = 0; i < run_count_; ++i) {
    const Range run = runs_[i];
    Range rest = run;
    if constexpr (std::is_same_v<Stored, Element>) {
      if (multiplies_keys_across(keys)) rest.begin = scores_across(band, keys, run);
    }
    const auto ask = [&](int64_t j) {
      RowsAhead ahead;
      if (in_pieces) {
        ahead = piece.step(j);
      } else if (band == 0) {  // after the last key come the values
        const int64_t next = j + distance.rows;
        ahead = next < run.end ? keys.ahead(block_key_ + next, key_len)
                               : values.ahead(block_key_ + run.begin + next - run.end, key_len);
        ahead.near = distance.near;
      }
      return ahead;
    };
    stream_keys(band, {band, band + band_rows(band)}, keys, run, rest, band == 0 ? distance.rows : 0, copied,
                ask);
  }
}

// The scores of some rows of a band with the keys of a run that are left. ask(j): for what, while key j is
// read.
template <typename S>
template <typename Stored, typename Ask>
ATTN_EXT_INLINE void QueryBlock<S>::stream_keys(int64_t band, Range rows, const StoredRows<Stored>& keys,
                                                Range run, Range rest, int64_t distance, Range& copied,
                                                Ask ask) {
  for (int64_t j = rest.begin; j < rest.end; j += S::kLane) {
    RowsAhead ahead = ask(j);
    // Of the last few keys, together with the ones before them, whose scores are made once more.
    const int64_t before = keys_before(keys, {j, run.end}, run.begin), to = j - before;
    for (int64_t r = rows.begin; before > 0 && r < rows.end; ++r) {
      store(score_row(band, r) + j, Vec<T>{});
    }
    const Matrix<Stored> right = before > 0 ? keys.in_place(block_key_ + to, S::kLane)
                                            : key_rows(keys, {j, run.end}, distance, copied);
    each_few_rows<S>(rows.begin, rows.end, [&](auto count, int64_t r) {
      dot_rows<S, decltype(count)::value>(s_.query + r * s_.query_stride, s_.query_stride, right, ahead,
                                          score_row(band, r) + to, s_.score_stride);
      ahead = {};
    });
  }
}

// How many keys before the first of `rest`, from `begin` on, make a vector of those that are left and lie
// with them in place; 0 if these are a vector, or have to be copied.
template <typename S>
template <typename Stored>
int64_t QueryBlock<S>::keys_before(const StoredRows<Stored>& keys, Range rest, int64_t begin) const {
  const int64_t first = block_count_ - S::kLane;
  const bool are_there = rest.begin > first && rest.begin < block_count_ && first >= begin;
  if (!are_there || params_.key.column_stride != 1 || !keys.lie_in_place(block_key_ + first, S::kLane))
    return 0;
  return rest.begin - first;
}

// A vector of keys, the first of `rest`: where they lie, or copied, with zero for those that are not there.
// Where keys lie across memory, some lines of it are copied at a time: the keys that are `copied`.
template <typename S>
template <typename Stored>
Matrix<Stored> QueryBlock<S>::key_rows(const StoredRows<Stored>& keys, Range rest, int64_t distance,
                                       Range& copied) const {
  const int64_t key = rest.begin, first = block_key_ + key;
  if (key + S::kLane <= block_count_ && params_.key.column_stride == 1 &&
      keys.lie_in_place(first, S::kLane)) {
    return keys.in_place(first, S::kLane);
  }
  Stored* rows = reinterpret_cast<Stored*>(s_.key_rows);
  if (key < copied.begin || key >= copied.end) {
    copied = {key, smaller(rest.end, key + (keys.lie_across() ? kAcrossRows<Stored> : S::kLane))};
    const int64_t count = larger(0, smaller(copied.end, block_count_) - key);
    keys.copy(first, count, copied.end - key, rows, distance, rows_to_ask_for(distance));
  }
  return {rows + (key - copied.begin) * keys.columns(), keys.columns(), 1, S::kLane, keys.columns()};
}

// Of out (Rows, Dv) (+)= left (Rows, depth) . rows (depth, Dv) the columns from `column` on: Vectors * lanes
// of them, or the `columns` that are left.
template <typename S, typename Stored>
struct StreamArgs {
  int64_t depth;  // in operands
  const typename S::Operand* left;
  int64_t left_stride;
  const Stored* rows;
  int64_t row_stride;
  RowsAhead ahead;
  int64_t column, columns;
  typename S::Accum* out;
  int64_t out_stride;
  bool fresh;
};

template <typename S, typename Element, int Rows, int Vectors, bool Partial>
void stream_product(const StreamArgs<S, Element>& args) {
  using T = typename S::Accum;
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
  const int64_t byte = args.column * static_cast<int64_t>(sizeof(Element)), stride = args.row_stride;
  const char* next = args.ahead.next;
  if (next != nullptr) next += byte;
  const char* const* places = args.ahead.places;
  for (int64_t k = 0; k < args.depth; ++k, row += S::kDepth * stride) {
    if (next != nullptr) {
#pragma GCC unroll 2
      for (int d = 0; d < S::kDepth; ++d, next += args.ahead.row_bytes) {
        if (places != nullptr) next = places[k * S::kDepth + d] + args.ahead.offset + byte;
#pragma GCC unroll 8
        for (int64_t b = 0; b < kBytes; b += 64) prefetch_line(next + b, args.ahead.near);
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

template <typename S, typename Stored, int Rows>
ATTN_EXT_INLINE void stream_columns(const StreamArgs<S, Stored>& args, int64_t vectors) {
  constexpr int kThree = kTileVectors >= 3 ? 3 : 1, kFour = kTileVectors >= 4 ? 4 : 1;
  static constexpr void (*kTable[])(const StreamArgs<S, Stored>&) = {
      stream_product<S, Stored, Rows, 1, true>, stream_product<S, Stored, Rows, 1, false>,
      stream_product<S, Stored, Rows, 2, false>, stream_product<S, Stored, Rows, kThree, false>,
      stream_product<S, Stored, Rows, kFour, false>};
  kTable[vectors](args);
}

// O (rows, Dv) = P (rows, keys) . V (keys, Dv), some keys at a time.
template <typename S>
template <typename Stored>
void QueryBlock<S>::stream_values_of(int64_t band) {
  const StoredRows<Stored> values = stored_values<Stored>(0, params_.shape.value_dim);
  const KeyPlace after = keys_after();
  const StoredRows<Stored> next_keys = stored_keys<Stored>(after.head);
  const int64_t key_len = params_.shape.key_len;
  const Distance distance = prefetch_distance<S::kLane>(values, key_len);
  const bool in_pieces = asks_for_pieces<Stored>();
  PieceAhead piece;
  if (in_pieces && band == 0) ask_for_next_keys<Stored>(piece);
  bool fresh = true;
  Range copied{0, 0};
  for (int64_t i = 0; i < run_count_; ++i) {
    const Range run = runs_[i];
    if constexpr (std::is_same_v<Stored, Element>) {
      if (multiplies_values_across(values)) {
        values_across(band, values, run, fresh);
        fresh = false;
        continue;
      }
    }
    const auto ask = [&](int64_t j) {
      RowsAhead rows;
      if (in_pieces) {
        rows = piece.step(j);
      } else if (band == 0) {
        const int64_t ahead = j + distance.rows;
        rows = ahead < run.end ? values.ahead(block_key_ + ahead, key_len)
                               : next_keys.ahead(after.key + ahead - run.end, key_len);
        rows.near = distance.near;
      }
      return rows;
    };
    stream_values_at(band, {band, band + band_rows(band)}, values, run, band == 0 ? distance.rows : 0, fresh,
                     copied, ask);
    fresh = false;
  }
  if (!fresh) memset(s_.tile_started, 1, static_cast<size_t>(rows_));
}

// Adds to the output of some rows of a band, or begins it if it is fresh, the values of some keys. ask(j):
// for what, while the value of key j is read.
template <typename S>
template <typename Stored, typename Ask>
ATTN_EXT_INLINE void QueryBlock<S>::stream_values_at(int64_t band, Range rows,
                                                     const StoredRows<Stored>& values, Range span,
                                                     int64_t distance, bool fresh, Range& copied, Ask ask) {
  const bool copies = careful_ || params_.value.column_stride != 1;
  StreamArgs<S, Stored> args{};
  args.fresh = fresh;
  BadRows bad;
  bad.count = 0;
  for (int64_t j = span.begin, next; j < span.end; j = next, args.fresh = false) {
    const Range keys = keys_of_stretch(values, j, span.end);
    next = keys.end == block_count_ ? span.end : keys.end;
    args.depth = depth_of<Product>(keys.end - j);
    const int64_t first = block_key_ + j, count = args.depth * S::kDepth;
    args.ahead = {};
    if (copies || j + count > block_count_ || !values.lie_in_place(first, count)) {
      args.rows = gather_values(values, {j, span.end}, keys.end, distance, copied, bad);
      args.row_stride = values.columns();
    } else {
      const Matrix<Stored> right = values.in_place(first, count);
      args.rows = right.data;
      args.row_stride = right.row_stride;
      args.ahead = ask(j);
    }
    each_few_rows<S>(rows.begin, rows.end, [&](auto together, int64_t r) {
      stream_rows<decltype(together)::value>(band, r, j, args);
      args.ahead = {};
    });
    if (bad.count > 0) add_bad_values(band, 0, values_of(0, values.columns(), keys), bad, keys.begin);
  }
}

// The keys from `key` on whose values are read at a time: of one page, where pages are read in place.
template <typename S>
template <typename Stored>
Range QueryBlock<S>::keys_of_stretch(const StoredRows<Stored>& values, int64_t key, int64_t end) const {
  const int64_t page_rows = params_.value_storage.page_rows;
  int64_t count = smaller(kStreamKeys, smaller(end, block_count_) - key);
  // The last one of an odd number comes alone, so that what fills it up is all that is copied.
  const bool in_place = params_.value.column_stride == 1 && !values.is_converted() && !careful_;
  if (in_place && count > S::kDepth) count = round_down(count, S::kDepth);
  const bool by_page = page_rows >= kSmallestPage && page_rows % S::kDepth == 0 && !values.is_converted() &&
                       !values.lie_across();
  return {key, key + (by_page ? values.in_page(block_key_ + key, count) : count)};
}

// For `Rows` rows from `row` on and the keys from `key` on, that args.rows holds.
template <typename S>
template <int Rows, typename Stored>
void QueryBlock<S>::stream_rows(int64_t band, int64_t row, int64_t key, StreamArgs<S, Stored>& args) {
  const int64_t value_dim = params_.shape.value_dim;
  args.left = reinterpret_cast<const Operand*>(score_row(band, row)) + key / S::kDepth;
  args.left_stride = s_.score_stride;
  args.out = s_.output + row * s_.output_stride;
  args.out_stride = s_.output_stride;
  for (args.column = 0; args.column < value_dim;) {
    args.columns = value_dim - args.column;
    const int64_t vectors = smaller(args.columns / S::kLane, kTileVectors);
    stream_columns<S, Stored, Rows>(args, vectors);
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

// Copies the values of the keys from the first of `rest` up to `end`, and zero for the keys that fill up the
// last operand, as key_rows does. In careful mode NaN and Inf are left out, and noted.
template <typename S>
template <typename Stored>
const Stored* QueryBlock<S>::gather_values(const StoredRows<Stored>& values, Range rest, int64_t end,
                                           int64_t distance, Range& copied, BadRows& bad) const {
  const int64_t key = rest.begin, width = values.columns();
  Stored* to = reinterpret_cast<Stored*>(s_.value_rows);
  if (key < copied.begin || key >= copied.end) {
    const int64_t most = smaller(rest.end, block_count_);
    copied = {key, values.lie_across() ? smaller(most, key + kAcrossRows<Stored>) : end};
    const int64_t count = copied.end - key;
    values.copy(block_key_ + key, count, round_up(count, S::kDepth), to, distance, rows_to_ask_for(distance));
  }
  to += (key - copied.begin) * width;
  if constexpr (std::is_same_v<Stored, Element>) {
    if (!careful_) return to;
    const Matrix<Element> copy{to, width, 1, round_up(end - key, S::kDepth), width};
    find_bad_rows(copy, bad);
    finite_only(copy, to);
  }
  return to;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
