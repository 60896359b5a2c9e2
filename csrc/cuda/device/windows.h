// The parts of a call that launches are over. With dropout the draws of a part, a bit for each row and key,
// are held at once; parts are as small as that asks for. No tensor, and no GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace attn_ext::cuda {

/// Heads are counted over N as well.
struct Window {
  int64_t first_head, heads, row_begin, rows, key_begin, keys;
};

/// What a launch over it takes, of TileParams.
template <class Params>
void put_window(Params& params, const Window& window) {
  params.first_head = static_cast<int>(window.first_head);
  params.launch_heads = static_cast<int>(window.heads);
  params.row_begin = static_cast<int>(window.row_begin);
  params.rows = static_cast<int>(window.rows);
  params.key_begin = static_cast<int>(window.key_begin);
  params.keys = static_cast<int>(window.keys);
}

inline constexpr int64_t kLinesOfWindow = 128;  // parts begin at multiples of it, as blocks do

/// Rows and keys in pairs of tiles of 64.
inline int64_t bytes_of_draws(const Window& window) {
  constexpr int64_t kPair = 128, kBits = 8;
  const auto whole = [](int64_t lines) { return (lines + kPair - 1) / kPair * kPair; };
  return window.heads * whole(window.rows) * whole(window.keys) / kBits;
}

/// Into parts of as many `lines` as each other, multiples of `step`, that take no more than `most_bytes` or
/// have one step.
inline std::vector<Window> split(const Window& whole, int64_t Window::*begin, int64_t Window::*lines,
                                 int64_t step, int64_t most_bytes) {
  if (bytes_of_draws(whole) <= most_bytes) {
    return {whole};
  }
  Window one = whole;
  one.*lines = step;
  const int64_t steps = (whole.*lines + step - 1) / step;
  const int64_t most = std::max(most_bytes / bytes_of_draws(one), int64_t{1});
  const int64_t parts = (steps + most - 1) / most;
  one.*lines = (steps + parts - 1) / parts * step;
  std::vector<Window> windows;
  for (int64_t line = 0; line < whole.*lines; line += one.*lines) {
    windows.push_back(one);
    windows.back().*begin = whole.*begin + line;
    windows.back().*lines = std::min(one.*lines, whole.*lines - line);
  }
  return windows;
}

/// In whole groups of heads.
inline std::vector<Window> split_heads(const Window& whole, int64_t group, int64_t most_bytes) {
  return split(whole, &Window::first_head, &Window::heads, group, most_bytes);
}

inline std::vector<Window> split_rows(const Window& whole, int64_t most_bytes) {
  return split(whole, &Window::row_begin, &Window::rows, kLinesOfWindow, most_bytes);
}

inline std::vector<Window> split_keys(const Window& whole, int64_t most_bytes) {
  return split(whole, &Window::key_begin, &Window::keys, kLinesOfWindow, most_bytes);
}

}  // namespace attn_ext::cuda
