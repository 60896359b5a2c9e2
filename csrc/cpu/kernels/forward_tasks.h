// The forward's plan and its rounds of tasks, for one scheme of computing.
#pragma once

#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kOnlineKeys = 512;
constexpr int64_t kRowsPathKeys = 2 * kOnlineKeys;  // whole rows up to here
constexpr int64_t kBlockRows = 96;
constexpr int64_t kSplitQueries = 32;  // as few query rows as this and the keys are split
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kDecodeQueries = 16;  // as few as this and nothing is packed
constexpr int64_t kDecodeKeys = 256;
constexpr int64_t kTasksPerThread = 8;    // at least, where keys are decoded and there are as many pieces
constexpr int64_t kPackKeys = 256;        // keys packed by a task of the packing round
constexpr int64_t kMaxMassSegments = 16;  // partial key masses of a head

ATTN_EXT_INLINE int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

template <typename S>
struct ForwardTasks {
  using T = typename S::Accum;
  using Element = typename S::Element;
  using Operand = typename S::Operand;
  using Product = typename S::Product;

  static void plan(const ForwardParams& params, int threads, ForwardPlan& plan);
  static void pack(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared);
  static void run(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared,
                  void* scratch);
  static void finish(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared,
                     void* scratch);

 private:
  static void choose_path(const ForwardParams& params, ForwardPlan& plan);
  static void choose_tasks(const ForwardParams& params, int threads, ForwardPlan& plan);
  static bool values_lie_packed(const ForwardParams& params);
  static bool has_weights(const ForwardParams& params) {
    return params.weights.data != nullptr || params.key_mass != nullptr;
  }
  static int64_t group_size(const AttentionShape& shape) {
    return shape.query_heads / larger(1, shape.key_heads);
  }
  static int64_t keys_held(const ForwardParams& params, const ForwardPlan& plan);
  static PackedHead<S> packed_head(const ForwardParams& params, const ForwardPlan& plan, Arena& arena,
                                   int64_t batch, int64_t key_head, int64_t first_key);
  static void pack_keys(const ForwardParams& params, const ForwardPlan& plan, const PackedHead<S>& packed,
                        int64_t batch, int64_t key_head, KeyRange keys);
  static void run_blocks(const ForwardParams& params, const ForwardPlan& plan, const QueryScratch<S>& scratch,
                         const PackedHead<S>& packed, int64_t batch, int64_t head, int64_t segment,
                         void* shared);
  static void run_split(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared,
                        void* scratch);
  static void run_piece(const ForwardParams& params, const ForwardPlan& plan, int64_t batch, int64_t key_head,
                        int64_t piece, void* shared, void* scratch);
  static T* mass_partial(const ForwardParams& params, const ForwardPlan& plan, void* shared, int64_t batch,
                         int64_t head, int64_t segment);
  static T* split_partial(const ForwardParams& params, const ForwardPlan& plan, void* shared, int64_t batch,
                          int64_t head, int64_t piece);
  static T* split_weights(const ForwardParams& params, const ForwardPlan& plan, void* shared, int64_t batch,
                          int64_t head);
  static void merge_split(const ForwardParams& params, const ForwardPlan& plan, int64_t batch, int64_t head,
                          void* shared, void* scratch);
  static void merge_weights(const ForwardParams& params, const ForwardPlan& plan,
                            const QueryScratch<S>& query, int64_t batch, int64_t row, void* shared);
  static int64_t packed_head_bytes(const ForwardParams& params, const ForwardPlan& plan);
  static int64_t partial_row_size(const AttentionShape& shape) {
    return padded_value_dim<S>(shape.value_dim) + S::kLane;  // the output, then row max and row sum
  }
  static int64_t padded_key_len(const AttentionShape& shape) { return round_up(shape.key_len, S::kLane); }
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY

#include "forward_plan.h"
#include "forward_split.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
PackedHead<S> ForwardTasks<S>::packed_head(const ForwardParams& params, const ForwardPlan& plan, Arena& arena,
                                           int64_t batch, int64_t key_head, int64_t first_key) {
  const AttentionShape& shape = params.shape;
  const int64_t keys = keys_held(params, plan);
  PackedHead<S> packed{};
  packed.first_key = first_key;
  packed.keys = take<Operand>(arena, packed_keys_size<S>(shape, keys));
  packed.value_row_stride = value_panel_width<S>(shape.value_dim);
  packed.value_panel_stride = packed_value_panel_size<S>(shape, keys);
  if (!plan.value_in_place) {
    packed.values = take<Operand>(arena, packed_values_size<S>(shape, keys));
  } else if constexpr (std::is_same_v<Element, Operand>) {
    packed.values = row_pointer<const Operand>(params.value, batch, key_head, first_key);
    packed.value_panel_stride = packed.value_row_stride;
    packed.value_row_stride = params.value.row_stride;
  }
  return packed;
}

// keys: a range that begins where a panel begins.
template <typename S>
void ForwardTasks<S>::pack_keys(const ForwardParams& params, const ForwardPlan& plan,
                                const PackedHead<S>& packed, int64_t batch, int64_t key_head, KeyRange keys) {
  const AttentionShape& shape = params.shape;
  const int64_t first = packed.first_key;
  const Matrix<Element> key{row_pointer<const Element>(params.key, batch, key_head, first),
                            params.key.row_stride, params.key.column_stride, keys.end - first,
                            shape.head_dim};
  const int64_t panel_size = S::kPanel * depth_of<Product>(shape.head_dim);
  for (int64_t j = keys.begin - first; j < keys.end - first; j += S::kPanel) {
    pack_column_panel<Product>(key, j, S::kPanel,
                               const_cast<Operand*>(packed.keys) + j / S::kPanel * panel_size);
  }
  if (plan.value_in_place) return;
  const Matrix<Element> value{row_pointer<const Element>(params.value, batch, key_head, first),
                              params.value.row_stride, params.value.column_stride, keys.end - first,
                              shape.value_dim};
  pack_row_panels<Product>(value, (keys.begin - first) / S::kDepth, depth_of<Product>(keys.end - first),
                           packed.value_row_stride, const_cast<Operand*>(packed.values),
                           packed.value_panel_stride);
}

template <typename S>
void ForwardTasks<S>::pack(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared) {
  const AttentionShape& shape = params.shape;
  const int64_t pieces = ceil_div(shape.key_len, kPackKeys);
  const int64_t unit = task / pieces;
  const int64_t begin = task % pieces * kPackKeys;
  const int64_t batch = unit / shape.key_heads, key_head = unit % shape.key_heads;
  Arena arena{static_cast<char*>(shared) + unit * packed_head_bytes(params, plan), 0};
  const PackedHead<S> packed = packed_head(params, plan, arena, batch, key_head, 0);
  pack_keys(params, plan, packed, batch, key_head, {begin, smaller(begin + kPackKeys, shape.key_len)});
}

template <typename S>
void ForwardTasks<S>::run(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared,
                          void* scratch) {
  if (plan.splits > 0) {
    run_split(params, plan, task, shared, scratch);
    return;
  }
  const AttentionShape& shape = params.shape;
  const int64_t group = group_size(shape);
  Arena arena{static_cast<char*>(scratch), 0};
  const QueryScratch<S> query = take_query_scratch<S>(arena, shape, plan);
  if (plan.pack_once) {
    // The last rows of a causal head see most: they come first, so that no thread is left with them at the
    // end.
    const int64_t segment = plan.segments - 1 - task % plan.segments;
    const int64_t head = task / plan.segments % shape.query_heads;
    const int64_t batch = task / plan.segments / shape.query_heads;
    const int64_t unit = batch * shape.key_heads + head / group;
    Arena packed_arena{static_cast<char*>(shared) + unit * packed_head_bytes(params, plan), 0};
    const PackedHead<S> packed = packed_head(params, plan, packed_arena, batch, head / group, 0);
    run_blocks(params, plan, query, packed, batch, head, segment, shared);
    return;
  }
  const int64_t batch = task / shape.key_heads, key_head = task % shape.key_heads;
  const PackedHead<S> packed = packed_head(params, plan, arena, batch, key_head, 0);
  pack_keys(params, plan, packed, batch, key_head, {0, shape.key_len});
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    for (int64_t segment = 0; segment < plan.segments; ++segment) {
      run_blocks(params, plan, query, packed, batch, head, segment, shared);
    }
  }
}

template <typename S>
void ForwardTasks<S>::run_blocks(const ForwardParams& params, const ForwardPlan& plan,
                                 const QueryScratch<S>& scratch, const PackedHead<S>& packed, int64_t batch,
                                 int64_t head, int64_t segment, void* shared) {
  const AttentionShape& shape = params.shape;
  const KeyRange keys{0, shape.key_len};
  const int64_t blocks = ceil_div(shape.query_len, plan.block_rows);
  QueryBlock<S> block(params, plan, scratch, packed, batch);
  if (params.key_mass != nullptr) {
    T* mass = mass_partial(params, plan, shared, batch, head, segment);
    fill_span(mass, 0, shape.key_len, static_cast<T>(0));
    block.set_key_mass(mass);
  }
  for (int64_t i = segment * blocks / plan.segments; i < (segment + 1) * blocks / plan.segments; ++i) {
    const int64_t first = i * plan.block_rows;
    block.set_rows(head, first, smaller(plan.block_rows, shape.query_len - first));
    block.set_emit_in_place(has_weights(params) && plan.path == ForwardPath::kRows);
    block.attend(keys);
    if (!block.output_is_finite()) block.attend_carefully(keys);
    block.finish();
    if (has_weights(params) && plan.path != ForwardPath::kRows) block.emit_all(keys);
  }
}

template <typename S>
void ForwardTasks<S>::finish(const ForwardParams& params, const ForwardPlan& plan, int64_t task, void* shared,
                             void* scratch) {
  const AttentionShape& shape = params.shape;
  const int64_t batch = task / shape.query_heads, head = task % shape.query_heads;
  if (plan.splits > 0) {
    merge_split(params, plan, batch, head, shared, scratch);
    return;
  }
  T* mass = static_cast<T*>(params.key_mass) + task * shape.key_len;
  fill_span(mass, 0, shape.key_len, static_cast<T>(0));
  for (int64_t segment = 0; segment < plan.segments; ++segment) {
    const T* part = mass_partial(params, plan, shared, batch, head, segment);
    for (int64_t j = 0; j < shape.key_len; ++j) mass[j] += part[j];
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
