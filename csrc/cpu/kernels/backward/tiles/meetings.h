// Tiles in turn: which part of a key block meets which part of a query block, and between which numbers of
// their lanes. In phase t of a head key segment i meets query segment (i + t) mod segments, in it the blocks
// and parts of keys and queries meet in ascending order: the order of the sums in run_unit().
#pragma once

#include "grid.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

// What a lane says: packed, known of whole rows where that is wanted, then after which turn it is.
constexpr int64_t kPacked = 1;
constexpr int64_t kReady = 2;
constexpr int64_t kFirstTurn = 3;

struct Meeting {
  int64_t group_head;
  BlockPlace key, query;
  int64_t key_before, key_after, query_before, query_after;
};

// Of a unit.
template <typename S>
class Meetings {
 public:
  Meetings(const AttentionShape& shape, const TilesPlan& plan, const BlockGrid<S>& grid)
      : plan_(plan), grid_(grid), group_(group_size(shape)) {}

  // Lanes: the key parts, then the query parts of each head of the group.
  int64_t lanes() const { return key_lanes() + group_ * plan_.query_blocks * plan_.query_parts; }
  int64_t key_lanes() const { return plan_.key_blocks * plan_.key_parts; }
  int64_t key_lane(BlockPlace key) const { return key.block * plan_.key_parts + key.part; }
  int64_t query_lane(int64_t group_head, BlockPlace query) const {
    return key_lanes() + (group_head * plan_.query_blocks + query.block) * plan_.query_parts + query.part;
  }

  // A key's turns are (head, phase, query place) in their order, a query's (phase, key place).
  int64_t key_number(int64_t group_head, int64_t phase, int64_t query_place) const {
    return kFirstTurn + (group_head * plan_.segments + phase) * grid_.query_places() + query_place;
  }
  int64_t query_number(int64_t phase, int64_t key_place) const {
    return kFirstTurn + phase * grid_.key_places() + key_place;
  }
  // After the last turn of all.
  int64_t last_key_number(BlockPlace key) const {
    const int64_t segment = grid_.segment_of_key(key.block);
    const int64_t first = (key.block - grid_.key_segment(segment).begin) * plan_.key_parts;
    return key_number_before(segment, first + key.part, group_ * plan_.segments * grid_.query_places());
  }
  int64_t last_query_number(BlockPlace query) const {
    const int64_t segment = grid_.segment_of_query(query.block);
    const int64_t first = (query.block - grid_.query_segment(segment).begin) * plan_.query_parts;
    return query_number_before(segment, first + query.part, plan_.segments * grid_.key_places());
  }

  // Also those that do not meet.
  int64_t places() const { return group_ * plan_.segments * places_of_phase(); }
  int64_t count() const;
  // body(head, phase, key segment, key place, query place) for all places. Those of a phase that wait for
  // nothing in it come first: diagonal after diagonal.
  template <typename Body>
  void each_place(Body body) const;
  // The same by its number; key.block is -1 where the parts do not see each other.
  Meeting at(int64_t number) const;

 private:
  int64_t places_of_phase() const { return plan_.segments * grid_.key_places() * grid_.query_places(); }
  // Of a lane's turns before this one the last that is one.
  int64_t key_number_before(int64_t segment, int64_t place, int64_t turn) const;
  int64_t query_number_before(int64_t segment, int64_t place, int64_t turn) const;

  const TilesPlan& plan_;
  const BlockGrid<S>& grid_;
  const int64_t group_;
};

template <typename S>
int64_t Meetings<S>::count() const {
  int64_t count = 0;
  for (int64_t i = 0; i < key_lanes(); ++i) {
    const Range queries = grid_.queries_seeing(grid_.keys_of({i / plan_.key_parts, i % plan_.key_parts}));
    if (is_empty(queries)) continue;
    for (int64_t block = queries.begin / plan_.block_queries; block * plan_.block_queries < queries.end;
         ++block) {
      for (int64_t part = 0; part < plan_.query_parts; ++part) {
        count += is_empty(intersect(queries, grid_.queries_of({block, part}))) ? 0 : 1;
      }
    }
  }
  return count * group_;
}

template <typename S>
template <typename Body>
void Meetings<S>::each_place(Body body) const {
  const int64_t keys = grid_.key_places(), queries = grid_.query_places();
  for (int64_t head = 0; head < group_; ++head) {
    for (int64_t phase = 0; phase < plan_.segments; ++phase) {
      for (int64_t diagonal = 0; diagonal < keys + queries - 1; ++diagonal) {
        const int64_t last = smaller(diagonal, keys - 1);
        for (int64_t place = larger(0, diagonal - queries + 1); place <= last; ++place) {
          for (int64_t i = 0; i < plan_.segments; ++i) body(head, phase, i, place, diagonal - place);
        }
      }
    }
  }
}

template <typename S>
Meeting Meetings<S>::at(int64_t number) const {
  const int64_t keys = grid_.key_places(), queries = grid_.query_places();
  int64_t place = number % places_of_phase() / plan_.segments;
  int64_t diagonal = 0, first = 0;  // key place of the diagonal's first
  for (;; ++diagonal) {
    first = larger(0, diagonal - queries + 1);
    const int64_t count = smaller(diagonal, keys - 1) - first + 1;
    if (place < count) break;
    place -= count;
  }
  const int64_t key_place = first + place, query_place = diagonal - key_place;
  const int64_t phase = number / places_of_phase() % plan_.segments;
  const int64_t segment = number % plan_.segments, other = (segment + phase) % plan_.segments;
  Meeting meeting{};
  meeting.group_head = number / places_of_phase() / plan_.segments;
  meeting.key = grid_.key_at(segment, key_place);
  meeting.query = grid_.query_at(other, query_place);
  if (!grid_.meet(meeting.key, meeting.query)) {
    meeting.key.block = -1;
    return meeting;
  }
  meeting.key_after = key_number(meeting.group_head, phase, query_place);
  meeting.key_before = key_number_before(segment, key_place, meeting.key_after - kFirstTurn);
  meeting.query_after = query_number(phase, key_place);
  meeting.query_before = query_number_before(other, query_place, meeting.query_after - kFirstTurn);
  return meeting;
}

template <typename S>
int64_t Meetings<S>::key_number_before(int64_t segment, int64_t place, int64_t turn) const {
  const BlockPlace key = grid_.key_at(segment, place);
  const int64_t queries = grid_.query_places();
  while (--turn >= 0) {
    const int64_t other = (segment + turn / queries) % plan_.segments;
    if (grid_.meet(key, grid_.query_at(other, turn % queries))) return kFirstTurn + turn;
  }
  return kReady;
}

template <typename S>
int64_t Meetings<S>::query_number_before(int64_t segment, int64_t place, int64_t turn) const {
  const BlockPlace query = grid_.query_at(segment, place);
  const int64_t keys = grid_.key_places();
  while (--turn >= 0) {
    const int64_t other = (segment - turn / keys + plan_.segments) % plan_.segments;
    if (grid_.meet(grid_.key_at(other, turn % keys), query)) return kFirstTurn + turn;
  }
  return kReady;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
