// The forward pass, whole: every path with its way.
#pragma once

#include "all_keys.h"
#include "key_pieces.h"
#include "output.h"
#include "packed.h"
#include "plan.h"
#include "streamed.h"
#include "visible.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr ForwardWays forward_ways() {
  using All = AllKeys<S>;
  using Pieces = KeyPieces<S>;
  ForwardWays ways{};
  ways.path = forward_path;
  for (const ForwardPath path : {ForwardPath::kWholeRows, ForwardPath::kOnline}) {
    ways.of[static_cast<int>(path)] = {All::plan, All::tasks, All::run};
  }
  for (const ForwardPath path : {ForwardPath::kSplit, ForwardPath::kFewRows}) {
    ways.of[static_cast<int>(path)] = {Pieces::plan, Pieces::tasks, Pieces::run};
  }
  return ways;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
