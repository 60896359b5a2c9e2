// Tiles over the rows of a group's heads, one head's after the other's, as if they were one head's:
// (B, Hkv, group * Lq, D). Rows that lie so already are read, or written, where they are; others go by way of
// a dense copy. Rounds: the copies (tiles have nothing to do in it), those of the tiles, and the copied
// gradient of the query to where it belongs.
#pragma once

#include "../matrix/gather.h"
#include "plan.h"
#include "tiles/tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
class JoinedHeads {
 public:
  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
    const JoinedHeads call(params, nullptr);
    JoinedHeadsPlan& joined = plan.joined_heads;
    joined.copied_bytes = call.copies_.used;
    joined.copy_tasks = call.copies_any() ? unit_count(params.shape) : 0;
    joined.store_tasks = call.grad_query_copied_ ? unit_count(params.shape) : 0;
    Tiles<S>::plan(call.joined_, params, threads, plan);
    plan.rounds = kStoreRound + 1;
    plan.shared_bytes += joined.copied_bytes;
  }
  static int64_t tasks(const BackwardPlan& plan, int64_t round) {
    if (round == kCopyRound) return plan.joined_heads.copy_tasks;
    if (round == kStoreRound) return plan.joined_heads.store_tasks;
    return Tiles<S>::tasks(plan, round);
  }
  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    const JoinedHeads call(params, shared);
    if (round == kCopyRound) return call.copy_rows(unit_at(params.shape, task));
    if (round == kStoreRound) return call.store_grad_query(unit_at(params.shape, task));
    Tiles<S>::run(call.joined_, plan, round, task, call.rest_of(shared), scratch);
  }
  static void run_in_turn(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared,
                          void* scratch, const Turns& turns) {
    const JoinedHeads call(params, shared);
    Tiles<S>::run_in_turn(call.joined_, plan, task, call.rest_of(shared), scratch, turns);
  }

 private:
  static constexpr int64_t kCopyRound = 0, kStoreRound = 3;
  using T = typename S::Accum;
  using Element = typename S::Element;

  JoinedHeads(const BackwardParams& params, void* shared)
      : params_(params),
        joined_(params),
        group_(group_size(params.shape)),
        rows_(params.shape.query_len),
        copies_{static_cast<char*>(shared), 0} {
    const AttentionShape& shape = params.shape;
    joined_.shape = joined_shape(shape);
    joined_.rule.mask.row_stride = 0;
    if (!joins(joined_.weights)) joined_.weights.data = nullptr;
    query_copied_ = join<Element>(joined_.query, shape.head_dim);
    output_copied_ = join<Element>(joined_.output, shape.value_dim);
    grad_output_copied_ = join<Element>(joined_.grad_output, shape.value_dim);
    grad_lse_copied_ = join<T>(joined_.grad_lse, 1);
    grad_query_copied_ = params.grad_query.wide ? join<T>(joined_.grad_query, shape.head_dim)
                                                : join<Element>(joined_.grad_query, shape.head_dim);
    lse_copied_ = params.lse_stride != rows_;
    joined_.lse_stride = group_ * rows_;
    if (lse_copied_) joined_.lse = take<T>(copies_, unit_count(shape) * group_ * rows_);
  }

  // Makes of a view of rows, head by head, one of joined heads, if they lie as such.
  bool joins(TensorView& view) const {
    if (rows_ == 1) {
      view.row_stride = view.head_stride;
    } else if (view.head_stride != rows_ * view.row_stride) {
      return false;
    }
    view.head_stride *= group_;
    return true;
  }
  // The same, or of a copy; whether it is one.
  template <typename E>
  bool join(TensorView& view, int64_t dim) {
    if (view.data == nullptr || joins(view)) return false;
    const int64_t head = group_ * rows_ * dim;
    E* copy = take<E>(copies_, unit_count(params_.shape) * head);
    view = {copy, nullptr, params_.shape.key_heads * head, head, dim, 1};
    return true;
  }
  bool copies_any() const {
    return query_copied_ || output_copied_ || grad_output_copied_ || grad_lse_copied_ || lse_copied_;
  }
  char* rest_of(void* shared) const { return static_cast<char*>(shared) + copies_.used; }

  // body(head, row of the joined head): for every head of the group.
  template <typename Body>
  ATTN_EXT_INLINE void each_head(Unit unit, Body body) const {
    for (int64_t g = 0; g < group_; ++g) body(unit.key_head * group_ + g, g * rows_);
  }
  template <typename E>
  void copy_view(const TensorView& from, const TensorView& to, Unit unit, int64_t dim) const {
    each_head(unit, [&](int64_t head, int64_t row) {
      gather_block(rows_of<E>(from, unit.batch, head, 0, rows_, dim), 0, rows_, 0, dim,
                   row_pointer<E>(to, unit.batch, unit.key_head, row));
    });
  }
  void copy_rows(Unit unit) const {
    const AttentionShape& shape = params_.shape;
    if (query_copied_) copy_view<Element>(params_.query, joined_.query, unit, shape.head_dim);
    if (output_copied_) copy_view<Element>(params_.output, joined_.output, unit, shape.value_dim);
    if (grad_output_copied_) {
      copy_view<Element>(params_.grad_output, joined_.grad_output, unit, shape.value_dim);
    }
    if (grad_lse_copied_) copy_view<T>(params_.grad_lse, joined_.grad_lse, unit, 1);
    if (!lse_copied_) return;
    T* lse = const_cast<T*>(lse_rows<S>(joined_, unit.batch, unit.key_head));
    each_head(unit, [&](int64_t head, int64_t row) {
      memcpy(lse + row, lse_rows<S>(params_, unit.batch, head), static_cast<size_t>(rows_) * sizeof(T));
    });
  }
  void store_grad_query(Unit unit) const {
    params_.grad_query.wide ? store_grad_query_as<T>(unit) : store_grad_query_as<Element>(unit);
  }
  template <typename Out>
  void store_grad_query_as(Unit unit) const {
    const int64_t dim = params_.shape.head_dim;
    each_head(unit, [&](int64_t head, int64_t row) {
      const Out* from = row_pointer<const Out>(joined_.grad_query, unit.batch, unit.key_head, row);
      for (int64_t i = 0; i < rows_; ++i) {
        memcpy(row_pointer<Out>(params_.grad_query, unit.batch, head, i), from + i * dim,
               static_cast<size_t>(dim) * sizeof(Out));
      }
    });
  }

  const BackwardParams& params_;
  BackwardParams joined_;
  const int64_t group_, rows_;  // of a head
  Arena copies_;
  bool query_copied_, output_copied_, grad_output_copied_, grad_lse_copied_, grad_query_copied_, lse_copied_;
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
