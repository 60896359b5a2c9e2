// Tiles in turn: in which order the threads of a chain begin its meetings. No bit depends on it, as long as
// each comes after those that it waits for.
#pragma once

#include "../../matrix/arena.h"
#include "meetings.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

constexpr int64_t kMostOrdered = 4096;  // places of a chain; more take too long to go through
constexpr int64_t kMostOrderThreads = 64;

// Of a meeting's time: P and dS, for which it waits for nobody, then dV and dK, then dQ.
constexpr int64_t kMakeShare = 5, kKeysShare = 4, kQueriesShare = 2;

struct ListedMeeting {
  Meeting meeting;
  int64_t key_lane, query_lane;
  int64_t work;  // scores that it makes, about
  int64_t rest;  // of the head's work, what can only follow one after the other
};

// The lanes of a unit as they will be.
struct LaneAhead {
  int64_t number;   // after what was begun last
  int64_t free_at;  // when that has added to it
  int64_t rest;
};

// Gives meetings out as `threads` would begin them that know how long each takes: of the next few of the
// list, among those of the earliest head, the one that much has to follow and that waits little.
class MeetingOrder {
 public:
  MeetingOrder(ListedMeeting* list, int64_t count, LaneAhead* lanes, int64_t lane_count, int64_t key_lanes,
               int64_t* thread_ends, int64_t threads)
      : list_(list), count_(count), lanes_(lanes), thread_ends_(thread_ends), threads_(threads) {
    for (int64_t i = 0; i < lane_count; ++i) lanes_[i] = {kReady, 0, 0};
    for (int64_t i = 0; i < threads; ++i) thread_ends_[i] = 0;
    find_rest(key_lanes);
  }

  // One that was not given out before, by its place in the list.
  int64_t next() {
    while (candidates_ < kCandidates && listed_ < count_) candidate_[candidates_++] = listed_++;
    int64_t thread = 0;
    for (int64_t i = 1; i < threads_; ++i) {
      if (thread_ends_[i] < thread_ends_[thread]) thread = i;
    }
    int64_t best = -1;
    Course course{};
    for (int64_t i = 0; i < candidates_; ++i) {
      const ListedMeeting& m = list_[candidate_[i]];
      if (!is_next_at_its_lanes(m)) continue;
      const Course other = course_of(m, thread_ends_[thread]);
      if (best >= 0 && !is_better(m, other, list_[candidate_[best]], course)) continue;
      best = i;
      course = other;
    }
    const int64_t chosen = candidate_[best];
    const ListedMeeting& m = list_[chosen];
    lanes_[m.key_lane].number = m.meeting.key_after;
    lanes_[m.key_lane].free_at = course.keys_added;
    lanes_[m.query_lane].number = m.meeting.query_after;
    lanes_[m.query_lane].free_at = course.queries_added;
    thread_ends_[thread] = course.queries_added;
    --candidates_;
    for (int64_t i = best; i < candidates_; ++i) candidate_[i] = candidate_[i + 1];
    return chosen;
  }

 private:
  static constexpr int64_t kCandidates = 16;

  struct Course {
    int64_t keys_added, queries_added, waits;
  };
  // The first in the list that is left always is.
  bool is_next_at_its_lanes(const ListedMeeting& m) const {
    return lanes_[m.key_lane].number == m.meeting.key_before &&
           lanes_[m.query_lane].number == m.meeting.query_before;
  }
  Course course_of(const ListedMeeting& m, int64_t begin) const {
    Course course{};
    course.keys_added = larger(begin + kMakeShare * m.work, lanes_[m.key_lane].free_at) + kKeysShare * m.work;
    course.queries_added = larger(course.keys_added, lanes_[m.query_lane].free_at) + kQueriesShare * m.work;
    course.waits = course.queries_added - begin - (kMakeShare + kKeysShare + kQueriesShare) * m.work;
    return course;
  }
  // The earliest head comes first whatever it waits: where heads share a mask's gradient of one column, each
  // waits for all of the one before, which is_next_at_its_lanes() knows nothing of.
  static bool is_better(const ListedMeeting& a, const Course& course_a, const ListedMeeting& b,
                        const Course& course_b) {
    constexpr int64_t kWaits = 5;  // what waiting weighs beside what has to follow
    if (a.meeting.group_head != b.meeting.group_head) return a.meeting.group_head < b.meeting.group_head;
    return a.rest - kWaits * course_a.waits > b.rest - kWaits * course_b.waits;
  }
  // From the last meeting back: what follows one at its key's lane, or its query's. Another head begins anew,
  // as heads keep their order.
  void find_rest(int64_t key_lanes) {
    for (int64_t i = count_ - 1; i >= 0; --i) {
      ListedMeeting& m = list_[i];
      if (i < count_ - 1 && m.meeting.group_head != list_[i + 1].meeting.group_head) {
        for (int64_t lane = 0; lane < key_lanes; ++lane) lanes_[lane].rest = 0;
      }
      LaneAhead &key = lanes_[m.key_lane], &query = lanes_[m.query_lane];
      query.rest += kQueriesShare * m.work;
      key.rest = larger(key.rest, query.rest) + kKeysShare * m.work;
      m.rest = key.rest + kMakeShare * m.work;
    }
  }

  ListedMeeting* list_;
  const int64_t count_;
  LaneAhead* lanes_;
  int64_t* thread_ends_;
  const int64_t threads_;
  int64_t listed_ = 0, candidates_ = 0;
  int64_t candidate_[kCandidates];
};

// What the list is made with.
struct ListScratch {
  struct Keys {
    BlockPlace place;
    int64_t number;  // of the lane, so far
    Range keys, seeing;
  };
  struct Queries {
    BlockPlace place;
    int64_t head, number;  // that is listed, and of its lane
    Range queries;
  };
  Keys* keys;        // (segments, places)
  Queries* queries;  // the same
};

template <typename S>
ListScratch take_list_scratch(Arena& arena, const TilesPlan& plan, const BlockGrid<S>& grid) {
  return {take<ListScratch::Keys>(arena, plan.segments * grid.key_places()),
          take<ListScratch::Queries>(arena, plan.segments * grid.query_places())};
}

template <typename S>
void place_parts(const TilesPlan& plan, const BlockGrid<S>& grid, const ListScratch& scratch) {
  for (int64_t segment = 0; segment < plan.segments; ++segment) {
    for (int64_t i = 0; i < grid.key_places(); ++i) {
      auto& keys = scratch.keys[segment * grid.key_places() + i];
      keys = {grid.key_at(segment, i), kReady, {0, 0}, {0, 0}};
      if (keys.place.block < 0) continue;
      keys.keys = grid.keys_of(keys.place);
      keys.seeing = grid.queries_seeing(keys.keys);
    }
    for (int64_t i = 0; i < grid.query_places(); ++i) {
      auto& queries = scratch.queries[segment * grid.query_places() + i];
      queries = {grid.query_at(segment, i), 0, kReady, {0, 0}};
      if (queries.place.block >= 0) queries.queries = grid.queries_of(queries.place);
    }
  }
}

// Meetings::count() of them, as each_place() goes through them.
template <typename S>
void list_meetings(const TilesPlan& plan, const BlockGrid<S>& grid, const Meetings<S>& meetings,
                   const ListScratch& scratch, ListedMeeting* list) {
  const int64_t key_places = grid.key_places(), query_places = grid.query_places();
  place_parts(plan, grid, scratch);
  meetings.each_place(
      [&](int64_t head, int64_t phase, int64_t segment, int64_t key_place, int64_t query_place) {
        auto& keys = scratch.keys[segment * key_places + key_place];
        auto& queries = scratch.queries[(segment + phase) % plan.segments * query_places + query_place];
        if (is_empty(intersect(keys.seeing, queries.queries))) return;
        if (queries.head != head) queries.number = kReady;
        queries.head = head;
        const auto count_seeing = [&](int64_t key) {
          const Range seeing = intersect(grid.queries_seeing(key), queries.queries);
          return larger(0, seeing.end - seeing.begin);
        };
        const int64_t key_after = meetings.key_number(head, phase, query_place);
        const int64_t query_after = meetings.query_number(phase, key_place);
        const Range some = keys.keys;
        ListedMeeting& m = *list++;
        m.meeting = {head, keys.place, queries.place, keys.number, key_after, queries.number, query_after};
        m.key_lane = meetings.key_lane(keys.place);
        m.query_lane = meetings.query_lane(head, queries.place);
        m.work = 1 + (some.end - some.begin) * (count_seeing(some.begin) + count_seeing(some.end - 1)) / 2;
        keys.number = key_after;
        queries.number = query_after;
      });
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
