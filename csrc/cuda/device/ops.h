// The arguments of the operators that the kernels of this folder are.
#pragma once

#include <ATen/core/Tensor.h>

#include "../../unboxed.h"

namespace attn_ext::cuda {

struct TileCall {
  at::Tensor query;  // (N, H, Lq, D), rows aligned, D and Dv as the kernels want them
  at::Tensor key;    // (N, Hkv, Lk, D)
  at::Tensor value;  // (N, Hkv, Lk, Dv)
  at::Tensor mask;   // (N, H, Lq, Lk), expanded, as it came; undefined: none
  at::Tensor seed;   // of dropout; undefined: none
  at::Tensor draws;  // all of them, as `_tile_draws` gives them; undefined: drawn where they are needed
  double scale = 1.0, softcap = 0.0, dropout_p = 0.0;
  int64_t low = 0, high = 0;                // row i sees keys i + low ... i + high
  int64_t first_batch = 0, batch_step = 1;  // n counts as n batch_step + first_batch in the draws

  /// -> (N, H, Lq, Dv) and lse, (N, H, Lq) float32, without sinks.
  auto arguments() {
    return fields(query, key, value, or_none(mask), or_none(seed), or_none(draws), scale, softcap, dropout_p,
                  low, high, first_batch, batch_step);
  }
};

struct TileWeightsCall {
  TileCall call;
  at::Tensor lse;                              // (N, H, Lq) float32
  int64_t first_head, heads, row_begin, rows;  // what is made; heads are counted over N as well

  /// -> (heads, rows, Lk).
  auto arguments() {
    return std::tuple_cat(call.arguments(), fields(lse, first_head, heads, row_begin, rows));
  }
};

struct TileGradsCall {
  TileCall call;
  at::Tensor grad_output, output;  // (N, H, Lq, Dv)
  at::Tensor lse, grad_lse;        // (N, H, Lq) float32; grad_lse undefined: none

  /// -> (N, H, Lq, D), (N, Hkv, Lk, D), (N, Hkv, Lk, Dv), and rowsum(dO O) - dLse, (N, H, Lq) float32.
  auto arguments() {
    return std::tuple_cat(call.arguments(), fields(grad_output, output, lse, or_none(grad_lse)));
  }
};

}  // namespace attn_ext::cuda
