// How memory is asked for that is read soon, and once.
#pragma once

#include <cstdint>

#include "amd_cpu.h"
#include "intel_cpu.h"

namespace attn_ext::cpu {

// Into the first cache, not the second: from Zen 5 on requests into that come to nothing in one process of
// two, where rows lie in pages; docs/trials.md has the figures.
[[maybe_unused]] static bool asks_into_first_cache() {
  return is_zen5_or_later();
}

// In many places at a time, not in the order of memory: so that several pages are on their way at once.
// docs/trials.md has the figures. What is on its way, and what is read, has to fit the second cache.
[[maybe_unused]] static bool asks_in_many_places() {
  constexpr unsigned int kLargeCache = 1u << 19;
  const SecondCache cache = intel_second_cache();
  return cache.bytes / cache.threads >= kLargeCache;
}

// Keys and values of more bytes than this, whose heads lie between each other, are read some keys of several
// heads at a time: of more than 32 pages in turns, Intel's processors of up to 1 MB of second cache forget
// what comes in each, and read twice as much memory as is asked for. docs/trials.md has the figures.
[[maybe_unused]] static int64_t most_bytes_head_by_head() {
  constexpr unsigned int kSmallCache = 1u << 20;
  const SecondCache cache = intel_second_cache();
  const bool forgets = cache.bytes > 0 && cache.bytes <= kSmallCache;
  return forgets ? int64_t{1} << 23 : INT64_MAX;
}

// How many columns may be asked for while others are read, times the power of two that they are apart, in
// bytes: they share sets of the second cache. Zen 4 asks for lines that have left it from the third without
// much loss; docs/trials.md has the figures.
[[maybe_unused]] static int64_t columns_to_ask_for() {
  return is_zen4() ? 1 << 23 : 1 << 18;
}

}  // namespace attn_ext::cpu
