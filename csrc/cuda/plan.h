// How a call goes on an NVIDIA GPU: by which kernel, on which views of its tensors, and why.
#pragma once

#include <functional>
#include <string>

#include "four_dims.h"
#include "fused.h"
#include "tiles.h"

namespace attn_ext::cuda {

/// What is asked of a pass beside output, or beside the gradients of query, key and value.
struct Purpose {
  SideOutputs sides{};     // forward
  bool wants_lse = false;  // forward
  bool is_backward = false;
  bool takes_grads_of_sides = false;  // of weights or key mass
  bool takes_lse_grad = false;
  bool wants_bias_grad = false;
  bool has_delta = false;
};

struct Plan {
  std::string reason;
  Problem problem;  // in numbers
  Backend backend = Backend::kComposition;
  // Of the composition nothing more is there.
  FourDims dims{};
  FusedCall call{};  // of a fused kernel
  TileCall tiles{};  // of our own

  bool is_fused() const { return backend != Backend::kComposition && backend != Backend::kTiles; }
};

/// Throws what check_args throws.
Plan make_plan(const SdpaArgs& args, const Purpose& purpose);

/// The columns that the value of a plan has beside those of the call's: where an incoming gradient of lse is
/// one of the output, in a column whose values are all 1, and in a second one what rounding leaves of it.
inline constexpr int64_t kLseColumns = 2;

}  // namespace attn_ext::cuda
