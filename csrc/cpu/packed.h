// Packed sequences as problems of their own over the same tensors: each takes the path, and with it the bits,
// that it would take alone.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../sequences.h"
#include "call.h"
#include "planned_call.h"
#include "tasks.h"

namespace attn_ext::cpu {

/// The view's elements from a row on.
inline TensorView from_row(TensorView view, int64_t row, int64_t element_bytes) {
  if (view.data != nullptr) {
    view.data = static_cast<char*>(view.data) + row * view.row_stride * element_bytes;
  }
  return view;
}

inline ResultView from_row(ResultView view, int64_t row, int64_t element_bytes, int64_t accumulator_bytes) {
  return {from_row(view, row, view.wide ? accumulator_bytes : element_bytes), view.wide};
}
inline TensorView from_row(TensorView view, int64_t row, int64_t element_bytes, int64_t) {
  return from_row(view, row, element_bytes);
}

/// Of query, key and value, and of what is accumulated.
inline int64_t element_bytes_of(const AttentionShape& shape) {
  const bool is_half = shape.dtype == ScalarKind::kBFloat16 || shape.dtype == ScalarKind::kFloat16;
  return is_half ? 2 : shape.dtype == ScalarKind::kFloat64 ? 8 : 4;
}
inline int64_t accumulator_bytes_of(const AttentionShape& shape) {
  return shape.dtype == ScalarKind::kFloat64 ? 8 : 4;
}

/// What of both passes' parameters is a sequence's.
template <class Params>
Params of_sequence(const Params& whole, const Sequence& sequence, int64_t number, int64_t count) {
  const int64_t element_bytes = element_bytes_of(whole.shape);
  const int64_t accumulator_bytes = accumulator_bytes_of(whole.shape);
  Params one = whole;
  one.shape.query_len = sequence.query_len;
  one.shape.key_len = sequence.key_len;
  one.rule.query_offset = std::clamp(sequence.query_offset, -kFar, kFar);
  one.dropout.first_batch = whole.dropout.first_batch * count + number;
  one.dropout.batch_step = count;
  one.dropout.batches_per_seed = whole.dropout.batches_per_seed * count;
  one.query = from_row(whole.query, sequence.query_begin, element_bytes);
  one.key = from_row(whole.key, sequence.key_begin, element_bytes);
  one.value = from_row(whole.value, sequence.key_begin, element_bytes);
  one.output = from_row(whole.output, sequence.query_begin, element_bytes, accumulator_bytes);
  if (whole.lse != nullptr) {
    one.lse =
        const_cast<char*>(static_cast<const char*>(whole.lse)) + sequence.query_begin * accumulator_bytes;
  }
  if (whole.double_lse != nullptr) {
    one.double_lse = whole.double_lse + sequence.query_begin;
  }
  return one;
}

/// Calls whose tasks are worked on together, the longest call first; those of each round before those of the
/// next.
template <class Call>
class JoinedCalls {
 public:
  /// `calls` in the order in which they begin.
  JoinedCalls(std::vector<Call> calls, int threads)
      : calls_(std::move(calls)), shared_at_(calls_.size()), noted_(static_cast<size_t>(threads)) {
    int64_t shared_bytes = 0, rounds = 0;
    for (size_t i = 0; i < calls_.size(); ++i) {
      const auto& plan = calls_[i].plan;
      shared_at_[i] = shared_bytes;
      shared_bytes += (plan.shared_bytes + 63) / 64 * 64;
      thread_bytes_ = std::max(thread_bytes_, plan.thread_bytes);
      rounds = std::max(rounds, plan.rounds);
    }
    shared_.emplace(shared_bytes);
    own_.emplace(thread_bytes_ * threads);
    for (int64_t round = 0; round < rounds; ++round) {
      rounds_.push_back({ends_of([round](const Call& call) { return call.tasks(round); }, round),
                         ends_of([round](const Call& call) { return call.turns_of(round).lanes; }, round)});
    }
  }

  int64_t rounds() const { return std::ssize(rounds_); }
  int64_t tasks(int64_t round) const { return at(round).task_ends.back(); }
  int64_t lanes(int64_t round) const { return at(round).lane_ends.back(); }

  /// A queue for each chain that takes turns, one for all calls between two that do.
  std::vector<TaskQueue> queues(int64_t round, int threads) const {
    std::vector<TaskQueue> queues;
    bool open = false;
    for (const Call& call : calls_) {
      if (round >= call.plan.rounds) continue;
      const TurnsPlan turns = call.turns_of(round);
      if (turns.lanes > 0) {
        add_chains(turns, call.tasks(round), queues);
      } else if (open) {
        queues.back().count += call.tasks(round);
      } else {
        add_chains({0, 1, threads}, call.tasks(round), queues);
      }
      open = turns.lanes == 0;
    }
    return queues;
  }

  void run(int64_t round, int64_t task, int64_t slot, Turns turns) const {
    const auto& [ends, lane_ends] = at(round);
    const auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    const Call& call = calls_[i];
    char* scratch = own_->data() + slot * thread_bytes_;
    const Call*& noted = noted_[static_cast<size_t>(slot)];
    if (noted != &call) {
      call.begin(scratch);
      noted = &call;
    }
    turns.first_lane += i == 0 ? 0 : lane_ends[i - 1];
    call.run(round, task - (i == 0 ? 0 : ends[i - 1]), shared_->data() + shared_at_[i], scratch, turns);
  }

 private:
  /// Tasks and lanes, up to and with each call.
  struct Round {
    std::vector<int64_t> task_ends, lane_ends;
  };
  const Round& at(int64_t round) const { return rounds_[static_cast<size_t>(round)]; }

  template <class Count>
  std::vector<int64_t> ends_of(Count count, int64_t round) const {
    std::vector<int64_t> ends(calls_.size());
    int64_t all = 0;
    for (size_t i = 0; i < calls_.size(); ++i) {
      all += round < calls_[i].plan.rounds ? count(calls_[i]) : 0;
      ends[i] = all;
    }
    return ends;
  }

  std::vector<Call> calls_;
  std::vector<int64_t> shared_at_;  // where the call's shared memory begins
  int64_t thread_bytes_ = 0;
  std::vector<Round> rounds_;
  std::optional<Scratch> shared_, own_;
  mutable std::vector<const Call*> noted_;  // whose notes a thread's memory holds
};

/// All problems over torch's threads, as many at a time as keep what they share in bounds.
template <class Ways, class Params>
void run_problems(const Ways& ways, const std::vector<Params>& problems) {
  constexpr int64_t kSharedBytes = int64_t{1} << 26;
  std::vector<size_t> order(problems.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto work = [&](size_t i) { return work_of(problems[i].shape); };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return work(a) > work(b); });
  double all = 0;
  for (const size_t i : order) {
    all += work(i);
  }
  const int threads = useful_threads(all);
  using Call = decltype(plan_call(ways, problems.front(), threads));
  std::vector<Call> wave;
  int64_t bytes = 0;
  for (const size_t i : order) {
    // A problem that is a small part of all is planned for few threads: the others have work of their own.
    const double share = all > 0 ? work(i) / all * threads : threads;
    Call call = plan_call(ways, problems[i], std::clamp(static_cast<int>(share + 1), 1, threads));
    if (!wave.empty() && bytes + call.plan.shared_bytes > kSharedBytes) {
      run_rounds(JoinedCalls<Call>(std::move(wave), threads), threads);
      wave.clear();
      bytes = 0;
    }
    bytes += call.plan.shared_bytes;
    wave.push_back(call);
  }
  if (!wave.empty()) {
    run_rounds(JoinedCalls<Call>(std::move(wave), threads), threads);
  }
}

/// Whether sequences leave rows out.
inline bool has_gaps(const std::vector<Sequence>& sequences, int64_t Sequence::*length, int64_t rows) {
  for (const Sequence& sequence : sequences) {
    rows -= sequence.*length;
  }
  return rows > 0;
}

}  // namespace attn_ext::cpu
