#include "fused.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>

namespace attn_ext::cuda {

namespace {

/// (N, H, rows, features) <-> (N, rows, H, features), as flash attention and the efficient kernel count dims.
at::Tensor swapped(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  return tensor.as_strided({sizes[0], sizes[2], sizes[1], sizes[3]},
                           {strides[0], strides[2], strides[1], strides[3]});
}

/// The lse of rows that see nothing because of the band.
void fill_blind_rows(const FusedCall& call, const at::Tensor& lse, double number) {
  const int64_t rows = call.query_len(), first = call.range.first_seeing_row,
                end = call.range.end_of_seeing_rows;
  if (first > 0) {
    lse.narrow(-1, 0, first).fill_(number);
  }
  if (end < rows) {
    lse.narrow(-1, end, rows - end).fill_(number);
  }
}

struct FlashCall {
  int64_t rows, keys;
  FlashWindow window;
  bool is_causal;

  explicit FlashCall(const FusedCall& call)
      : rows(call.query_len()),
        keys(call.range.keys()),
        window(*flash_window(call.range, rows)),
        is_causal(window.left < 0 && window.right == 0) {}

  std::optional<c10::SymInt> left() const { return of(window.left); }
  std::optional<c10::SymInt> right() const { return of(window.right); }

 private:
  static std::optional<c10::SymInt> of(int64_t side) {
    return side < 0 ? std::nullopt : std::optional<c10::SymInt>(side);
  }
};

FusedOutputs flash_forward(const FusedCall& call) {
  const FlashCall flash(call);
  auto results = at::_flash_attention_forward_symint(
      swapped(call.query), swapped(call.key), swapped(call.value), /*cum_seq_q=*/std::nullopt,
      /*cum_seq_k=*/std::nullopt, flash.rows, flash.keys, /*dropout_p=*/0.0, flash.is_causal,
      /*return_debug_mask=*/false, call.scale, flash.left(), flash.right());
  const FusedOutputs outputs{swapped(std::get<0>(results)), std::get<1>(results)};
  if (call.wants_lse) {
    fill_blind_rows(call, outputs.lse, -kInfinity);
  }
  return outputs;
}

FusedGrads flash_backward(const FusedCall& call, const at::Tensor& grad_output, const FusedOutputs& rows) {
  const FlashCall flash(call);
  at::Tensor lse = rows.lse;
  if (call.range.has_blind_rows(flash.rows)) {
    lse = lse.clone();
    fill_blind_rows(call, lse, kInfinity);
  }
  const at::Tensor no_draw = at::empty({2}, lse.options().dtype(at::kUInt64));
  auto [query, key, value] = at::_flash_attention_backward_symint(
      swapped(grad_output), swapped(call.query), swapped(call.key), swapped(call.value), swapped(rows.output),
      lse, /*cum_seq_q=*/{}, /*cum_seq_k=*/{}, flash.rows, flash.keys, /*dropout_p=*/0.0, flash.is_causal,
      no_draw, no_draw, call.scale, flash.left(), flash.right());
  return {swapped(query), swapped(key), swapped(value), {}};
}

constexpr int64_t kLseAlignment = 32;  // of the efficient kernel, in rows

/// (N, H, Lq) of what the efficient kernel gives, whose rows are padded and 0 where they see nothing.
at::Tensor whole_lse(const FusedCall& call, const at::Tensor& padded) {
  const at::Tensor lse =
      padded.size(-1) == call.query_len() ? padded : padded.narrow(-1, 0, call.query_len());
  if (!call.row_max.defined()) {
    return lse.contiguous();
  }
  if (call.bias_only_hides) {
    return lse + call.row_max;
  }
  return lse.masked_fill_(call.row_max == -kInfinity, -kInfinity).contiguous();
}

/// What the efficient kernel's gradient takes: +inf in rows that see nothing, since exp(score - inf) is 0
/// where exp(-inf + inf) is not, and in those beyond the query.
at::Tensor padded_lse(const FusedCall& call, const at::Tensor& lse) {
  const int64_t rows = lse.size(-1), all = rounded_up(rows, kLseAlignment);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (all == rows) {
    return call.bias.defined() ? at::nan_to_num(lse, nan, kInfinity, kInfinity) : lse;
  }
  const at::Tensor padded = at::full({lse.size(0), lse.size(1), all}, kInfinity, lse.options());
  at::Tensor inside = padded.narrow(-1, 0, rows);
  if (call.bias.defined()) {
    at::nan_to_num_out(inside, lse, nan, kInfinity, kInfinity);
  } else {
    inside.copy_(lse);
  }
  return padded;
}

FusedOutputs efficient_forward(const FusedCall& call) {
  const EfficientMask mask = *efficient_mask(call.range, call.query_len(), /*is_backward=*/false);
  auto results = at::_efficient_attention_forward_symint(
      swapped(call.query), swapped(call.key), swapped(call.value), optional_of(call.bias),
      /*cu_seqlens_q=*/std::nullopt, /*cu_seqlens_k=*/std::nullopt, /*max_seqlen_q=*/std::nullopt,
      /*max_seqlen_k=*/std::nullopt, /*dropout_p=*/0.0, mask.type, call.wants_lse, call.scale,
      /*seqlen_k=*/std::nullopt, mask.window);
  return {swapped(std::get<0>(results)),
          call.wants_lse ? whole_lse(call, std::get<1>(results)) : at::Tensor()};
}

FusedGrads efficient_backward(const FusedCall& call, const at::Tensor& grad_output, const FusedOutputs& rows,
                              bool wants_bias_grad) {
  const EfficientMask mask = *efficient_mask(call.range, call.query_len(), /*is_backward=*/true);
  // The kernel takes the rows of the output to lie as those that the forward kernel gives.
  const at::Tensor output = swapped(rows.output).contiguous();
  const at::Tensor lse = padded_lse(call, rows.lse);
  auto [query, key, value, bias] = at::_efficient_attention_backward_symint(
      swapped(grad_output), swapped(call.query), swapped(call.key), swapped(call.value),
      optional_of(call.bias), output, /*cu_seqlens_q=*/std::nullopt,
      /*cu_seqlens_k=*/std::nullopt, call.query_len(), call.range.keys(), lse, /*dropout_p=*/0.0,
      /*philox_seed=*/lse, /*philox_offset=*/lse, mask.type, wants_bias_grad, call.scale);
  return {swapped(query), swapped(key), swapped(value), bias};
}

FusedOutputs cudnn_forward(const FusedCall& call) {
  auto results = at::_scaled_dot_product_cudnn_attention(
      call.query, call.key, call.value, optional_of(call.bias), call.wants_lse,
      /*dropout_p=*/0.0, call.range.kind == BandKind::kCausal, /*return_debug_mask=*/false, call.scale);
  return {std::get<0>(results), call.wants_lse ? std::get<1>(results).squeeze(-1) : at::Tensor()};
}

FusedGrads cudnn_backward(const FusedCall& call, const at::Tensor& grad_output, const FusedOutputs& rows) {
  // In the output's layout, without which it would be copied with a warning.
  at::Tensor grad = grad_output;
  if (grad.strides() != rows.output.strides()) {
    grad = at::empty_like(rows.output).copy_(grad_output);
  }
  auto [query, key, value] = at::_scaled_dot_product_cudnn_attention_backward_symint(
      grad, call.query, call.key, call.value, rows.output, rows.lse.unsqueeze(-1),
      /*philox_seed=*/rows.lse, /*philox_offset=*/rows.lse, call.bias, /*cum_seq_q=*/{},
      /*cum_seq_k=*/{}, call.query_len(), call.range.keys(), /*dropout_p=*/0.0,
      call.range.kind == BandKind::kCausal, call.scale);
  return {query, key, value, {}};
}

}  // namespace

FusedOutputs fused_forward(const FusedCall& call) {
  switch (call.backend) {
    case Backend::kFlash:
      return flash_forward(call);
    case Backend::kEfficient:
      return efficient_forward(call);
    default:
      return cudnn_forward(call);
  }
}

FusedGrads fused_backward(const FusedCall& call, const at::Tensor& grad_output, const FusedOutputs& rows,
                          bool wants_bias_grad) {
  switch (call.backend) {
    case Backend::kFlash:
      return flash_backward(call, grad_output, rows);
    case Backend::kEfficient:
      return efficient_backward(call, grad_output, rows, wants_bias_grad);
    default:
      return cudnn_backward(call, grad_output, rows);
  }
}

}  // namespace attn_ext::cuda
