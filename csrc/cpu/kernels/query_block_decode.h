// QueryBlock: scores and values for a handful of query rows, bound by reading keys and values once: nothing
// is packed for others to use, rows are read where they lie, or converted into a buffer in the nearest cache.
// Included by query_block.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// Sums the lanes of as many vectors as a vector has lanes: lane i of the result is the sum of sums[i]. Every
// step adds neighbours, so that a sum does not depend on which vectors stand beside it.
template <typename T>
ATTN_EXT_INLINE Vec<T> lane_sums(Vec<T> (&sums)[kLanes<T>]) {
  constexpr int kWidth = kLanes<T>;
  Vec<Bits<T>> even, odd;
  for (int i = 0; i < kWidth; ++i) {
    even[i] = 2 * i;
    odd[i] = 2 * i + 1;
  }
#pragma GCC unroll 4
  for (int n = kWidth / 2; n > 0; n /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      const Vec<T> a = sums[2 * i], b = sums[2 * i + 1];
      sums[i] = shuffle<T>(a, b, even) + shuffle<T>(a, b, odd);
    }
  }
  return sums[0];
}

// One query row (depth) against as many key rows as a vector has lanes. The rows `ahead` operands further on
// are asked for meanwhile: short pieces of many rows are not what a processor guesses by itself.
template <typename Product>
inline void dot_rows(const typename Product::Operand* query, const typename Product::Operand* keys,
                     int64_t key_stride, int64_t depth, int64_t ahead, typename Product::Accum* out) {
  using Accum = typename Product::Accum;
  using Operand = typename Product::Operand;
  constexpr int kWidth = kLanes<Accum>;
  Vec<Accum> sums[kWidth] = {};
  for (int64_t k = 0; k < depth; k += kWidth) {
    const Vec<Operand> q = load(query + k);
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) {
      Vec<Operand> key;
      memcpy(&key, keys + j * key_stride + k, sizeof(key));
      if (ahead != 0) __builtin_prefetch(keys + j * key_stride + k + ahead);
      sums[j] = Product::step(q, key, sums[j]);
    }
  }
  store(out, lane_sums<Accum>(sums));
}

// S (rows, keys) = Q . K^T, a vector of keys at a time.
template <typename S>
void QueryBlock<S>::stream_scores(int64_t group) {
  const AttentionShape& shape = params_.shape;
  const Matrix<Element> key{row_pointer<const Element>(params_.key, batch_, key_head_, 0),
                            params_.key.row_stride, params_.key.column_stride, shape.key_len, shape.head_dim};
  const int64_t depth = s_.query_stride;
  // Read in place if a row is whole vectors of operands.
  const bool in_place = sizeof(Element) * S::kDepth == sizeof(Operand) && key.column_stride == 1 &&
                        shape.head_dim == depth * S::kDepth && key.row_stride % S::kDepth == 0;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t j = runs_[i].begin; j < runs_[i].end; j += S::kLane) {
      const int64_t first = block_key_ + j;
      const int64_t count = smaller(S::kLane, shape.key_len - first);
      const Operand* rows = s_.key_rows;
      int64_t stride = depth;
      if (in_place && count == S::kLane) {
        rows = reinterpret_cast<const Operand*>(key.data + first * key.row_stride);
        stride = key.row_stride / S::kDepth;
      } else {
        pack_rows<Product>(key, first, count, s_.key_rows, depth);
        // The rows past the end of the keys: any finite numbers.
        memset(s_.key_rows + count * depth, 0,
               static_cast<size_t>((S::kLane - count) * depth) * sizeof(Operand));
      }
      for (int64_t r = group; r < group + group_rows(group); ++r) {
        const int64_t ahead = r == group && rows != s_.key_rows ? S::kLane * stride : 0;
        dot_rows<Product>(s_.query + r * s_.query_stride, rows, stride, depth, ahead,
                          score_row(group, r) + j);
      }
    }
  }
}

// O (rows, Dv) = carry O + P (rows, keys) . V (keys, Dv), some keys at a time.
template <typename S>
void QueryBlock<S>::stream_values(int64_t group) {
  const AttentionShape& shape = params_.shape;
  const int64_t width = value_panel_width<S>(shape.value_dim);
  Matrix<Element> value{row_pointer<const Element>(params_.value, batch_, key_head_, 0),
                        params_.value.row_stride, params_.value.column_stride, shape.key_len,
                        shape.value_dim};
  const bool in_place = std::is_same_v<Element, T> && value.column_stride == 1 &&
                        shape.value_dim % S::kLane == 0 && visible_ == nullptr;
  bool first = true;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t j = runs_[i].begin; j < runs_[i].end; j += kStreamKeys) {
      const KeyRange keys{j, smaller(smaller(j + kStreamKeys, runs_[i].end), shape.key_len - block_key_)};
      StreamedValues values{};
      if constexpr (std::is_same_v<Element, T>) {
        values = {value.data + (block_key_ + j) * value.row_stride, value.row_stride, width};
      }
      if (!in_place) {
        pack_row_panels<PlainProduct<T>>(rows_from(value, block_key_ + j), 0, keys.end - j, width,
                                         s_.value_rows, kStreamKeys * width);
        values = {s_.value_rows, width, kStreamKeys * width};
      }
      if (visible_ == nullptr) {
        for (int64_t tile = group; tile < group + group_rows(group); tile += kTileRows) {
          stream_product(group, tile, tile_rows(tile), keys, values, first);
        }
      } else {
        for (int64_t r = group; r < group + group_rows(group); ++r) {
          hide_values(value, group, r, keys);
          stream_product(group, r, 1, keys, values, first);
        }
      }
      first = false;
    }
  }
  if (!first) memset(s_.tile_started, 1, static_cast<size_t>(rows_));
}

template <typename S>
void QueryBlock<S>::stream_product(int64_t group, int64_t row, int64_t rows, KeyRange keys,
                                   const StreamedValues& values, bool first) {
  const int64_t width = value_panel_width<S>(params_.shape.value_dim);
  const bool fresh = first && s_.tile_started[row / kTileRows] == 0;
  for (int64_t column = 0; column < s_.output_stride; column += width) {
    const int64_t vectors = smaller(width, s_.output_stride - column) / S::kLane;
    TileArgs<PlainProduct<T>> args{};
    args.depth = keys.end - keys.begin;
    args.left = score_row(group, row) + keys.begin;
    args.left_stride = s_.score_stride;
    args.right = values.data + column / width * values.panel_stride;
    args.right_stride = values.row_stride;
    args.out = s_.output + row * s_.output_stride + column;
    args.out_stride = s_.output_stride;
    args.carry = first ? s_.carry + row : s_.ones + row;
    (fresh ? tile_function<PlainProduct<T>, false>(rows, vectors)
           : tile_function<PlainProduct<T>, true>(rows, vectors))(args);
  }
}

// Values as one row sees them: zero where it does not.
template <typename S>
void QueryBlock<S>::hide_values(const Matrix<Element>& value, int64_t group, int64_t r, KeyRange keys) {
  const int64_t width = value_panel_width<S>(params_.shape.value_dim);
  const uint8_t* visible = visible_ + (r - group) * s_.score_stride;
  pack_row_panels<PlainProduct<T>>(rows_from(value, block_key_ + keys.begin), 0, keys.end - keys.begin, width,
                                   s_.value_rows, kStreamKeys * width);
  for (int64_t column = 0; column < s_.output_stride; column += width) {
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      T* row = s_.value_rows + (column / width * kStreamKeys + j - keys.begin) * width;
      if (!visible[j]) fill_span(row, 0, width, static_cast<T>(0));
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
