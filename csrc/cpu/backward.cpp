// `_sdpa_backward` on the CPU: tensors to parameters, then the kernels' rounds of tasks over the threads.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "../aten/sdpa_aten.h"
#include "call.h"
#include "fork.h"
#include "huge_pages.h"
#include "outgoing_grads.h"
#include "packed.h"
#include "planned_call.h"
#include "tasks.h"

namespace attn_ext::cpu {

namespace {

// Of the gradients of broadcast inputs that are kept until they are added up: the fewer, the more of them are
// still in the caches; the more, the better tasks balance.
constexpr int64_t kSliceBytes = 1 << 23;

/// The incoming gradients, where necessary in the dtype of accumulation.
struct IncomingGrads {
  IncomingGrads(const SdpaOutputs& grads, at::ScalarType dtype)
      : output(grads.output), weights(grads.weights) {
    const auto accumulator = accumulation_dtype(dtype);
    if (grads.lse.defined()) {
      lse = grads.lse.to(accumulator).unsqueeze(-1);
    }
    if (grads.key_mass.defined()) {
      key_mass = grads.key_mass.to(accumulator).unsqueeze(-2);
    }
  }

  at::Tensor output;    // (..., Hq, Lq, Dv)
  at::Tensor weights;   // (..., Hq, Lq, Lk)
  at::Tensor lse;       // (..., Hq, Lq, 1)
  at::Tensor key_mass;  // (..., Hq, 1, Lk)
};

TensorView readable(Views& views, const at::Tensor& tensor) {
  return tensor.defined() ? views.matrix(tensor) : TensorView{};
}

/// A gradient in the dtype that it is given in.
at::Tensor in_dtype_of(const SdpaArgs& args, const at::Tensor& gradient, const at::Tensor& input) {
  return gradient.defined() ? gradient.to(gradient_dtype(args, input)) : gradient;
}

/// The call's parameters for some of its batches; the outgoing gradients of query, key and value are left.
BackwardParams slice_of(const BackwardParams& whole, int64_t batch, int64_t batches, int64_t mask_bytes,
                        int64_t sink_bytes) {
  const int64_t element_bytes = element_bytes_of(whole.shape);
  const int64_t accumulator_bytes = accumulator_bytes_of(whole.shape);
  BackwardParams slice = whole;
  slice.shape.batch = batches;
  slice.dropout.first_batch = batch;
  for (TensorView* view : {&slice.query, &slice.key, &slice.value, &slice.output, &slice.weights,
                           &slice.grad_output, &slice.grad_weights}) {
    *view = from_batch(*view, batch, element_bytes);
  }
  for (TensorView* view : {&slice.grad_lse, &slice.grad_key_mass}) {
    *view = from_batch(*view, batch, accumulator_bytes);
  }
  slice.grad_mask = {
      from_batch(whole.grad_mask, batch, whole.grad_mask.wide ? accumulator_bytes : element_bytes),
      whole.grad_mask.wide};
  slice.rule.mask = from_batch(whole.rule.mask, batch, mask_bytes);
  slice.rule.sinks = from_batch(whole.rule.sinks, batch, sink_bytes);
  const int64_t heads_before = batch * whole.shape.query_heads, rows_before = heads_before * whole.lse_stride;
  slice.lse = static_cast<const char*>(whole.lse) + rows_before * accumulator_bytes;
  if (whole.delta != nullptr) {
    slice.delta = static_cast<const char*>(whole.delta) + rows_before * accumulator_bytes;
  }
  if (whole.double_lse != nullptr) {
    slice.double_lse = whole.double_lse + rows_before;
  }
  if (whole.grad_sinks != nullptr) {
    slice.grad_sinks = static_cast<char*>(whole.grad_sinks) + heads_before * accumulator_bytes;
  }
  if (whole.grad_mask.batch_offsets == nullptr && whole.grad_mask.batch_stride != 0) {
    slice.grad_mask_size = batches * whole.grad_mask.batch_stride;
  }
  return slice;
}

/// The same for one of some packed sequences; sinks have a row of gradients for each.
BackwardParams sequence_of(const BackwardParams& slice, const Sequence& sequence, int64_t number,
                           int64_t count, int64_t sink_grads) {
  const int64_t element_bytes = element_bytes_of(slice.shape);
  const int64_t accumulator_bytes = accumulator_bytes_of(slice.shape);
  BackwardParams one = of_sequence(slice, sequence, number, count);
  const auto grad_from_row = [&](ResultView& view, int64_t row) {
    view = from_row(view, row, element_bytes, accumulator_bytes);
  };
  if (slice.delta != nullptr) {
    one.delta = static_cast<const char*>(slice.delta) + sequence.query_begin * accumulator_bytes;
  }
  one.grad_output = from_row(slice.grad_output, sequence.query_begin, element_bytes);
  one.grad_lse = from_row(slice.grad_lse, sequence.query_begin, accumulator_bytes);
  grad_from_row(one.grad_query, sequence.query_begin);
  grad_from_row(one.grad_key, sequence.key_begin);
  grad_from_row(one.grad_value, sequence.key_begin);
  if (slice.grad_sinks != nullptr) {
    one.grad_sinks = static_cast<char*>(slice.grad_sinks) + number * sink_grads * accumulator_bytes;
  }
  return one;
}

/// Everything that the kernels write to.
struct OutgoingGrads {
  OutgoingGrads(const SdpaArgs& args, InputMask wanted, Inputs& inputs)
      : query(args.query, gradient_dtype(args, args.query), wanted.query, inputs.views, inputs.sizes,
              inputs.sizes.heads, inputs.sizes.head_dim),
        key(args.key, gradient_dtype(args, args.key), wanted.key, inputs.views, inputs.sizes,
            inputs.params.shape.key_heads, inputs.sizes.head_dim),
        value(args.value, gradient_dtype(args, args.value), wanted.value, inputs.views, inputs.sizes,
              inputs.params.shape.key_heads, inputs.sizes.value_dim) {
    const CallSizes& sizes = inputs.sizes;
    const auto options = args.query.options();
    const auto accumulated = options.dtype(accumulation_dtype(args.query.scalar_type()));
    if (wanted.attn_mask) {
      const int64_t scores = sizes.batch * sizes.heads * sizes.query_len * sizes.key_len;
      mask_is_sum = args.attn_mask.numel() != scores || sizes.key_len == 1 ||
                    gradient_dtype(args, args.attn_mask) != args.query.scalar_type();
      mask = with_huge_pages(at::empty(args.attn_mask.sizes(), mask_is_sum ? accumulated : options));
      if (sizes.batch == 0) {
        mask.zero_();
      }
    }
    if (wanted.sinks) {
      const int64_t sequences = args.sequences.defined() ? args.sequences.size(0) : 1;
      sinks = at::zeros({sequences, sizes.batch, sizes.heads}, accumulated);
    }
    const int64_t batch_bytes = query.slice_bytes() + key.slice_bytes() + value.slice_bytes();
    slice = batch_bytes == 0
                ? sizes.batch
                : std::clamp<int64_t>(kSliceBytes / batch_bytes, 1, std::max<int64_t>(sizes.batch, 1));
    query.make_slice(slice, sizes.head_dim);
    key.make_slice(slice, sizes.head_dim);
    value.make_slice(slice, sizes.value_dim);
  }

  void add_slice(int64_t batch, int64_t batches, int threads) const {
    for (const OutgoingGrad* grad : {&query, &key, &value}) {
      grad->add_slice(batch, batches, threads);
    }
  }

  /// For kernels that do not fill it. `is_shared`: by all batches.
  void clear_mask_of_slice(int64_t batch, int64_t batches, int64_t all, bool is_shared) const {
    if (!mask.defined()) {
      return;
    }
    if (!is_shared) {
      mask.view({all, -1}).narrow(0, batch, batches).zero_();
    } else if (batch == 0) {
      mask.zero_();
    }
  }

  int64_t slice;  // batches that the kernels are given at a time
  OutgoingGrad query, key, value;
  at::Tensor mask;          // in its own shape
  bool mask_is_sum = true;  // in the dtype of accumulation: the mask broadcasts, or has another dtype
  at::Tensor sinks;         // (sequences, batch, heads), the same
};

/// What a forward pass has saved, as the kernels want it.
struct SavedRows {
  SavedRows(const SavedOutputs& saved, at::ScalarType accumulator, bool reads_weights)
      : lse(saved.lse.to(accumulator).contiguous()) {
    if (reads_weights && saved.weights.defined()) {
      weights = saved.weights.stride(-1) == 1 ? saved.weights : saved.weights.contiguous();
    }
    if (!saved.delta.defined()) {
      output = saved.output;
      return;
    }
    delta = saved.delta.contiguous();
    if (saved.lse.scalar_type() != accumulator) {
      double_lse = saved.lse.contiguous();
    }
  }

  // lse in the dtype of accumulation; the others may be undefined
  at::Tensor output, lse, delta, double_lse, weights;
};

BackwardParams params_of(Inputs& inputs, const IncomingGrads& incoming, const OutgoingGrads& outgoing,
                         const SavedRows& saved) {
  auto params = params_over<BackwardParams>(inputs);
  params.output = readable(inputs.views, saved.output);
  params.weights = readable(inputs.views, saved.weights);
  params.lse = saved.lse.const_data_ptr();
  if (saved.delta.defined()) {
    params.delta = saved.delta.const_data_ptr();
  }
  if (saved.double_lse.defined()) {
    params.double_lse = saved.double_lse.const_data_ptr<double>();
  }
  params.lse_stride = inputs.sizes.query_len;
  params.grad_output = readable(inputs.views, incoming.output);
  params.grad_lse = readable(inputs.views, incoming.lse);
  params.grad_weights = readable(inputs.views, incoming.weights);
  params.grad_key_mass = readable(inputs.views, incoming.key_mass);
  if (outgoing.mask.defined()) {
    params.grad_mask = {inputs.views.writable(outgoing.mask), outgoing.mask_is_sum};
    params.grad_mask_size = outgoing.mask.numel();
  }
  if (outgoing.sinks.defined()) {
    params.grad_sinks = outgoing.sinks.mutable_data_ptr();
  }
  return params;
}

SdpaInputs backward_cpu(const SdpaOutputs& grads, const SdpaArgs& args, const SavedOutputs& saved,
                        InputMask wanted) {
  const OneThreadInForkedChild guard;
  const KernelTable* table = kernels_in_use();
  if (table == nullptr) {
    return backward_aten(grads, args, saved, wanted);
  }
  Inputs inputs(args, check_backward(grads, args, saved, wanted));
  TORCH_CHECK(!saved.has_draws(), "attn_ext: expected weights on the CPU, but got draws of a GPU");
  inputs.make_mask_dense(args.attn_mask);
  const CallSizes& sizes = inputs.sizes;
  const auto dtype = args.query.scalar_type();
  const IncomingGrads incoming(grads, dtype);
  const OutgoingGrads outgoing(args, wanted, inputs);
  const SavedRows rows(saved, accumulation_dtype(dtype),
                       kernels_of(*table, dtype).saves_weights(inputs.params.shape, true));
  const BackwardParams params = params_of(inputs, incoming, outgoing, rows);
  const auto bytes_of = [](const at::Tensor& t) {
    return t.defined() ? static_cast<int64_t>(t.element_size()) : 0;
  };
  std::vector<Sequence> sequences;
  if (args.sequences.defined()) {
    sequences = sequences_of(args);
    outgoing.query.zero_gaps(has_gaps(sequences, &Sequence::query_len, sizes.query_len));
    const bool keys_left_out = has_gaps(sequences, &Sequence::key_len, sizes.key_len);
    outgoing.key.zero_gaps(keys_left_out);
    outgoing.value.zero_gaps(keys_left_out);
  }
  const bool mask_is_shared = params.grad_mask.batch_offsets != nullptr || params.grad_mask.batch_stride == 0;
  for (int64_t batch = 0; batch < sizes.batch; batch += outgoing.slice) {
    const int64_t batches = std::min(outgoing.slice, sizes.batch - batch);
    BackwardParams part = slice_of(params, batch, batches, bytes_of(args.attn_mask), bytes_of(args.sinks));
    part.grad_query = outgoing.query.slice_from(batch);
    part.grad_key = outgoing.key.slice_from(batch);
    part.grad_value = outgoing.value.slice_from(batch);
    part.adds_to_mask_grad = (batch > 0 && mask_is_shared) || args.sequences.defined();
    const int threads = useful_threads(work_of(part.shape));
    if (args.sequences.defined()) {
      outgoing.clear_mask_of_slice(batch, batches, sizes.batch, mask_is_shared);
      std::vector<BackwardParams> problems;
      for (int64_t i = 0; i < std::ssize(sequences); ++i) {
        problems.push_back(sequence_of(part, sequences[static_cast<size_t>(i)], i, std::ssize(sequences),
                                       sizes.batch * sizes.heads));
      }
      run_problems(kernels_of(*table, dtype).backward, problems);
    } else {
      const auto call = plan_call(kernels_of(*table, dtype).backward, part, threads);
      if (!call.plan.fills_mask_grad) {
        outgoing.clear_mask_of_slice(batch, batches, sizes.batch, mask_is_shared);
      }
      run_call(call, threads);
    }
    outgoing.add_slice(batch, batches, threads);
  }
  return {outgoing.query.result(), outgoing.key.result(), outgoing.value.result(),
          in_dtype_of(args, outgoing.mask, args.attn_mask),
          in_dtype_of(args, sum_sinks(inputs.views, sizes, outgoing.sinks, args.sinks), args.sinks)};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CPU, m) {
  m.impl("_sdpa_backward", TORCH_FN((backward_kernel<&backward_cpu>)));
}

}  // namespace attn_ext::cpu
