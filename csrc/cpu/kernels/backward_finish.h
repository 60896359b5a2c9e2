// BackwardTasks: from sums to what the caller gets, rounded once. Included by backward_tasks.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void BackwardTasks<S>::store_key_block(const BackwardParams& params, const BackwardPlan& plan,
                                       const UnitMemory& memory, Unit unit, int64_t block) {
  const AttentionShape& shape = params.shape;
  const int64_t first = block * plan.block_keys;
  const T* grad_key = key_sums(memory, block);
  const T* grad_value = grad_key + plan.block_keys * padded_value_dim<S>(shape.head_dim);
  for (int64_t r = 0; r < block_count(shape.key_len, plan.block_keys, block); ++r) {
    if (params.grad_key.data != nullptr) {
      write_gradient_row<S>(grad_key + r * padded_value_dim<S>(shape.head_dim), params.grad_key, unit.batch,
                            unit.key_head, first + r, shape.head_dim, static_cast<T>(params.rule.scale));
    }
    if (params.grad_value.data != nullptr) {
      write_gradient_row<S>(grad_value + r * padded_value_dim<S>(shape.value_dim), params.grad_value,
                            unit.batch, unit.key_head, first + r, shape.value_dim, 1);
    }
  }
}

// dQ = scale (dQ^T)^T, a square of lanes at a time.
template <typename S>
void BackwardTasks<S>::store_query_block(const BackwardParams& params, const BackwardPlan& plan,
                                         const UnitMemory& memory, Unit unit, int64_t group_head,
                                         int64_t block) {
  if (params.grad_query.data == nullptr) return;
  params.grad_query.wide ? store_query_block_as<T>(params, plan, memory, unit, group_head, block)
                         : store_query_block_as<Element>(params, plan, memory, unit, group_head, block);
}

template <typename S>
template <typename Out>
void BackwardTasks<S>::store_query_block_as(const BackwardParams& params, const BackwardPlan& plan,
                                            const UnitMemory& memory, Unit unit, int64_t group_head,
                                            int64_t block) {
  const AttentionShape& shape = params.shape;
  const int64_t head = unit.key_head * group_size(shape) + group_head, dim = shape.head_dim;
  const int64_t first = block * plan.block_queries;
  const int64_t count = block_count(shape.query_len, plan.block_queries, block);
  const T* sums = query_pack(params, plan, memory, group_head, block).grad_query;
  const Vec<T> scale = broadcast(static_cast<T>(params.rule.scale));
  for (int64_t q = 0; q < count; q += S::kLane) {
    const int64_t panel = round_down(q, S::kPanel);
    const int64_t width = smaller(S::kPanel, round_up(count, S::kLane) - panel);
    for (int64_t d = 0; d < dim; d += S::kLane) {
      const T* from = sums + panel * dim + d * width + q - panel;
      Out* to = row_pointer<Out>(params.grad_query, unit.batch, head, first + q) + d;
      const int64_t row_stride = params.grad_query.row_stride;
      Vec<T> square[kLanes<T>];
      if (dim - d >= S::kLane && count - q >= S::kLane) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) square[i] = load(from + i * width) * scale;
        transpose_square<T>(square);
#pragma GCC unroll 16
        for (int64_t i = 0; i < S::kLane; ++i) store_element(to + i * row_stride, square[i]);
        continue;
      }
      for (int64_t i = 0; i < S::kLane; ++i)
        square[i] = d + i < dim ? load(from + i * width) * scale : Vec<T>{};
      transpose_square<T>(square);
      for (int64_t i = 0; i < smaller(S::kLane, count - q); ++i) {
        store_element_partial(to + i * row_stride, square[i], smaller(S::kLane, dim - d));
      }
    }
  }
}

// The sink of a head; -inf, which changes nothing, where there is none.
template <typename S>
typename S::Accum BackwardTasks<S>::sink_of(const BackwardParams& params, int64_t batch, int64_t head) {
  T sink = -kInfinity<T>;
  if (params.rule.sinks_kind == ScalarKind::kNone) return sink;
  with_mask_type<Element>(params.rule.sinks_kind, [&](auto tag) {
    using M = typename decltype(tag)::Type;
    const M value = *row_pointer<const M>(params.rule.sinks, batch, head, 0);
    if constexpr (!std::is_same_v<M, uint8_t>) sink = static_cast<T>(to_compute(value));
  });
  return sink;
}

// dsink = sum over the rows of exp(sink - lse) (dLse - delta)
template <typename S>
void BackwardTasks<S>::store_sink(const BackwardParams& params, const BackwardPlan& plan,
                                  const UnitMemory& memory, Unit unit, int64_t group_head) {
  if (params.grad_sinks == nullptr) return;
  const AttentionShape& shape = params.shape;
  const int64_t head = unit.key_head * group_size(shape) + group_head;
  const T sink = sink_of(params, unit.batch, head);
  const int64_t row = (unit.batch * shape.query_heads + head) * shape.query_len;
  const T* lse = static_cast<const T*>(params.lse) + row;
  T sum = 0;
  for (int64_t i = 0; i < shape.query_len; ++i) {
    if (lse[i] == -kInfinity<T> || sink == -kInfinity<T>) continue;
    const QueryPack<S> pack = query_pack(params, plan, memory, group_head, i / plan.block_queries);
    const T share = exp2<T>(broadcast(static_cast<T>((sink - lse[i]) * static_cast<T>(kLog2E))))[0];
    sum -= share * pack.delta[i % plan.block_queries];
  }
  static_cast<T*>(params.grad_sinks)[unit.batch * shape.query_heads + head] = sum;
}

// Tasks: the query blocks of every query head.
template <typename S>
void BackwardTasks<S>::finish(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                              void* shared) {
  const AttentionShape& shape = params.shape;
  const int64_t group = group_size(shape);
  const int64_t block = task % plan.query_blocks, head = task / plan.query_blocks % shape.query_heads;
  const Unit unit{task / plan.query_blocks / shape.query_heads, head / group};
  const UnitMemory memory = shared_memory(params, plan, unit, shared);
  store_query_block(params, plan, memory, unit, head % group, block);
  if (block == 0) store_sink(params, plan, memory, unit, head % group);
}

// The copies of the mask gradient, added in their order.
template <typename S>
void BackwardTasks<S>::sum_masks(const BackwardParams& params, const BackwardPlan& plan, int64_t task,
                                 void* shared) {
  const int64_t size = params.grad_mask_size;
  T* to = static_cast<T*>(params.grad_mask.data);
  for (int64_t copy = 1; copy < plan.mask_copies; ++copy) {
    const T* from = mask_copy(params, plan, copy, shared);
    for (int64_t i = task * size / plan.sum_tasks; i < (task + 1) * size / plan.sum_tasks; ++i)
      to[i] += from[i];
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
