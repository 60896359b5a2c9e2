// ForwardTasks: which path a call takes, how it is cut, and the memory that needs. Included by
// forward_tasks.h.
#pragma once

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
void ForwardTasks<S>::plan(const ForwardParams& params, int threads, ForwardPlan& plan) {
  plan = {};
  choose_path(params, plan);
  choose_tasks(params, threads, plan);
}

// Everything that the bits of a result hang on, so neither the batch, nor the heads, nor the threads come
// into it.
template <typename S>
void ForwardTasks<S>::choose_path(const ForwardParams& params, ForwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  if (shape.query_len <= kDecodeQueries) {
    plan.path = ForwardPath::kDecode;
    plan.split_keys = kDecodeKeys;
    plan.splits = larger(1, ceil_div(shape.key_len, kDecodeKeys));
    plan.block_keys = kDecodeKeys;
  } else if (shape.query_len <= kSplitQueries && shape.key_len > kRowsPathKeys && !has_weights(params)) {
    plan.path = ForwardPath::kSplit;
    plan.split_keys = kSplitKeys;
    plan.splits = ceil_div(shape.key_len, kSplitKeys);
    plan.block_keys = kSplitKeys;
  } else if (shape.key_len <= (has_weights(params) ? kMaxBlockKeys : kRowsPathKeys)) {
    plan.path = ForwardPath::kRows;
    plan.block_keys = larger(1, shape.key_len);
  } else {
    plan.path = ForwardPath::kOnline;
    plan.block_keys = kOnlineKeys;
  }
}

template <typename S>
void ForwardTasks<S>::choose_tasks(const ForwardParams& params, int threads, ForwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const int64_t key_units = shape.batch * shape.key_heads;
  const int64_t query_units = shape.batch * shape.query_heads;
  const bool split = plan.splits > 0;
  const int64_t rows = shape.query_len * (split ? group_size(shape) : 1);
  // Blocks of equal height, in whole tiles, enough of them for every thread to find work.
  int64_t blocks = larger(1, ceil_div(rows, kBlockRows));
  if (!split && query_units > 0) {
    // Key mass is summed block by block: its bits hang on their height, which then must not hang on the
    // threads.
    const int64_t wanted = params.key_mass != nullptr ? kMaxMassSegments : ceil_div(4 * threads, query_units);
    blocks = larger(blocks, smaller(wanted, ceil_div(rows, 4 * kTileRows)));
  }
  plan.block_rows = larger(kTileRows, round_up(ceil_div(rows, blocks), kTileRows));
  plan.segments = larger(1, ceil_div(rows, plan.block_rows));
  if (params.key_mass != nullptr) plan.segments = smaller(plan.segments, kMaxMassSegments);
  plan.value_in_place = values_lie_packed(params);
  if (query_units == 0 || shape.query_len == 0) return;

  Arena scratch{nullptr, 0};
  take_query_scratch<S>(scratch, shape, plan);
  if (split) {
    // Pieces that lie beside each other stream better; some tasks a thread are enough for an even share.
    const int64_t even = key_units * plan.splits / (kTasksPerThread * threads);
    plan.task_splits = plan.path == ForwardPath::kDecode ? larger(1, smaller(even, plan.splits)) : 1;
    plan.run_tasks = key_units * ceil_div(plan.splits, plan.task_splits);
    if (plan.splits > 1 || has_weights(params)) {
      const int64_t kept = has_weights(params) ? padded_key_len(shape) : 0;
      plan.finish_tasks = query_units;
      plan.shared_bytes = query_units * shape.query_len * (plan.splits * partial_row_size(shape) + kept) *
                          static_cast<int64_t>(sizeof(T));
    }
    if (plan.path == ForwardPath::kSplit) packed_head(params, plan, scratch, 0, 0, 0);
    plan.thread_bytes = scratch.used;
    return;
  }
  // A task that packs for itself finds what it has packed in its own cache; it takes all rows of a key head,
  // so there have to be many key heads for the threads to share them evenly.
  plan.pack_once =
      threads > 1 && key_units < 8 * threads && (key_units < 2 * threads || key_units % threads != 0);
  if (plan.pack_once) {
    plan.pack_tasks = key_units * ceil_div(shape.key_len, kPackKeys);
    plan.run_tasks = query_units * plan.segments;
    plan.shared_bytes = key_units * packed_head_bytes(params, plan);
  } else {
    plan.run_tasks = key_units;
    packed_head(params, plan, scratch, 0, 0, 0);
  }
  plan.thread_bytes = scratch.used;
  if (params.key_mass != nullptr) {
    plan.finish_tasks = query_units;
    plan.shared_bytes += query_units * plan.segments * shape.key_len * static_cast<int64_t>(sizeof(T));
  }
}

// Whole cache lines from the first value on, so that reading them is as good as reading a packed copy.
template <typename S>
bool ForwardTasks<S>::values_lie_packed(const ForwardParams& params) {
  if (!std::is_same_v<Element, Operand>) return false;
  const TensorView& value = params.value;
  const int64_t dim = params.shape.value_dim;
  bool aligned = reinterpret_cast<uintptr_t>(value.data) % 64 == 0 && dim % S::kLane == 0 &&
                 value.batch_stride % S::kLane == 0 && value.head_stride % S::kLane == 0;
  for (int64_t b = 0; value.batch_offsets != nullptr && b < params.shape.batch; ++b) {
    aligned = aligned && value.batch_offsets[b] % S::kLane == 0;
  }
  return aligned && value.column_stride == 1 && value.row_stride == dim;
}

template <typename S>
int64_t ForwardTasks<S>::keys_held(const ForwardParams& params, const ForwardPlan& plan) {
  return plan.path == ForwardPath::kSplit ? plan.split_keys : params.shape.key_len;
}

template <typename S>
int64_t ForwardTasks<S>::packed_head_bytes(const ForwardParams& params, const ForwardPlan& plan) {
  Arena arena{nullptr, 0};
  packed_head(params, plan, arena, 0, 0, 0);
  return arena.used;
}

// Partial key masses lie behind the packed heads.
template <typename S>
typename S::Accum* ForwardTasks<S>::mass_partial(const ForwardParams& params, const ForwardPlan& plan,
                                                 void* shared, int64_t batch, int64_t head, int64_t segment) {
  const AttentionShape& shape = params.shape;
  const int64_t packed = plan.pack_once ? shape.batch * shape.key_heads * packed_head_bytes(params, plan)
                                        : static_cast<int64_t>(0);
  return reinterpret_cast<T*>(static_cast<char*>(shared) + packed) +
         ((batch * shape.query_heads + head) * plan.segments + segment) * shape.key_len;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
