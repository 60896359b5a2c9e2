// Into which cache memory is asked for that is read soon, once, and in order.
#pragma once

#include "amd_cpu.h"

namespace attn_ext::cpu {

// From Zen 5 on requests into the second cache come to nothing in one process of two, where rows lie in
// pages; docs/trials.md has the figures.
[[maybe_unused]] static bool asks_into_first_cache() {
  return is_zen5_or_later();
}

}  // namespace attn_ext::cpu
