// The backward pass, whole: every path with its way.
#pragma once

#include "few_keys/rows.h"
#include "few_keys/tasks.h"
#include "few_rows/tasks.h"
#include "plan.h"
#include "tiles/cell.h"
#include "tiles/plan.h"
#include "tiles/products.h"
#include "tiles/store.h"
#include "tiles/tasks.h"
#include "tiles/visible.h"

namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY {

template <typename S>
constexpr BackwardWays backward_ways() {
  BackwardWays ways{};
  ways.path = backward_path;
  ways.of[static_cast<int>(BackwardPath::kTiles)] = {Tiles<S>::plan, Tiles<S>::tasks, Tiles<S>::run};
  ways.of[static_cast<int>(BackwardPath::kFewRows)] = {FewRows<S>::plan, FewRows<S>::tasks, FewRows<S>::run};
  ways.of[static_cast<int>(BackwardPath::kFewKeys)] = {FewKeys<S>::plan, FewKeys<S>::tasks, FewKeys<S>::run};
  return ways;
}

}  // namespace attn_ext::cpu::ATTN_EXT_CPU_CAPABILITY
