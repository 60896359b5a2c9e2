// Few query rows against many keys. A task lets the rows of all query heads of a group attend to some pieces
// of their keys (packed first, unless there is but a handful of rows); then the pieces' outputs, row maxima
// and sums are merged in order. Weights are kept from the first look at the keys to the merge where they are
// wanted; where only the key mass is, the keys are looked at once more.
#pragma once

#include "../interface/forward.h"
#include "heads_beside.h"
#include "output.h"
#include "packed_head.h"
#include "plan.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// So many rows of a group, where a head has few, are worth packing what they read, and more of more dims: one
// for so many. Pairs and short vectors lose most where rows lie, floats of 512 bits least (docs/trials.md).
constexpr int64_t kSharedRows = 32;
template <typename S>
constexpr int64_t kDimsASharedRow = S::kPaired || sizeof(Vec<typename S::Accum>) < 64 ? 6
                                    : sizeof(typename S::Element) == 2                ? 4
                                                                                      : 1;
constexpr int64_t kTasksPerThread = 8;  // at least, of a handful of rows, if there are as many pieces

template <typename S>
class KeyPieces {
 public:
  static void plan(const ForwardParams& params, int threads, ForwardPlan& plan);
  static int64_t tasks(const ForwardPlan& plan, int64_t round) { return plan.round_tasks[round]; }
  static void run(const ForwardParams& params, const ForwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    KeyPieces<S> call(params, plan, shared, scratch);
    const int64_t heads = params.shape.query_heads;
    if (round == 1) return call.merge(task / heads, task % heads);
    call.each_piece(task, [&](int64_t batch, const Piece& piece, const Piece& next) {
      round == 0 ? call.run_piece(batch, piece, next) : call.add_key_mass(batch, piece.key_head, piece.index);
    });
  }

 private:
  using T = typename S::Accum;
  using Element = typename S::Element;

  KeyPieces(const ForwardParams& params, const ForwardPlan& plan, void* shared, void* scratch)
      : params_(params),
        plan_(plan),
        shape_(params.shape),
        shared_(static_cast<T*>(shared)),
        arena_{static_cast<char*>(scratch), 0},
        query_(take_query_scratch<S>(arena_, params, plan)) {}

  struct Piece {
    int64_t key_head, index;
  };

  Piece piece_at(int64_t i) const {
    const int64_t count = plan_.pieces.count, heads = plan_.pieces.heads_beside;
    if (!plan_.pieces.heads_together) return {i / count, i % count};
    const int64_t sections = ceil_div(shape_.key_heads, heads);
    return {i % sections * heads, i / sections};
  }
  // body(batch, piece, the next one; of index -1 if it is the last)
  template <typename Body>
  void each_piece(int64_t task, Body body) const {
    const int64_t all = plan_.pieces.count * ceil_div(shape_.key_heads, plan_.pieces.heads_beside);
    const int64_t tasks = ceil_div(all, plan_.pieces.per_task);
    const int64_t batch = task / tasks, first = task % tasks * plan_.pieces.per_task;
    const int64_t end = smaller(first + plan_.pieces.per_task, all);
    for (int64_t i = first; i < end; ++i) {
      body(batch, piece_at(i), i + 1 < end ? piece_at(i + 1) : Piece{0, -1});
    }
  }
  Range piece_keys(int64_t piece) const {
    const int64_t begin = (plan_.pieces.first + piece) * plan_.pieces.keys;
    return {begin, smaller(begin + plan_.pieces.keys, shape_.key_len)};
  }
  // What the windows of all rows span, or all keys where those that nobody sees have results as well.
  static Range keys_to_visit(const ForwardParams& params) {
    const AttentionShape& shape = params.shape;
    const Range all{0, shape.key_len};
    if (has_weights(params) || shape.query_len == 0) return all;
    const Range seen{window_keys(params.rule, shape.key_len, 0).begin,
                     window_keys(params.rule, shape.key_len, shape.query_len - 1).end};
    return is_empty(seen) ? Range{0, 0} : seen;
  }
  // Where keys and values are read as they lie, the lanes of a dot product are summed, and short elements
  // made floats, or pairs of two rows of values, for every few query rows anew. Of more dims the sums tell
  // less, and packing more; the more so where rows of heads lie between each other.
  static bool shares_packs(const ForwardParams& params) {
    const AttentionShape& shape = params.shape;
    const auto are_enough = [&](int64_t rows) {
      return rows >= kSharedRows && rows * kDimsASharedRow<S> >= shape.head_dim;
    };
    const int64_t rows = group_size(shape) * shape.query_len;
    if (!S::Product::kInRegisters || !are_enough(rows)) return false;
    return are_enough(rows / 2) || !key_heads_interleave(params);
  }
  static int64_t bytes_of_keys(const ForwardParams& params) {
    const AttentionShape& shape = params.shape;
    return shape.batch * shape.key_heads * shape.key_len * (shape.head_dim + shape.value_dim) *
           static_cast<int64_t>(sizeof(Element));
  }
  static void plan_heads_beside(const ForwardParams& params, int threads, ForwardPlan& plan);
  PackedHead<S> pack_piece(int64_t batch, int64_t key_head, Range keys, bool packs_values) const;
  void add_key_mass(int64_t batch, int64_t key_head, int64_t piece) const;
  void run_piece(int64_t batch, const Piece& piece, const Piece& next);
  void run_head(int64_t batch, const Piece& piece, const Piece& next);
  bool run_heads_beside(int64_t batch, const Piece& piece, const Piece& next, int64_t heads);
  // Whether the scratch holds the rows of these heads, all in one block, from the piece that was run before.
  bool holds_rows_of(int64_t batch, int64_t key_head, int64_t heads) {
    const bool holds = batch == batch_of_rows_ && key_head == head_of_rows_ && heads == heads_of_rows_ &&
                       heads * group_size(shape_) * shape_.query_len <= plan_.block_rows;
    batch_of_rows_ = batch;
    head_of_rows_ = key_head;
    heads_of_rows_ = heads;
    return holds;
  }
  void end_piece(QueryBlock<S>& block, int64_t batch, int64_t rows, int64_t piece);
  void unsign_zeros(int64_t rows) const;
  void keep_rows(int64_t batch, int64_t rows, int64_t piece) const {
    const int64_t width = query_.output_stride;
    for (int64_t r = 0; r < rows; ++r) {
      T* to = partials(batch, query_.row_head[r], piece) + query_.row_index[r] * partial_row_size(shape_);
      memcpy(to, query_.output + r * width, static_cast<size_t>(width) * sizeof(T));
      to[width] = query_.row_max[r];
      to[width + 1] = query_.row_sum[r];
    }
  }
  void merge(int64_t batch, int64_t head);
  void merge_row(const T* partials, int64_t row) const;
  void merge_weights(int64_t batch, int64_t row) const;

  // A row of a piece: the output, then row max and row sum.
  static int64_t partial_row_size(const AttentionShape& shape) {
    return padded_dim<S>(shape.value_dim) + S::kLane;
  }
  // One row of weights a head is no more than the key mass itself.
  static bool keeps_weights(const ForwardParams& params) {
    return params.weights.data != nullptr || (params.key_mass != nullptr && params.shape.query_len == 1);
  }
  static bool looks_twice(const ForwardParams& params) {
    return params.key_mass != nullptr && !keeps_weights(params);
  }
  // Rows of weights that are kept for the merge, each piece relative to its own row max; behind the partial
  // rows. Without them the rows' maxima and factors, for the second look.
  static int64_t kept_row_size(const ForwardParams& params) {
    return keeps_weights(params) ? round_up(params.shape.key_len, S::kLane) : looks_twice(params) ? 2 : 0;
  }
  int64_t piece_stride() const { return shape_.query_len * partial_row_size(shape_); }
  T* partials(int64_t batch, int64_t head, int64_t piece) const {
    return shared_ + ((batch * shape_.query_heads + head) * plan_.pieces.count + piece) * piece_stride();
  }
  T* key_mass_of(int64_t batch, int64_t head) const {
    return static_cast<T*>(params_.key_mass) + (batch * shape_.query_heads + head) * shape_.key_len;
  }
  T* kept_rows(int64_t batch, int64_t head) const {
    return partials(shape_.batch, 0, 0) +
           (batch * shape_.query_heads + head) * shape_.query_len * kept_row_size(params_);
  }

  const ForwardParams& params_;
  const ForwardPlan& plan_;
  const AttentionShape& shape_;
  T* const shared_;
  Arena arena_;
  const QueryScratch<S> query_;
  int64_t batch_of_rows_ = -1, head_of_rows_ = -1, heads_of_rows_ = 0;
  bool head_by_head_ = false;
};

template <typename S>
void KeyPieces<S>::plan(const ForwardParams& params, int threads, ForwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const int64_t query_units = shape.batch * shape.query_heads;
  const bool by_unit = plan.path == ForwardPath::kUnitRows;
  const bool few_rows = plan.path == ForwardPath::kFewRows || by_unit;
  plan.pieces.keys = plan.block_keys = piece_length(plan.path, shape);
  const Range keys = keys_to_visit(params);
  plan.pieces.first = keys.begin / plan.pieces.keys;
  plan.pieces.count = larger(1, ceil_div(keys.end, plan.pieces.keys) - plan.pieces.first);
  plan.block_rows = block_height<S>(shape.query_len * group_size(shape), 1);
  plan.value_in_place = values_stay_in_place<S>(params);
  if (by_unit) {  // where no bit hangs on it
    const bool many = shape.query_len * group_size(shape) > kInPlaceRows;
    plan.pieces.packs_keys = many || params.key.column_stride != 1;
    plan.pieces.packs_values = many || !unit_reads_in_place<S>(params);
  } else {
    // What lies across memory is read there, or copied, faster than any but pairs are packed.
    const auto packs = [&](const TensorView& view) { return S::kPaired || !lies_across(view); };
    const bool shares = few_rows && shares_packs(params);
    plan.pieces.packs_keys = !few_rows || (shares && packs(params.key));
    plan.pieces.packs_values = !few_rows || (shares && packs(params.value));
  }
  plan.pieces.heads_beside = 1;
  plan.rounds = 3;
  if (query_units == 0 || shape.query_len == 0) return;

  plan.pieces.heads_together = few_rows && key_heads_interleave(params);
  if (few_rows) plan_heads_beside(params, threads, plan);
  const int64_t sections = ceil_div(shape.key_heads, plan.pieces.heads_beside);
  // Pieces that lie beside each other stream better; some tasks a thread are enough for an even share.
  const int64_t even = shape.batch * sections * plan.pieces.count / (kTasksPerThread * threads);
  plan.pieces.per_task = few_rows ? larger(1, even) : 1;
  plan.pieces.merged = plan.pieces.count > 1 || has_weights(params);
  plan.round_tasks[0] = shape.batch * ceil_div(sections * plan.pieces.count, plan.pieces.per_task);
  if (plan.pieces.merged) {
    plan.round_tasks[1] = query_units;
    if (looks_twice(params)) plan.round_tasks[2] = plan.round_tasks[0];
    plan.shared_bytes = query_units * shape.query_len *
                        (plan.pieces.count * partial_row_size(shape) + kept_row_size(params)) *
                        static_cast<int64_t>(sizeof(T));
  }
  Arena scratch{nullptr, 0};
  take_query_scratch<S>(scratch, params, plan);
  if (plan.pieces.packs_keys || plan.pieces.packs_values) {
    take_packed_head<S>(params, plan, scratch, plan.pieces.keys);
  }
  plan.thread_bytes = scratch.used;
}

// Several heads a piece, where that leaves each thread as many tasks as an even share needs.
template <typename S>
void KeyPieces<S>::plan_heads_beside(const ForwardParams& params, int threads, ForwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const int64_t rows = group_size(shape) * shape.query_len;
  const bool streams =
      plan.path == ForwardPath::kFewRows && !plan.pieces.packs_keys && !plan.pieces.packs_values;
  if (!streams || looks_twice(params) || bytes_of_keys(params) <= params.most_bytes_head_by_head) return;
  int64_t heads = most_heads_beside<S>(params, rows);
  const auto tasks = [&] { return shape.batch * ceil_div(shape.key_heads, heads) * plan.pieces.count; };
  while (heads > 1 && threads > 1 && tasks() < kTasksPerThread * threads) heads /= 2;
  if (heads <= 1) return;
  heads = ceil_div(shape.key_heads, ceil_div(shape.key_heads, heads));  // as many in each
  plan.pieces.heads_beside = heads;
  plan.pieces.keys_beside = keys_of_heads_beside<S>(params, heads);
  plan.block_rows = larger(plan.block_rows, heads * rows);
}

template <typename S>
PackedHead<S> KeyPieces<S>::pack_piece(int64_t batch, int64_t key_head, Range keys, bool packs_values) const {
  PackedHead<S> packed{};
  if (!plan_.pieces.packs_keys && !packs_values) return packed;
  Arena arena = arena_;
  packed = take_packed_head<S>(params_, plan_, arena, plan_.pieces.keys);
  set_head(params_, plan_, packed, batch, key_head, keys.begin);
  if (plan_.pieces.packs_keys) pack_keys(params_, plan_, packed, batch, key_head, keys, query_.stored_rows);
  if (packs_values) {
    pack_values(params_, plan_, packed, batch, key_head, keys, query_.stored_rows);
  }
  return packed;
}

// A sum that underflows to -0 stays so, or becomes +0 with the next weight of 0: which of a piece's keys are
// gone through, although a row does not see them, is up to the rows beside it. Merged pieces are added to +0.
template <typename S>
void KeyPieces<S>::unsign_zeros(int64_t rows) const {
  for (int64_t i = 0; i < rows * query_.output_stride; i += S::kLane) {
    store(query_.output + i, load(query_.output + i) + Vec<T>{});
  }
}

template <typename S>
void KeyPieces<S>::run_piece(int64_t batch, const Piece& piece, const Piece& next) {
  const int64_t heads = smaller(plan_.pieces.heads_beside, shape_.key_heads - piece.key_head);
  if (heads == 1) return run_head(batch, piece, next);
  if (!head_by_head_ && run_heads_beside(batch, piece, next, heads)) return;
  head_by_head_ = true;  // for the rest of the task: what is not finite is found out there
  for (int64_t h = 0; h < heads; ++h) run_head(batch, {piece.key_head + h, piece.index}, {0, -1});
}

template <typename S>
void KeyPieces<S>::run_head(int64_t batch, const Piece& piece, const Piece& next) {
  const int64_t group = group_size(shape_), rows = group * shape_.query_len, key_head = piece.key_head;
  const Range keys = piece_keys(piece.index);
  const PackedHead<S> packed = pack_piece(batch, key_head, keys, plan_.pieces.packs_values);
  QueryBlock<S> block(params_, plan_, query_, packed, batch);
  if (keeps_weights(params_)) block.set_kept_weights(kept_rows(0, 0), kept_row_size(params_));
  if (plan_.pieces.per_task > 1) {
    block.set_next_piece(next.key_head, next.index < 0 ? Range{0, 0} : piece_keys(next.index));
  }
  const bool again = holds_rows_of(batch, key_head, 1);
  for (int64_t first = 0; first < rows; first += plan_.block_rows) {
    const int64_t count = smaller(plan_.block_rows, rows - first);
    block.set_rows(key_head * group, first, count, keys, again);
    block.attend(keys);
    end_piece(block, batch, count, piece.index);
  }
}

// False: has to be done head by head. A thread that has met NaN or Inf among values does so from then on.
template <typename S>
bool KeyPieces<S>::run_heads_beside(int64_t batch, const Piece& piece, const Piece& next, int64_t heads) {
  if (*query_.met_bad_values != 0) return false;
  const int64_t group = group_size(shape_), rows = heads * group * shape_.query_len;
  const Range keys = piece_keys(piece.index);
  const PackedHead<S> none{};
  QueryBlock<S> block(params_, plan_, query_, none, batch);
  if (keeps_weights(params_)) block.set_kept_weights(kept_rows(0, 0), kept_row_size(params_));
  block.set_next_piece(next.key_head, next.index < 0 ? Range{0, 0} : piece_keys(next.index));
  block.set_rows(piece.key_head * group, 0, rows, keys, holds_rows_of(batch, piece.key_head, heads));
  if (!block.attend_beside(keys)) return false;
  end_piece(block, batch, rows, piece.index);
  return true;
}

template <typename S>
void KeyPieces<S>::end_piece(QueryBlock<S>& block, int64_t batch, int64_t rows, int64_t piece) {
  if (plan_.pieces.merged) return keep_rows(batch, rows, piece);
  unsign_zeros(rows);
  block.finish();
}

// The second look: the piece's keys again, now that the rows' maxima and sums over all keys are known.
template <typename S>
void KeyPieces<S>::add_key_mass(int64_t batch, int64_t key_head, int64_t piece) const {
  const int64_t group = group_size(shape_), rows = group * shape_.query_len;
  const Range keys = piece_keys(piece);
  constexpr bool kNoValues = false;
  const PackedHead<S> packed = pack_piece(batch, key_head, keys, kNoValues);
  QueryBlock<S> block(params_, plan_, query_, packed, batch);
  block.set_key_mass(key_mass_of(batch, 0), shape_.key_len);
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    fill_span(key_mass_of(batch, head), keys.begin, keys.end, static_cast<T>(0));
  }
  for (int64_t first = 0; first < rows; first += plan_.block_rows) {
    const int64_t count = smaller(plan_.block_rows, rows - first);
    block.set_rows(key_head * group, first, count, keys);
    for (int64_t r = 0; r < count; ++r) {
      const T* kept = kept_rows(batch, query_.row_head[r]) + query_.row_index[r] * kept_row_size(params_);
      query_.row_max[r] = kept[0];
      query_.factor[r] = kept[1];
    }
    block.emit_all(keys);
  }
}

// weights = factor 2^(m_i - m) P_i of one row, key mass += weights
template <typename S>
void KeyPieces<S>::merge_weights(int64_t batch, int64_t row) const {
  const int64_t head = query_.row_head[row], index = query_.row_index[row];
  const T* kept = kept_rows(batch, head) + index * kept_row_size(params_);
  WeightRow<S> out{};
  if (params_.key_mass != nullptr) out.mass = key_mass_of(batch, head);
  if (params_.weights.data != nullptr)
    out.weights = row_pointer<Element>(params_.weights, batch, head, index);
  const T top = query_.row_max[row];
  const T origin = top == -kInfinity<T> ? 0 : top;
  for (int64_t piece = 0; piece < plan_.pieces.count; ++piece) {
    const T* part = partials(batch, head, piece) + index * partial_row_size(shape_);
    const Vec<T> share = exp2<T>(broadcast(part[query_.output_stride] - origin));
    const Vec<T> factor = broadcast(query_.factor[row]) * share;
    const int64_t end = smaller((piece + 1) * plan_.pieces.keys, shape_.key_len);
    for (int64_t j = piece * plan_.pieces.keys; j < end; j += S::kLane) {
      out.write(j, load(kept + j), factor, smaller(S::kLane, end - j), [&](int64_t key) {
        return sees_key<Element>(params_.rule, shape_.key_len, batch, head, index, key);
      });
    }
  }
}

// m = max m_i,  l = sum 2^(m_i - m) l_i,  O = sum 2^(m_i - m) O_i   over the pieces i, in their order
template <typename S>
void KeyPieces<S>::merge_row(const T* first_partial, int64_t row) const {
  const int64_t width = query_.output_stride;
  T* output = query_.output + row * width;
  const auto part = [&](int64_t piece) { return first_partial + piece * piece_stride(); };
  Vec<T> top = broadcast(-kInfinity<T>);
  for (int64_t i = 0; i < plan_.pieces.count; ++i) top = maximum(top, broadcast(part(i)[width]));
  const Vec<T> origin = top == -kInfinity<T> ? Vec<T>{} : top;
  Vec<T> sum = {};
  fill_span(output, 0, width, static_cast<T>(0));
  for (int64_t i = 0; i < plan_.pieces.count; ++i) {
    const T* from = part(i);
    const Vec<T> share = exp2<T>(broadcast(from[width]) - origin);
    sum = multiply_add(share, broadcast(from[width + 1]), sum);
    for (int64_t c = 0; c < width; c += S::kLane) {
      store(output + c, multiply_add(share, load(from + c), load(output + c)));
    }
  }
  query_.row_max[row] = top[0];
  query_.row_sum[row] = sum[0];
}

template <typename S>
void KeyPieces<S>::merge(int64_t batch, int64_t head) {
  const PackedHead<S> none{};
  QueryBlock<S> block(params_, plan_, query_, none, batch);
  if (params_.key_mass != nullptr && keeps_weights(params_)) {
    fill_span(key_mass_of(batch, head), 0, shape_.key_len, static_cast<T>(0));
  }
  for (int64_t first = 0; first < shape_.query_len; first += plan_.block_rows) {
    const int64_t rows = smaller(plan_.block_rows, shape_.query_len - first);
    constexpr bool kNoneMultiplied = true;  // so that none has to be packed
    block.set_rows(head, first, rows, {0, shape_.key_len}, kNoneMultiplied);
    for (int64_t r = 0; r < rows; ++r) {
      merge_row(partials(batch, head, 0) + (first + r) * partial_row_size(shape_), r);
    }
    block.finish();
    for (int64_t r = 0; r < rows && keeps_weights(params_); ++r) merge_weights(batch, r);
    for (int64_t r = 0; r < rows && looks_twice(params_); ++r) {
      T* kept = kept_rows(batch, head) + (first + r) * kept_row_size(params_);
      kept[0] = query_.row_max[r];
      kept[1] = query_.factor[r];
    }
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
