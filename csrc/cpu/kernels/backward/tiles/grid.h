// How a head's keys and queries lie in blocks, these in segments and in parts, and which of them see each
// other. Segments may differ by a block; in a phase each key segment meets one of the queries'.
#pragma once

#include "block.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// A part of a block; block is -1 where there is none.
struct BlockPlace {
  int64_t block, part;
};

template <typename S>
class BlockGrid {
 public:
  BlockGrid(const BackwardParams& params, const TilesPlan& plan)
      : params_(params), shape_(params.shape), plan_(plan) {}

  Range key_segment(int64_t index) const { return segment(plan_.key_blocks, index); }
  Range query_segment(int64_t index) const { return segment(plan_.query_blocks, index); }
  int64_t segment_of_key(int64_t block) const { return segment_of(plan_.key_blocks, block); }
  int64_t segment_of_query(int64_t block) const { return segment_of(plan_.query_blocks, block); }
  Range key_rows(int64_t block) const { return block_rows(shape_.key_len, plan_.block_keys, block); }
  Range query_rows(int64_t block) const { return block_rows(shape_.query_len, plan_.block_queries, block); }

  // Of some query blocks those that may see any of these keys, as far as the window goes. A gradient of a
  // mask that is filled wants to hear of all of them, and has no window.
  Range seen_blocks(Range keys, Range blocks) const {
    const Range queries = queries_seeing(keys);
    if (is_empty(queries)) return {blocks.begin, blocks.begin};
    return intersect(blocks,
                     {queries.begin / plan_.block_queries, ceil_div(queries.end, plan_.block_queries)});
  }

  // Parts of the longest segment, and of any those that it has.
  int64_t key_places() const { return ceil_div(plan_.key_blocks, plan_.segments) * plan_.key_parts; }
  int64_t query_places() const { return ceil_div(plan_.query_blocks, plan_.segments) * plan_.query_parts; }
  BlockPlace key_at(int64_t segment, int64_t place) const {
    return place_in(key_segment(segment), plan_.key_parts, place);
  }
  BlockPlace query_at(int64_t segment, int64_t place) const {
    return place_in(query_segment(segment), plan_.query_parts, place);
  }

  // From the block's first on.
  Range part_of_keys(BlockPlace key) const {
    return part_in_steps(size_of(key_rows(key.block)), cell_rows_of<S>(params_), plan_.key_parts, key.part);
  }
  Range part_of_queries(BlockPlace query) const {
    return part_in_steps(size_of(query_rows(query.block)), S::kPanel, plan_.query_parts, query.part);
  }
  // From the head's first on.
  Range keys_of(BlockPlace key) const { return moved(part_of_keys(key), key_rows(key.block).begin); }
  Range queries_of(BlockPlace query) const {
    return moved(part_of_queries(query), query_rows(query.block).begin);
  }

  // As far as the window goes; of several keys, from the first to the last that sees one of them.
  Range queries_seeing(int64_t key) const { return window_queries(params_.rule, shape_.query_len, key); }
  Range queries_seeing(Range keys) const {
    if (is_empty(keys)) return {0, 0};
    return {queries_seeing(keys.begin).begin, queries_seeing(keys.end - 1).end};
  }
  bool meet(BlockPlace key, BlockPlace query) const {
    return key.block >= 0 && query.block >= 0 &&
           !is_empty(intersect(queries_seeing(keys_of(key)), queries_of(query)));
  }

 private:
  static int64_t size_of(Range range) { return range.end - range.begin; }
  static Range moved(Range range, int64_t by) { return {range.begin + by, range.end + by}; }
  Range segment(int64_t blocks, int64_t index) const {
    return {index * blocks / plan_.segments, (index + 1) * blocks / plan_.segments};
  }
  int64_t segment_of(int64_t blocks, int64_t block) const {
    int64_t index = block * plan_.segments / blocks;
    while (segment(blocks, index).end <= block) ++index;
    return index;
  }
  static Range block_rows(int64_t len, int64_t size, int64_t block) {
    return {block * size, smaller((block + 1) * size, len)};
  }
  static BlockPlace place_in(Range blocks, int64_t parts, int64_t place) {
    const int64_t block = blocks.begin + place / parts;
    return {block < blocks.end ? block : -1, place % parts};
  }

  const BackwardParams& params_;
  const AttentionShape& shape_;
  const TilesPlan& plan_;
};

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
