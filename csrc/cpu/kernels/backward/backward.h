// The backward pass, whole: every path with its way.
#pragma once

#include "few_keys/rows.h"
#include "few_keys/tasks.h"
#include "few_rows/tasks.h"
#include "joined_heads.h"
#include "plan.h"
#include "tiles/blocks_apart.h"
#include "tiles/cell.h"
#include "tiles/plan.h"
#include "tiles/products.h"
#include "tiles/saved_weights.h"
#include "tiles/store.h"
#include "tiles/tasks.h"
#include "tiles/transposed.h"
#include "tiles/turns.h"
#include "tiles/visible.h"
#include "tiles/whole_units.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr Way<BackwardParams, BackwardPlan> backward_way(BackwardPath path) {
  switch (path) {
    case BackwardPath::kTiles:
      return {Tiles<S>::plan, Tiles<S>::tasks, Tiles<S>::run, Tiles<S>::turns, Tiles<S>::run_in_turn};
    case BackwardPath::kFewRows:
      if constexpr (!S::Product::kInRegisters)
        return {};
      else
        return {FewRows<S>::plan, FewRows<S>::tasks, FewRows<S>::run};
    case BackwardPath::kFewKeys:
      return {FewKeys<S>::plan, FewKeys<S>::tasks, FewKeys<S>::run, FewKeys<S>::turns,
              FewKeys<S>::run_in_turn};
    case BackwardPath::kSmallHeads:
      if constexpr (!S::Product::kInRegisters)
        return {};
      else
        return {FewKeys<WideScheme<S>>::plan, FewKeys<WideScheme<S>>::tasks, FewKeys<WideScheme<S>>::run,
                FewKeys<WideScheme<S>>::turns, FewKeys<WideScheme<S>>::run_in_turn};
    case BackwardPath::kJoinedHeads:
      return {JoinedHeads<S>::plan, JoinedHeads<S>::tasks, JoinedHeads<S>::run, Tiles<S>::turns,
              JoinedHeads<S>::run_in_turn};
  }
  return {};
}

template <typename S>
constexpr BackwardWays backward_ways() {
  BackwardWays ways{backward_path<S>, {}};
  for (int i = 0; i < kBackwardPaths; ++i) ways.of[i] = backward_way<S>(static_cast<BackwardPath>(i));
  return ways;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
