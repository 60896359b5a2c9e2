// Paged attention by gathering: for devices without kernels, and what the kernels are held against.

#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "../aten/by_sequence.h"
#include "../aten/sdpa_aten.h"
#include "../checks.h"
#include "../memory_order.h"
#include "call.h"

namespace attn_ext {

namespace {

/// (heads, keys, features) of a sequence in `dtype`, multiplied by the scale.
at::Tensor gather(const at::Tensor& pages, const at::Tensor& scale, const at::Tensor& places, int64_t keys,
                  at::ScalarType dtype) {
  const auto rows_of = [&](const at::Tensor& tensor) {
    return tensor.index_select(0, places).flatten(0, 1).narrow(0, 0, keys).to(dtype).transpose(0, 1);
  };
  const at::Tensor rows = rows_of(pages);
  if (!scale.defined()) {
    return rows;
  }
  const at::Tensor factors = scale_of_pages(scale);
  const bool by_row = scale.dim() == 4;
  return rows * (by_row ? rows_of(factors) : factors.flatten(0, 1).transpose(0, 1).to(dtype));
}

}  // namespace

SdpaOutputs paged_aten(const PagedCall& call) {
  const SdpaArgs all = check_paged(call);
  check_args(all);
  const PagedSequences paged = sequences_of(call);
  const auto dtype = call.query.scalar_type();
  const bool exact =
      call.key_pages.scalar_type() == dtype && !call.key_scale.defined() && !call.value_scale.defined();
  const auto working = exact ? dtype : accumulation_dtype(dtype);
  const int64_t rows = call.query.size(0);
  RowsOfSequences output(-2, rows, 0), lse(-1, rows, -std::numeric_limits<double>::infinity());
  const auto add = [&](const Sequence& sequence, const at::Tensor& places) {
    SdpaArgs one = all;
    one.query = all.query.narrow(-2, sequence.query_begin, sequence.query_len).to(working);
    one.key = gather(call.key_pages, call.key_scale, places, sequence.key_len, working);
    one.value = gather(call.value_pages, call.value_scale, places, sequence.key_len, working);
    one.sinks = call.sinks.defined() ? call.sinks.to(accumulation_dtype(dtype)) : call.sinks;
    one.query_offset = sequence.query_offset;
    const SdpaOutputs outputs = forward_aten(one, {});
    output.add(outputs.output.to(dtype), sequence.query_begin, sequence.query_len);
    lse.add(outputs.lse, sequence.query_begin, sequence.query_len);
  };
  const int64_t page_rows = call.key_pages.size(1);
  for (size_t i = 0; i < paged.sequences.size(); ++i) {
    const Sequence& sequence = paged.sequences[i];
    const int64_t used = (sequence.key_len + page_rows - 1) / page_rows;
    const at::Tensor places =
        at::from_blob(const_cast<int64_t*>(paged.pages_of(i)), {used}, at::TensorOptions(at::kLong));
    add(sequence, places.to(call.query.device()));
  }
  if (paged.sequences.empty()) {
    add({}, at::zeros({0}, call.query.options().dtype(at::kLong)));
  }
  return {in_order(output.join(), memory_order(all.query, 3)), lse.join(), {}, {}};
}

}  // namespace attn_ext
