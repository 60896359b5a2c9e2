// The forward pass, whole: every path with its way.
#pragma once

#include "all_keys.h"
#include "key_pieces.h"
#include "output.h"
#include "packed.h"
#include "plan.h"
#include "shared.h"
#include "stored.h"
#include "streamed.h"
#include "unit_rows.h"
#include "visible.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr Way<ForwardParams, ForwardPlan> forward_way(ForwardPath path) {
  switch (path) {
    case ForwardPath::kWholeRows:
    case ForwardPath::kOnline:
      return {AllKeys<S>::plan, AllKeys<S>::tasks, AllKeys<S>::run};
    case ForwardPath::kFewRows:
      if (!S::Product::kInRegisters) return {};
      return {KeyPieces<S>::plan, KeyPieces<S>::tasks, KeyPieces<S>::run};
    case ForwardPath::kUnitRows:
      if (S::Product::kInRegisters) return {};
      [[fallthrough]];
    case ForwardPath::kSplit:
      return {KeyPieces<S>::plan, KeyPieces<S>::tasks, KeyPieces<S>::run};
  }
  return {};
}

template <typename S>
constexpr ForwardWays forward_ways() {
  ForwardWays ways{forward_path<S>, {}};
  for (int i = 0; i < kForwardPaths; ++i) ways.of[i] = forward_way<S>(static_cast<ForwardPath>(i));
  return ways;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
