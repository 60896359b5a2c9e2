// Keys and values in pages of a cache on the CPU: a problem a sequence, as packed sequences are, whose rows
// the kernels find by the table.

#include "paged.h"

#include "call.h"
#include "fork.h"
#include "outputs.h"
#include "packed.h"

namespace attn_ext::cpu {

namespace {

ScalarKind stored_kind(at::ScalarType stored, at::ScalarType dtype) {
  if (stored == dtype) {
    return ScalarKind::kNone;
  }
  if (stored == at::kChar) {
    return ScalarKind::kInt8;
  }
  return stored == at::kFloat8_e4m3fn ? ScalarKind::kFloat8E4m3 : kind_of(stored);
}

TensorView page_view(const at::Tensor& pages) {
  TensorView view;
  view.data = const_cast<void*>(pages.const_data_ptr());
  view.row_stride = pages.stride(1);
  view.head_stride = pages.stride(2);
  view.column_stride = 1;
  return view;
}

int64_t stride_or_zero(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

/// Without the pages themselves, which are a sequence's.
Storage storage_of(const at::Tensor& pages, const at::Tensor& scale, at::ScalarType dtype) {
  Storage storage;
  storage.kind = stored_kind(pages.scalar_type(), dtype);
  storage.page_rows = pages.size(1);
  storage.page_stride = pages.stride(0);
  if (scale.defined()) {
    const at::Tensor factors = scale_of_pages(scale);
    storage.scale.data = const_cast<void*>(factors.const_data_ptr());
    storage.scale.batch_stride = stride_or_zero(factors, 0);
    storage.scale.row_stride = stride_or_zero(factors, 1);
    storage.scale.head_stride = stride_or_zero(factors, 2);
  }
  return storage;
}

}  // namespace

SdpaOutputs paged_cpu(const PagedCall& call, bool wants_lse) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return paged_aten(call);
  }
  const SdpaArgs args = check_paged(call);
  const PagedSequences paged = sequences_of(call);
  const auto dtype = call.query.scalar_type();
  Inputs inputs(args, check_args(args));
  const CallSizes& sizes = inputs.sizes;

  SdpaOutputs outputs;
  outputs.output = empty_output_like(args.query, sizes, dtype);
  auto params = params_over<ForwardParams>(inputs);
  params.key = page_view(call.key_pages);
  params.value = page_view(call.value_pages);
  params.key_storage = storage_of(call.key_pages, call.key_scale, dtype);
  params.value_storage = storage_of(call.value_pages, call.value_scale, dtype);
  add_output(inputs, params, outputs.output);
  if (wants_lse) {
    outputs.lse = empty_output(sizes, {sizes.query_len}, accumulation_dtype(dtype));
    params.lse = outputs.lse.mutable_data_ptr();
    params.lse_stride = sizes.query_len;
  }
  std::vector<ForwardParams> problems;
  const int64_t count = std::ssize(paged.sequences);
  for (int64_t i = 0; i < count; ++i) {
    const auto n = static_cast<size_t>(i);
    ForwardParams& one = problems.emplace_back(of_sequence(params, paged.sequences[n], i, count));
    one.key_storage.pages = one.value_storage.pages = paged.pages_of(n);
  }
  fill_gaps(has_gaps(paged.sequences, &Sequence::query_len, sizes.query_len), outputs);
  run_problems(kernels_of(*table, dtype).forward, problems);
  return outputs;
}

}  // namespace attn_ext::cpu
