// Blocks of keys against blocks of queries. Rounds: the clearing of the mask gradient's copies, the chains or
// the parts of their blocks in turn (TilesPlan, turns.h), and the sum of the mask gradient's copies, or of dQ
// (blocks_apart.h).
#pragma once

#include "../store_rows.h"
#include "block.h"
#include "memory.h"
#include "order.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr int64_t kBackwardKeys = S::Product::kInRegisters ? 216 : 256;  // of a block, at most
// The same in whole cells of any kind that are whole lines of a mask's gradient.
template <typename S>
constexpr int64_t kLineKeys = S::Product::kInRegisters ? 96 : 64;
template <typename S>
constexpr int64_t kMostLineKeys = S::Product::kInRegisters ? 288 : 256;
constexpr int64_t kBackwardQueries = 256;
constexpr int64_t kSegmentLength = 256;  // at least so many keys and queries
constexpr int64_t kManyBlocks = 12;      // of keys
constexpr int64_t kSummedDims = 128;     // of some queries' dQ, by a task

template <typename S>
class Tiles {
 public:
  static void plan(const BackwardParams& params, int threads, BackwardPlan& plan) {
    Tiles<S>::plan(params, params, threads, plan);
  }
  // given: has the rows' lse already, whose copies params may point to.
  static void plan(const BackwardParams& params, const BackwardParams& given, int threads,
                   BackwardPlan& plan);
  static int64_t tasks(const BackwardPlan& plan, int64_t round);
  static void run(const BackwardParams& params, const BackwardPlan& plan, int64_t round, int64_t task,
                  void* shared, void* scratch) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    Tiles<S> call(params, plan, shared, scratch);
    if (round == 0) return call.mask_copies_.clear({1, plan.chains.mask_copies});
    const bool in_parts = plan.tiles.chain_tasks > 1;
    if (round == 2) return in_parts ? call.sum_blocks(task) : call.mask_copies_.sum(plan.chains, task);
    in_parts ? call.run_part_of_chain(task) : call.run_chain(task);
  }
  static TurnsPlan turns(const BackwardPlan& plan, int64_t round);
  static void run_in_turn(const BackwardParams& params, const BackwardPlan& plan, int64_t task, void* shared,
                          void* scratch, const Turns& turns) {
    [[maybe_unused]] const TaskOf<typename S::Product> in_task;
    Tiles<S>(params, plan, shared, scratch).run_in_turn(task, turns);
  }

 private:
  using T = typename S::Accum;
  using Element = typename S::Element;

  Tiles(const BackwardParams& params, const BackwardPlan& plan, void* shared, void* scratch)
      : params_(params),
        plan_(plan.tiles),
        chains_(plan.chains),
        exact_delta_(plan.exact_delta),
        fills_mask_(plan.fills_mask_grad),
        streamed_(plan.streamed),
        streams_mask_(streams_mask_grad<S>(params)),
        shape_(params.shape),
        group_(group_size(params.shape)),
        grid_(params, plan.tiles),
        meetings_(params.shape, plan.tiles, grid_),
        memory_(params.shape, plan.tiles),
        shared_(shared),
        arena_{static_cast<char*>(scratch), 0},
        cleaned_(take<Element>(arena_, cleaned_size<S>(params.shape, plan.tiles))),
        mask_copies_{
            static_cast<T*>(params.grad_mask.data),
            reinterpret_cast<T*>(static_cast<char*>(shared) + mask_copies_offset(shape_, plan, memory_)),
            params.grad_mask_size} {}

  // plan.h
  static void plan_blocks(const BackwardParams& params, TilesPlan& plan);
  static void plan_segments(const BackwardParams& params, ChainsPlan& chains, TilesPlan& plan);
  static bool takes_turns(const BackwardParams& params, int threads, const BackwardPlan& plan);
  // Whether several parts of a unit, or several heads of a group, may add to the same numbers of the mask's
  // gradient.
  static bool shares_mask(const BackwardParams& params) {
    const TensorView& mask = params.grad_mask;
    return mask.data != nullptr &&
           (group_size(params.shape) > 1 || mask.row_stride == 0 || mask.column_stride == 0);
  }
  // Whether the heads of a group add to the same numbers of a mask of one column, which no key's lane guards.
  static bool heads_share_rows(const BackwardParams& params) {
    const TensorView& mask = params.grad_mask;
    return mask.data != nullptr && mask.column_stride == 0 && mask.head_stride == 0;
  }
  // Whether all blocks add to the one number of a mask that broadcasts over rows and keys.
  static bool shares_one_number(const BackwardParams& params) {
    const TensorView& mask = params.grad_mask;
    return mask.data != nullptr && mask.row_stride == 0 && mask.column_stride == 0;
  }
  static bool are_blocks_apart(const BackwardParams& params, const BackwardParams& given,
                               const BackwardPlan& plan);
  static void plan_chain_tasks(const AttentionShape& shape, int threads, BackwardPlan& plan);
  static void plan_parts(const BackwardParams& params, int threads, BackwardPlan& plan);
  static void plan_chain_threads(int64_t head_bytes, BackwardPlan& plan);
  // At most.
  static int64_t units_of_chain(const ChainsPlan& plan) {
    return ceil_div(plan.family_units, plan.mask_copies);
  }
  static void plan_turns(const BackwardParams& params, const BackwardParams& given,
                         const Meetings<S>& meetings, BackwardPlan& plan);
  static void plan_order(const Meetings<S>& meetings, int threads, BackwardPlan& plan);
  static int64_t packed_bytes(const AttentionShape& shape, const TilesPlan& plan,
                              const UnitMemory<S>& memory) {
    return plan.in_turn ? unit_count(shape) * memory.shared_bytes() : 0;
  }
  // Of a chain: its meetings, then the order of these.
  static int64_t order_bytes(const TilesPlan& plan) {
    Arena arena{nullptr, 0};
    if (plan.order_tasks > 0) take_order(arena, plan);
    return arena.used;
  }
  static int64_t mask_copies_offset(const AttentionShape& shape, const BackwardPlan& plan,
                                    const UnitMemory<S>& memory) {
    return packed_bytes(shape, plan.tiles, memory) + plan.chains.count * order_bytes(plan.tiles);
  }

  // dQ of a query block; of all key blocks apart, where tasks share them.
  static int64_t query_sums_size(const AttentionShape& shape, const TilesPlan& plan) {
    return plan.block_queries * shape.head_dim;
  }
  static int64_t partial_bytes(const AttentionShape& shape, const BackwardPlan& plan) {
    if (plan.tiles.chain_tasks == 1) return 0;
    return plan.chains.count * plan.tiles.key_blocks * query_sums_size(shape, plan.tiles) *
           static_cast<int64_t>(sizeof(T));
  }

  int64_t head_of(Unit unit, int64_t group_head) const { return unit.key_head * group_ + group_head; }

  // As a unit of a chain, its first or another, is to make it.
  MaskGrad<S> mask_grad(int64_t chain, bool first) const {
    return {params_.grad_mask, mask_copies_.of_chain(chains_, chain), fills_mask_ && first};
  }
  void pack_queries(Unit unit, int64_t group_head, int64_t block) const {
    pack_query_block<S>(params_, plan_, memory_.query_pack(group_head, block), unit.batch,
                        head_of(unit, group_head), grid_.query_rows(block), exact_delta_, cleaned_);
  }
  void pack_keys(Unit unit, int64_t block) const {
    pack_key_block<S>(params_, memory_.key_pack(block), unit.batch, unit.key_head, grid_.key_rows(block),
                      cleaned_);
  }
  void run_chain(int64_t chain) {
    const auto scratch = take_key_query_scratch<S>(arena_, params_, plan_.block_keys, plan_.block_queries);
    memory_.take_from(arena_);
    T* const sum = plan_.blocks_apart ? take<T>(arena_, query_sums_size(shape_, plan_)) : nullptr;
    UnitStates states{take_block_states(arena_, plan_.query_blocks),
                      take_block_states(arena_, plan_.key_blocks)};
    if (!plan_.blocks_apart) memory_.put_at(states.queries.of, states.keys.of);
    KeyQueryBlock<S> scores(params_, plan_, scratch);
    const Range members = chain_members(chains_, chain);
    for (int64_t i = members.begin; i < members.end; ++i) {
      const Unit unit = chain_unit(shape_, chains_, chain, i);
      scores.set_mask_grad(mask_grad(chain, i == members.begin));
      plan_.blocks_apart ? run_blocks_apart(scores, unit, sum) : run_unit(scores, unit, states);
    }
    if (streamed_ || streams_mask_) finish_streams();
  }
  void set_keys(KeyQueryBlock<S>& scores, Unit unit, int64_t block) const {
    scores.set_keys(unit.batch, unit.key_head, grid_.key_rows(block), memory_.key_pack(block),
                    memory_.grad_key(block), memory_.grad_value(block));
  }
  // A key block against some query blocks of one head of its group.
  void run_key_block(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, Range query_blocks) const {
    for (int64_t i = query_blocks.begin; i < query_blocks.end; ++i) {
      scores.add_queries(head_of(unit, group_head), grid_.query_rows(i), memory_.query_pack(group_head, i));
    }
  }
  // whole_units.h
  struct UnitStates {
    BlockStates queries, keys;  // queries: of the head that is worked on
  };
  void run_unit(KeyQueryBlock<S>& scores, Unit unit, UnitStates& states) const;
  void meet_query_block(Unit unit, int64_t group_head, int64_t block, UnitStates& states) const;
  void meet_key_block(Unit unit, int64_t block, UnitStates& states) const;
  void leave_query_block(Unit unit, int64_t group_head, int64_t block, UnitStates& states) const;
  void run_head(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, UnitStates& states) const;
  void visit_key_block(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, int64_t block,
                       Range query_blocks, UnitStates& states) const;
  void finish_key_block(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, int64_t block,
                        int64_t query_block) const;
  void make_rows(KeyQueryBlock<S>& scores, Unit unit, int64_t group_head, Range query_blocks) const;
  // blocks_apart.h
  void visit_apart(KeyQueryBlock<S>& scores, Unit unit, int64_t block) const;
  void run_blocks_apart(KeyQueryBlock<S>& scores, Unit unit, T* sum) const;
  int64_t first_block_of_part(int64_t part) const { return part * plan_.key_blocks / plan_.chain_tasks; }
  void run_part_of_chain(int64_t task);
  static int64_t sum_tasks(const AttentionShape& shape);  // of a chain
  void sum_blocks(int64_t task) const;
  template <typename Out>
  void sum_blocks_as(int64_t task) const;
  T* partial_sums(int64_t chain, int64_t block) const {
    return static_cast<T*>(shared_) + (chain * plan_.key_blocks + block) * query_sums_size(shape_, plan_);
  }
  // turns.h
  static int64_t turns_of_chain(const TilesPlan& plan) {
    return plan.order_tasks + plan.pack_tasks + plan.row_tasks + plan.meeting_tasks + plan.store_tasks;
  }
  int64_t first_lane(Unit unit) const { return unit_index(shape_, unit) * meetings_.lanes(); }
  int64_t key_lane(Unit unit, BlockPlace key) const { return first_lane(unit) + meetings_.key_lane(key); }
  int64_t query_lane(Unit unit, int64_t group_head, BlockPlace query) const {
    return first_lane(unit) + meetings_.query_lane(group_head, query);
  }
  int64_t order_lane(int64_t chain) const { return unit_count(shape_) * meetings_.lanes() + chain; }
  void run_in_turn(int64_t task, const Turns& turns);
  void pack_queries_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns);
  void pack_keys_in_turn(Unit unit, int64_t block, const Turns& turns);
  void make_rows_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns);
  struct Order {
    ListedMeeting* list;
    int32_t* of;  // places in the list
  };
  static Order take_order(Arena& arena, const TilesPlan& plan) {
    return {take<ListedMeeting>(arena, plan.meeting_tasks), take<int32_t>(arena, plan.meeting_tasks)};
  }
  Order order_of(int64_t chain) const {
    const int64_t first = packed_bytes(shape_, plan_, memory_);
    Arena arena{static_cast<char*>(shared_) + first + chain * order_bytes(plan_), 0};
    return take_order(arena, plan_);
  }
  struct OrderScratch {
    ListScratch list;
    LaneAhead* lanes;
    int64_t* thread_ends;
  };
  static OrderScratch take_order_scratch(Arena& arena, const TilesPlan& plan, const BlockGrid<S>& grid,
                                         const Meetings<S>& meetings);
  void order_in_turn(int64_t chain, const Turns& turns);
  void meet_in_turn(int64_t chain, const Meeting& meeting, const Turns& turns);
  void store_queries_in_turn(Unit unit, int64_t group_head, int64_t block, const Turns& turns);
  void store_keys_in_turn(Unit unit, int64_t block, const Turns& turns);
  // store.h
  void store_key_block(Unit unit, int64_t block) const;
  // Zeros, for keys that need not be packed for that.
  void store_unseen_keys(Unit unit, int64_t block) const {
    *memory_.key_pack(block).has_sums = 0;
    store_key_block(unit, block);
  }
  void store_query_block(Unit unit, int64_t group_head, int64_t block) const;
  template <typename Out>
  void store_query_block_as(Unit unit, int64_t group_head, int64_t block) const;
  template <typename Out, typename SumsAt>
  void store_query_sums(Unit unit, int64_t group_head, Range rows, Range queries, Range dims,
                        SumsAt sums_at) const;
  void store_sink_of(Unit unit, int64_t group_head) const;

  const BackwardParams& params_;
  const TilesPlan& plan_;
  const ChainsPlan& chains_;
  const bool exact_delta_, fills_mask_, streamed_, streams_mask_;
  const AttentionShape& shape_;
  const int64_t group_;
  const BlockGrid<S> grid_;
  const Meetings<S> meetings_;
  UnitMemory<S> memory_;  // of the unit that is worked on
  void* const shared_;
  Arena arena_;
  Element* const cleaned_;
  const MaskCopies<T> mask_copies_;
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
