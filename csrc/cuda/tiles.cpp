#include "tiles.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "device/kernels.h"
#include "device/windows.h"

namespace attn_ext::cuda {

namespace {

// Weights of one launch, in elements, where key mass alone is wanted.
constexpr int64_t kLaunchElements = int64_t{1} << 26;

/// What is made at once: heads, counted over N as well, and rows.
struct Launch {
  int64_t first_head, heads, row_begin, rows;
};

int64_t heads_of(const TileCall& call) {
  return call.query.size(0) * call.query.size(1);
}

Launch first_launch(const TileCall& call, bool whole) {
  const int64_t rows = call.query.size(2), keys = call.key.size(2), scores = rows * keys;
  if (whole || heads_of(call) * scores <= kLaunchElements) {
    return {0, heads_of(call), 0, rows};
  }
  if (scores <= kLaunchElements) {
    return {0, kLaunchElements / scores, 0, rows};
  }
  constexpr int64_t kRows = 128;  // whole blocks
  return {0, 1, 0, std::max(kLaunchElements / keys / kRows, int64_t{1}) * kRows};
}

template <class Function>
void for_each_launch(const TileCall& call, const Launch& first, Function function) {
  for (int64_t head = 0; head < heads_of(call); head += first.heads) {
    for (int64_t row = 0; row < call.query.size(2); row += first.rows) {
      function(Launch{head, std::min(first.heads, heads_of(call) - head), row,
                      std::min(first.rows, call.query.size(2) - row)});
    }
  }
}

constexpr const char* kAttendOp = "attn_ext::_tile_attend";

at::Tensor make_weights(const TileCall& call, const at::Tensor& lse, const Launch& launch) {
  static const auto op = find_op<TileWeightsCall, at::Tensor>("attn_ext::_tile_weights");
  TileWeightsCall wanted{.call = call,
                         .lse = lse,
                         .first_head = launch.first_head,
                         .heads = launch.heads,
                         .row_begin = launch.row_begin,
                         .rows = launch.rows};
  return call_op(op, wanted.arguments());
}

}  // namespace

bool has_tiles(const at::Tensor& query, int64_t head_dim, int64_t value_dim, bool is_backward) {
  if (!query.is_cuda()) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow(kAttendOp, "")
        .hasKernelForDispatchKey(c10::DispatchKey::CPU);
  }
  const TileDims dims{head_dim, value_dim, query.scalar_type(), /*has_dropout=*/true};  // which takes most
  const auto has = [&](TileKernel kernel) { return has_tile_kernel(kernel, dims, query.device()); };
  return is_backward ? has(TileKernel::kGradQuery) && has(TileKernel::kGradKeys)
                     : has(TileKernel::kAttend) && has(TileKernel::kMerge) && has(TileKernel::kWeights);
}

TileOutputs tile_forward(const TileCall& call) {
  static const auto op = find_op<TileCall, std::tuple<at::Tensor, at::Tensor>>(kAttendOp);
  TileCall wanted = call;
  const auto [output, lse] = call_op(op, wanted.arguments());
  return {output, lse};
}

int64_t bytes_of_draws(const TileCall& call) {
  return bytes_of_draws(Window{0, heads_of(call), 0, call.query.size(2), 0, call.key.size(2)});
}

at::Tensor make_draws(const TileCall& call) {
  static const auto op = find_op<TileCall, at::Tensor>("attn_ext::_tile_draws");
  TileCall wanted = call;
  return call_op(op, wanted.arguments());
}

TileSides tile_sides(const TileCall& call, const at::Tensor& lse, SideOutputs wanted) {
  at::Tensor weights, key_mass;
  if (wanted.key_mass) {
    key_mass = at::zeros({heads_of(call), call.key.size(2)}, call.query.options().dtype(at::kFloat));
  }
  for_each_launch(call, first_launch(call, wanted.weights), [&](const Launch& launch) {
    weights = make_weights(call, lse, launch);
    if (wanted.key_mass) {
      key_mass.narrow(0, launch.first_head, launch.heads).add_(weights.sum(1, /*keepdim=*/false, at::kFloat));
    }
  });
  const auto with_heads = [&](const at::Tensor& flat) {
    return flat.unflatten(0, {call.query.size(0), call.query.size(1)});
  };
  return {wanted.weights ? with_heads(weights) : at::Tensor(),
          wanted.key_mass ? with_heads(key_mass.to(call.query.scalar_type())) : at::Tensor()};
}

TileGrads tile_backward(const TileCall& call, const at::Tensor& grad_output, const at::Tensor& output,
                        const at::Tensor& lse, const at::Tensor& grad_lse) {
  static const auto op = find_op<TileGradsCall, std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>>(
      "attn_ext::_tile_grads");
  TileGradsCall incoming{
      .call = call, .grad_output = grad_output, .output = output, .lse = lse, .grad_lse = grad_lse};
  const auto [query, key, value, delta] = call_op(op, incoming.arguments());
  return {query, key, value, delta};
}

}  // namespace attn_ext::cuda
