// Blocks of query rows against all keys of their head. Rounds: packing (or each task packs for itself), the
// blocks, and the sum of the partial key masses.
#pragma once

#include "../interface/forward.h"
#include "packed_head.h"
#include "plan.h"
#include "query_block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kMostPackKeys = 256;    // packed by a task of the packing round,
constexpr int64_t kPackKeys = 64;         // in units of this, whole panels of any type
constexpr int64_t kMaxMassSegments = 16;  // partial key masses of a head

template <typename S>
class AllKeys {
 public:
  static void plan(const ForwardParams& params, int threads, ForwardPlan& plan);
  static int64_t tasks(const ForwardPlan& plan, int64_t round) { return plan.round_tasks[round]; }
  static void run(const ForwardParams& params, const ForwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    const AllKeys<S> call(params, plan, shared);
    if (round == 0) return call.pack(task, scratch);
    round == 1 ? call.attend(task, scratch) : call.sum_key_mass(task);
  }

 private:
  using T = typename S::Accum;

  AllKeys(const ForwardParams& params, const ForwardPlan& plan, void* shared)
      : params_(params), plan_(plan), shape_(params.shape), shared_(static_cast<char*>(shared)) {}

  void pack(int64_t task, void* scratch) const {
    Arena arena{static_cast<char*>(scratch), 0};
    const int64_t keys = plan_.all_keys.pack_keys, parts = ceil_div(shape_.key_len, keys);
    const int64_t begin = task % parts * keys;
    const int64_t batch = task / parts / shape_.key_heads, key_head = task / parts % shape_.key_heads;
    pack_head(params_, plan_, shared_head(batch, key_head), batch, key_head,
              {begin, smaller(begin + keys, shape_.key_len)},
              take_query_scratch<S>(arena, params_, plan_).stored_rows);
  }
  void attend(int64_t task, void* scratch) const;
  void run_blocks(const QueryScratch<S>& scratch, const PackedHead<S>& packed, int64_t batch, int64_t head,
                  int64_t segment) const;
  void sum_key_mass(int64_t head) const {
    T* mass = static_cast<T*>(params_.key_mass) + head * shape_.key_len;
    fill_span(mass, 0, shape_.key_len, static_cast<T>(0));
    for (int64_t segment = 0; segment < plan_.all_keys.segments; ++segment) {
      const T* part = mass_partial(head, segment);
      for (int64_t j = 0; j < shape_.key_len; ++j) mass[j] += part[j];
    }
  }
  PackedHead<S> shared_head(int64_t batch, int64_t key_head) const {
    const int64_t heads = shape_.batch * shape_.key_heads, index = batch * shape_.key_heads + key_head;
    Arena arena{shared_ + index * (plan_.packed_bytes / heads), 0};
    PackedHead<S> packed = take_packed_head<S>(params_, plan_, arena, shape_.key_len);
    set_head(params_, plan_, packed, batch, key_head, 0);
    return packed;
  }
  // Partial key masses (heads, segments, keys) lie behind the packed heads.
  T* mass_partial(int64_t head, int64_t segment) const {
    return reinterpret_cast<T*>(shared_ + plan_.packed_bytes) +
           (head * plan_.all_keys.segments + segment) * shape_.key_len;
  }

  const ForwardParams& params_;
  const ForwardPlan& plan_;
  const AttentionShape& shape_;
  char* const shared_;
};

template <typename S>
void AllKeys<S>::plan(const ForwardParams& params, int threads, ForwardPlan& plan) {
  const AttentionShape& shape = params.shape;
  const int64_t key_units = shape.batch * shape.key_heads, query_units = shape.batch * shape.query_heads;
  const int64_t rows = shape.query_len;
  const bool has_mass = params.key_mass != nullptr;
  plan.block_keys = plan.path == ForwardPath::kWholeRows ? larger(1, shape.key_len) : kOnlineKeys;
  // Enough blocks for every thread to find work. Key mass is summed block by block: its bits hang on their
  // height, which then must not hang on the threads.
  const int64_t wanted = has_mass ? kMaxMassSegments : ceil_div(4 * threads, larger(1, query_units));
  const int64_t most = ceil_div(rows, 4 * S::kTileRows);
  plan.block_rows = block_height<S>(rows, query_units > 0 ? smaller(wanted, most) : 1);
  // A task that packs for itself finds what it has packed in its own cache; it takes all rows of a key head,
  // so there have to be many key heads for the threads to share them evenly.
  plan.all_keys.pack_once =
      threads > 1 && key_units < 8 * threads && (key_units < 2 * threads || key_units % threads != 0);
  const bool is_even = params.rule.window_left < 0 && params.rule.window_right < 0;
  if (plan.all_keys.pack_once && is_even && !has_mass && query_units > 0 && rows > 0) {
    plan.block_rows = height_of_full_waves<S>(rows, query_units, threads, plan.block_rows);
  }
  plan.all_keys.segments = larger(1, ceil_div(rows, plan.block_rows));
  if (has_mass) plan.all_keys.segments = smaller(plan.all_keys.segments, kMaxMassSegments);
  plan.value_in_place = values_stay_in_place<S>(params);
  plan.rounds = 3;
  if (query_units == 0 || rows == 0) return;

  Arena scratch{nullptr, 0}, packed{nullptr, 0};
  take_query_scratch<S>(scratch, params, plan);
  take_packed_head<S>(params, plan, packed, shape.key_len);
  if (plan.all_keys.pack_once) {
    const int64_t even = round_up(key_units * shape.key_len / (2 * threads), kPackKeys);
    plan.all_keys.pack_keys = larger(kPackKeys, smaller(even, kMostPackKeys));
    plan.all_keys.heads_in_turn = threads > query_units;
    plan.round_tasks[0] = key_units * ceil_div(shape.key_len, plan.all_keys.pack_keys);
    plan.round_tasks[1] = query_units * plan.all_keys.segments;
    plan.packed_bytes = key_units * packed.used;
  } else {
    plan.round_tasks[1] = key_units;
  }
  plan.round_tasks[2] = has_mass ? query_units : 0;
  plan.thread_bytes = scratch.used + (plan.all_keys.pack_once ? 0 : packed.used);
  const int64_t masses = has_mass ? query_units * plan.all_keys.segments * shape.key_len : 0;
  plan.shared_bytes = plan.packed_bytes + masses * static_cast<int64_t>(sizeof(T));
}

template <typename S>
void AllKeys<S>::attend(int64_t task, void* scratch) const {
  const int64_t group = group_size(shape_), segments = plan_.all_keys.segments;
  Arena arena{static_cast<char*>(scratch), 0};
  const QueryScratch<S> query = take_query_scratch<S>(arena, params_, plan_);
  if (plan_.all_keys.pack_once) {
    // The last rows of a causal head see most: they come first, so that no thread is left with them at the
    // end. Head by head, what is packed stays in the cache of who works on it; with more threads than heads
    // it is in the caches of several anyway.
    const int64_t units = shape_.batch * shape_.query_heads;
    const bool in_turn = plan_.all_keys.heads_in_turn;
    const int64_t unit = in_turn ? task % units : task / segments;
    const int64_t segment = segments - 1 - (in_turn ? task / units : task % segments);
    const int64_t batch = unit / shape_.query_heads, head = unit % shape_.query_heads;
    return run_blocks(query, shared_head(batch, head / group), batch, head, segment);
  }
  const int64_t batch = task / shape_.key_heads, key_head = task % shape_.key_heads;
  PackedHead<S> packed = take_packed_head<S>(params_, plan_, arena, shape_.key_len);
  set_head(params_, plan_, packed, batch, key_head, 0);
  pack_head(params_, plan_, packed, batch, key_head, {0, shape_.key_len}, query.stored_rows);
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    for (int64_t segment = 0; segment < segments; ++segment) run_blocks(query, packed, batch, head, segment);
  }
}

template <typename S>
void AllKeys<S>::run_blocks(const QueryScratch<S>& scratch, const PackedHead<S>& packed, int64_t batch,
                            int64_t head, int64_t segment) const {
  const Range keys{0, shape_.key_len};
  const int64_t blocks = ceil_div(shape_.query_len, plan_.block_rows), segments = plan_.all_keys.segments;
  const bool emits = has_weights(params_), whole_rows = plan_.path == ForwardPath::kWholeRows;
  QueryBlock<S> block(params_, plan_, scratch, packed, batch);
  if (params_.key_mass != nullptr) {
    T* mass = mass_partial(batch * shape_.query_heads + head, segment);
    fill_span(mass, 0, shape_.key_len, static_cast<T>(0));
    block.set_key_mass(mass);
  }
  for (int64_t i = segment * blocks / segments; i < (segment + 1) * blocks / segments; ++i) {
    const int64_t first = i * plan_.block_rows;
    block.set_rows(head, first, smaller(plan_.block_rows, shape_.query_len - first), keys);
    block.attend(keys, emits && whole_rows);
    block.finish();
    if (emits && !whole_rows) block.emit_all(keys);
  }
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
