// The kernels of this folder as operators, which a test can stand in for.

#include "ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"
#include "windows.h"

namespace attn_ext::cuda {

namespace {

const u16* numbers_of(const at::Tensor& tensor) {
  return static_cast<const u16*>(tensor.const_data_ptr());
}

u16* numbers_into(const at::Tensor& tensor) {
  return static_cast<u16*>(tensor.mutable_data_ptr());
}

template <size_t dims>
void put_strides(const at::Tensor& tensor, i64 (&strides)[dims]) {
  for (size_t dim = 0; dim < dims; ++dim) {
    strides[dim] = tensor.stride(static_cast<int64_t>(dim));
  }
}

TileParams params_of(const TileCall& call) {
  TileParams params{};
  params.query = numbers_of(call.query);
  params.key = numbers_of(call.key);
  params.value = numbers_of(call.value);
  put_strides(call.query, params.query_strides);
  put_strides(call.key, params.key_strides);
  put_strides(call.value, params.value_strides);
  if (call.mask.defined()) {
    const auto dtype = call.mask.scalar_type();
    params.bias = call.mask.const_data_ptr();
    params.bias_kind = dtype == at::kBool ? 1 : dtype == at::kFloat ? 3 : 2;
    put_strides(call.mask, params.bias_strides);
  }
  params.batches = static_cast<int>(call.query.size(0));
  params.heads = static_cast<int>(call.query.size(1));
  params.group = static_cast<int>(call.query.size(1) / call.key.size(1));
  params.query_len = static_cast<int>(call.query.size(2));
  params.key_len = static_cast<int>(call.key.size(2));
  constexpr int64_t kFarthest = int64_t{1} << 31;  // from each other, of any row and key
  params.low = static_cast<int>(std::clamp(call.low, -kFarthest, kFarthest - 1));
  params.high = static_cast<int>(std::clamp(call.high, -kFarthest, kFarthest - 1));
  params.scale = static_cast<float>(call.scale);
  params.softcap = static_cast<float>(call.softcap);
  if (call.seed.defined()) {
    constexpr int kDrawBits = 32;
    params.seed = reinterpret_cast<const i64*>(call.seed.const_data_ptr<int64_t>());
    // With dropout_p 1, of which the product is one too large, what is kept is multiplied by 0.
    params.threshold = static_cast<u32>(
        std::min(std::floor(std::ldexp(call.dropout_p, kDrawBits)), std::ldexp(1.0, kDrawBits) - 1.0));
    params.first_batch = static_cast<int>(call.first_batch);
    params.batch_step = static_cast<int>(call.batch_step);
    params.kept = call.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - call.dropout_p)) : 0.0F;
  }
  return params;
}

TileDims dims_of(const TileCall& call) {
  return {call.key.size(-1), call.value.size(-1), call.query.scalar_type(), call.seed.defined()};
}

int64_t blocks_of(int64_t lines, int64_t lines_of_block) {
  return (lines + lines_of_block - 1) / lines_of_block;
}

int64_t blocks_of(int64_t lines, TileKernel kernel, const TileCall& call) {
  return blocks_of(lines, lines_held(kernel, dims_of(call), call.query.device()));
}

/// How many key heads, of each so many lines that pass by, take turns: those that a cache holds together.
int64_t key_heads_together(const TileCall& call, int64_t lines) {
  constexpr int64_t kCacheBytes = int64_t{32} << 20;
  const int64_t bytes = lines * (call.key.size(-1) + call.value.size(-1)) * call.query.element_size();
  return std::clamp(kCacheBytes / bytes, int64_t{1}, call.key.size(0) * call.key.size(1));
}

Window all_of(const TileCall& call) {
  return {0, call.query.size(0) * call.query.size(1), 0, call.query.size(2), 0, call.key.size(2)};
}

void launch_over_rows(TileKernel kernel, TileParams params, const TileCall& call, const Window& window,
                      int64_t parts = 1) {
  put_window(params, window);
  params.heads_together = params.group * static_cast<int>(key_heads_together(call, call.key.size(2)));
  launch_tile_kernel(kernel, params, dims_of(call),
                     {window.heads * blocks_of(window.rows, kernel, call), parts}, call.query.device());
}

void launch_over_keys(TileKernel kernel, TileParams params, const TileCall& call, const Window& window) {
  put_window(params, window);
  params.heads_together = static_cast<int>(key_heads_together(call, params.group * call.query.size(2)));
  launch_tile_kernel(kernel, params, dims_of(call),
                     {window.heads / params.group * blocks_of(window.keys, kernel, call)},
                     call.query.device());
}

constexpr int64_t kWordBytes = sizeof(u32);

at::Tensor empty_draws(const TileCall& call, int64_t bytes) {
  return at::empty({bytes / kWordBytes}, call.query.options().dtype(at::kInt));
}

u32* words_of(const at::Tensor& draws) {
  return reinterpret_cast<u32*>(draws.data_ptr<int32_t>());
}

void launch_draws(TileParams params, const TileCall& call, const Window& window) {
  put_window(params, window);
  // One kernel for all head dims.
  const TileDims dims{kTileDimsStep, kTileDimsStep, call.query.scalar_type(), true};
  const int64_t lines = lines_held(TileKernel::kDraws, dims, call.query.device());
  launch_tile_kernel(TileKernel::kDraws, params, dims,
                     {blocks_of(window.keys, kKeysOfBlock), blocks_of(window.rows, lines), window.heads},
                     call.query.device());
}

/// The draws of dropout, where there is any, of one window after the other.
class Draws {
 public:
  explicit Draws(const TileCall& call) : call_(call) {}

  /// Of a launch: 64 MB, or where lines are long as much as keeps the processors busy. Without dropout no
  /// limit.
  int64_t most_bytes() const {
    if (!call_.seed.defined()) {
      return std::numeric_limits<int64_t>::max();
    }
    constexpr int64_t kBytes = int64_t{1} << 26, kBlocksOfProcessor = 4, kBitsOfByte = 8;
    const int64_t line = std::max(call_.key.size(2), call_.query.size(2)) / kBitsOfByte;
    return std::max(kBytes, kBlocksOfProcessor * processors_of(call_.query.device()) * kLinesOfWindow * line);
  }

  // What a launch may be over. Draws that are there are those of whole heads.
  std::vector<Window> of_heads() const { return split_heads(all_of(call_), group(), most_bytes()); }
  std::vector<Window> of_rows(const Window& heads) const {
    return are_there() ? std::vector{heads} : split_rows(heads, most_bytes());
  }
  std::vector<Window> of_keys(const Window& heads) const {
    return are_there() ? std::vector{heads} : split_keys(heads, most_bytes());
  }

  /// Until the next window's are made; with `of_keys` as keys are held, too.
  void make(TileParams& params, const Window& window, bool of_keys = false) {
    if (!call_.seed.defined()) {
      return;
    }
    const int64_t bytes = bytes_of_draws(window);
    params.are_drawn = are_there() ? 1 : 0;
    if (are_there()) {
      params.draws = words_of(call_.draws) + window.first_head * (bytes / window.heads) / kWordBytes;
    } else {
      reserve(bits_, bytes);
      params.draws = words_of(bits_);
    }
    if (of_keys) {
      reserve(bits_of_keys_, bytes);
    }
    params.draws_of_keys = of_keys ? words_of(bits_of_keys_) : nullptr;
    if (of_keys || !are_there()) {
      launch_draws(params, call_, window);
    }
  }

 private:
  bool are_there() const { return call_.draws.defined(); }
  int64_t group() const { return call_.query.size(1) / call_.key.size(1); }

  void reserve(at::Tensor& bits, int64_t bytes) const {
    if (!bits.defined() || static_cast<int64_t>(bits.nbytes()) < bytes) {
      bits = empty_draws(call_, bytes);
    }
  }

  const TileCall& call_;
  at::Tensor bits_, bits_of_keys_;
};

/// Of the keys: where rows are few, as many parts as keep the processors busy, of some steps each.
int64_t parts_of(const TileCall& call) {
  constexpr int64_t kBlocksOfProcessor = 2, kLeastKeys = 256;
  const int64_t blocks =
      call.query.size(0) * call.query.size(1) * blocks_of(call.query.size(2), TileKernel::kAttend, call);
  const int64_t wanted = processors_of(call.query.device()) * kBlocksOfProcessor / blocks;
  return std::clamp(std::min(wanted, call.key.size(2) / kLeastKeys), int64_t{1}, int64_t{64});
}

at::Tensor tile_draws(const TileCall& call) {
  const at::Tensor draws = empty_draws(call, bytes_of_draws(all_of(call)));
  TileParams params = params_of(call);
  params.draws = words_of(draws);
  launch_draws(params, call, all_of(call));
  return draws;
}

std::tuple<at::Tensor, at::Tensor> tile_attend(const TileCall& call) {
  const at::Tensor& query = call.query;
  const at::DimVector rows{query.size(0), query.size(1), query.size(2)};
  const at::DimVector lines{rows[0], rows[1], rows[2], call.value.size(-1)};
  const auto floats = query.options().dtype(at::kFloat);
  const at::Tensor output = at::empty(lines, query.options()), lse = at::empty(rows, floats);
  TileParams params = params_of(call);
  params.output = numbers_into(output);
  params.made_lse = lse.mutable_data_ptr<float>();
  params.parts = static_cast<int>(parts_of(call));
  at::Tensor part_output, part_lse;
  if (params.parts > 1) {
    part_output = at::empty({params.parts, output.numel()}, floats);
    part_lse = at::empty({params.parts, lse.numel()}, floats);
    params.part_output = part_output.mutable_data_ptr<float>();
    params.part_lse = part_lse.mutable_data_ptr<float>();
  }
  Draws draws(call);
  for (const Window& heads : draws.of_heads()) {
    for (const Window& rows : draws.of_rows(heads)) {
      draws.make(params, rows);
      launch_over_rows(TileKernel::kAttend, params, call, rows, params.parts);
    }
  }
  if (params.parts > 1) {
    constexpr int64_t kLinesOfBlock = 8;  // as in merge.cu, of 128 lines held
    launch_tile_kernel(TileKernel::kMerge, params, dims_of(call), {blocks_of(lse.numel(), kLinesOfBlock)},
                       query.device());
  }
  return {output, lse};
}

at::Tensor tile_weights(const TileWeightsCall& wanted) {
  TileCall call = wanted.call;
  call.draws.reset();  // which are of all heads and rows
  const at::Tensor weights = at::empty({wanted.heads, wanted.rows, call.key.size(2)}, call.query.options());
  TileParams params = params_of(call);
  params.lse = wanted.lse.const_data_ptr<float>();
  Draws draws(call);
  const Window all{wanted.first_head, wanted.heads, wanted.row_begin, wanted.rows, 0, call.key.size(2)};
  for (const Window& heads : split_heads(all, /*group=*/1, draws.most_bytes())) {
    draws.make(params, heads);
    put_window(params, heads);
    params.weights =
        numbers_into(weights) + (heads.first_head - all.first_head) * weights.size(1) * weights.size(2);
    launch_tile_kernel(
        TileKernel::kWeights, params, dims_of(call),
        {blocks_of(heads.keys, kKeysOfBlock), blocks_of(heads.rows, TileKernel::kWeights, call), heads.heads},
        call.query.device());
  }
  return weights;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> tile_grads(const TileGradsCall& incoming) {
  const TileCall& call = incoming.call;
  const auto dense = [](const at::Tensor& like) { return at::empty(like.sizes(), like.options()); };
  const at::Tensor query = dense(call.query), key = dense(call.key), value = dense(call.value),
                   delta = dense(incoming.lse), subtrahend = dense(incoming.lse);
  TileParams params = params_of(call);
  params.grad_output = numbers_of(incoming.grad_output);
  params.saved_output = numbers_of(incoming.output);
  put_strides(incoming.grad_output, params.grad_output_strides);
  put_strides(incoming.output, params.saved_output_strides);
  params.lse = incoming.lse.const_data_ptr<float>();
  params.grad_lse = incoming.grad_lse.defined() ? incoming.grad_lse.const_data_ptr<float>() : nullptr;
  params.delta = delta.mutable_data_ptr<float>();
  params.subtrahend = subtrahend.mutable_data_ptr<float>();
  params.grad_query = numbers_into(query);
  params.grad_key = numbers_into(key);
  params.grad_value = numbers_into(value);
  Draws draws(call);
  for (const Window& heads : draws.of_heads()) {
    const auto of_rows = draws.of_rows(heads), of_keys = draws.of_keys(heads);
    const bool is_one = of_rows.size() == 1 && of_keys.size() == 1;
    for (const Window& rows : of_rows) {
      draws.make(params, rows, /*of_keys=*/is_one);
      launch_over_rows(TileKernel::kGradQuery, params, call, rows);  // makes what the next one reads
    }
    for (const Window& keys : of_keys) {
      if (!is_one) {
        draws.make(params, keys, /*of_keys=*/true);
      }
      launch_over_keys(TileKernel::kGradKeys, params, call, keys);
    }
  }
  return {query, key, value, delta};
}

}  // namespace

TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) {
  m.impl("_tile_draws", TORCH_FN((Unboxed<TileCall>::kernel<&tile_draws>)));
  m.impl("_tile_attend", TORCH_FN((Unboxed<TileCall>::kernel<&tile_attend>)));
  m.impl("_tile_weights", TORCH_FN((Unboxed<TileWeightsCall>::kernel<&tile_weights>)));
  m.impl("_tile_grads", TORCH_FN((Unboxed<TileGradsCall>::kernel<&tile_grads>)));
}

}  // namespace attn_ext::cuda
