// QueryBlock: scores and values for a handful of query rows, bound by reading keys and values once: nothing
// is packed, and rows are read where they lie, in the order in which they lie.
// Included by query_block.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// So far ahead of what is being read, memory is asked for what comes next: into the second cache, as the
// first can wait for too few lines at a time.
constexpr int64_t kPrefetchBytes = 16384;

// As load_operands, of the first `count` elements; zero in the others, and nothing past them is read.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_operands_partial(const Element* p, int64_t count) {
  if constexpr (sizeof(Element) >= 4) {
    return load_partial(p, count);
  } else {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const auto lanes = static_cast<uint32_t>((uint64_t{1} << count) - 1);
    if constexpr (Product::kDepth == 2) {
      return (Vec<typename Product::Operand>)_mm512_maskz_loadu_epi16(lanes, p);
    } else if constexpr (std::is_same_v<Element, Float16>) {
      return (Vec<float>)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(lanes), p));
    } else {
      const __m256i bits = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(lanes), p);
      return (Vec<float>)(widen((HalfBits)bits) << 16);
    }
#else
    return load_compute_partial(p, count);
#endif
  }
}

// out (Rows, lanes) = query (Rows, dim) . rows (lanes, dim)^T. As many sums as a vector has lanes are in the
// making at a time, of all Rows and some of the keys.
template <typename S, int Rows>
void stream_dots(const typename S::Operand* query, int64_t query_stride,
                 const RowStream<typename S::Element>& rows, int64_t dim, typename S::Accum* out,
                 int64_t out_stride) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Product = typename S::Product;
  constexpr int kWidth = kLanes<T>;
  constexpr int kKeys = kWidth / Rows;
  constexpr int64_t kStep = kWidth * S::kDepth;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  for (int64_t first = 0; first < kWidth; first += kKeys) {
    const Element* keys = rows.data + first * rows.stride;
    const Element* next = rows.next + first * rows.next_stride;
    Vec<T> sums[kWidth] = {};
    const auto step = [&](int64_t k, auto load_keys) __attribute__((always_inline)) {
      Vec<typename S::Operand> key[kKeys];
#pragma GCC unroll 16
      for (int j = 0; j < kKeys; ++j) key[j] = load_keys(keys + j * rows.stride + k);
      if (rows.next != nullptr && k % kLine == 0) {
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) __builtin_prefetch(next + j * rows.next_stride + k, 0, 2);
      }
#pragma GCC unroll 4
      for (int r = 0; r < Rows; ++r) {
        const Vec<typename S::Operand> q = load(query + r * query_stride + k / S::kDepth);
#pragma GCC unroll 16
        for (int j = 0; j < kKeys; ++j) {
          sums[r * kKeys + j] = Product::step(q, key[j], sums[r * kKeys + j]);
        }
      }
    };
    int64_t k = 0;
    for (; k + kStep <= dim; k += kStep) step(k, load_operands<Product, Element>);
    if (k < dim) {
      step(k, [&](const Element* p) { return load_operands_partial<Product>(p, dim - k); });
    }
    T dots[kWidth];
    store(dots, lane_sums<T>(sums));
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) memcpy(out + r * out_stride + first, dots + r * kKeys, kKeys * sizeof(T));
  }
}

// body(rows, r) for the rows of a group, as many at a time as share what is read.
template <typename S>
template <typename Body>
ATTN_EXT_INLINE void QueryBlock<S>::each_stream_tile(int64_t group, Body body) const {
  int64_t r = group;
  const int64_t end = group + group_rows(group);
  if constexpr (S::kLane >= 4) {
    for (; r + 4 <= end; r += 4) body(std::integral_constant<int, 4>{}, r);
  }
  for (; r + 2 <= end; r += 2) body(std::integral_constant<int, 2>{}, r);
  if (r < end) body(std::integral_constant<int, 1>{}, r);
}

// Rows of `dim` elements that kPrefetchBytes hold, in whole vectors of keys.
template <typename S>
int64_t QueryBlock<S>::rows_ahead(int64_t dim) {
  return round_up(kPrefetchBytes / larger(1, dim * static_cast<int64_t>(sizeof(Element))), S::kLane);
}

// S (rows, keys) = Q . K^T, a vector of keys at a time.
template <typename S>
void QueryBlock<S>::stream_scores(int64_t group) {
  const AttentionShape& shape = params_.shape;
  const int64_t dim = shape.head_dim;
  const Matrix<Element> key{row_pointer<const Element>(params_.key, batch_, key_head_, block_key_),
                            params_.key.row_stride, params_.key.column_stride, block_count_, dim};
  const Element* value = row_pointer<const Element>(params_.value, batch_, key_head_, block_key_);
  const int64_t ahead = rows_ahead(dim);
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t j = runs_[i].begin; j < runs_[i].end; j += S::kLane) {
      RowStream<Element> rows{key.data + j * key.row_stride, key.row_stride, nullptr, 0};
      if (group == 0) {  // after the last key come the values
        const int64_t next = j + ahead;
        rows.next = next < runs_[i].end
                        ? key.data + next * key.row_stride
                        : value + (runs_[i].begin + next - runs_[i].end) * params_.value.row_stride;
        rows.next_stride = next < runs_[i].end ? key.row_stride : params_.value.row_stride;
      }
      if (key.column_stride != 1 || j + S::kLane > key.rows) {
        gather_block(key, j, S::kLane, 0, dim, s_.key_rows);
        rows.data = s_.key_rows;
        rows.stride = dim;
      }
      const auto dots = [&](auto count, int64_t r) {
        stream_dots<S, decltype(count)::value>(s_.query + r * s_.query_stride, s_.query_stride, rows, dim,
                                               score_row(group, r) + j, s_.score_stride);
        rows.next = nullptr;
      };
      each_stream_tile(group, dots);
    }
  }
}

// out (Rows, n) (+)= left (Rows, depth) . rows (depth, n),   n = Vectors * lanes, or the `columns` left of it
template <typename S>
struct StreamArgs {
  int64_t depth;  // in operands
  const typename S::Operand* left;
  int64_t left_stride;
  RowStream<typename S::Element> rows;
  int64_t columns;
  typename S::Accum* out;
  int64_t out_stride;
  bool fresh;
};

// The first `count` lanes of an operand row.
template <typename Product, typename Element>
ATTN_EXT_INLINE Vec<typename Product::Operand> load_row_operands_partial(const Element* p, int64_t row_stride,
                                                                         int64_t count) {
  if constexpr (Product::kDepth == 1) {
    return load_operands_partial<Product>(p, count);
  } else {
    using Plain = PlainProduct<float>;  // bfloat16 are the upper halves of its floats
    const Vec<uint32_t> low = (Vec<uint32_t>)load_operands_partial<Plain>(p, count);
    const Vec<uint32_t> high = (Vec<uint32_t>)load_operands_partial<Plain>(p + row_stride, count);
    return (low >> 16) | high;
  }
}

template <typename S, int Rows, int Vectors, bool Partial>
void stream_product(const StreamArgs<S>& args) {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  constexpr int kWidth = kLanes<T>;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  constexpr int64_t kColumns = Vectors * kWidth;
  T* out = args.out;
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
  const Element* row = args.rows.data;
  const Element* next = args.rows.next;
  const int64_t stride = args.rows.stride;
  for (int64_t k = 0; k < args.depth; ++k, row += S::kDepth * stride) {
    if (next != nullptr) {
#pragma GCC unroll 2
      for (int d = 0; d < S::kDepth; ++d, next += args.rows.next_stride) {
#pragma GCC unroll 8
        for (int64_t c = 0; c < kColumns; c += kLine) __builtin_prefetch(next + c, 0, 2);
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
  static constexpr void (*kTable[])(const StreamArgs<S>&) = {
      stream_product<S, Rows, 1, true>,
      stream_product<S, Rows, 1, false>,
      stream_product<S, Rows, 2, false>,
      stream_product < S,
      Rows,
      kTileVectors >= 3 ? 3 : 1,
      false >
      , stream_product < S, Rows, kTileVectors >= 4 ? 4 : 1, false > };
  kTable[vectors](args);
}

// O (rows, Dv) = P (rows, keys) . V (keys, Dv), some keys at a time.
template <typename S>
void QueryBlock<S>::stream_values(int64_t group) {
  const AttentionShape& shape = params_.shape;
  const Matrix<Element> value{row_pointer<const Element>(params_.value, batch_, key_head_, block_key_),
                              params_.value.row_stride, params_.value.column_stride, block_count_,
                              shape.value_dim};
  const Element* key = row_pointer<const Element>(params_.key, batch_, key_head_, block_key_);
  const int64_t ahead = rows_ahead(shape.value_dim);
  bool first = true;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t j = runs_[i].begin; j < runs_[i].end; j += kStreamKeys, first = false) {
      const KeyRange keys{j, smaller(j + kStreamKeys, smaller(runs_[i].end, block_count_))};
      const int64_t depth = depth_of<Product>(keys.end - j);
      RowStream<Element> rows{value.data + j * value.row_stride, value.row_stride, nullptr, 0};
      if (group == 0) {  // after the last value come the keys of the next piece
        const int64_t next = j + ahead;
        rows.next = next < runs_[i].end ? value.data + next * value.row_stride
                                        : key + (block_count_ + next - runs_[i].end) * params_.key.row_stride;
        rows.next_stride = next < runs_[i].end ? value.row_stride : params_.key.row_stride;
      }
      if (visible_ != nullptr) {
        for (int64_t r = group; r < group + group_rows(group); ++r) {
          gather_values(value, keys, visible_ + (r - group) * s_.score_stride);
          stream_rows<1>(group, r, j, depth, {s_.value_rows, shape.value_dim, nullptr, 0}, first);
        }
        continue;
      }
      if (value.column_stride != 1 || j + depth * S::kDepth > value.rows) {
        gather_values(value, keys, nullptr);
        rows = {s_.value_rows, shape.value_dim, nullptr, 0};
      }
      each_stream_tile(group, [&](auto count, int64_t r) {
        stream_rows<decltype(count)::value>(group, r, j, depth, rows, first);
        rows.next = nullptr;
      });
    }
  }
  if (!first) memset(s_.tile_started, 1, static_cast<size_t>(rows_));
}

template <typename S>
template <int Rows>
void QueryBlock<S>::stream_rows(int64_t group, int64_t row, int64_t key, int64_t depth,
                                const RowStream<Element>& rows, bool fresh) {
  const int64_t value_dim = params_.shape.value_dim;
  StreamArgs<S> args{};
  args.depth = depth;
  args.left = reinterpret_cast<const Operand*>(score_row(group, row)) + key / S::kDepth;
  args.left_stride = s_.score_stride;
  args.rows = rows;
  args.out_stride = s_.output_stride;
  args.fresh = fresh;
  for (int64_t column = 0; column < value_dim;) {
    args.out = s_.output + row * s_.output_stride + column;
    args.columns = value_dim - column;
    const int64_t vectors = smaller(args.columns / S::kLane, kTileVectors);
    stream_columns<S, Rows>(args, vectors);
    const int64_t done = larger(vectors, 1) * S::kLane;
    column += done;
    args.rows.data += done;
    if (args.rows.next != nullptr) args.rows.next += done;
  }
}

template <typename S>
void QueryBlock<S>::keep_weights(int64_t group) const {
  const AttentionShape& shape = params_.shape;
  for (int64_t r = group; r < group + group_rows(group); ++r) {
    const int64_t row = (batch_ * shape.query_heads + s_.row_head[r]) * shape.query_len + s_.row_index[r];
    T* to = kept_weights_ + row * kept_stride_ + block_key_;
    fill_span(to, 0, round_up(block_count_, S::kLane), static_cast<T>(0));
    for (int64_t i = 0; i < run_count_; ++i) {
      memcpy(to + runs_[i].begin, score_row(group, r) + runs_[i].begin,
             static_cast<size_t>(runs_[i].end - runs_[i].begin) * sizeof(T));
    }
  }
}

// Copies the values of `keys`, zero where they are not visible (null: all are) and for the keys that fill up
// the last operand.
template <typename S>
void QueryBlock<S>::gather_values(const Matrix<Element>& value, KeyRange keys, const uint8_t* visible) {
  const int64_t width = value.columns;
  gather_block(value, keys.begin, round_up(keys.end - keys.begin, S::kDepth), 0, width, s_.value_rows);
  for (int64_t j = keys.begin; visible != nullptr && j < keys.end; ++j) {
    if (!visible[j]) {
      memset(s_.value_rows + (j - keys.begin) * width, 0, static_cast<size_t>(width) * sizeof(Element));
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
