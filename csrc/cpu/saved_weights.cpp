#include "saved_weights.h"

#include <attn_ext/attn_ext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "call.h"
#include "kernel_choice.h"

namespace attn_ext {

namespace {

bool allowed_at_first() {
  const char* value = std::getenv("ATTN_EXT_SAVE_WEIGHTS");
  return value == nullptr || std::string_view(value) != "0";
}

bool& allowed() {
  thread_local bool allowed = allowed_at_first();
  return allowed;
}

/// As any thread said last.
std::atomic<bool>& allowed_in_process() {
  static std::atomic<bool> allowed = allowed_at_first();
  return allowed;
}

}  // namespace

std::optional<std::array<int64_t, 3>> sizes_of(const at::Tensor& tensor) {
  if (tensor.is_nested() || tensor.dim() < 2) {
    return std::nullopt;
  }
  std::array<int64_t, 3> sizes{1, 0, 0};
  for (int64_t i = tensor.dim() < 3 ? 1 : 0; i < 3; ++i) {
    const auto size = tensor.sym_size(i - 3).maybe_as_int();
    if (!size.has_value()) {
      return std::nullopt;
    }
    sizes[static_cast<size_t>(i)] = *size;
  }
  return sizes;
}

bool save_weights_for_backward() {
  return allowed();
}

bool save_draws_for_backward() {
  return allowed_in_process().load(std::memory_order_relaxed);
}

void set_save_weights_for_backward(bool enabled) {
  allowed() = enabled;
  allowed_in_process().store(enabled, std::memory_order_relaxed);
}

namespace cpu {

namespace {

/// can_join_heads() of the backward kernels, as far as it shows before there are gradients.
bool can_join_heads(const SdpaArgs& args, int64_t query_len) {
  const bool has_window = args.is_causal || args.window_left.has_value() || args.window_right.has_value();
  if (has_window || args.sinks.defined()) {
    return false;
  }
  if (!args.attn_mask.defined()) {
    return true;
  }
  if (args.attn_mask.requires_grad()) {
    return false;
  }
  if (args.attn_mask.dim() < 2) {
    return true;
  }
  const auto sizes = sizes_of(args.attn_mask);
  return sizes.has_value() && (*sizes)[0] == 1 && ((*sizes)[1] == 1 || query_len == 1);
}

}  // namespace

bool saves_weights(const SdpaArgs& args) {
  const KernelTable* table = kernels_in_use();
  const bool is_plain = args.dropout_p == 0.0 && args.softcap == 0.0 && !args.sequences.defined() &&
                        !args.unrounded && !args.dropout_origin.has_value();
  if (!allowed() || !is_plain || table == nullptr || !args.query.device().is_cpu()) {
    return false;
  }
  // A sink may leave all of a row's weights below what float16 can tell from 0.
  if (args.sinks.defined() && args.query.scalar_type() == at::kHalf) {
    return false;
  }
  const auto query = sizes_of(args.query), key = sizes_of(args.key), value = sizes_of(args.value);
  if (!query.has_value() || !key.has_value() || !value.has_value()) {
    return false;
  }
  AttentionShape shape;
  const int64_t key_heads = std::max((*key)[0], (*value)[0]);
  shape.query_heads = std::max((*query)[0], key_heads);
  shape.key_heads = args.enable_gqa ? key_heads : shape.query_heads;
  shape.query_len = (*query)[1];
  shape.key_len = (*key)[1];
  shape.head_dim = (*query)[2];
  shape.value_dim = (*value)[2];
  return kernels_of(*table, args.query.scalar_type())
      .saves_weights(shape, can_join_heads(args, shape.query_len));
}

}  // namespace cpu

}  // namespace attn_ext
