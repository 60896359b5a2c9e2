#include "call.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>

#include "dense_mask.h"

namespace attn_ext::cpu {

namespace {

// In multiply-adds: what one thread does in the time that it takes to wake another; to read or write one
// number; and all else that a head takes.
constexpr double kSerialWork = 4e5, kElementWork = 2, kHeadWork = 6e3;

int64_t window_of(const std::optional<c10::SymInt>& window) {
  return window ? clamp_distance(*window) : -1;
}

AttentionShape shape_of(const SdpaArgs& args, const CallSizes& sizes) {
  AttentionShape shape;
  shape.dtype = kind_of(args.query.scalar_type());
  shape.batch = sizes.batch;
  shape.query_heads = sizes.heads;
  shape.key_heads = sizes.key_heads;
  shape.query_len = sizes.query_len;
  shape.key_len = sizes.key_len;
  shape.head_dim = sizes.head_dim;
  shape.value_dim = sizes.value_dim;
  return shape;
}

ScoreRule rule_of(const SdpaArgs& args, const CallSizes& sizes, Views& views) {
  ScoreRule rule;
  rule.scale = scale_of(args, sizes.head_dim);
  rule.softcap = softcap_of(args);
  rule.query_offset = clamp_distance(args.query_offset);
  rule.window_left = window_of(args.window_left);
  rule.window_right = args.is_causal ? 0 : window_of(args.window_right);
  if (args.attn_mask.defined() && args.attn_mask.numel() > 0) {  // else there is nothing to be asked
    rule.mask_kind = kind_of(args.attn_mask.scalar_type());
    rule.mask = views.matrix(args.attn_mask);
  }
  if (args.sinks.defined()) {
    rule.sinks_kind = kind_of(args.sinks.scalar_type());
    rule.sinks = views.per_head(args.sinks);
  }
  return rule;
}

bool has_one_head(const at::Tensor& tensor) {
  return tensor.dim() < 3 || tensor.size(-3) == 1;
}

/// The seeds, flat over the leading batch dims that they cover.
at::Tensor flat_seeds(const at::Tensor& seed, const CallSizes& sizes) {
  const at::IntArrayRef covered(sizes.batch_dims.data(), static_cast<size_t>(seed.dim()));
  return seed.expand(covered).contiguous();
}

DropoutRule dropout_of(const SdpaArgs& args, const CallSizes& sizes, at::Tensor& seeds) {
  DropoutRule dropout;
  if (args.dropout_p <= 0.0) {
    return dropout;
  }
  seeds = flat_seeds(args.dropout_seed, sizes);
  const bool drops_all = args.dropout_p >= 1.0;
  dropout.enabled = true;
  dropout.threshold = drops_all ? 0 : static_cast<uint32_t>(std::floor(std::ldexp(args.dropout_p, 32)));
  dropout.keep_scale = drops_all ? 0.0 : 1.0 / (1.0 - args.dropout_p);
  dropout.seeds = seeds.const_data_ptr<int64_t>();
  dropout.batches_per_seed = std::max<int64_t>(sizes.batch / std::max<int64_t>(seeds.numel(), 1), 1);
  const auto [batch, head, row, column] = origin_of(args);
  dropout.batch_origin = batch;
  dropout.head_origin = head;
  dropout.row_origin = row;
  dropout.chunk_origin = column / 64;
  return dropout;
}

}  // namespace

Inputs::Inputs(const SdpaArgs& args, const SdpaSizes& checked) : sizes(checked), views(sizes) {
  params.shape = shape_of(args, sizes);
  params.rule = rule_of(args, sizes, views);
  params.dropout = dropout_of(args, sizes, seeds);
  params.query = views.matrix(args.query);
  params.key = views.matrix(args.key);
  params.value = views.matrix(args.value);
  if (!args.enable_gqa && has_one_head(args.key) && has_one_head(args.value)) {
    params.shape.key_heads = std::min<int64_t>(params.shape.key_heads, 1);  // one head for all: packed once
  }
}

void Inputs::copy_scattered(const at::Tensor& given) {
  mask = dense_mask(given, params);
  if (!mask.is_same(given)) {
    params.rule.mask = views.matrix(mask);
  }
}

double work_of(const AttentionShape& shape) {
  const auto heads = static_cast<double>(shape.batch) * static_cast<double>(shape.query_heads);
  const auto key_heads = static_cast<double>(shape.batch) * static_cast<double>(shape.key_heads);
  const auto rows = static_cast<double>(shape.query_len), keys = static_cast<double>(shape.key_len);
  const auto dims = static_cast<double>(shape.head_dim + shape.value_dim);
  const double elements = (heads * rows + key_heads * keys) * dims;
  return heads * rows * keys * dims + kElementWork * elements + kHeadWork * heads;
}

int useful_threads(double work) {
  return work < kSerialWork || at::in_parallel_region() ? 1 : at::get_num_threads();
}

}  // namespace attn_ext::cpu
