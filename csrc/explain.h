// Which way a call would take, and why, without computing it. (On a GPU its tensors are laid out as the
// kernel would have them.)
#pragma once

#include <attn_ext/attn_ext.h>

#include <cstdint>
#include <string>

#include "args.h"

namespace attn_ext {

struct Explanation {
  // "aten", or how the kernels go: "whole-row", "online", "split", "few-rows", "unit-rows"; on an NVIDIA GPU
  // which of ATen's: "flash", "efficient", "cudnn", or "tiles", our own
  std::string path;
  std::string capability;  // the instruction set, or the device's type where that is not the CPU
  int64_t block_rows;      // query rows worked on at once; on a GPU's fused kernels all
  int64_t block_keys;      // keys worked on at once; there all that any row sees
  int64_t packed_bytes;    // of key and value in another layout or dtype
  int64_t scratch_bytes;   // beyond inputs, outputs and what is packed
  int64_t saved_bytes;     // of weights, or of draws of dropout, that are saved for the backward pass
  std::string reason;
};

/// Throws what the call itself would throw.
ATTN_EXT_API Explanation explain(const SdpaArgs& args);

/// As on an NVIDIA GPU, wherever the tensors are.
ATTN_EXT_API Explanation explain_gpu(const SdpaArgs& args);

}  // namespace attn_ext
