// BackwardTasks for few query rows: a task takes a piece of the keys of a group, or of the groups that share
// a mask gradient, in order. Rounds: the rows' terms where they need all keys, the pieces, the merge of dQ,
// and the gradient of a mask that all keys share. Included by backward_tasks.h.
#pragma once

#include "backward_decode.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kFewQueries = 8;           // of a head
constexpr int64_t kPieceKeys = 256;          // of a task
constexpr int64_t kStreamedBytes = 1 << 23;  // gradients beyond that would push everything else out of caches
static_assert(kPieceKeys % kDropoutColumns == 0);

template <typename S>
struct DecodeTasks {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Tasks = BackwardTasks<S>;
  using Unit = typename Tasks::Unit;

  // The path hangs on the shape of one head alone. Few keys have a path of their own, whose delta comes from
  // the weights instead of a rounded output: with few keys nothing averages that rounding out.
  static bool suits(const AttentionShape& shape) {
    return shape.query_len <= kFewQueries && (shape.key_len == 0 || shape.key_len > kSmallKeys);
  }
  static void plan(const BackwardParams& params, BackwardPlan& plan);
  static int64_t tasks(const BackwardPlan& plan, int64_t round) {
    const int64_t counts[] = {plan.row_tasks, plan.run_tasks, plan.finish_tasks, plan.sum_tasks};
    return counts[round];
  }
  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch);

 private:
  // Shared memory of a unit: terms (3, rows), then for every piece dQ (rows, padded D) and sums of dS (rows).
  static int64_t terms_size(const BackwardParams& params, const BackwardPlan& plan);
  static int64_t partial_size(const BackwardParams& params);
  static T* unit_memory(const BackwardParams& params, const BackwardPlan& plan, Unit unit, void* shared);
  static T* partial(const BackwardParams& params, const BackwardPlan& plan, Unit unit, int64_t piece,
                    void* shared);
  static Unit chain_unit(const BackwardParams& params, const BackwardPlan& plan, int64_t chain,
                         int64_t index);
  static void set_unit(const BackwardParams& params, const BackwardPlan& plan, DecodeBlock<S>& block,
                       const DecodeScratch<S>& s, Unit unit, void* shared);
  static void make_terms(const BackwardParams& params, const BackwardPlan& plan, Unit unit, void* shared,
                         void* scratch);
  static void run_piece(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared,
                        void* scratch);
  static void merge(const BackwardParams& params, const BackwardPlan& plan, Unit unit, void* shared,
                    void* scratch);
  static void store_sinks(const BackwardParams& params, const DecodeScratch<S>& s, Unit unit);
  static void sum_mask_rows(const BackwardParams& params, const BackwardPlan& plan, void* shared);
  static int64_t rows_of_group(const AttentionShape& shape) {
    return Tasks::group_size(shape) * shape.query_len;
  }
};

template <typename S>
void DecodeTasks<S>::plan(const BackwardParams& params, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const TensorView& view = params.grad_mask;
  const int64_t units = shape.batch * shape.key_heads;
  plan.few_rows = true;
  plan.block_keys = kPieceKeys;
  plan.key_blocks = pieces(shape.key_len, kPieceKeys);
  plan.block_queries = shape.query_len;
  plan.query_blocks = plan.segments = plan.mask_copies = 1;
  plan.rounds = 4;
  const bool mask_has_keys = view.data != nullptr && view.column_stride != 0;
  plan.heads_share_mask = mask_has_keys && view.head_stride == 0 && shape.key_heads > 1;
  plan.batches_share_mask = mask_has_keys && Tasks::batches_share_mask(params);
  plan.chains = units == 0 ? 0
                           : (plan.heads_share_mask ? 1 : shape.key_heads) *
                                 (plan.batches_share_mask ? 1 : shape.batch);
  plan.units_per_chain = units / larger(1, plan.chains);
  plan.row_tasks = plan.exact_delta || is_biased(params.rule) ? units : 0;
  plan.run_tasks = plan.chains * plan.key_blocks;
  plan.finish_tasks = units;
  plan.sum_tasks = units > 0 && view.data != nullptr && view.column_stride == 0 ? 1 : 0;
  plan.shared_bytes = units * (terms_size(params, plan) + plan.key_blocks * partial_size(params)) *
                      static_cast<int64_t>(sizeof(T));
  constexpr int64_t kSize = sizeof(Element);
  plan.streamed = units * shape.key_len * (shape.head_dim + shape.value_dim) * kSize > kStreamedBytes &&
                  shape.head_dim * kSize % 64 == 0 && shape.value_dim * kSize % 64 == 0;
  Arena arena{nullptr, 0};
  take_decode_scratch<S>(arena, params, rows_of_group(shape));
  plan.thread_bytes = arena.used;
}

template <typename S>
int64_t DecodeTasks<S>::terms_size(const BackwardParams& params, const BackwardPlan& plan) {
  return plan.row_tasks > 0 ? 3 * rows_of_group(params.shape) : 0;
}

template <typename S>
int64_t DecodeTasks<S>::partial_size(const BackwardParams& params) {
  return rows_of_group(params.shape) * (padded_value_dim<S>(params.shape.head_dim) + 1);
}

template <typename S>
typename S::Accum* DecodeTasks<S>::unit_memory(const BackwardParams& params, const BackwardPlan& plan,
                                               Unit unit, void* shared) {
  const int64_t size = terms_size(params, plan) + plan.key_blocks * partial_size(params);
  return static_cast<T*>(shared) + (unit.batch * params.shape.key_heads + unit.key_head) * size;
}

template <typename S>
typename S::Accum* DecodeTasks<S>::partial(const BackwardParams& params, const BackwardPlan& plan, Unit unit,
                                           int64_t piece, void* shared) {
  return unit_memory(params, plan, unit, shared) + terms_size(params, plan) + piece * partial_size(params);
}

template <typename S>
typename DecodeTasks<S>::Unit DecodeTasks<S>::chain_unit(const BackwardParams& params,
                                                         const BackwardPlan& plan, int64_t chain,
                                                         int64_t index) {
  const int64_t heads = params.shape.key_heads;
  const int64_t inner = plan.heads_share_mask ? heads : 1;  // heads that a chain goes through
  const int64_t outer = plan.heads_share_mask ? 1 : heads;  // heads with a chain of their own
  return {plan.batches_share_mask ? index / inner : chain / outer,
          plan.heads_share_mask ? index % inner : chain % outer};
}

template <typename S>
void DecodeTasks<S>::set_unit(const BackwardParams& params, const BackwardPlan& plan, DecodeBlock<S>& block,
                              const DecodeScratch<S>& s, Unit unit, void* shared) {
  block.set_unit(unit.batch, unit.key_head);
  if (plan.row_tasks == 0) return;
  const int64_t rows = rows_of_group(params.shape);
  const T* from = unit_memory(params, plan, unit, shared);
  T* const terms[] = {s.terms.lse, s.terms.delta, s.terms.row_scale};
  for (int64_t i = 0; i < 3; ++i) memcpy(terms[i], from + i * rows, static_cast<size_t>(rows) * sizeof(T));
}

// The maxima and sums of far rows, and delta where the output does not tell it.
template <typename S>
void DecodeTasks<S>::make_terms(const BackwardParams& params, const BackwardPlan& plan, Unit unit,
                                void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t rows = rows_of_group(shape);
  Arena arena{static_cast<char*>(scratch), 0};
  const DecodeScratch<S> s = take_decode_scratch<S>(arena, params, rows);
  DecodeBlock<S> block(params, plan, s);
  block.set_unit(unit.batch, unit.key_head);
  block.pack_rows_of_unit();
  if (*s.terms.has_far_rows != 0) {
    block.visit(TilePass::kRowMax, {0, shape.key_len});
    block.visit(TilePass::kRowSum, {0, shape.key_len});
    for (int64_t g = 0; g < Tasks::group_size(shape); ++g) {
      Tasks::finish_far_rows(params, plan, unit.batch, unit.key_head * Tasks::group_size(shape) + g,
                             terms_from<S>(s.terms, g * shape.query_len));
    }
  }
  if (plan.exact_delta) {
    block.visit(TilePass::kDelta, {0, shape.key_len});
    for (int64_t r = 0; r < rows; ++r) s.terms.delta[r] += lane_sum<T>(load(s.grad_sums + r * S::kLane));
  }
  T* to = unit_memory(params, plan, unit, shared);
  const T* const terms[] = {s.terms.lse, s.terms.delta, s.terms.row_scale};
  for (int64_t i = 0; i < 3; ++i) memcpy(to + i * rows, terms[i], static_cast<size_t>(rows) * sizeof(T));
}

template <typename S>
void DecodeTasks<S>::run_piece(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                               void* shared, void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t rows = rows_of_group(shape), dim = padded_value_dim<S>(shape.head_dim);
  const int64_t chain = task / plan.key_blocks, piece = task % plan.key_blocks;
  Arena arena{static_cast<char*>(scratch), 0};
  const DecodeScratch<S> s = take_decode_scratch<S>(arena, params, rows);
  DecodeBlock<S> block(params, plan, s);
  for (int64_t index = 0; index < plan.units_per_chain; ++index) {
    const Unit unit = chain_unit(params, plan, chain, index);
    set_unit(params, plan, block, s, unit, shared);
    block.pack_rows_of_unit();
    block.visit(TilePass::kGradients, {piece * kPieceKeys, smaller((piece + 1) * kPieceKeys, shape.key_len)});
    T* to = partial(params, plan, unit, piece, shared);
    memcpy(to, s.grad_query, static_cast<size_t>(rows * dim) * sizeof(T));
    for (int64_t r = 0; r < rows; ++r) to[rows * dim + r] = lane_sum<T>(load(s.grad_sums + r * S::kLane));
  }
  if (plan.streamed) finish_streams();
}

// dQ = scale * the sum over the pieces, in their order.
template <typename S>
void DecodeTasks<S>::merge(const BackwardParams& params, const BackwardPlan& plan, Unit unit, void* shared,
                           void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t rows = rows_of_group(shape), dim = padded_value_dim<S>(shape.head_dim);
  const int64_t group = Tasks::group_size(shape);
  Arena arena{static_cast<char*>(scratch), 0};
  const DecodeScratch<S> s = take_decode_scratch<S>(arena, params, rows);
  if (params.grad_sinks != nullptr) {
    DecodeBlock<S> block(params, plan, s);
    set_unit(params, plan, block, s, unit, shared);
    store_sinks(params, s, unit);
  }
  if (params.grad_query.data == nullptr) return;
  KeyPack<S> centre{};
  centre.centre = s.out;
  const bool centred = keys_centre<S>(params) && shape.key_len > 0;
  if (centred) set_centre<S>(params, centre, unit.batch, unit.key_head);
  for (int64_t r = 0; r < rows; ++r) {
    T* sums = s.grad_query + r * dim;
    T grads = 0;
    fill_span(sums, 0, dim, static_cast<T>(0));
    for (int64_t piece = 0; piece < plan.key_blocks; ++piece) {
      const T* from = partial(params, plan, unit, piece, shared);
      grads += from[rows * dim + r];
      for (int64_t d = 0; d < dim; d += S::kLane) store(sums + d, load(sums + d) + load(from + r * dim + d));
    }
    for (int64_t d = 0; centred && d < dim; d += S::kLane) {
      store(sums + d, load(sums + d) - broadcast(grads) * load(centre.centre + d));
    }
    write_gradient_row<S>(sums, params.grad_query, unit.batch, unit.key_head * group + r / shape.query_len,
                          r % shape.query_len, shape.head_dim, static_cast<T>(params.rule.scale));
  }
}

template <typename S>
void DecodeTasks<S>::store_sinks(const BackwardParams& params, const DecodeScratch<S>& s, Unit unit) {
  const AttentionShape& shape = params.shape;
  const int64_t group = Tasks::group_size(shape);
  for (int64_t g = 0; g < group; ++g) {
    const int64_t head = unit.key_head * group + g;
    const int64_t row = (unit.batch * shape.query_heads + head) * shape.query_len;
    const T* lse = static_cast<const T*>(params.lse) + row;
    const T sink = Tasks::sink_of(params, unit.batch, head);
    T sum = 0;
    for (int64_t i = 0; i < shape.query_len; ++i) {
      if (lse[i] == -kInfinity<T> || sink == -kInfinity<T>) continue;
      const T share = exp2<T>(broadcast(static_cast<T>((sink - lse[i]) * static_cast<T>(kLog2E))))[0];
      sum -= share * s.terms.delta[g * shape.query_len + i];
    }
    static_cast<T*>(params.grad_sinks)[unit.batch * shape.query_heads + head] = sum;
  }
}

// A mask that all keys share has the rows' sums of dS as its gradient.
template <typename S>
void DecodeTasks<S>::sum_mask_rows(const BackwardParams& params, const BackwardPlan& plan, void* shared) {
  const AttentionShape& shape = params.shape;
  const int64_t rows = rows_of_group(shape), dim = padded_value_dim<S>(shape.head_dim);
  const int64_t group = Tasks::group_size(shape);
  for (int64_t i = 0; i < shape.batch * shape.key_heads; ++i) {
    const Unit unit{i / shape.key_heads, i % shape.key_heads};
    for (int64_t r = 0; r < rows; ++r) {
      T* to = row_pointer<T>(params.grad_mask, unit.batch, unit.key_head * group + r / shape.query_len,
                             r % shape.query_len);
      for (int64_t piece = 0; piece < plan.key_blocks; ++piece) {
        *to += partial(params, plan, unit, piece, shared)[rows * dim + r];
      }
    }
  }
}

template <typename S>
void DecodeTasks<S>::run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                         void* shared, void* scratch) {
  const Unit unit{task / params.shape.key_heads, task % params.shape.key_heads};
  if (round == 0) {
    make_terms(params, plan, unit, shared, scratch);
  } else if (round == 1) {
    run_piece(params, plan, task, shared, scratch);
  } else if (round == 2) {
    merge(params, plan, unit, shared, scratch);
  } else {
    sum_mask_rows(params, plan, shared);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
