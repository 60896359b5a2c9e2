// One block of keys against one block of queries of a head, transposed: keys are rows, queries are columns.
// The block is worked through in cells of a few tiles of keys x one panel of queries, small enough to stay in
// the nearest cache from the scores to dS; then the whole block's P and dS go into the gradients of value,
// key and query.
#pragma once

#include "../../interface/backward.h"
#include "../../matrix/rows_ahead.h"
#include "../../scores/dropout_draw.h"
#include "../../scores/mask_and_scale.h"
#include "../mask_grad.h"
#include "../plan.h"
#include "../row_terms.h"
#include "pack.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// A cell of keys is as many tiles as stay in the nearest cache; in whole multiples of what a product takes
// along the depth.
template <typename S>
constexpr int64_t kCellRows = S::Product::kInRegisters ? 4 * S::kTileRows : 2 * S::kTileRows;
// With a mask to be turned around, whole cache lines of it and whole squares of lanes.
template <typename S>
constexpr int64_t kMaskCellRows = S::Product::kInRegisters ? 48 : 64;
// With P to be turned around, in pairs perhaps, whole squares of those.
template <typename S>
constexpr int64_t kSavedCellRows = S::kPaired ? 96 : kMaskCellRows<S>;
constexpr int64_t kMaxBackwardKeys = 512;
constexpr int64_t kMaxBackwardQueries = 512;
constexpr int64_t kMaxPanels = kMaxBackwardQueries / 4;

template <typename S>
struct KeyQueryScratch {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  T* scores;              // of a cell, or (wide) of the block: S, then P, after dropout
  T* grads;               // the same: dP, then dS
  Operand* weights_left;  // (keys, operand_stride): P as a left operand; wide: the scores
  Operand* grads_left;    // the same for dS; wide: the grads
  Operand* grads_right;   // (query panels, depth of keys, kPanel): dS as a right operand; not there when wide
  T* bias;                // (cell keys, kPanel): mask or bias in units of log2
  Operand* saved_weights;  // (cell keys / 2, kPanel): P of the forward pass, in pairs of neighbouring keys;
                           // not there when wide
  T* weight_grads;         // (cell keys, kPanel): dW
  T* cap_slope;            // (cell keys, kPanel): 1 - tanh^2
  T* keep;                 // (keys, kPanel): dropout factors of a panel
  T* grad_key;             // (keys, padded D), to be scaled
  T* grad_value;           // (keys, padded Dv)
  int64_t score_stride, operand_stride;
};

template <typename S>
KeyQueryScratch<S> take_key_query_scratch(Arena& arena, const BackwardParams& params, int64_t keys,
                                          int64_t queries) {
  using T = typename S::Accum;
  using Operand = typename S::Operand;
  KeyQueryScratch<S> s{};
  const int64_t cell =
      (larger(larger(kCellRows<S>, kMaskCellRows<S>), kSavedCellRows<S>) + S::kLane) * S::kPanel;
  const int64_t step = S::kLane * S::kDepth;
  int64_t padded = queries + step;  // off the powers of two that share cache sets
  if ((padded & (padded - 1)) == 0) padded += step;
  s.operand_stride = padded / S::kDepth;
  s.weights_left = take<Operand>(arena, (keys + kCellRows<S>)*s.operand_stride);
  s.grads_left = take<Operand>(arena, (keys + kCellRows<S>)*s.operand_stride);
  if constexpr (S::kPaired) {
    s.score_stride = S::kPanel;
    s.scores = take<T>(arena, cell);
    s.grads = take<T>(arena, cell);
    s.grads_right =
        take<Operand>(arena, ceil_div(queries, S::kPanel) * depth_of<typename S::Product>(keys) * S::kPanel);
  } else {
    s.score_stride = padded;
    s.scores = s.weights_left;
    s.grads = s.grads_left;
  }
  if (params.rule.mask_kind != ScalarKind::kNone) s.bias = take<T>(arena, cell);
  if (S::kPaired && params.weights.data != nullptr) s.saved_weights = take<Operand>(arena, cell);
  if (params.grad_weights.data != nullptr) s.weight_grads = take<T>(arena, cell);
  if (params.rule.softcap > 0) s.cap_slope = take<T>(arena, cell);
  if (params.dropout.enabled) s.keep = take<T>(arena, (keys + 2 * kDropoutColumns) * S::kPanel);
  s.grad_key = take<T>(arena, keys * padded_dim<S>(params.shape.head_dim));
  s.grad_value = take<T>(arena, keys * padded_dim<S>(params.shape.value_dim));
  return s;
}

// What is worked on of a block, whole cells and panels but at its ends: counted from the block's first key
// and query on. The bits of its sums do not depend on how a block is cut, if the parts of its keys meet each
// part of its queries in their order, and the other way around.
struct BlockPart {
  Range keys, queries;
};

// Keys of a cell.
template <typename S>
int64_t cell_rows_of(const BackwardParams& params) {
  if (kReadsWeights<S> && params.weights.data != nullptr) return kSavedCellRows<S>;
  return params.rule.mask_kind == ScalarKind::kNone ? kCellRows<S> : kMaskCellRows<S>;
}

template <typename S>
class KeyQueryBlock {
 public:
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  KeyQueryBlock(const BackwardParams& params, const TilesPlan& plan, const KeyQueryScratch<S>& scratch);
  KeyQueryBlock(const KeyQueryBlock&) = delete;
  KeyQueryBlock& operator=(const KeyQueryBlock&) = delete;

  // Some keys of a key head, and where their gradients are summed.
  void set_keys(int64_t batch, int64_t key_head, Range keys, const KeyPack<S>& pack, T* grad_key,
                T* grad_value) {
    batch_ = batch;
    key_head_ = key_head;
    key_first_ = keys.begin;
    key_count_ = keys.end - keys.begin;
    keys_ = pack;
    grad_key_ = grad_key;
    grad_value_ = grad_value;
  }
  void set_mask_grad(MaskGrad<S> mask_grad) { mask_grad_ = mask_grad; }

  // Adds to the gradients what some query rows of a head give.
  void add_queries(int64_t head, Range rows, const QueryPack<S>& pack) {
    if (!make_grads(head, rows, pack, {{0, key_count_}, {0, rows.end - rows.begin}})) return;
    add_to_block_keys(begins_sums(keys_.has_sums));
    add_to_queries(begins_sums(queries_.has_sums));
  }
  // The same in steps, of a part of the block: P and dS, and with them the mask's gradient (false: no query
  // of it sees any key); then the gradients of value and key, where set_keys() has them or, of some cells of
  // keys, `to`, which is that of the first of them; then that of the query. fresh: nothing was added yet, and
  // what lies there means nothing.
  bool make_grads(int64_t head, Range rows, const QueryPack<S>& pack, const BlockPart& part);
  void add_to_block_keys(bool fresh);
  void add_to_values(Range keys, T* to, bool fresh);
  void add_to_keys(Range keys, T* to, bool fresh);
  void add_to_queries(bool fresh);

  // Takes these keys into the rows' maxima or sums, or adds to delta what they give of rowsum(P dP).
  void add_to_rows(Pass pass, int64_t head, Range rows, const QueryPack<S>& pack);

 private:
  static constexpr int64_t kMaxCells = kMaxBackwardKeys / kCellRows<S> + 1;

  int64_t cell_rows(int64_t cell) const { return smaller(cell_size_, key_count_ - cell); }
  int64_t tile_rows(int64_t tile) const { return smaller(S::kTileRows, key_count_ - tile); }
  // Rows of a product's tile of so many columns: those of two where a tall one has room before `end` and the
  // same queries see both.
  int64_t tile_rows(int64_t tile, int64_t end, int64_t columns) const {
    const int64_t tall = tile_height<Product>(columns), index = tile / S::kTileRows;
    if (tall == S::kTileRows || tile + tall > end) return tile_rows(tile);
    const Range a = tile_span_[index], b = tile_span_[index + 1];
    return a.begin == b.begin && a.end == b.end ? tall : tile_rows(tile);
  }
  int64_t panel_width(int64_t panel) const { return smaller(S::kPanel, padded_queries_ - panel); }
  int64_t cell_offset(int64_t cell, int64_t panel, int64_t r) const {
    return S::kPaired ? (r - cell) * S::kPanel : r * s_.score_stride + panel;
  }
  T* score_row(int64_t cell, int64_t panel, int64_t r) const {
    return s_.scores + cell_offset(cell, panel, r);
  }
  T* grad_row(int64_t cell, int64_t panel, int64_t r) const { return s_.grads + cell_offset(cell, panel, r); }
  // Every key of the cell is seen by every query of the panel, as far as windows and masks of one row or
  // column go.
  bool is_whole(int64_t cell, int64_t panel) const {
    const Range common = cell_common_[cell / cell_size_];
    return common.begin <= panel && common.end >= smaller(panel + S::kPanel, query_count_);
  }
  uint8_t& live(int64_t cell, int64_t panel) { return live_[cell / cell_size_][panel / S::kPanel]; }
  // body(queries) for every run of panels that the cell is live in.
  template <typename Body>
  ATTN_EXT_INLINE void each_live_run(int64_t cell, Body body) {
    for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
      const int64_t begin = panel;
      while (panel < part_.queries.end && live(cell, panel)) panel += S::kPanel;
      if (panel > begin) body(Range{begin, smaller(panel, query_count_)});
    }
  }
  // body(keys) for every run of cells that the panel is live in.
  template <typename Body>
  ATTN_EXT_INLINE void each_live_key_run(int64_t panel, Body body) {
    for (int64_t cell = part_.keys.begin; cell < part_.keys.end; cell += cell_size_) {
      const int64_t begin = cell;
      while (cell < part_.keys.end && live(cell, panel)) cell += cell_size_;
      if (cell > begin) body(Range{begin, smaller(cell, key_count_)});
    }
  }
  // Columns of a panel that some key of the tile is seen by, from the panel's first on.
  Range panel_span(int64_t tile, int64_t panel) const {
    Range span = intersect(tile_span_[tile / S::kTileRows], {panel, panel + panel_width(panel)});
    return {span.begin - panel, span.end - panel};
  }

  // visible.h
  bool set_block(int64_t head, Range rows, const QueryPack<S>& pack, const BlockPart& part);
  // Queries, from the block's first on, that see a key, as far as windows go, in the block or out of it; and
  // those in it, as far as windows and a mask of keys go.
  Range window_of_key(int64_t r) const;
  Range queries_of_key(int64_t r) const;
  void see_tile(int64_t tile, Range& common, Range& hull) const;
  // Of all rows: NaN and Inf of other keys' values, or of the gradient of lse, show there.
  bool has_finite_delta() const {
    T residue = 0;  // x - x is 0, NaN for what is not finite
    for (int64_t i = 0; i < query_count_; ++i) {
      residue += queries_.terms.delta[i] - queries_.terms.delta[i];
    }
    return residue == 0;
  }
  bool cell_is_live(int64_t cell, int64_t panel) const;

  // transposed.h
  RowsAhead rows_ahead(const TensorView& view, const void* data, int64_t size, int64_t cell,
                       int64_t panel) const;
  RowsAhead mask_ahead(int64_t cell, int64_t panel) const;
  RowsAhead mask_grad_ahead(int64_t cell, int64_t panel) const;
  template <typename M, typename Load, typename Finish>
  void load_cell(const TensorView& view, int64_t cell, int64_t panel, T* out, Load load_lanes,
                 Finish finish) const;
  void load_bias_cell(int64_t cell, int64_t panel) const;
  void load_weight_grads_cell(int64_t cell, int64_t panel) const;
  void put_mask_grads(int64_t cell, int64_t panel) const;
  void put_mask_square(const T* grads, int64_t keys, int64_t place, int64_t queries) const;
  void put_mask_pairs();
  void clear_unseen_mask_grads();
  void put_pairs_square(const Operand* pairs, int64_t keys, Element* to, int64_t queries) const;
  void draw_dropout(int64_t panel);

  // cell.h
  void run_cell(int64_t cell, int64_t panel);
  void multiply_cell(int64_t cell, int64_t panel, const Operands<Operand>& left, const Operand* right,
                     int64_t dim, T* out, RowsAhead ahead);
  void keep_seen_of_cell(int64_t cell, int64_t panel) const;
  void finish_cell_scores(int64_t cell, int64_t panel);
  void finish_weights(int64_t cell, int64_t panel);
  struct KeySpans {
    Range computed, seen;  // queries, from the panel's first on
  };
  KeySpans spans_of_key(int64_t r, int64_t panel) const;
  void make_seen_weights(Range seen, const T* scores, int64_t panel, int64_t i, Vec<T>& weight,
                         Vec<T>& grad) const;
  void partial_row(int64_t cell, int64_t panel, int64_t r) const;
  void partial_paired_cell(int64_t cell, int64_t panel);
  void full_row(int64_t cell, int64_t panel, int64_t r, Range columns) const;
  void finish_side_grads(int64_t cell, int64_t panel);
  void clear_outside(int64_t cell, int64_t panel);
  void pair_cell(int64_t cell, int64_t panel);
  void run_plain_cell(int64_t cell, int64_t panel);
  template <bool Masked, bool Select>
  void plain_cell(int64_t cell, int64_t panel) const;
  template <bool Masked, bool Select>
  void plain_paired_cell(int64_t cell, int64_t panel);
  Operand* grads_right_at(int64_t panel, int64_t r, int64_t i) const {
    const int64_t depth = depth_of<Product>(plan_.block_keys);
    return s_.grads_right + (panel / S::kPanel * depth + r / S::kDepth) * S::kPanel + i;
  }
  void store_pairs(int64_t panel, int64_t r, int64_t i, const Vec<T> (&weights)[2][2],
                   const Vec<T> (&grads)[2][2]);
  template <typename Make>
  void make_pairs(int64_t panel, int64_t r, int64_t i, int keys, int vectors, Make make);
  template <typename Make>
  void make_pairs_of_cell(int64_t cell, int64_t panel, Make make);
  void clear_last_pairs(int64_t panel) const;
  void sum_delta(int64_t cell, int64_t panel);
  void sum_rows(int64_t cell, int64_t panel);

  // saved_weights.h
  RowsAhead weights_ahead(int64_t cell, int64_t panel) const;
  // P of the forward pass, turned around: of key r of the cell and, in pairs, of its neighbour. Where nothing
  // is paired it lies where scores would.
  Operand* saved_row(int64_t cell, int64_t panel, int64_t r) const {
    if constexpr (S::kPaired) {
      return s_.saved_weights + (r - cell) / S::kDepth * S::kPanel;
    } else {
      return score_row(cell, panel, r);
    }
  }
  void load_weights_cell(int64_t cell, int64_t panel) const;
  void run_saved_cell(int64_t cell, int64_t panel);
  template <bool Select>
  void saved_paired_cell(int64_t cell, int64_t panel);
  void saved_rows(int64_t cell, int64_t panel) const;

  // products.h
  struct KeySide {
    const Operand* left;             // P or dS
    const Operands<Operand>& right;  // dO or Q
    const TensorView& rows;          // the same, with NaN and Inf
    bool has_bad_rows;
    int64_t dim;
  };
  void add_key_side(const KeySide& side, Range keys, T* to, bool fresh);
  void add_grad_query(bool fresh);
  void add_grad_query(int64_t panel, Range columns, Range keys, bool fresh);
  Range seen_keys(Range keys, Range queries) const;
  int64_t even_columns(int64_t panel);
  bool is_seen(int64_t key, int64_t query) const {
    return sees_key<Element>(params_.rule, params_.shape.key_len, batch_, head_, query_first_ + query,
                             key_first_ + key);
  }
  T operand_at(const Operand* left, int64_t key, int64_t query) const {
    const Operand* row = left + key * s_.operand_stride;
    if constexpr (S::kPaired) return to_compute(reinterpret_cast<const Element*>(row)[query]);
    return row[query];
  }
  void add_bad_rows(const KeySide& side, Range keys, T* to) const;
  void add_bad_keys() const;

  const BackwardParams& params_;
  const TilesPlan& plan_;
  const KeyQueryScratch<S>& s_;
  const ScoreUnits<T> units_;
  const bool wants_grads_;                // of the scores: for query, key or mask
  const bool full_;                       // any of what plain_cell and partial_row do not know
  const bool mask_pairs_, streams_mask_;  // plan.h
  const int64_t cell_size_;               // keys of a cell
  MaskGrad<S> mask_grad_;
  int64_t batch_ = 0, key_head_ = 0, key_first_ = 0, key_count_ = 0;
  int64_t head_ = 0, query_first_ = 0, query_count_ = 0, padded_queries_ = 0;
  BlockPart part_{};  // queries up to a whole step
  KeyPack<S> keys_{};
  QueryPack<S> queries_{};
  T* grad_key_ = nullptr;
  T* grad_value_ = nullptr;
  bool mask_hides_keys_ = false;  // a bool mask of one row
  bool mask_by_key_ = false;      // a mask that has to be looked at element by element
  bool select_all_ = false;       // some dP may not be finite where P is 0
  bool reads_weights_ = false;    // those of the forward pass; no score is made
  Pass pass_ = Pass::kGradients;
  bool special_ = false;                                  // full_, or rows that are far
  int64_t keep_first_ = 0;                                // key of the first row of `keep`
  Range tile_span_[kMaxBackwardKeys / S::kTileRows + 1];  // hull of queries_of_key(), in whole steps
  Range cell_common_[kMaxCells];                          // queries that see every key of the cell
  uint8_t live_[kMaxCells][kMaxPanels];
};

template <typename S>
KeyQueryBlock<S>::KeyQueryBlock(const BackwardParams& params, const TilesPlan& plan,
                                const KeyQueryScratch<S>& scratch)
    : params_(params),
      plan_(plan),
      s_(scratch),
      units_(score_units<T>(params.rule)),
      wants_grads_(params.grad_query.data != nullptr || params.grad_key.data != nullptr ||
                   params.grad_mask.data != nullptr),
      full_(params.dropout.enabled || params.rule.softcap > 0 || params.grad_weights.data != nullptr ||
            params.grad_key_mass.data != nullptr || params.grad_output.data == nullptr),
      mask_pairs_(mask_grad_in_pairs<S>(params)),
      streams_mask_(streams_mask_grad<S>(params)),
      cell_size_(cell_rows_of<S>(params)) {}

template <typename S>
bool KeyQueryBlock<S>::make_grads(int64_t head, Range rows, const QueryPack<S>& pack, const BlockPart& part) {
  const bool any = set_block(head, rows, pack, part);
  if (mask_grad_.sets()) clear_unseen_mask_grads();
  if (!any) return false;
  for (int64_t panel = part_.queries.begin; panel < part_.queries.end; panel += S::kPanel) {
    if (params_.dropout.enabled) draw_dropout(panel);
    for (int64_t cell = part_.keys.begin; cell < part_.keys.end; cell += cell_size_) {
      if (live(cell, panel)) run_cell(cell, panel);
    }
    if constexpr (S::kDepthStep > 1) clear_last_pairs(panel);
  }
  if (mask_pairs_) put_mask_pairs();
  return true;
}

template <typename S>
void KeyQueryBlock<S>::add_to_block_keys(bool fresh) {
  const int64_t first = part_.keys.begin;
  add_to_values(part_.keys, grad_value_ + first * padded_dim<S>(params_.shape.value_dim), fresh);
  add_to_keys(part_.keys, grad_key_ + first * padded_dim<S>(params_.shape.head_dim), fresh);
}

template <typename S>
void KeyQueryBlock<S>::add_to_values(Range keys, T* to, bool fresh) {
  if (params_.grad_value.data == nullptr) return;
  const int64_t dim = params_.shape.value_dim;
  if (params_.grad_output.data != nullptr) {
    const bool bad = *queries_.has_bad_grads != 0;
    add_key_side({s_.weights_left, *queries_.grad_rows, params_.grad_output, bad, dim}, keys, to, fresh);
  } else if (fresh) {
    fill_span(to, 0, (keys.end - keys.begin) * padded_dim<S>(dim), static_cast<T>(0));
  }
}

template <typename S>
void KeyQueryBlock<S>::add_to_keys(Range keys, T* to, bool fresh) {
  if (params_.grad_key.data == nullptr) return;
  const bool bad = *queries_.has_bad_queries != 0;
  add_key_side({s_.grads_left, *queries_.query_rows, params_.query, bad, params_.shape.head_dim}, keys, to,
               fresh);
}

template <typename S>
void KeyQueryBlock<S>::add_to_queries(bool fresh) {
  if (params_.grad_query.data == nullptr) return;
  add_grad_query(fresh);
  if (*keys_.has_bad_keys != 0) add_bad_keys();
}

template <typename S>
void KeyQueryBlock<S>::add_to_rows(Pass pass, int64_t head, Range rows, const QueryPack<S>& pack) {
  if (!set_block(head, rows, pack, {{0, key_count_}, {0, rows.end - rows.begin}})) return;
  pass_ = pass;
  for (int64_t panel = 0; panel < padded_queries_; panel += S::kPanel) {
    if (params_.dropout.enabled && pass == Pass::kDelta) draw_dropout(panel);
    for (int64_t cell = 0; cell < key_count_; cell += cell_size_) {
      if (live(cell, panel)) run_cell(cell, panel);
    }
  }
  pass_ = Pass::kGradients;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
