#include "tiles.h"

#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "device/kernels.h"
#include "device/ops.h"

namespace attn_ext::cuda {

namespace {

// Weights of one launch, in elements, unless they are wanted whole.
constexpr int64_t kLaunchElements = int64_t{1} << 26;

/// What is made at once: heads, counted over N as well, that share key heads whole or not at all; and rows.
struct Launch {
  int64_t first_head, heads, row_begin, rows;
};

/// The sizes of a call, and its tensors as batches of matrices: one for each head, or for each key head.
class Matrices {
 public:
  explicit Matrices(const TileCall& call)
      : batches(call.query.size(0)),
        query_heads(call.query.size(1)),
        group(query_heads / call.key.size(1)),
        query_len(call.query.size(2)),
        key_len(call.key.size(2)) {}

  int64_t heads() const { return batches * query_heads; }

  /// (N, heads, rows, columns) -> (N heads, rows, columns); copied where it is no view.
  static at::Tensor flat(const at::Tensor& tensor) { return tensor.flatten(0, 1); }

  /// (heads of the launch, rows, columns) -> (key heads, rows of all heads that share one, columns).
  at::Tensor by_key_head(const at::Tensor& tensor, const Launch& launch) const {
    const int64_t key_heads = key_heads_of(launch);
    return tensor.reshape({key_heads, launch.heads / key_heads * tensor.size(1), tensor.size(2)});
  }

  /// Of a flat tensor of heads, the launch's; of key heads, those that it reads.
  static at::Tensor rows_of(const at::Tensor& flat, const Launch& launch) {
    return flat.narrow(0, launch.first_head, launch.heads).narrow(1, launch.row_begin, launch.rows);
  }
  at::Tensor keys_of(const at::Tensor& flat, const Launch& launch) const {
    return flat.narrow(0, launch.first_head / group, key_heads_of(launch));
  }

  /// Whether launches add to the same key head.
  bool shares_keys(const Launch& launch) const {
    return launch.heads % group != 0 || launch.rows < query_len;
  }

  Launch first_launch(bool whole) const {
    const int64_t scores = query_len * key_len;
    if (whole || heads() * scores <= kLaunchElements) {
      return {0, heads(), 0, query_len};
    }
    if (scores > kLaunchElements) {
      return {0, 1, 0, std::max(kLaunchElements / key_len / kTileRows, int64_t{1}) * kTileRows};
    }
    int64_t fit = kLaunchElements / scores;
    if (fit >= group) {
      fit -= fit % group;
    }
    while (fit < group && group % fit != 0) {
      --fit;
    }
    return {0, fit, 0, query_len};
  }

  template <class Function>
  void for_each_launch(const Launch& first, Function function) const {
    for (int64_t head = 0; head < heads(); head += first.heads) {
      for (int64_t row = 0; row < query_len; row += first.rows) {
        function(
            Launch{head, std::min(first.heads, heads() - head), row, std::min(first.rows, query_len - row)});
      }
    }
  }

  int64_t batches, query_heads, group, query_len, key_len;

 private:
  int64_t key_heads_of(const Launch& launch) const { return std::max(launch.heads / group, int64_t{1}); }
};

constexpr const char* kWeightsOp = "attn_ext::_tile_weights";

/// (heads, rows, Lk) of the launch, and in backward the gradients of scores, before softcap.
std::tuple<at::Tensor, at::Tensor> make_weights(const TileCall& call, const Launch& launch,
                                                const at::Tensor& lse, const at::Tensor& grad_output,
                                                const at::Tensor& delta) {
  static const auto op = find_op<WeightsCall, std::tuple<at::Tensor, at::Tensor>>(kWeightsOp);
  WeightsCall weights{.query = call.query,
                      .key = call.key,
                      .value = grad_output.defined() ? call.value : at::Tensor(),
                      .grad_output = grad_output,
                      .mask = call.mask,
                      .seed = call.seed,
                      .lse = lse,
                      .delta = delta,
                      .scale = call.scale,
                      .softcap = call.softcap,
                      .dropout_p = call.dropout_p,
                      .low = call.low,
                      .high = call.high,
                      .first_head = launch.first_head,
                      .heads = launch.heads,
                      .row_begin = launch.row_begin,
                      .rows = launch.rows};
  return call_op(op, weights.arguments());
}

}  // namespace

bool has_tiles(const at::Tensor& query, int64_t head_dim, int64_t value_dim, bool with_gradients) {
  return query.is_cuda()
             ? has_tile_kernels({head_dim, value_dim, query.scalar_type()}, with_gradients, query.device())
             : c10::Dispatcher::singleton()
                   .findSchemaOrThrow(kWeightsOp, "")
                   .hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

int64_t tile_scratch_bytes(const TileCall& call) {
  const Launch launch = Matrices(call).first_launch(/*whole=*/false);
  return launch.heads * launch.rows * call.key.size(2) * call.query.element_size();
}

at::Tensor tile_lse(const TileCall& call) {
  static const auto op = find_op<LseCall, at::Tensor>("attn_ext::_tile_lse");
  LseCall sums{call.query, call.key, call.mask, call.scale, call.softcap, call.low, call.high};
  return call_op(op, sums.arguments());
}

TileOutputs tile_forward(const TileCall& call, const at::Tensor& lse, bool wants_output, SideOutputs wanted) {
  const Matrices matrices(call);
  const int64_t value_dim = call.value.size(-1);
  const at::Tensor values = Matrices::flat(call.value);
  at::Tensor output, weights, key_mass;
  if (wants_output) {
    output = at::empty({matrices.heads(), matrices.query_len, value_dim}, call.query.options());
  }
  if (wanted.key_mass) {
    key_mass = at::zeros({matrices.heads(), matrices.key_len}, call.query.options().dtype(at::kFloat));
  }
  matrices.for_each_launch(matrices.first_launch(wanted.weights), [&](const Launch& launch) {
    weights = std::get<0>(make_weights(call, launch, lse, {}, {}));
    if (wants_output) {
      at::Tensor rows = matrices.by_key_head(Matrices::rows_of(output, launch), launch);
      at::bmm_out(rows, matrices.by_key_head(weights, launch), matrices.keys_of(values, launch));
    }
    if (wanted.key_mass) {
      key_mass.narrow(0, launch.first_head, launch.heads).add_(weights.sum(1, /*keepdim=*/false, at::kFloat));
    }
  });
  const auto with_heads = [&](const at::Tensor& flat) {
    return flat.defined() ? flat.unflatten(0, {matrices.batches, matrices.query_heads}) : flat;
  };
  return {with_heads(output), wanted.weights ? with_heads(weights) : at::Tensor(),
          wanted.key_mass ? with_heads(key_mass.to(call.query.scalar_type())) : at::Tensor()};
}

TileGrads tile_backward(const TileCall& call, const at::Tensor& grad_output, const at::Tensor& lse,
                        const at::Tensor& delta) {
  const Matrices matrices(call);
  const Launch first = matrices.first_launch(/*whole=*/false);
  const at::Tensor queries = Matrices::flat(call.query), keys = Matrices::flat(call.key),
                   grads = Matrices::flat(grad_output);
  // Launches that add to the same key head do so in float.
  const bool shares = matrices.shares_keys(first);
  const auto like_keys = [&](int64_t columns) {
    const at::DimVector sizes{keys.size(0), matrices.key_len, columns};
    return shares ? at::zeros(sizes, keys.options().dtype(at::kFloat)) : at::empty(sizes, keys.options());
  };
  const at::Tensor query_grads = at::empty(queries.sizes(), queries.options()),
                   key_grads = like_keys(keys.size(-1)), value_grads = like_keys(call.value.size(-1));
  const auto add = [&](const at::Tensor& to, const at::Tensor& left, const at::Tensor& right, double scale) {
    if (shares) {
      to.add_(at::bmm(left, right, at::kFloat), scale);
    } else {
      to.baddbmm_(left, right, /*beta=*/0, scale);
    }
  };
  matrices.for_each_launch(first, [&](const Launch& launch) {
    const auto [weights, grad_scores] = make_weights(call, launch, lse, grad_output, delta);
    const at::Tensor scores = matrices.by_key_head(grad_scores, launch);
    add(matrices.keys_of(value_grads, launch), matrices.by_key_head(weights, launch).mT(),
        matrices.by_key_head(Matrices::rows_of(grads, launch), launch), 1.0);
    add(matrices.keys_of(key_grads, launch), scores.mT(),
        matrices.by_key_head(Matrices::rows_of(queries, launch), launch), call.scale);
    matrices.by_key_head(Matrices::rows_of(query_grads, launch), launch)
        .baddbmm_(scores, matrices.keys_of(keys, launch), /*beta=*/0, call.scale);
  });
  const auto with_heads = [&](const at::Tensor& flat, const at::Tensor& input) {
    return flat.to(input.scalar_type()).unflatten(0, {input.size(0), input.size(1)});
  };
  return {with_heads(query_grads, call.query), with_heads(key_grads, call.key),
          with_heads(value_grads, call.value)};
}

}  // namespace attn_ext::cuda
