// What each task of a call on the CPU takes: for benchmarks/many_cores.py.
#pragma once

#include <attn_ext/attn_ext.h>

#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

namespace attn_ext {

/// Of a round of tasks: its queues, one behind the other, as (tasks, threads that it keeps at work); and of
/// each task its steps, as (seconds of work, then whether it waits for a lane or sets it, the lane, the
/// number), with lane -1 at its end (cpu/task_queues.h, cpu/kernels/interface/ways.h).
using RoundTimes = std::pair<std::vector<std::pair<int64_t, int64_t>>,
                             std::vector<std::vector<std::tuple<double, bool, int64_t, int64_t>>>>;

/// Of every round of tasks that `call` hands out. They run one after the other on the thread that hands them
/// out, though they are cut for as many threads as torch is set to. While it lasts no other thread may use
/// attn_ext.
ATTN_EXT_API std::vector<RoundTimes> task_times(const std::function<void()>& call);

}  // namespace attn_ext
