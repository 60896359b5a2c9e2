#include "problem.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>

namespace attn_ext {

namespace {

/// Ones in front until `dims`.
at::Tensor pad_front(const at::Tensor& tensor, int64_t dims) {
  Dims shape(std::max<int64_t>(dims - tensor.dim(), 0), 1);
  shape.append(tensor.sizes().begin(), tensor.sizes().end());
  return tensor.view(shape);
}

int64_t broadcast_size(int64_t a, int64_t b) {
  return a == 1 ? b : a;
}

Band band_of(const SdpaArgs& args) {
  const int64_t offset = clamp_distance(args.query_offset);
  Band band;
  if (args.window_left) {
    band.low = offset - clamp_distance(*args.window_left);
  }
  if (args.is_causal || args.window_right) {
    const int64_t right = args.window_right ? clamp_distance(*args.window_right) : kFar;
    band.high = offset + (args.is_causal ? std::min<int64_t>(right, 0) : right);
  }
  return band;
}

Dims lead_of(const Problem& problem) {
  Dims lead;
  for (int64_t dim = 0; dim < problem.query.dim() - 2; ++dim) {
    lead.push_back(broadcast_size(problem.query.size(dim),
                                  broadcast_size(problem.key.size(dim), problem.value.size(dim))));
  }
  return lead;
}

}  // namespace

at::Tensor Layout::of_query_heads(const at::Tensor& tensor, int64_t tail_dims) const {
  const at::Tensor padded = pad_front(tensor, batch_dims + 1 + tail_dims);
  if (padded.size(batch_dims) == 1) {
    return padded.unsqueeze(batch_dims);
  }
  Dims shape(padded.sizes().begin(), padded.sizes().end());
  shape[batch_dims] = key_heads;
  shape.insert(shape.begin() + batch_dims + 1, group);
  return padded.view(shape);
}

at::Tensor Layout::of_key_heads(const at::Tensor& tensor, int64_t tail_dims) const {
  return pad_front(tensor, batch_dims + 1 + tail_dims).unsqueeze(batch_dims + 1);
}

Dims Problem::with_tail(std::initializer_list<int64_t> tail) const {
  Dims shape(lead.begin(), lead.end());
  shape.append(tail.begin(), tail.end());
  return shape;
}

Dims Problem::output_shape(std::initializer_list<int64_t> tail) const {
  Dims shape(lead.begin(), lead.end() - 2);
  if (layout.has_heads) {
    shape.push_back(lead[lead.size() - 2] * lead.back());
  }
  shape.append(tail.begin(), tail.end());
  return shape;
}

Problem make_problem(const SdpaArgs& args) {
  const SdpaSizes sizes = check_args(args);
  const auto number = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  Problem problem;
  const int64_t key_heads = number(sizes.key_heads), heads = number(sizes.heads);
  problem.layout = {.batch_dims = static_cast<int64_t>(sizes.batch.size()),
                    .key_heads = key_heads,
                    .group = key_heads == 0 ? 1 : heads / key_heads,
                    .has_heads = sizes.has_heads};
  problem.query_len = number(sizes.query_len);
  problem.key_len = number(sizes.key_len);
  problem.head_dim = number(sizes.head_dim);
  problem.value_dim = number(sizes.value_dim);
  problem.dtype = args.query.scalar_type();
  problem.accumulator = accumulation_dtype(problem.dtype);
  problem.scale = scale_of(args, problem.head_dim);
  problem.softcap = softcap_of(args);
  problem.dropout_p = args.dropout_p;
  problem.band = band_of(args);

  const Layout& layout = problem.layout;
  problem.query = layout.of_query_heads(args.query, 2);
  problem.key = layout.of_key_heads(args.key, 2).to(problem.accumulator);
  problem.value = layout.of_key_heads(args.value, 2).to(problem.accumulator);
  problem.lead = lead_of(problem);
  if (args.attn_mask.defined()) {
    problem.attn_mask = layout.of_query_heads(args.attn_mask, 2);
  }
  if (args.sinks.defined()) {
    problem.sinks = layout.of_query_heads(args.sinks, 0).to(problem.accumulator);
  }
  if (args.dropout_seed.defined()) {
    Dims shape(args.dropout_seed.sizes().begin(), args.dropout_seed.sizes().end());
    shape.resize(layout.batch_dims + 4, 1);
    problem.dropout_seed = args.dropout_seed.view(shape);
    problem.seed_dims = args.dropout_seed.dim();
  }
  return problem;
}

int64_t rows_per_chunk(const Problem& problem) {
  // What a score tensor of one chunk may hold, in elements. On the CPU not much more than a cache: of larger
  // blocks the C library's allocator keeps many times what is in use.
  const int64_t chunk_elements = problem.query.device().is_cpu() ? int64_t{1} << 20 : int64_t{1} << 24;
  constexpr int64_t kMinimumRows = 16;
  int64_t columns = std::max<int64_t>(problem.key_len, 1);
  for (const int64_t size : problem.lead) {
    columns *= std::max<int64_t>(size, 1);
  }
  return std::clamp<int64_t>(chunk_elements / columns, kMinimumRows,
                             std::max<int64_t>(problem.query_len, kMinimumRows));
}

}  // namespace attn_ext
