// The kernels of weights.cu as operators, which a test can stand in for.

#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "kernels.h"

namespace attn_ext::cuda {

namespace {

const u16* numbers_of(const at::Tensor& tensor) {
  return static_cast<const u16*>(tensor.const_data_ptr());
}

template <size_t dims>
void put_strides(const at::Tensor& tensor, i64 (&strides)[dims]) {
  for (size_t dim = 0; dim < dims; ++dim) {
    strides[dim] = tensor.stride(static_cast<int64_t>(dim));
  }
}

/// What both kernels take.
template <class Call>
WeightsParams params_of(const Call& call) {
  WeightsParams params{};
  params.query = numbers_of(call.query);
  params.key = numbers_of(call.key);
  put_strides(call.query, params.query_strides);
  put_strides(call.key, params.key_strides);
  if (call.mask.defined()) {
    const auto dtype = call.mask.scalar_type();
    params.bias = call.mask.const_data_ptr();
    params.bias_kind = dtype == at::kBool ? 1 : dtype == at::kFloat ? 3 : 2;
    put_strides(call.mask, params.bias_strides);
  }
  params.heads = static_cast<int>(call.query.size(1));
  params.group = static_cast<int>(call.query.size(1) / call.key.size(1));
  params.query_len = static_cast<int>(call.query.size(2));
  params.key_len = static_cast<int>(call.key.size(2));
  constexpr int64_t kFarthest = int64_t{1} << 31;  // from each other, of any row and key
  params.low = static_cast<int>(std::clamp(call.low, -kFarthest, kFarthest - 1));
  params.high = static_cast<int>(std::clamp(call.high, -kFarthest, kFarthest - 1));
  params.scale = static_cast<float>(call.scale);
  params.softcap = static_cast<float>(call.softcap);
  params.capped_scale = call.softcap > 0.0 ? static_cast<float>(2.0 * call.scale / call.softcap) : 0.0F;
  return params;
}

at::Tensor tile_lse(const LseCall& call) {
  const at::Tensor& query = call.query;
  const at::Tensor lse =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  WeightsParams params = params_of(call);
  params.row_sums = lse.mutable_data_ptr<float>();
  const int64_t dim = query.size(-1);
  launch_row_sums(params, {dim, dim, query.scalar_type()}, query.size(0) * query.size(1), query.device());
  return lse;
}

std::tuple<at::Tensor, at::Tensor> tile_weights(const WeightsCall& call) {
  WeightsParams params = params_of(call);
  const at::DimVector sizes{call.heads, call.rows, call.key.size(2)};
  const at::Tensor weights = at::empty(sizes, call.query.options());
  at::Tensor grad_scores;
  params.first_head = static_cast<int>(call.first_head);
  params.row_begin = static_cast<int>(call.row_begin);
  params.rows = static_cast<int>(call.rows);
  params.lse = call.lse.const_data_ptr<float>();
  params.weights = static_cast<u16*>(weights.mutable_data_ptr());
  if (call.seed.defined()) {
    constexpr int kDrawBits = 32;
    params.seed = reinterpret_cast<const i64*>(call.seed.const_data_ptr<int64_t>());
    params.threshold = static_cast<u64>(std::floor(std::ldexp(call.dropout_p, kDrawBits)));
    params.kept = call.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - call.dropout_p)) : 0.0F;
  }
  TileDims dims{call.key.size(-1), call.key.size(-1), call.query.scalar_type()};
  if (call.grad_output.defined()) {
    grad_scores = at::empty(sizes, call.query.options());
    params.grad_scores = static_cast<u16*>(grad_scores.mutable_data_ptr());
    params.delta = call.delta.const_data_ptr<float>();
    params.value = numbers_of(call.value);
    params.grad_output = numbers_of(call.grad_output);
    put_strides(call.value, params.value_strides);
    put_strides(call.grad_output, params.grad_output_strides);
    dims.value_dim = call.value.size(-1);
  }
  launch_weights(params, dims, call.heads, call.query.device());
  return {weights, grad_scores};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("_tile_lse", TORCH_FN((Unboxed<LseCall>::kernel<&tile_lse>)));
  m.impl("_tile_weights", TORCH_FN((Unboxed<WeightsCall>::kernel<&tile_weights>)));
}

}  // namespace attn_ext::cuda
