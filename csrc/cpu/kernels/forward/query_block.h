// One block of query rows against the keys of one head: for every block of keys it goes through
//   scores S = Q K^T  ->  mask  ->  softmax (row max, weights, row sum)  ->  dropout  ->  O = carry O + P V
// in bands of rows small enough for S to stay in the nearest cache. Rows never mix: what a row gets does not
// depend on which rows lie beside it.
#pragma once

#include "../interface/forward.h"
#include "../matrix/arena.h"
#include "../matrix/finite.h"
#include "../matrix/stored_rows.h"
#include "../scores/mask_and_scale.h"
#include "packed_head.h"
#include "piece_ahead.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr int64_t kBandRows = (S::Product::kInRegisters ? 4 : 3) * S::kTileRows;
constexpr int64_t kMaxBlockKeys = 4096;
constexpr int64_t kRunKeys = 64;  // keys are left out by the mask in units of this
constexpr int64_t kMaxRuns = kMaxBlockKeys / kRunKeys / 2 + 1;
constexpr int64_t kStreamKeys = 32;  // keys whose values are streamed at a time
constexpr int64_t kInPlaceRows =
    8;  // of a group, that a matrix unit multiplies by keys where they lie, at most
// Keys of a value product: so many rows of values stay in the nearest cache for all tiles of a band.
constexpr int64_t kValueDepth = 1024;

// Keys, or values, that are copied at a time, at most.
template <typename Element>
constexpr int64_t kCopiedKeys = larger(kStreamKeys, kAcrossRows<Element>);

template <typename S>
struct QueryScratch {
  using T = typename S::Accum;
  int64_t* met_bad_values;          // NaN or Inf, by this thread in this call: first, where all is 0 at first
  typename S::Operand* query;       // (rows, query_stride)
  T* scores;                        // (band rows, score_stride)
  T* output;                        // (rows, padded Dv), not yet divided by the row sum
  typename S::Element* key_rows;    // (kCopiedKeys, D), and
  typename S::Element* value_rows;  // (kCopiedKeys, Dv): copied rows, where they are streamed; else
  typename S::Element* finite_values;          // (kValueDepth, panel width): a stretch without NaN and Inf,
  typename S::Operand* finite_value_operands;  // and as it is multiplied,
  BadRows* bad_keys;                           // and the keys of which they were left out
  typename S::Element* stored_rows;            // a copy of rows that cannot be read where they lie
  T *key_factors, *value_factors;              // of the keys of a block, where their storage has them
  typename S::Operand* query_columns;   // (depth of D, lanes), for products of keys where they lie, and
  typename S::Operand* weight_columns;  // (depth of keys, lanes), of values across
  T *row_max, *row_sum, *carry, *ones, *factor, *lse;
  int64_t *row_head, *row_index;
  Range* row_keys;   // visible keys, the mask apart
  Range* row_span;   // the same within the key block
  Range* tile_span;  // the hull of a tile's row spans
  uint8_t* tile_started;
  int64_t query_stride, score_stride, output_stride;
};

// Of QueryScratch::stored_rows: a panel of keys or values, or a stretch of some columns of values.
template <typename S>
int64_t stored_rows_size(const AttentionShape& shape, const ForwardPlan& plan) {
  const int64_t panel = S::kPanel * larger(shape.head_dim, shape.value_dim);
  const int64_t stretch = smaller(kValueDepth, plan.block_keys) * panel_width_of<S>(shape.value_dim);
  return larger(panel, larger(stretch, kStreamKeys * shape.value_dim));
}

template <typename S>
inline QueryScratch<S> take_query_scratch(Arena& arena, const ForwardParams& params,
                                          const ForwardPlan& plan) {
  using T = typename S::Accum;
  const AttentionShape& shape = params.shape;
  QueryScratch<S> s{};
  s.met_bad_values = take<int64_t>(arena, 1);
  const int64_t rows = round_up(plan.block_rows, S::kTileRows) + S::kLane + kBandRows<S>;
  s.query_stride = row_stride_of<S>(shape.head_dim);
  s.score_stride =
      round_up(plan.block_keys, S::kPanel) + S::kLane;  // off the powers of two that share cache sets
  s.output_stride = padded_dim<S>(shape.value_dim);
  s.query = take<typename S::Operand>(arena, rows * s.query_stride);
  s.scores = take<T>(arena, kBandRows<S> * s.score_stride);
  s.output = take<T>(arena, rows * s.output_stride);
  const bool by_unit = plan.path == ForwardPath::kUnitRows;
  if (plan.path == ForwardPath::kFewRows || by_unit) {
    s.key_rows = take<typename S::Element>(arena, kCopiedKeys<typename S::Element> * shape.head_dim);
    s.value_rows = take<typename S::Element>(arena, kCopiedKeys<typename S::Element> * shape.value_dim);
  }
  if (by_unit) {
    s.query_columns =
        take<typename S::Operand>(arena, depth_of<typename S::Product>(shape.head_dim) * S::kLane);
    s.weight_columns =
        take<typename S::Operand>(arena, depth_of<typename S::Product>(plan.block_keys) * S::kLane);
  }
  if (plan.path != ForwardPath::kFewRows) {
    const int64_t keys = round_up(smaller(kValueDepth, plan.block_keys), S::kLane);
    const int64_t width = panel_width_of<S>(shape.value_dim);
    s.finite_values = take<typename S::Element>(arena, keys * width);
    s.bad_keys = take<BadRows>(arena, 1);
    s.finite_value_operands = take<typename S::Operand>(arena, depth_of<typename S::Product>(keys) * width);
  }
  if (!is_plain(params.key_storage) || !is_plain(params.value_storage)) {
    s.stored_rows = take<typename S::Element>(arena, stored_rows_size<S>(shape, plan));
    s.key_factors = take<T>(arena, s.score_stride);
    s.value_factors = take<T>(arena, s.score_stride);
  }
  s.row_max = take<T>(arena, rows);
  s.row_sum = take<T>(arena, rows);
  s.carry = take<T>(arena, rows);
  s.ones = take<T>(arena, rows);
  s.factor = take<T>(arena, rows);
  s.lse = take<T>(arena, rows);
  s.row_head = take<int64_t>(arena, rows);
  s.row_index = take<int64_t>(arena, rows);
  s.row_keys = take<Range>(arena, rows);
  s.row_span = take<Range>(arena, rows);
  s.tile_span = take<Range>(arena, rows);
  s.tile_started = take<uint8_t>(arena, rows);
  return s;
}

// Values of some keys of the block, as right operand: from key `first` of the block on.
template <typename S>
struct ValueStretch {
  const typename S::Operand* data;
  int64_t row_stride;
  int64_t first;
  const BadRows* bad_keys;  // of which NaN and Inf were left out; null: of none
};

template <typename S, typename Stored>
struct StreamArgs;  // streamed.h

template <typename S>
class QueryBlock {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  QueryBlock(const ForwardParams& params, const ForwardPlan& plan, const QueryScratch<S>& scratch,
             const PackedHead<S>& packed, int64_t batch)
      : params_(params),
        plan_(plan),
        s_(scratch),
        packed_(packed),
        batch_(batch),
        units_(score_units<T>(params.rule)) {}
  QueryBlock(const QueryBlock&) = delete;
  QueryBlock& operator=(const QueryBlock&) = delete;

  // Where the weights' column sums are added, of all heads or each at its own.
  void set_key_mass(T* key_mass, int64_t head_stride = 0) {
    key_mass_ = key_mass;
    key_mass_stride_ = head_stride;
  }

  // Where attend() leaves the weights, not yet divided by the row sums: (B, Hq, Lq, key_stride).
  void set_kept_weights(T* weights, int64_t key_stride) {
    kept_weights_ = weights;
    kept_stride_ = key_stride;
  }

  // That pieces of a task follow each other, and which keys come after those that attend() is given; none
  // after the last.
  void set_next_piece(int64_t key_head, Range keys) {
    in_pieces_ = true;
    next_head_ = key_head;
    next_keys_ = keys;
  }

  // Rows [first, first + rows) of the query rows of heads first_head, first_head + 1, ..., one after the
  // other. They will attend to no other than these keys. `again`: the scratch holds these very rows already.
  void set_rows(int64_t first_head, int64_t first, int64_t rows, Range keys, bool again = false);

  // Attends to `keys`, leaving row max, row sum and the undivided output in the scratch. `emit`: writes
  // weights and key mass, as it can where one block holds all keys; else emit_all() has to. NaN and Inf among
  // the values, which a weight of 0 does not keep out, reach only the rows that see them; all else has the
  // same bits with and without them.
  void attend(Range keys, bool emit = false);

  // The same for rows of several key heads, all in one band; false: has to be done head by head.
  bool attend_beside(Range keys);

  // Divides by the row sums and writes output and lse.
  void finish();

  // Makes the scores once more, now that the row sums are known, and writes weights and key mass.
  void emit_all(Range keys);

 private:
  static Range aligned(Range span) { return in_steps<S::kSpan>(span); }
  int64_t band_rows(int64_t band) const { return smaller(kBandRows<S>, rows_ - band); }
  int64_t tile_rows(int64_t tile) const { return smaller(S::kTileRows, rows_ - tile); }
  // To configure a matrix unit for fewer rows than a tile has takes longer than to multiply what lies behind
  // them in the scratch.
  int64_t multiplied_rows(int64_t tile) const { return by_unit() ? S::kTileRows : tile_rows(tile); }
  T* score_row(int64_t band, int64_t r) const { return s_.scores + (r - band) * s_.score_stride; }
  Range tile_span(int64_t r) const { return s_.tile_span[r / S::kTileRows]; }

  // body(begin, end) for every run of live keys inside span.
  template <typename Body>
  ATTN_EXT_INLINE void each_run(Range span, Body body) const {
    for (int64_t i = 0; i < run_count_; ++i) {
      const Range part = intersect(runs_[i], span);
      if (!is_empty(part)) body(part.begin, part.end);
    }
  }

  // visible.h
  // Dense rows of operands can be read where they lie.
  bool lie_packed(const Matrix<Element>& query) const {
    return plan_.path != ForwardPath::kFewRows && !by_unit() && is_dense(query) &&
           are_operands<Product>(query);
  }
  void limit_rows(Range keys);
  bool is_seen(int64_t r, int64_t key) const {
    return sees_key<Element>(params_.rule, params_.shape.key_len, batch_, s_.row_head[r], s_.row_index[r],
                             block_key_ + key);
  }
  bool set_key_block(int64_t first_key, int64_t count);
  void select_runs();
  bool is_live(int64_t begin, int64_t end) const;
  bool masked_in_tile(int64_t tile, Range span) const;
  Range masked_panels(int64_t r, Range run) const;
  void scores_masked(int64_t tile, Range span, const TileArgs<Product>& args) const;
  void mask(int64_t band);
  void mask_row(int64_t r, T* row, int64_t begin, int64_t end) const;

  double score_of_key(int64_t r, int64_t key) const;
  T score_of_largest_bias(int64_t r) const;

  // stored.h
  template <typename Stored = Element>
  StoredRows<Stored> stored_keys(int64_t key_head) const {
    return {params_.key, params_.key_storage, batch_, key_head, 0, params_.shape.head_dim};
  }
  template <typename Stored = Element>
  StoredRows<Stored> stored_values(int64_t column, int64_t columns) const {
    return {params_.value, params_.value_storage, batch_, key_head_, column, columns};
  }
  StoredRows<Element> stored_values_of(int64_t key_head) const {
    return {params_.value, params_.value_storage, batch_, key_head, 0, params_.shape.value_dim};
  }
  // Copies of rows that are stored otherwise ask for the memory of those to come.
  int64_t rows_to_ask_for(int64_t distance) const {
    return distance > 0 && s_.stored_rows != nullptr ? params_.shape.key_len : 0;
  }
  bool values_have_factors() const { return params_.value_storage.scale.data != nullptr; }
  void read_factors();
  void multiply_factors(int64_t band, const Storage& storage, const T* factors);

  // packed.h
  bool output_is_finite() const { return are_finite(s_.output, rows_ * s_.output_stride); }
  bool has_bad_values(Range keys);
  void attend_once(Range keys);
  void scores(int64_t band);
  void attend_band(int64_t band);
  void make_scores(int64_t band);
  void add_values(int64_t band);
  void softmax(int64_t band, bool paired);
  void row_maxima(int64_t band, T* top) const;
  void exponentials(int64_t band, bool paired);
  void dropout(int64_t band, bool paired);
  void pair_weights(int64_t band);
  void values(int64_t band);
  Matrix<Element> values_of(int64_t column, int64_t columns, Range keys) const;
  ValueStretch<S> value_stretch(int64_t column, Range stretch);
  ValueStretch<S> finite_stretch(int64_t column, Range stretch);
  void multiply_values(int64_t band, int64_t tile, int64_t column, Range span, const ValueStretch<S>& values);
  void add_bad_values(int64_t band, int64_t column, const Matrix<Element>& values, const BadRows& bad,
                      int64_t first_key) const;

  // shared.h
  void shared_scores(int64_t band);
  void ask_for_next_rows(const StoredRows<Element>& rows) const;
  void ask_for_next_pack();

  // unit_rows.h
  bool by_unit() const { return plan_.path == ForwardPath::kUnitRows; }
  bool reads_values_in_place() const { return by_unit() && !plan_.pieces.packs_values; }
  void pack_query_columns() const;
  void unit_scores(int64_t band);
  void unit_values(int64_t band);
  void unit_value_rows(int64_t band);
  void unit_value_columns(int64_t band);
  void pack_weight_columns(int64_t band) const;
  Matrix<Element> value_columns(int64_t dim, int64_t key) const;
  void round_weights(int64_t band);

  // streamed.h
  struct KeyPlace {
    int64_t head, key;
  };
  KeyPlace keys_after() const;
  template <typename Stored>
  bool asks_for_pieces() const;
  template <typename Stored>
  void ask_for_next_keys(PieceAhead& piece) const;
  void stream_scores(int64_t band);
  void stream_values(int64_t band);
  template <typename Stored>
  void stream_scores_of(int64_t band);
  template <typename Stored>
  void stream_values_of(int64_t band);
  template <typename Stored, typename Ask>
  void stream_keys(int64_t band, Range rows, const StoredRows<Stored>& keys, Range run, Range rest,
                   int64_t distance, Range& copied, Ask ask);
  template <typename Stored, typename Ask>
  void stream_values_at(int64_t band, Range rows, const StoredRows<Stored>& values, Range span,
                        int64_t distance, bool fresh, Range& copied, Ask ask);
  template <int Rows, typename Stored>
  void stream_rows(int64_t band, int64_t row, int64_t key, StreamArgs<S, Stored>& args);
  void keep_weights(int64_t band) const;
  template <typename Stored>
  Matrix<Stored> key_rows(const StoredRows<Stored>& keys, Range rest, int64_t distance, Range& copied) const;
  template <typename Stored>
  int64_t keys_before(const StoredRows<Stored>& keys, Range rest, int64_t begin) const;
  template <typename Stored>
  Range keys_of_stretch(const StoredRows<Stored>& values, int64_t key, int64_t end) const;
  template <typename Stored>
  const Stored* gather_values(const StoredRows<Stored>& values, Range rest, int64_t end, int64_t distance,
                              Range& copied, BadRows& bad) const;

  // heads_beside.h
  template <typename Body>
  void each_head_beside(Body body) const;
  void scores_beside();
  void values_beside();

  // across.h
  bool multiplies_keys_across(const StoredRows<Element>& keys) const;
  int64_t scores_across(int64_t band, const StoredRows<Element>& keys, Range run) const;
  bool multiplies_values_across(const StoredRows<Element>& values) const;
  void values_across(int64_t band, const StoredRows<Element>& values, Range keys, bool fresh) const;

  // output.h
  void finish_rows(int64_t band);
  void finish_largest(int64_t band) const;
  void gather_sinks(int64_t band);
  double double_lse(int64_t r) const;
  template <typename Out>
  void store_output_as() const;
  void emit(int64_t band);
  void emit_row(int64_t r, const T* row) const;
  void emit_pairs(int64_t band);

  const ForwardParams& params_;
  const ForwardPlan& plan_;
  const QueryScratch<S>& s_;
  const PackedHead<S>& packed_;
  const int64_t batch_;
  const ScoreUnits<T> units_;
  T* key_mass_ = nullptr;
  int64_t key_mass_stride_ = 0;
  T* kept_weights_ = nullptr;
  int64_t kept_stride_ = 0;
  bool emit_in_place_ = false;  // weights go out while their scores are in cache
  bool careful_ = false;        // NaN and Inf are left out of the values' products, and shown apart
  Range finite_keys_{0, 0};     // what the scratch's finite values are: keys, and column
  int64_t finite_column_ = 0;
  int8_t bad_values_ = -1;          // has_bad_values(); -1: not looked for yet
  bool mask_by_key_ = false;        // the mask has to be looked at key by key
  bool mask_in_tile_ = false;       // and its rows are dense, so that whole tiles do
  const Operand* query_ = nullptr;  // the rows' operands, query_stride_ apart
  int64_t query_stride_ = 0;
  int64_t rows_ = 0;
  int64_t key_head_ = 0;      // the first, of
  int64_t heads_beside_ = 1;  // key heads that the rows are of
  int64_t block_key_ = 0;     // first key of the key block; spans and runs count from it
  int64_t block_count_ = 0;
  Range runs_[kMaxRuns];
  int64_t run_count_ = 0;
  bool in_pieces_ = false;
  int64_t next_head_ = 0;
  Range next_keys_{0, 0};
  int64_t asked_keys_ = 0;  // of the next piece, which is packed
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
