// QueryBlock: scores and values for a handful of query rows where a processor has a matrix unit. Bound by
// reading keys and values once, as streamed.h, and with the bits of the packed products: many rows on one key
// head are worth packs, and a row has the same bits beside them and alone.
//   scores  by the unit, keys as its left operand, where they lie: it adds the same products in the same
//           order whichever side they are on
//   values  by vectors: of each step of 32 keys the unit adds up those of even and of odd keys apart, fused,
//           then both to each other, then to what there is, and takes what is subnormal for 0. Values that
//           lie across memory by the unit, as its left operand.
#pragma once

#include "query_block.h"
#include "streamed.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

#if defined(ATTN_EXT_AMX)

constexpr int64_t kUnitStep = 32;  // keys that the unit adds up before it adds them to what there is

// Query rows as columns, as the unit's right operand.
template <typename S>
void QueryBlock<S>::pack_query_columns() const {
  const Matrix<Element> query{reinterpret_cast<const Element*>(s_.query), s_.query_stride * S::kDepth, 1,
                              rows_, params_.shape.head_dim};
  pack_column_panel<Product>(query, 0, S::kLane, s_.query_columns);
}

// S (rows, keys) = (K . Q^T)^T, a tile of keys at a time.
template <typename S>
void QueryBlock<S>::unit_scores(int64_t band) {
  constexpr int64_t kKeys = S::kTileRows;
  const int64_t key_len = params_.shape.key_len;
  const StoredRows<Element> keys = stored_keys(key_head_);
  const StoredRows<Element> values = stored_values(0, params_.shape.value_dim);
  const Distance distance = prefetch_distance<S::kLane>(keys, key_len);
  amx_unit::RowsTile tile;
  tile.columns = s_.query_columns;
  tile.depth = depth_of<Product>(params_.shape.head_dim);
  const bool in_pieces = asks_for_pieces<Element>();
  PieceAhead piece;
  if (in_pieces && band == 0) piece.begin(values, block_key_, block_count_);
  Range copied{0, 0};
  for (int64_t i = 0; i < run_count_; ++i) {
    const Range run = runs_[i];
    for (int64_t j = run.begin; j < run.end; j += kKeys) {
      const Matrix<Element> m = key_rows(keys, {j, run.end}, distance.rows, copied);
      tile.rows = reinterpret_cast<const char*>(m.data);
      tile.row_bytes = m.row_stride * static_cast<int64_t>(sizeof(Element));
      const int64_t next = j + distance.rows;  // after the last key come the values
      RowsAhead ahead = in_pieces        ? piece.step(j)
                        : next < run.end ? keys.ahead(block_key_ + next, key_len)
                                         : values.ahead(block_key_ + run.begin + next - run.end, key_len);
      ahead.near = distance.near;
      tile.asks = ahead.next != nullptr;
      const int64_t columns = next < run.end ? keys.columns() : values.columns();
      tile.ahead = LinesAhead(ahead, columns * static_cast<int64_t>(sizeof(Element)));
      amx_unit::multiply_rows(tile);
      for (int64_t r = 0; r < band_rows(band); r += 4) {
        Vec<T> scores[4];
        amx_unit::tile_columns(tile, r, scores);
#pragma GCC unroll 4
        for (int64_t k = 0; k < 4; ++k) store(score_row(band, band + r + k) + j, scores[k]);
      }
    }
  }
}

// Rounded as pairs of them are, and floats still.
template <typename S>
void QueryBlock<S>::round_weights(int64_t band) {
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    T* row = score_row(band, r);
    S::Product::stay_awake();
    each_run(aligned(tile_span(r)), [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; j += S::kLane) {
        const Element* example = nullptr;
        store(row + j, from_half_bits(to_element(load(row + j), example), example));
      }
    });
  }
}

// One step: half of its keys each from a place of its own, as pages end where they like.
template <typename S>
struct UnitStep {
  using Element = typename S::Element;
  using T = typename S::Accum;
  const T* weights;
  int64_t weight_stride;
  const Element* rows[2];
  int64_t row_stride[2];
  bool asks[2];  // for memory, meanwhile
  LinesAhead ahead[2];
  T* out;
  int64_t out_stride;
  bool fresh;
};

// Of out (Rows, Dv) (+)= weights (Rows, 32) . rows (32, Dv) the columns from `column` on: Vectors * lanes of
// them, or the `columns` that are left.
template <typename S, int Rows, int Vectors, bool Partial>
__attribute__((noinline)) void add_unit_step(UnitStep<S>& step, int64_t column,
                                             [[maybe_unused]] int64_t columns) {
  using T = typename S::Accum;
  constexpr int64_t kHalf = kUnitStep / 2;
  const int64_t weight_stride = step.weight_stride;
  const int64_t byte = column * static_cast<int64_t>(sizeof(typename S::Element));
  // Even and odd keys at a time, if there are registers for both.
  constexpr int kParities = Rows * Vectors <= 8 ? 2 : 1;
  Vec<T> sums[2][Rows][Vectors] = {};
#pragma GCC unroll 2
  for (int first = 0; first < 2; first += kParities) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const int64_t stride = step.row_stride[half];
      const auto* row = step.rows[half] + column + first * stride;
      const T* weights = step.weights + half * kHalf + first;
      const bool asks = step.asks[half];
      LinesAhead ahead = step.ahead[half];
      for (int64_t k = 0; k < kHalf; k += 2, row += 2 * stride) {
        if (asks) ahead.template ask<kParities, (Vectors > 2 ? 2 : 1)>(first + k, byte);
#pragma GCC unroll 2
        for (int i = 0; i < kParities; ++i) {
          Vec<T>(&to)[Rows][Vectors] = sums[first + i];
          Vec<T> value[Vectors];
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; ++v) {
            value[v] = Partial ? load_compute_partial(row + i * stride, columns)
                               : load_compute(row + i * stride + v * S::kLane);
          }
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) {
            const Vec<T> weight = broadcast(weights[r * weight_stride + k + i]);
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; ++v) to[r][v] = multiply_add(weight, value[v], to[r][v]);
          }
        }
      }
      step.ahead[half] = ahead;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      T* out = step.out + r * step.out_stride + column + v * S::kLane;
      const Vec<T> before = step.fresh ? Vec<T>{} : load(out);
      store(out, before + (sums[0][r][v] + sums[1][r][v]));
    }
  }
}

template <typename S, int Rows>
ATTN_EXT_INLINE void add_unit_steps(UnitStep<S>& step, int64_t columns) {
  static constexpr void (*kTable[])(UnitStep<S>&, int64_t, int64_t) = {
      add_unit_step<S, Rows, 1, true>, add_unit_step<S, Rows, 1, false>, add_unit_step<S, Rows, 2, false>,
      add_unit_step<S, Rows, 3, false>, add_unit_step<S, Rows, 4, false>};
  for (int64_t column = 0; column < columns;) {
    const int64_t vectors = smaller((columns - column) / S::kLane, 4);
    if (column % 128 == 0) S::Product::stay_awake();
    kTable[vectors](step, column, columns - column);
    column += larger(vectors, 1) * S::kLane;
  }
}

template <typename S>
void QueryBlock<S>::unit_values(int64_t band) {
  params_.value.column_stride == 1 ? unit_value_rows(band) : unit_value_columns(band);
  memset(s_.tile_started, 1, static_cast<size_t>(rows_));
}

// O (rows, Dv) = P (rows, keys) . V (keys, Dv), a step at a time.
template <typename S>
void QueryBlock<S>::unit_value_rows(int64_t band) {
  constexpr int64_t kHalf = kUnitStep / 2;
  round_weights(band);
  const StoredRows<Element> values = stored_values(0, params_.shape.value_dim);
  const KeyPlace after = keys_after();
  const StoredRows<Element> next_keys = stored_keys(after.head);
  const int64_t key_len = params_.shape.key_len;
  const Distance distance = prefetch_distance<S::kLane>(values, key_len);
  const bool in_pieces = asks_for_pieces<Element>();
  PieceAhead piece;
  if (in_pieces && band == 0) ask_for_next_keys<Element>(piece);
  UnitStep<S> step{};
  step.weight_stride = s_.score_stride;
  step.out_stride = s_.output_stride;
  step.fresh = true;
  const amx_unit::FlushSubnormals as_the_unit;
  for (int64_t i = 0; i < run_count_; ++i) {
    const Range run = runs_[i];
    for (int64_t j = run.begin; j < run.end; j += kUnitStep, step.fresh = false) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t key = j + half * kHalf, first = block_key_ + key, ahead = key + distance.rows;
        const bool in_place = key + kHalf <= block_count_ && values.lie_in_place(first, kHalf);
        if (in_place) {
          const Matrix<Element> m = values.in_place(first, kHalf);
          step.rows[half] = m.data;
          step.row_stride[half] = m.row_stride;
        } else {
          Element* copy = s_.value_rows + half * kHalf * values.columns();
          values.copy(first, larger(0, smaller(kHalf, block_count_ - key)), kHalf, copy);
          step.rows[half] = copy;
          step.row_stride[half] = values.columns();
        }
        RowsAhead rows = in_pieces         ? piece.step(key)
                         : ahead < run.end ? values.ahead(block_key_ + ahead, key_len)
                                           : next_keys.ahead(after.key + ahead - run.end, key_len);
        rows.near = distance.near;
        step.asks[half] = rows.next != nullptr;
        const int64_t columns = ahead < run.end ? values.columns() : next_keys.columns();
        step.ahead[half] = LinesAhead(rows, columns * static_cast<int64_t>(sizeof(Element)));
      }
      each_few_rows<S>(band, band + band_rows(band), [&](auto rows, int64_t r) {
        step.weights = score_row(band, r) + j;
        step.out = s_.output + r * s_.output_stride;
        add_unit_steps<S, decltype(rows)::value>(step, values.columns());
        step.asks[0] = step.asks[1] = false;
      });
    }
  }
}

// P^T, a right operand of whole steps, in the order of the runs.
template <typename S>
void QueryBlock<S>::pack_weight_columns(int64_t band) const {
  Operand* out = s_.weight_columns;
  for (int64_t i = 0; i < run_count_; ++i) {
    for (int64_t j = runs_[i].begin; j < runs_[i].end; j += kUnitStep, out += S::kLane * S::kLane) {
      Vec<T> square[S::kLane] = {};
      for (int64_t r = band; r < band + band_rows(band); ++r) {
        square[r - band] = load(score_row(band, r) + j / S::kDepth);
      }
      transpose_square<T>(square);
      memcpy(out, square, sizeof(square));
    }
  }
}

// Of V^T the columns of a step, in rows, as the unit reads them: what lies behind the last key is another
// row, or nothing.
template <typename S>
Matrix<typename S::Element> QueryBlock<S>::value_columns(int64_t dim, int64_t key) const {
  constexpr int64_t kDims = S::kTileRows;
  const TensorView& value = params_.value;
  const Element* from =
      row_pointer<const Element>(value, batch_, key_head_, block_key_ + key) + dim * value.column_stride;
  const int64_t count = block_count_ - key;
  if (count >= kUnitStep) return {from, value.column_stride, 1, kDims, kUnitStep};
  memset(s_.value_rows, 0, kDims * kUnitStep * sizeof(Element));
  for (int64_t d = 0; d < kDims && count > 0; ++d) {
    memcpy(s_.value_rows + d * kUnitStep, from + d * value.column_stride,
           static_cast<size_t>(count) * sizeof(Element));
  }
  return {s_.value_rows, kUnitStep, 1, kDims, kUnitStep};
}

// O (rows, Dv) = (V^T (Dv, keys) . P^T)^T of values that lie across memory: their columns are rows of the
// unit's left operand.
template <typename S>
void QueryBlock<S>::unit_value_columns(int64_t band) {
  constexpr int64_t kDims = S::kTileRows, kSize = sizeof(Element);
  pair_weights(band);
  pack_weight_columns(band);
  const int64_t value_dim = params_.shape.value_dim, column_stride = params_.value.column_stride;
  for (int64_t r = band; r < band + band_rows(band); ++r) {
    T* row = s_.output + r * s_.output_stride;
    fill_span(row, round_down(value_dim, S::kLane), s_.output_stride, static_cast<T>(0));
  }
  amx_unit::RowsTile tile{};
  for (int64_t dim = 0; dim < value_dim; dim += kDims) {
    dim = smaller(dim, value_dim - kDims);  // the last tile makes some once more
    const int64_t to_next = smaller(dim + kDims, value_dim - kDims) - dim;
    const Operand* weights = s_.weight_columns;
    amx_unit::clear<0>();
    for (int64_t i = 0; i < run_count_; ++i) {
      for (int64_t j = runs_[i].begin; j < runs_[i].end; j += kUnitStep, weights += S::kLane * S::kLane) {
        const Matrix<Element> values = value_columns(dim, j);
        if (to_next > 0 && values.row_stride == column_stride) {
#pragma GCC unroll 16
          for (int64_t d = 0; d < kDims; ++d) {
            __builtin_prefetch(values.data + (to_next + d) * column_stride, 0, 2);
          }
        }
        amx_unit::load_tile<4>(weights, kUnitStep * kSize);
        amx_unit::load_tile<5>(values.data, values.row_stride * kSize);
        amx_unit::multiply_tiles<0, 5, 4>();
      }
    }
    amx_unit::store_tile<0>(tile.sums, sizeof(tile.sums[0]));
    for (int64_t r = 0; r < band_rows(band); r += 4) {
      Vec<T> sums[4];
      amx_unit::tile_columns(tile, r, sums);
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) store(s_.output + (band + r + k) * s_.output_stride + dim, sums[k]);
    }
  }
}

#else

template <typename S>
void QueryBlock<S>::pack_query_columns() const {}

template <typename S>
void QueryBlock<S>::unit_scores(int64_t) {}

template <typename S>
void QueryBlock<S>::unit_values(int64_t) {}

#endif

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
