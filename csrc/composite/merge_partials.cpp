#include "merge_partials.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include <limits>

#include "../checks.h"
#include "../memory_order.h"

namespace attn_ext {

namespace {

void check_partials(at::TensorList outputs, at::TensorList lses) {
  TORCH_CHECK(!outputs.empty(), "attn_ext: expected at least one partial output, but got none");
  TORCH_CHECK(outputs.size() == lses.size(), "attn_ext: expected as many lses as outputs (", outputs.size(),
              "), but got ", lses.size());
  const at::Tensor& first = outputs.front();
  TORCH_CHECK(at::isFloatingType(first.scalar_type()), "attn_ext: expected floating outputs, but got dtype ",
              first.scalar_type());
  TORCH_CHECK(first.dim() >= 1, "attn_ext: expected outputs of shape (..., value dim), but got no dimension");
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor &output = outputs[i], &lse = lses[i];
    TORCH_CHECK(output.sym_sizes() == first.sym_sizes() && output.scalar_type() == first.scalar_type() &&
                    output.device() == first.device(),
                "attn_ext: expected outputs of one shape, dtype and device, but got ", first.sym_sizes(), " ",
                first.scalar_type(), " on ", first.device(), " at place 0 and ", output.sym_sizes(), " ",
                output.scalar_type(), " on ", output.device(), " at place ", i);
    TORCH_CHECK(lse.sym_sizes() == first.sym_sizes().slice(0, first.sym_sizes().size() - 1),
                "attn_ext: expected lses in the shape of an output without its last dimension (outputs have ",
                first.sym_sizes(), "), but got ", lse.sym_sizes(), " at place ", i);
    const auto dtype = lse.scalar_type(), accumulated = accumulation_dtype(first.scalar_type());
    TORCH_CHECK((dtype == accumulated || dtype == at::kDouble) && dtype == lses.front().scalar_type(),
                "attn_ext: expected lses of dtype ", accumulated,
                accumulated == at::kDouble ? "" : " or all of dtype Double", " with outputs of ",
                first.scalar_type(), ", but got ", dtype, " at place ", i);
    TORCH_CHECK(lse.device() == first.device(), "attn_ext: expected lses on the device of the outputs (",
                first.device(), "), but got ", lse.device(), " at place ", i);
    check_storage(output, "outputs");
    check_storage(lse, "lses");
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> merge_partials_composite(at::TensorList outputs, at::TensorList lses) {
  check_partials(outputs, lses);
  constexpr double kNothing = -std::numeric_limits<double>::infinity();
  const at::Tensor parts = at::stack(lses);
  const at::Tensor top = parts.detach().amax(0);
  const at::Tensor origin = top.masked_fill(top.isinf(), 0);
  const at::Tensor shares = (parts - origin).exp();
  const at::Tensor sum = shares.sum(0), dead = sum.detach() == 0;
  const at::Tensor divisor = sum.masked_fill(dead, 1);
  const auto accumulator = accumulation_dtype(outputs.front().scalar_type());
  const at::Tensor lse = (divisor.log() + origin).masked_fill(dead, kNothing);
  at::Tensor output;
  for (size_t i = 0; i < outputs.size(); ++i) {
    // What saw no key has no say, whatever its output is.
    const at::Tensor unseen = (lses[i].detach() == kNothing).unsqueeze(-1);
    const at::Tensor part = outputs[i].to(accumulator).masked_fill(unseen, 0);
    const at::Tensor weight = (shares.select(0, static_cast<int64_t>(i)) / divisor).to(accumulator);
    const at::Tensor share = part * weight.unsqueeze(-1);
    output = output.defined() ? output + share : share;
  }
  output = output.to(outputs.front().scalar_type());
  return {in_order(output, memory_order(outputs.front(), output.dim())), lse};
}

TORCH_LIBRARY_IMPL(attn_ext, CompositeImplicitAutograd, m) {
  m.impl("merge_partials", TORCH_FN(merge_partials_composite));
}

// As of the other public ops: under vmap it is what it is made of.
TORCH_LIBRARY_IMPL(attn_ext, FuncTorchBatched, m) {
  m.impl("merge_partials", TORCH_FN(merge_partials_composite));
}

}  // namespace attn_ext
