#include "problem.h"

#include <ATen/Context.h>
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

Problem describe(const SdpaArgs& args, Seed seed) {
  const SdpaSizes sizes = check_args(args, seed);
  const auto number = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  Problem problem;
  const int64_t key_heads = number(sizes.key_heads), heads = number(sizes.heads);
  problem.layout = {.batch_dims = static_cast<int64_t>(sizes.batch.size()),
                    .key_heads = key_heads,
                    .group = key_heads == 0 ? 1 : heads / key_heads,
                    .has_heads = sizes.has_heads};
  for (const c10::SymInt& size : sizes.batch) {
    problem.lead.push_back(number(size));
  }
  problem.lead.append({problem.layout.key_heads, problem.layout.group});
  problem.whole_lead = problem.lead;
  problem.lead_begin.assign(problem.lead.size(), 0);
  problem.on_cpu = args.query.device().is_cpu();
  problem.query_len = number(sizes.query_len);
  problem.key_len = number(sizes.key_len);
  problem.head_dim = number(sizes.head_dim);
  problem.value_dim = number(sizes.value_dim);
  problem.dtype = args.query.scalar_type();
  problem.accumulator = problem.factors = accumulation_dtype(problem.dtype);
  problem.output_dtype = output_dtype(args);
  problem.lse_dtype = lse_dtype(args);
  problem.scale = scale_of(args, problem.head_dim);
  problem.softcap = softcap_of(args);
  problem.dropout_p = args.dropout_p;
  problem.band = band_of(args);
  problem.first_batch = args.first_batch;
  problem.batch_step = args.batch_step;
  problem.dropout_origin = origin_of(args);
  problem.output_order =
      memory_order(args.query, static_cast<int64_t>(sizes.batch.size()) + (sizes.has_heads ? 3 : 2));
  return problem;
}

Problem make_problem(const SdpaArgs& args, bool for_derivatives) {
  Problem problem = describe(args);
  if (args.query.is_cuda() && !at::globalContext().hasROCM() && !for_derivatives) {
    problem.factors = problem.dtype;
  }
  const Layout& layout = problem.layout;
  problem.query = layout.of_query_heads(args.query, 2);
  problem.key = layout.of_key_heads(args.key, 2).to(problem.factors);
  problem.value = layout.of_key_heads(args.value, 2).to(problem.factors);
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

at::Tensor of_part(const Problem& part, const at::Tensor& tensor) {
  at::Tensor narrowed = tensor;
  for (size_t dim = 0; tensor.defined() && dim < part.lead.size(); ++dim) {
    const auto place = static_cast<int64_t>(dim);
    if (tensor.size(place) != 1 && tensor.size(place) != part.lead[dim]) {
      narrowed = narrowed.narrow(place, part.lead_begin[dim], part.lead[dim]);
    }
  }
  return narrowed;
}

ChunkSizes chunk_sizes(const Problem& problem) {
  // What a score tensor of one chunk may hold, in elements. On the CPU not much more than a cache: of larger
  // blocks the C library's allocator keeps many times what is in use.
  const int64_t chunk_elements = problem.on_cpu ? int64_t{1} << 20 : int64_t{1} << 24;
  constexpr int64_t kMinimumRows = 16;
  const int64_t query_len = std::max<int64_t>(problem.query_len, 1);
  int64_t columns = std::max<int64_t>(problem.key_len, 1);
  // How many of the lead dims' product fit with the fewest rows. Inner dims are taken whole, one is cut, and
  // of those before it each chunk has one.
  int64_t fit = std::max<int64_t>(chunk_elements / (columns * std::min(kMinimumRows, query_len)), 1);
  ChunkSizes sizes{problem.lead, 0};
  for (size_t dim = sizes.lead.size(); dim-- > 0;) {
    int64_t& size = sizes.lead[dim];
    const bool is_cut = fit < size;
    size = std::min(size, fit);
    fit = is_cut ? 1 : std::max<int64_t>(fit / std::max<int64_t>(size, 1), 1);
    columns *= std::max<int64_t>(size, 1);
  }
  sizes.rows = std::clamp(chunk_elements / columns, kMinimumRows, std::max(query_len, kMinimumRows));
  return sizes;
}

Problem part_of(const Problem& problem, const Dims& begin, const Dims& sizes) {
  Problem part = problem;
  part.lead_begin = begin;
  for (size_t dim = 0; dim < begin.size(); ++dim) {
    part.lead[dim] = std::min(sizes[dim], problem.lead[dim] - begin[dim]);
  }
  for (at::Tensor* tensor :
       {&part.query, &part.key, &part.value, &part.attn_mask, &part.sinks, &part.dropout_seed}) {
    *tensor = of_part(part, *tensor);
  }
  return part;
}

bool advance(Dims& begin, const Dims& sizes, const Dims& lead) {
  for (size_t dim = begin.size(); dim-- > 0;) {
    begin[dim] += sizes[dim];
    if (begin[dim] < lead[dim]) {
      return true;
    }
    begin[dim] = 0;
  }
  return false;
}

}  // namespace attn_ext
