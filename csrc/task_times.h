// What each task of a call on the CPU takes: for benchmarks/many_cores.py.
#pragma once

#include <attn_ext/attn_ext.h>

#include <functional>

#include "cpu/tasks.h"

namespace attn_ext {

/// Of every round of tasks that `call` hands out, the queues and each task's steps. They run one after the
/// other on the thread that hands them out, though they are cut for as many threads as torch is set to. While
/// it lasts no other thread may use attn_ext.
ATTN_EXT_API cpu::TaskTimes task_times(const std::function<void()>& call);

/// Seconds of a call of so many rounds, a task for each of `threads` threads in each, that keeps it busy for
/// `seconds`.
ATTN_EXT_API double time_of_rounds(int64_t rounds, int threads, double seconds);

}  // namespace attn_ext
