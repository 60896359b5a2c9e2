// Where the packs and sums of a unit lie, in shared memory or in a thread's.
#pragma once

#include "../chains.h"
#include "pack.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// How far a block of a unit is that one thread works through.
struct BlockState {
  int64_t meetings;  // that are left, with blocks of the other side
  int64_t place;     // of its pack and sums
  bool packed, stored;
};

// Such blocks of queries or of keys. A place that is free again is the next to be taken: the caches have it.
struct BlockStates {
  BlockState* of;
  int64_t* free_places;
  int64_t free_count;

  void reset(int64_t blocks) {
    free_count = blocks;
    for (int64_t i = 0; i < blocks; ++i) {
      of[i] = {};
      free_places[i] = blocks - 1 - i;
    }
  }
  void take_place(int64_t block) { of[block].place = free_places[--free_count]; }
  void free_place(int64_t block) { free_places[free_count++] = of[block].place; }
};

inline BlockStates take_block_states(Arena& arena, int64_t blocks) {
  return {take<BlockState>(arena, blocks), take<int64_t>(arena, blocks), 0};
}

template <typename S>
class UnitMemory {
 public:
  using T = typename S::Accum;

  UnitMemory(const AttentionShape& shape, const TilesPlan& plan) : shape_(shape), plan_(plan) {
    Arena queries{nullptr, 0}, keys{nullptr, 0};
    take_query_pack<S>(queries, shape, plan.block_queries);
    take_key_pack<S>(keys, shape, plan.block_keys);
    query_bytes_ = queries.used;
    key_bytes_ = keys.used;
    key_sums_size_ =
        round_up(plan.block_keys * (padded_dim<S>(shape.head_dim) + padded_dim<S>(shape.value_dim)),
                 64 / static_cast<int64_t>(sizeof(T)));
  }

  // A thread's own: of one head's queries, and of one key block where nothing is kept for the next head or
  // segment.
  void take_from(Arena& arena) {
    heads_ = 1;
    keeps_keys_ = plan_.segments > 1 || group_size(shape_) > 1;
    take_all(arena);
  }
  // From now on blocks lie where these say, not each in a place of its own.
  void put_at(const BlockState* queries, const BlockState* keys) {
    query_places_ = queries;
    key_places_ = keys;
  }
  // The part of `unit` in memory that all units share.
  void take_from_shared(void* shared, Unit unit) {
    heads_ = group_size(shape_);
    keeps_keys_ = true;
    Arena arena{static_cast<char*>(shared) + unit_index(shape_, unit) * shared_bytes(), 0};
    take_all(arena);
  }
  // Of a unit, and of its keys with one query head.
  int64_t shared_bytes() const { return bytes(group_size(shape_)); }
  int64_t head_bytes() const { return bytes(1); }

  // Whether keys stay packed, and their sums unstored, from one visit to the next.
  bool keeps_keys() const { return keeps_keys_; }
  QueryPack<S> query_pack(int64_t group_head, int64_t block) const {
    const int64_t place = query_places_ != nullptr ? query_places_[block].place : block;
    Arena arena{queries_ + ((heads_ == 1 ? 0 : group_head * plan_.query_blocks) + place) * query_bytes_, 0};
    QueryPack<S> pack = take_query_pack<S>(arena, shape_, plan_.block_queries);
    if (query_sums_ != nullptr) pack.grad_query = query_sums_;
    return pack;
  }
  // From now on the sums of the one query block go there.
  void put_query_sums(T* sums) { query_sums_ = sums; }
  KeyPack<S> key_pack(int64_t block) const {
    Arena arena{keys_ + key_index(block) * key_bytes_, 0};
    return take_key_pack<S>(arena, shape_, plan_.block_keys);
  }
  // (block keys, padded D), to be scaled, and (block keys, padded Dv)
  T* grad_key(int64_t block) const { return key_sums_ + key_index(block) * key_sums_size_; }
  T* grad_value(int64_t block) const {
    return grad_key(block) + plan_.block_keys * padded_dim<S>(shape_.head_dim);
  }
  // keys, queries: of the block.
  void clear_key_sums(int64_t block, Range keys) const {
    const auto clear = [&](T* sums, int64_t stride) {
      fill_span(sums, keys.begin * stride, keys.end * stride, static_cast<T>(0));
    };
    clear(grad_key(block), padded_dim<S>(shape_.head_dim));
    clear(grad_value(block), padded_dim<S>(shape_.value_dim));
  }
  void clear_query_sums(int64_t group_head, int64_t block, Range queries) const {
    fill_span(query_pack(group_head, block).grad_query, queries.begin * shape_.head_dim,
              round_up(queries.end, S::kSpan) * shape_.head_dim, static_cast<T>(0));
  }

 private:
  int64_t bytes(int64_t heads) const {
    UnitMemory unit = *this;
    unit.heads_ = heads;
    unit.keeps_keys_ = true;
    Arena count{nullptr, 0};
    unit.take_all(count);
    return count.used;
  }
  int64_t key_index(int64_t block) const {
    if (!keeps_keys_) return 0;
    return key_places_ != nullptr ? key_places_[block].place : block;
  }
  void take_all(Arena& arena) {
    const int64_t key_blocks = keeps_keys_ ? plan_.key_blocks : 1;
    queries_ = take<char>(arena, heads_ * plan_.query_blocks * query_bytes_);
    keys_ = take<char>(arena, key_blocks * key_bytes_);
    key_sums_ = take<T>(arena, key_blocks * key_sums_size_);
  }

  const AttentionShape& shape_;
  const TilesPlan& plan_;
  int64_t query_bytes_, key_bytes_, key_sums_size_;
  int64_t heads_ = 1;
  bool keeps_keys_ = true;
  const BlockState* query_places_ = nullptr;
  const BlockState* key_places_ = nullptr;
  char* queries_ = nullptr;  // (query heads, query blocks)
  char* keys_ = nullptr;     // (key blocks), or one
  T* key_sums_ = nullptr;    // the same
  T* query_sums_ = nullptr;  // those of the only query block, where not in its pack
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
