// A task takes a piece of the keys of a chain of units, unit after unit, or all keys of several chains, where
// one piece is all and no chain is long. Rounds:
// the rows' terms where they need all keys, the pieces, the merge of dQ, and the gradient of a mask that all
// keys share.
#pragma once

#include <array>

#include "../centre.h"
#include "../plan.h"
#include "block.h"
#include "gradients.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kBackwardPieceKeys = 256;
static_assert(kBackwardPieceKeys % kDropoutColumns == 0);

template <typename S>
class FewRows {
 public:
  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan);
  static int64_t tasks(const BackwardPlan& plan, int64_t round) {
    const FewRowsPlan& few_rows = plan.few_rows;
    const int64_t counts[] = {few_rows.term_tasks, few_rows.piece_tasks, few_rows.merge_tasks,
                              few_rows.mask_tasks};
    return counts[round];
  }
  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    FewRows<S> call(params, plan, shared, scratch);
    if (round == 0) return call.make_terms(unit_at(params.shape, task));
    if (round == 1) return call.run_pieces(task);
    round == 2 ? call.merge(unit_at(params.shape, task)) : call.sum_mask_rows();
  }

 private:
  using T = typename S::Accum;
  using Element = typename S::Element;

  FewRows(const BackwardParams& params, const BackwardPlan& plan, void* shared, void* scratch)
      : params_(params),
        plan_(plan),
        shape_(params.shape),
        group_(group_size(params.shape)),
        rows_(group_ * params.shape.query_len),
        dim_(padded_dim<S>(params.shape.head_dim)),
        shared_(static_cast<T*>(shared)),
        arena_{static_cast<char*>(scratch), 0},
        s_(take_few_rows_scratch<S>(arena_, params)),
        block_(params, plan, s_) {}

  // Shared memory of a unit: terms (kTerms, rows) if there is a round for them, then for every piece dQ
  // (rows, padded D) and sums of dS (rows).
  static int64_t unit_size(const BackwardParams& params, const BackwardPlan& plan) {
    const int64_t rows = group_size(params.shape) * params.shape.query_len;
    const int64_t piece = rows * (padded_dim<S>(params.shape.head_dim) + 1);
    return (plan.few_rows.term_tasks > 0 ? kTerms * rows : 0) + plan.few_rows.pieces * piece;
  }
  T* terms_of(Unit unit) const { return shared_ + unit_index(shape_, unit) * unit_size(params_, plan_); }
  T* partial(Unit unit, int64_t piece) const {
    return terms_of(unit) + (plan_.few_rows.term_tasks > 0 ? kTerms * rows_ : 0) + piece * rows_ * (dim_ + 1);
  }
  T* partial_sums(Unit unit, int64_t piece) const { return partial(unit, piece) + rows_ * dim_; }
  static constexpr int64_t kTerms = 4;
  std::array<T*, kTerms> kept_terms() const {
    return {s_.terms.lse, s_.terms.delta, s_.terms.row_scale, s_.terms.sink_share};
  }
  int64_t head_of(Unit unit, int64_t row) const { return unit.key_head * group_ + row / shape_.query_len; }

  void set_unit(Unit unit) {
    block_.set_unit(unit);
    if (plan_.few_rows.term_tasks == 0) return;
    const T* from = terms_of(unit);
    for (T* to : kept_terms()) {
      memcpy(to, from, static_cast<size_t>(rows_) * sizeof(T));
      from += rows_;
    }
  }
  void make_terms(Unit unit);
  void complete_terms(Unit unit);
  void run_pieces(int64_t task);
  void run_piece(int64_t chain, int64_t piece);
  void merge(Unit unit) {
    if (params_.grad_sinks != nullptr) {
      if (!plan_.few_rows.whole) set_unit(unit);
      for (int64_t r = 0; r < rows_; r += shape_.query_len) {
        store_sink<S>(params_, unit.batch, head_of(unit, r), [&](int64_t i) { return s_.terms.from(r + i); });
      }
    }
    if (params_.grad_query.data != nullptr) merge_grad_query(unit);
  }
  void merge_grad_query(Unit unit) const;
  // A mask that all keys share has the rows' sums of dS as its gradient.
  void sum_mask_rows() const {
    for (int64_t i = 0; i < unit_count(shape_); ++i) {
      const Unit unit = unit_at(shape_, i);
      for (int64_t r = 0; r < rows_; ++r) {
        T* to = row_pointer<T>(params_.grad_mask, unit.batch, head_of(unit, r), r % shape_.query_len);
        for (int64_t piece = 0; piece < plan_.few_rows.pieces; ++piece) *to += partial_sums(unit, piece)[r];
      }
    }
  }

  const BackwardParams& params_;
  const BackwardPlan& plan_;
  const AttentionShape& shape_;
  const int64_t group_, rows_, dim_;
  T* const shared_;
  Arena arena_;
  const FewRowsScratch<S> s_;
  FewRowsBlock<S> block_;
};

template <typename S>
void FewRows<S>::plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const TensorView& view = params.grad_mask;
  const bool has_mask_grad = view.data != nullptr, mask_has_keys = view.column_stride != 0;
  const int64_t units = unit_count(shape);
  FewRowsPlan& few_rows = plan.few_rows;
  // The rounding of the output, which nothing averages out among few keys, would show in delta.
  const bool wants_delta =
      params.grad_query.data != nullptr || params.grad_key.data != nullptr || params.grad_sinks != nullptr;
  plan.exact_delta = needs_exact_delta(params) ||
                     (keeps_products(shape) && shape.key_len > 0 && params.delta == nullptr && wants_delta);
  plan.rounds = 4;
  few_rows.pieces = ceil_div(shape.key_len, kBackwardPieceKeys);
  few_rows.heads_together = key_heads_interleave(params);
  plan_families(shape, has_mask_grad && mask_has_keys ? &view : nullptr, plan.chains);
  few_rows.whole = few_rows.pieces == 1 && !has_mask_grad;
  few_rows.term_tasks = !few_rows.whole && (plan.exact_delta || any_far<T>(params)) ? units : 0;
  few_rows.task_chains = few_rows.whole ? chains_of_task(shape, plan.chains, threads) : 1;
  few_rows.piece_tasks = ceil_div(plan.chains.count, few_rows.task_chains) * few_rows.pieces;
  few_rows.merge_tasks = few_rows.whole ? 0 : units;
  few_rows.mask_tasks = units > 0 && has_mask_grad && !mask_has_keys ? 1 : 0;
  plan.shared_bytes = units * unit_size(params, plan) * static_cast<int64_t>(sizeof(T));
  plan.streamed = streams_key_gradients<S>(shape);
  Arena arena{nullptr, 0};
  take_few_rows_scratch<S>(arena, params);
  plan.thread_bytes = arena.used;
}

// The maxima and sums of far rows, and delta where the output does not tell it.
template <typename S>
void FewRows<S>::complete_terms(Unit unit) {
  if (*s_.terms.has_far_rows != 0) {
    block_.visit(Pass::kRowMax, {0, shape_.key_len});
    block_.visit(Pass::kRowSum, {0, shape_.key_len});
    for (int64_t r = 0; r < rows_; r += shape_.query_len) {
      finish_far_rows(params_, s_.terms.from(r), unit.batch, head_of(unit, r), {0, shape_.query_len});
    }
  }
  if (plan_.exact_delta) block_.make_delta();
}

template <typename S>
void FewRows<S>::make_terms(Unit unit) {
  block_.set_unit(unit);
  block_.pack_rows_of_unit();
  complete_terms(unit);
  T* to = terms_of(unit);
  for (const T* from : kept_terms()) {
    memcpy(to, from, static_cast<size_t>(rows_) * sizeof(T));
    to += rows_;
  }
}

template <typename S>
void FewRows<S>::run_pieces(int64_t task) {
  const FewRowsPlan& few_rows = plan_.few_rows;
  const int64_t tasks = few_rows.piece_tasks / few_rows.pieces;
  const int64_t first = few_rows.heads_together ? task % tasks : task / few_rows.pieces;
  const int64_t piece = few_rows.heads_together ? task / tasks : task % few_rows.pieces;
  const int64_t end = smaller(plan_.chains.count, (first + 1) * few_rows.task_chains);
  for (int64_t chain = first * few_rows.task_chains; chain < end; ++chain) run_piece(chain, piece);
  if (plan_.streamed) finish_streams();
}

template <typename S>
void FewRows<S>::run_piece(int64_t chain, int64_t piece) {
  const Range members = chain_members(plan_.chains, chain);
  for (int64_t i = members.begin; i < members.end; ++i) {
    const Unit unit = chain_unit(shape_, plan_.chains, chain, i);
    set_unit(unit);
    block_.pack_rows_of_unit();
    if (plan_.few_rows.whole) complete_terms(unit);
    block_.visit(Pass::kGradients,
                 {piece * kBackwardPieceKeys, smaller((piece + 1) * kBackwardPieceKeys, shape_.key_len)});
    memcpy(partial(unit, piece), s_.grad_query, static_cast<size_t>(rows_ * dim_) * sizeof(T));
    T* sums = partial_sums(unit, piece);
    for (int64_t r = 0; r < rows_; ++r) sums[r] = lane_sum<T>(load(s_.grad_sums + r * S::kLane));
    if (plan_.few_rows.whole) merge(unit);
  }
}

// dQ = scale * the sum over the pieces, in their order.
template <typename S>
void FewRows<S>::merge_grad_query(Unit unit) const {
  T* centre = s_.out;
  const bool centred = keys_centre<S>(params_) && !plan_.exact_delta && shape_.key_len > 0;
  if (centred) set_centre<S>(params_, unit.batch, unit.key_head, centre);
  for (int64_t r = 0; r < rows_; ++r) {
    T* sums = s_.grad_query + r * dim_;
    T grads = 0;
    fill_span(sums, 0, dim_, static_cast<T>(0));
    for (int64_t piece = 0; piece < plan_.few_rows.pieces; ++piece) {
      const T* from = partial(unit, piece) + r * dim_;
      grads += partial_sums(unit, piece)[r];
      for (int64_t d = 0; d < dim_; d += S::kLane) store(sums + d, load(sums + d) + load(from + d));
    }
    for (int64_t d = 0; centred && d < dim_; d += S::kLane) {
      store(sums + d, load(sums + d) - broadcast(grads) * load(centre + d));
    }
    const int64_t row = r % shape_.query_len;
    const HeadGradient<S> result{params_.grad_query, unit.batch, head_of(unit, r), shape_.head_dim,
                                 params_.rule.scale};
    result.write(sums, dim_, {row, row + 1});
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
