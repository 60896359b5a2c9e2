// Tiles of a head whose query rows are one block: dQ of each key block is made by itself, and added to that
// of the blocks before it: by the one task that takes them all, or, where several share a chain, in a round
// of its own. So no bit depends on who works.
#pragma once

#include "tasks.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// to = a + b
template <typename T>
void add_sums(const T* a, const T* b, T* to, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes<T>) store(to + i, load(a + i) + load(b + i));
}

template <typename S>
void Tiles<S>::visit_apart(KeyQueryBlock<S>& scores, Unit unit, int64_t block) const {
  const QueryPack<S> pack = memory_.query_pack(0, 0);
  *pack.has_sums = 0;
  if (is_empty(grid_.seen_blocks(grid_.key_rows(block), {0, 1}))) {
    store_unseen_keys(unit, block);
  } else {
    pack_keys(unit, block);
    set_keys(scores, unit, block);
    finish_key_block(scores, unit, 0, block, 0);
  }
  if (params_.grad_query.data == nullptr || begins_sums(pack.has_sums)) {
    memory_.clear_query_sums(0, 0, {0, shape_.query_len});
  }
}

template <typename S>
void Tiles<S>::run_blocks_apart(KeyQueryBlock<S>& scores, Unit unit, T* sum) const {
  T* const block_sums = memory_.query_pack(0, 0).grad_query;
  const int64_t size = query_sums_size(shape_, plan_), last = plan_.key_blocks - 1;
  pack_queries(unit, 0, 0);
  visit_apart(scores, unit, 0);
  memcpy(sum, block_sums, static_cast<size_t>(size) * sizeof(T));
  for (int64_t block = 1; block <= last; ++block) {
    visit_apart(scores, unit, block);
    add_sums(sum, block_sums, block < last ? sum : block_sums, size);
  }
  store_query_block(unit, 0, 0);
  store_sink_of(unit, 0);
}

// The first part adds its blocks up; the others leave theirs to sum_blocks().
template <typename S>
void Tiles<S>::run_part_of_chain(int64_t task) {
  const int64_t chain = task / plan_.chain_tasks, part = task % plan_.chain_tasks;
  const Unit unit = chain_unit(shape_, chains_, chain, 0);
  const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
  memory_.take_from(arena_);
  KeyQueryBlock<S> scores(params_, plan_, scratch);
  scores.set_mask_grad({params_.grad_mask, nullptr});
  pack_queries(unit, 0, 0);
  T* const sum = partial_sums(chain, 0);
  const Range blocks{first_block_of_part(part), first_block_of_part(part + 1)};
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    const bool added = part == 0 && block > 0;
    memory_.put_query_sums(added ? nullptr : partial_sums(chain, block));
    visit_apart(scores, unit, block);
    if (added) add_sums(sum, memory_.query_pack(0, 0).grad_query, sum, query_sums_size(shape_, plan_));
  }
  if (part == 0) store_sink_of(unit, 0);
  if (streamed_) finish_streams();
}

// A task takes a vector of queries and some dims.
template <typename S>
int64_t Tiles<S>::sum_tasks(const AttentionShape& shape) {
  return ceil_div(shape.query_len, S::kLane) * ceil_div(shape.head_dim, kSummedDims);
}

template <typename S>
void Tiles<S>::sum_blocks(int64_t task) const {
  if (params_.grad_query.data == nullptr) return;
  params_.grad_query.wide ? sum_blocks_as<T>(task) : sum_blocks_as<Element>(task);
}

template <typename S>
template <typename Out>
void Tiles<S>::sum_blocks_as(int64_t task) const {
  const int64_t chain = task / sum_tasks(shape_), part = task % sum_tasks(shape_);
  const int64_t dim_parts = ceil_div(shape_.head_dim, kSummedDims);
  const int64_t query = part / dim_parts * S::kLane, dim = part % dim_parts * kSummedDims;
  const T* first = partial_sums(chain, 0);
  const int64_t step = query_sums_size(shape_, plan_), blocks = plan_.key_blocks;
  const int64_t second_part = first_block_of_part(1);
  store_query_sums<Out>(
      chain_unit(shape_, chains_, chain, 0), 0, grid_.query_rows(0),
      {query, smaller(query + S::kLane, shape_.query_len)},
      {dim, smaller(dim + kSummedDims, shape_.head_dim)}, [&](int64_t at) __attribute__((always_inline)) {
        Vec<T> sum = load(first + at);
        for (int64_t i = second_part; i < blocks; ++i) sum = sum + load(first + i * step + at);
        return sum;
      });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
