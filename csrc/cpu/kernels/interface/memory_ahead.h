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
  return intel_second_cache() >= kLargeCache;
}

// How many columns may be asked for while others are read, times the power of two that they are apart, in
// bytes: they share sets of the second cache. Zen 4 asks for lines that have left it from the third without
// much loss; docs/trials.md has the figures.
[[maybe_unused]] static int64_t columns_to_ask_for() {
  return is_zen4() ? 1 << 23 : 1 << 18;
}

}  // namespace attn_ext::cpu
