// One validation for every backend, run before any work: CPU, other devices and meta tensors alike.
#pragma once

#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include "args.h"

namespace attn_ext {

using SymDimVector = c10::SmallVector<c10::SymInt, 5>;

/// The sizes of a call, after broadcasting.
struct SdpaSizes {
  SymDimVector batch;     // the broadcast dims before the heads
  bool has_heads;         // false where query, key and value are matrices: the outputs have no head dim then
  c10::SymInt heads;      // of the output
  c10::SymInt key_heads;  // of key and value; equal to heads without enable_gqa, broadcast included
  c10::SymInt query_len, key_len, head_dim, value_dim;

  /// (batch..., heads, tail...)
  SymDimVector with_tail(std::initializer_list<c10::SymInt> tail) const;
};

enum class Seed { kGiven, kNotYetDrawn };

/// Throws a c10::Error that says what was expected and what came.
SdpaSizes check_args(const SdpaArgs& args, Seed seed = Seed::kGiven);

/// That the memory of a tensor is there.
void check_storage(const at::Tensor& tensor, const char* name);

/// What a call over packed sequences cannot be asked for.
void check_packed(const SdpaArgs& args, SideOutputs wanted);

/// check_args, and everything else that a backward pass takes: gradients that come in are like what they are
/// the gradient of, what was saved like what a forward pass gives, and what is wanted can have a gradient.
SdpaSizes check_backward(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                         InputMask wanted);

/// The incoming gradients alone.
void check_grads(const SdpaOutputs& grads, const at::Tensor& query, const SdpaSizes& sizes);

/// The factor of the scores. Without a head dim they are all 0.
double scale_of(const SdpaArgs& args, int64_t head_dim);

/// The softcap, 0 where there is none, within what scores can be multiplied and divided by: in float it
/// leaves nothing of them below 1e-30, and all above 1e30.
double softcap_of(const SdpaArgs& args);

/// A distance that no sequence reaches: beyond it sums would overflow and mean nothing more.
inline constexpr int64_t kFar = int64_t{1} << 60;

/// An offset or a window as a plain number, within kFar.
int64_t clamp_distance(const c10::SymInt& distance);

/// Of two bytes.
inline bool is_half(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

/// float32, or float64 for float64 inputs: of every sum, and of lse.
at::ScalarType accumulation_dtype(at::ScalarType dtype);

/// Of the output, and of lse. A float32 says little about the weights of a part where it is far from 0.
at::ScalarType output_dtype(const SdpaArgs& args);
at::ScalarType lse_dtype(const SdpaArgs& args);

/// Of the gradient of an input.
at::ScalarType gradient_dtype(const SdpaArgs& args, const at::Tensor& input);

/// `dropout_origin` as plain numbers: batch, head, row and column.
using Origin = std::array<int64_t, 4>;
Origin origin_of(const SdpaArgs& args);

}  // namespace attn_ext
