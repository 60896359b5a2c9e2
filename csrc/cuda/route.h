// Which of ATen's fused kernels for NVIDIA GPUs a call may go to: rules over plain numbers, that need no GPU.
//
// What the kernels share: no dropout but their own, no softcap, no side outputs but lse. Where they differ:
//
//   flash      float16, bfloat16; no bias; any window, aligned at the last row and the last key
//   efficient  float32 too; bias and its gradient; causal, a window to the left; as many key heads as heads
//   cudnn      float16, bfloat16; bias; causal from the first row and key
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "../aten/problem.h"

namespace attn_ext::cuda {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// With the numbers of at::SDPBackend; the composition stands in for its `math`. Tiles are our own (tiles.h).
enum class Backend : int64_t { kComposition = 0, kFlash = 1, kEfficient = 2, kCudnn = 3, kTiles = -1 };

/// The name that `explain` gives it.
const char* name_of(Backend backend);

/// Which of the keys at hand the rows see.
enum class BandKind {
  kNothing,
  kAll,
  kCausal,       // row i sees keys 0 ... i
  kCausalAtEnd,  // the last row sees the last key, and each row one key less than the next
  kWindow,
};

/// The keys that a band lets any row see, and the band over these.
struct VisibleRange {
  int64_t key_begin, key_end;
  Band band;  // open at a side where it cuts nothing off
  BandKind kind;
  // Rows before and from these see no key at all.
  int64_t first_seeing_row, end_of_seeing_rows;

  int64_t keys() const { return key_end - key_begin; }
  bool has_blind_rows(int64_t query_len) const {
    return first_seeing_row > 0 || end_of_seeing_rows < query_len;
  }
};

VisibleRange visible_range(const Band& band, int64_t query_len, int64_t key_len);

/// The window of flash attention: row i sees keys from i + keys - rows - left to i + keys - rows + right; -1
/// is open. Nothing where it has no word for the band.
struct FlashWindow {
  int64_t left = -1, right = -1;
};
std::optional<FlashWindow> flash_window(const VisibleRange& range, int64_t query_len);

/// The causal mask of the efficient kernel, from the first row and key or at the last ones, and how many keys
/// a row sees at most. Nothing where it has no word for the band.
struct EfficientMask {
  int64_t type = 0;  // 0: none, 1: causal, 2: causal at the end
  std::optional<int64_t> window;
};
std::optional<EfficientMask> efficient_mask(const VisibleRange& range, int64_t query_len, bool is_backward);

/// A call, as far as it matters for the choice.
struct RouteRequest {
  BandKind kind;
  bool has_flash_window;    // flash_window has a word for it
  bool has_efficient_mask;  // efficient_mask has
  bool has_bias;            // then the band is in it
  bool wants_bias_grad;
};

/// The backend, where ATen's own choice for these tensors with no mask but the bias, or with a causal one
/// (`kind` is kCausal), is `choice`. `flash_is_enabled`: as the user has it.
Backend route(const RouteRequest& request, Backend choice, bool flash_is_enabled, bool efficient_is_enabled);

inline int64_t rounded_up(int64_t number, int64_t to) {
  return (number + to - 1) / to * to;
}

}  // namespace attn_ext::cuda
