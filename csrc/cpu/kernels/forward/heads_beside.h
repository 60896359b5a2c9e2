// QueryBlock: rows of several key heads whose keys lie between each other, (B, L, H, D): some keys of all
// heads at a time, so that each page of memory is read as long as the processor still foresees what comes in
// it.
#pragma once

#include "streamed.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Pages in which Intel's processors of 1 MB of second cache foresee what is read (docs/trials.md).
constexpr int64_t kForeseenPages = 32, kPageBytes = 4096;

// How many key heads of one row of keys are read at a time: they share a page, and their query rows a band.
template <typename S>
int64_t most_heads_beside(const ForwardParams& params, int64_t rows) {
  const int64_t bytes = larger(params.shape.head_dim, params.shape.value_dim) *
                        static_cast<int64_t>(sizeof(typename S::Element));
  const bool lie_between = key_heads_interleave(params) &&
                           params.value.head_stride < params.value.row_stride &&
                           params.key.column_stride == 1 && params.value.column_stride == 1;
  const bool are_plain = is_plain(params.key_storage) && is_plain(params.value_storage);
  // Masks of their own let each head leave out other keys.
  const bool see_alike = params.rule.mask_kind == ScalarKind::kNone || params.rule.mask.head_stride == 0;
  if (!S::Product::kInRegisters || rows == 0 || bytes == 0) return 1;
  if (!lie_between || !are_plain || !see_alike) return 1;
  return smaller(params.shape.key_heads, smaller(kBandRows<S> / rows, kPageBytes / bytes));
}

// And how many keys of theirs.
template <typename S>
int64_t keys_of_heads_beside(const ForwardParams& params, int64_t heads) {
  constexpr int64_t kBytes = sizeof(typename S::Element);
  const int64_t width = heads * larger(params.shape.head_dim, params.shape.value_dim) * kBytes;
  const int64_t apart =
      smaller(larger(params.key.row_stride, params.value.row_stride) * kBytes, round_up(width, kPageBytes));
  return larger(S::kLane, round_down(kForeseenPages * kPageBytes / apart, S::kLane));
}

// Asks for keys, or values, of all these heads in the order of memory while others are read.
class HeadsAhead {
 public:
  static constexpr int64_t kMostRows = 32;  // that are read in a step

  // `rows` are of the first head; keys [first, first + count).
  template <typename Element>
  HeadsAhead(const StoredRows<Element>& rows, int64_t first, int64_t count, int64_t heads,
             int64_t head_stride)
      : heads_(heads),
        count_(count * heads),
        head_bytes_(head_stride * static_cast<int64_t>(sizeof(Element))) {
    if (count <= 0) return;
    const RowsAhead ahead = rows.ahead(first, first + count);
    begin_ = ahead.next;
    row_bytes_ = ahead.row_bytes;
  }

  // What to ask for in the step before which `done` rows, of all heads, were read.
  ATTN_EXT_INLINE RowsAhead step(int64_t done) {
    RowsAhead ahead;
    if (done >= count_ || count_ < kMostRows) return ahead;
    done = smaller(done, count_ - kMostRows);
    int64_t head = done % heads_;
    const char* row = begin_ + done / heads_ * row_bytes_;
    for (const char*& place : places_) {
      place = row + head * head_bytes_;
      if (++head < heads_) continue;
      head = 0;
      row += row_bytes_;
    }
    ahead.places = places_;
    ahead.next = places_[0];
    return ahead;
  }

 private:
  const char* begin_ = nullptr;
  const int64_t heads_, count_, head_bytes_;
  int64_t row_bytes_ = 0;
  const char* places_[kMostRows];
};

// body(run, keys of it, the keys after them, head, the head's rows)
template <typename S>
template <typename Body>
ATTN_EXT_INLINE void QueryBlock<S>::each_head_beside(Body body) const {
  const int64_t rows = rows_ / heads_beside_, step = plan_.pieces.keys_beside;
  const auto from = [&](int64_t run, int64_t key) {
    if (key >= runs_[run].end && ++run < run_count_) key = runs_[run].begin;
    return run < run_count_ ? Range{key, smaller(key + step, runs_[run].end)} : Range{0, 0};
  };
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t key = runs_[i].begin; key < runs_[i].end; key += step) {
      const Range keys = from(i, key), after = from(i, keys.end);
      for (int64_t h = 0; h < heads_beside_; ++h) {
        body(runs_[i], keys, after, h, Range{h * rows, (h + 1) * rows});
      }
    }
  }
}

template <typename S>
void QueryBlock<S>::scores_beside() {
  each_head_beside([&](Range run, Range keys, Range after, int64_t h, Range rows) {
    const bool last = is_empty(after);  // then come the values
    if (last) after = {runs_[0].begin, smaller(runs_[0].begin + plan_.pieces.keys_beside, runs_[0].end)};
    HeadsAhead ahead(last ? stored_values_of(key_head_) : stored_keys(key_head_), block_key_ + after.begin,
                     smaller(after.end, block_count_) - after.begin, heads_beside_,
                     last ? params_.value.head_stride : params_.key.head_stride);
    Range copied{0, 0};
    const int64_t done = h * (keys.end - keys.begin) - keys.begin;
    stream_keys(0, rows, stored_keys(key_head_ + h), run, keys, 0, copied,
                [&](int64_t j) { return ahead.step(done + j); });
  });
}

template <typename S>
void QueryBlock<S>::values_beside() {
  each_head_beside([&](Range, Range keys, Range after, int64_t h, Range rows) {
    HeadsAhead ahead = is_empty(after)  // then come the next piece's keys
                           ? HeadsAhead(stored_keys(next_head_), next_keys_.begin,
                                        smaller(plan_.pieces.keys_beside, next_keys_.end - next_keys_.begin),
                                        heads_beside_, params_.key.head_stride)
                           : HeadsAhead(stored_values_of(key_head_), block_key_ + after.begin,
                                        smaller(after.end, block_count_) - after.begin, heads_beside_,
                                        params_.value.head_stride);
    Range copied{0, 0};
    const int64_t done = h * (keys.end - keys.begin) - keys.begin;
    stream_values_at(0, rows, stored_values_of(key_head_ + h), keys, 0, keys.begin == runs_[0].begin, copied,
                     [&](int64_t j) { return ahead.step(done + j); });
  });
  if (run_count_ > 0) memset(s_.tile_started, 1, static_cast<size_t>(rows_));
}

// False: some output is NaN or Inf, perhaps as a value is, which attend() of each head finds out.
template <typename S>
bool QueryBlock<S>::attend_beside(Range keys) {
  careful_ = emit_in_place_ = false;
  attend_once(keys);
  return output_is_finite();
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
