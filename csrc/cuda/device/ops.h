// The arguments of the operators that the kernels of weights.cu are.
#pragma once

#include <ATen/core/Tensor.h>

#include "../../unboxed.h"

namespace attn_ext::cuda {

struct LseCall {
  at::Tensor query;  // (N, H, Lq, D)
  at::Tensor key;    // (N, Hkv, Lk, D)
  at::Tensor mask;   // (N, H, Lq, Lk), expanded, as it came; undefined: none
  double scale, softcap;
  int64_t low, high;  // row i sees keys i + low ... i + high

  auto arguments() { return fields(query, key, or_none(mask), scale, softcap, low, high); }
};

struct WeightsCall {
  at::Tensor query, key;          // as above
  at::Tensor value, grad_output;  // (N, Hkv, Lk, Dv), (N, H, Lq, Dv); undefined: no gradients
  at::Tensor mask, seed;          // undefined: none
  at::Tensor lse, delta;          // (N, H, Lq) float32; delta undefined without gradients
  double scale, softcap, dropout_p;
  int64_t low, high;
  int64_t first_head, heads, row_begin, rows;  // what is made; heads are counted over N as well

  auto arguments() {
    return fields(query, key, or_none(value), or_none(grad_output), or_none(mask), or_none(seed), lse,
                  or_none(delta), scale, softcap, dropout_p, low, high, first_head, heads, row_begin, rows);
  }
};

}  // namespace attn_ext::cuda
