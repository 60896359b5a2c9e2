// The kernels of weights.cu as operators, which a test can stand in for.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "../../unboxed.h"
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
WeightsParams params_of(const at::Tensor& query, const at::Tensor& key, const OptionalTensor& mask,
                        double scale, double softcap, int64_t low, int64_t high) {
  WeightsParams params{};
  params.query = numbers_of(query);
  params.key = numbers_of(key);
  put_strides(query, params.query_strides);
  put_strides(key, params.key_strides);
  if (mask) {
    params.bias = mask->const_data_ptr();
    put_strides(*mask, params.bias_strides);
    params.bias_kind = mask->scalar_type() == at::kBool ? 1 : mask->scalar_type() == at::kFloat ? 3 : 2;
  }
  params.heads = static_cast<int>(query.size(1));
  params.group = static_cast<int>(query.size(1) / key.size(1));
  params.query_len = static_cast<int>(query.size(2));
  params.key_len = static_cast<int>(key.size(2));
  constexpr int64_t kFarthest = int64_t{1} << 31;  // from each other, of any row and key
  params.low = static_cast<int>(std::max(low, -kFarthest));
  params.high = static_cast<int>(std::min(high, kFarthest - 1));
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.capped_scale = softcap > 0.0 ? static_cast<float>(2.0 * scale / softcap) : 0.0F;
  return params;
}

at::Tensor tile_lse(const at::Tensor& query, const at::Tensor& key, const OptionalTensor& mask, double scale,
                    double softcap, int64_t low, int64_t high) {
  const at::Tensor lse =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  WeightsParams params = params_of(query, key, mask, scale, softcap, low, high);
  params.row_sums = lse.mutable_data_ptr<float>();
  launch_row_sums(params, {key.size(-1), key.size(-1), query.scalar_type()}, query.size(0) * query.size(1),
                  query.device());
  return lse;
}

std::tuple<at::Tensor, at::Tensor> tile_weights(
    const at::Tensor& query, const at::Tensor& key, const OptionalTensor& value,
    const OptionalTensor& grad_output, const OptionalTensor& mask, const OptionalTensor& seed,
    const at::Tensor& lse, const OptionalTensor& delta, double scale, double softcap, double dropout_p,
    int64_t low, int64_t high, int64_t first_head, int64_t heads, int64_t row_begin, int64_t rows) {
  WeightsParams params = params_of(query, key, mask, scale, softcap, low, high);
  const at::DimVector sizes{heads, rows, key.size(2)};
  const at::Tensor weights = at::empty(sizes, query.options());
  at::Tensor grad_scores;
  params.first_head = static_cast<int>(first_head);
  params.row_begin = static_cast<int>(row_begin);
  params.rows = static_cast<int>(rows);
  params.lse = lse.const_data_ptr<float>();
  params.weights = static_cast<u16*>(weights.mutable_data_ptr());
  if (seed) {
    constexpr int kDrawBits = 32;
    params.seed = reinterpret_cast<const i64*>(seed->const_data_ptr<int64_t>());
    params.threshold = static_cast<u64>(std::floor(std::ldexp(dropout_p, kDrawBits)));
    params.kept = dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - dropout_p)) : 0.0f;
  }
  int64_t value_dim = key.size(-1);
  if (grad_output) {
    grad_scores = at::empty(sizes, query.options());
    params.grad_scores = static_cast<u16*>(grad_scores.mutable_data_ptr());
    params.delta = delta->const_data_ptr<float>();
    params.value = numbers_of(*value);
    params.grad_output = numbers_of(*grad_output);
    put_strides(*value, params.value_strides);
    put_strides(*grad_output, params.grad_output_strides);
    value_dim = value->size(-1);
  }
  launch_weights(params, {key.size(-1), value_dim, query.scalar_type()}, heads, query.device());
  return {weights, grad_scores};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("_tile_lse", TORCH_FN(tile_lse));
  m.impl("_tile_weights", TORCH_FN(tile_weights));
}

}  // namespace attn_ext::cuda
