// The kernels of csrc/cuda/device against plain sums, on a GPU made of threads.

#include "gpu.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#define HEAD_DIM 32
#define VALUE_DIM 16
#define IS_BFLOAT16 1
#define WITH_GRADIENTS 1
namespace bfloat16_with_gradients {
#include "../../csrc/cuda/device/weights_params.h"

#include "gpu_primitives.h"

#include "../../csrc/cuda/device/weights.cu"
}  // namespace bfloat16_with_gradients
#undef IS_BFLOAT16
#define IS_BFLOAT16 0
namespace half_with_gradients {
#include "../../csrc/cuda/device/weights_params.h"

#include "gpu_primitives.h"

#include "../../csrc/cuda/device/weights.cu"
}  // namespace half_with_gradients
#undef WITH_GRADIENTS
#define WITH_GRADIENTS 0
namespace half {
#include "../../csrc/cuda/device/weights_params.h"

#include "gpu_primitives.h"

#include "../../csrc/cuda/device/weights.cu"
}  // namespace half

namespace {

struct Case {
  std::string name;
  int batches, heads, group, query_len, key_len;
  int low = -1000000, high = 1000000;
  float softcap = 0.0F;
  int bias_kind = 0;
  double dropout_p = 0.0;
  int first_head = 0, heads_of_launch = 0, row_begin = 0, rows = 0;  // 0: all
};

const std::vector<Case> kCases{
    {"one tile", 1, 1, 1, 128, 128},
    {"ragged", 2, 2, 1, 70, 131},
    {"grouped", 1, 4, 2, 40, 50},
    {"causal", 1, 2, 2, 200, 260, -1000000, 0},
    {"window over tiles", 1, 1, 1, 300, 300, -20, 5},
    {"rows that see nothing", 1, 1, 1, 150, 140, -1000000, -30},
    {"softcap", 1, 2, 1, 60, 90, -1000000, 1000000, 2.0F},
    {"bool mask", 1, 2, 1, 60, 90, -1000000, 1000000, 0.0F, 1},
    {"bias of half precision", 1, 2, 1, 60, 90, -1000000, 1000000, 0.0F, 2},
    {"bias of float and softcap", 1, 2, 1, 60, 90, -1000000, 1000000, 3.0F, 3},
    {"dropout", 2, 3, 1, 50, 200, -1000000, 1000000, 0.0F, 0, 0.3},
    {"all dropped", 1, 1, 1, 20, 30, -1000000, 1000000, 0.0F, 0, 1.0},
    {"far band", 1, 1, 1, 20, 30, -2147483647 - 1, 2147483647},
    {"wide softcap", 1, 1, 1, 40, 60, -1000000, 1000000, 1e6F},
    {"a part", 2, 4, 2, 300, 130, -1000000, 1000000, 0.0F, 0, 0.0, 2, 4, 128, 128},
};

constexpr int kHeadDim = HEAD_DIM, kValueDim = VALUE_DIM;

/// As csrc/aten/dropout.cpp has it.
uint32_t draw(uint64_t seed, uint32_t batch, uint32_t head, uint32_t row, uint32_t column) {
  uint32_t c[4] = {16 * (column / 64) + column % 16, row, head, batch};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{c[0]} * 0xD2511F53U, b = uint64_t{c[2]} * 0xCD9E8D57U;
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
    std::copy(next, next + 4, c);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c[column / 16 % 4];
}

int failures = 0;

void expect_near(const Case& one, const char* what, double actual, double expected, double tolerance) {
  if (!(std::fabs(actual - expected) <= tolerance) && actual != expected) {
    if (++failures <= 20) {
      std::printf("%s: %s is %g, expected %g\n", one.name.c_str(), what, actual, expected);
    }
  }
}

/// Both kernels over a case, with `params` of a namespace of its own.
template <class Params, class Narrow, class Widen>
void run(const Case& one, bool with_gradients, Narrow narrow, Widen widen, void (*row_sums)(Params),
         void (*weights)(Params)) {
  const int all = one.batches * one.heads, keys_of = all / one.group;
  const int heads = one.heads_of_launch == 0 ? all : one.heads_of_launch;
  const int rows = one.rows == 0 ? one.query_len : one.rows;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto fill = [&](size_t count) {
    std::vector<uint16_t> numbers(count);
    std::generate(numbers.begin(), numbers.end(), [&] { return narrow(normal(random)); });
    return numbers;
  };
  const auto lines = static_cast<size_t>(all) * one.query_len,
             key_lines = static_cast<size_t>(keys_of) * one.key_len;
  const auto query = fill(lines * kHeadDim), key = fill(key_lines * kHeadDim),
             value = fill(key_lines * kValueDim), grad = fill(lines * kValueDim);
  const auto half_bias = fill(lines * one.key_len);
  std::vector<float> float_bias(half_bias.size()), lse(lines), delta(lines);
  std::vector<uint8_t> bool_bias(half_bias.size());
  for (size_t i = 0; i < half_bias.size(); ++i) {
    float_bias[i] = widen(half_bias[i]);
    bool_bias[i] = float_bias[i] > 0.0F;
  }
  std::generate(delta.begin(), delta.end(), [&] { return normal(random); });
  const auto scores = static_cast<size_t>(heads) * rows * one.key_len;
  std::vector<uint16_t> made(scores, narrow(7.0F)), grads(scores, narrow(7.0F));
  const long long seed = 0x123456789abcdefLL;

  Params p{};
  p.query = query.data();
  p.key = key.data();
  p.value = value.data();
  p.grad_output = grad.data();
  const auto strides = [](auto& to, long long all_heads, long long len, long long dim) {
    to[0] = all_heads * len * dim;
    to[1] = len * dim;
    to[2] = dim;
  };
  strides(p.query_strides, one.heads, one.query_len, kHeadDim);
  strides(p.key_strides, one.heads / one.group, one.key_len, kHeadDim);
  strides(p.value_strides, one.heads / one.group, one.key_len, kValueDim);
  strides(p.grad_output_strides, one.heads, one.query_len, kValueDim);
  strides(p.bias_strides, one.heads, one.query_len, one.key_len);
  p.bias_strides[3] = 1;
  p.bias_kind = one.bias_kind;
  p.bias = one.bias_kind == 1   ? static_cast<const void*>(bool_bias.data())
           : one.bias_kind == 2 ? static_cast<const void*>(half_bias.data())
                                : static_cast<const void*>(float_bias.data());
  p.lse = lse.data();
  p.delta = with_gradients ? delta.data() : nullptr;
  p.row_sums = lse.data();
  p.weights = made.data();
  p.grad_scores = grads.data();
  p.heads = one.heads;
  p.group = one.group;
  p.query_len = one.query_len;
  p.key_len = one.key_len;
  p.rows = one.query_len;
  p.low = one.low;
  p.high = one.high;
  p.scale = 0.3F;
  p.softcap = one.softcap;
  p.capped_scale = one.softcap > 0.0F ? 2.0F * p.scale / one.softcap : 0.0F;
  if (one.dropout_p > 0.0) {
    p.seed = &seed;
    p.threshold = static_cast<unsigned long long>(std::ldexp(one.dropout_p, 32));
    p.kept = one.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - one.dropout_p)) : 0.0F;
  }
  const auto tiles = [](int length) { return (length + 127) / 128; };
  constexpr size_t kTileBytes = 128 * (kHeadDim + 8) * 2, kValueBytes = 128 * (kValueDim + 8) * 2;
  gpu::launch({1, tiles(one.query_len), all}, 2 * kTileBytes, [&] { row_sums(p); });
  p.first_head = one.first_head;
  p.row_begin = one.row_begin;
  p.rows = rows;
  gpu::launch({tiles(one.key_len), tiles(rows), heads},
              std::max(2 * kTileBytes + (with_gradients ? 2 * kValueBytes : 0), size_t{128 * 136 * 2}),
              [&] { weights(p); });

  const double step = narrow(1.0F) == 0x3f80 ? 0.01 : 0.002;  // of bfloat16's rounding, and half's
  for (int head = 0; head < heads; ++head) {
    for (int r = 0; r < rows; ++r) {
      const int n_h = one.first_head + head, row = one.row_begin + r;
      const size_t line = static_cast<size_t>(n_h) * one.query_len + row;
      std::vector<double> score(one.key_len), slope(one.key_len);
      double sum = 0.0;
      for (int j = 0; j < one.key_len; ++j) {
        const size_t key_line = static_cast<size_t>(n_h / one.group) * one.key_len + j;
        double product = 0.0;
        for (int d = 0; d < kHeadDim; ++d) {
          product +=
              static_cast<double>(widen(query[line * kHeadDim + d])) * widen(key[key_line * kHeadDim + d]);
        }
        score[j] = product * 0.3F;
        slope[j] = 1.0;
        if (one.softcap > 0.0F) {
          const double tanh = std::tanh(score[j] / one.softcap);
          score[j] = one.softcap * tanh;
          slope[j] = 1.0 - tanh * tanh;
        }
        const size_t place = line * one.key_len + j;
        const bool hidden =
            j - row < one.low || j - row > one.high || (one.bias_kind == 1 && !bool_bias[place]);
        score[j] = hidden ? -std::numeric_limits<double>::infinity()
                          : score[j] + (one.bias_kind >= 2 ? float_bias[place] : 0.0F);
        sum += std::exp(score[j]);
      }
      expect_near(one, "lse", lse[line], std::log(sum), 1e-4);
      for (int j = 0; j < one.key_len; ++j) {
        const size_t key_line = static_cast<size_t>(n_h / one.group) * one.key_len + j;
        const size_t at = (static_cast<size_t>(head) * rows + r) * one.key_len + j;
        const double weight = sum == 0.0 ? 0.0 : std::exp(score[j]) / sum;
        double multiplier = 1.0;
        if (p.seed != nullptr) {
          const auto drawn = draw(static_cast<uint64_t>(seed), n_h / one.heads, n_h % one.heads, row, j);
          multiplier = drawn >= p.threshold ? p.kept : 0.0;
        }
        expect_near(one, "a weight", widen(made[at]), weight * multiplier,
                    step * std::max(weight * multiplier, 1e-4));
        if (with_gradients) {
          double grad_weight = 0.0;
          for (int d = 0; d < kValueDim; ++d) {
            grad_weight += static_cast<double>(widen(grad[line * kValueDim + d])) *
                           widen(value[key_line * kValueDim + d]);
          }
          const double expected = weight * (grad_weight * multiplier - delta[line]) * slope[j];
          expect_near(one, "a gradient", widen(grads[at]), expected,
                      step * std::max(std::fabs(expected), 1e-3));
        }
      }
    }
  }
}

/// A row of NaN is no row that sees nothing.
void expect_nan() {
  std::vector<uint16_t> numbers(4 * kHeadDim, gpu::to_half(1.0F)), made(4);
  std::fill(numbers.begin(), numbers.begin() + kHeadDim, gpu::to_half(std::nanf("")));
  std::vector<float> lse(2);
  half::WeightsParams p{};
  p.query = numbers.data();
  p.key = numbers.data() + 2 * kHeadDim;
  p.query_strides[2] = p.key_strides[2] = kHeadDim;
  p.lse = p.row_sums = lse.data();
  p.weights = made.data();
  p.heads = p.group = 1;
  p.query_len = p.key_len = p.rows = 2;
  p.low = -2;
  p.high = 2;
  p.scale = 1.0F;
  constexpr size_t kBytes = 128 * 136 * 2;
  gpu::launch({1, 1, 1}, kBytes, [&] { half::row_sums(p); });
  gpu::launch({1, 1, 1}, kBytes, [&] { half::weights(p); });
  const bool shows = std::isnan(lse[0]) && std::isnan(gpu::from_half(made[0])) && std::isfinite(lse[1]) &&
                     gpu::from_half(made[2]) == 0.5F;
  if (!shows) {
    ++failures;
    std::printf("NaN: lse %g %g, weights %g %g\n", lse[0], lse[1], gpu::from_half(made[0]),
                gpu::from_half(made[2]));
  }
}

}  // namespace

int main() {
  expect_nan();
  for (const Case& one : kCases) {
    run<bfloat16_with_gradients::WeightsParams>(one, true, gpu::to_bfloat16, gpu::from_bfloat16,
                                                bfloat16_with_gradients::row_sums,
                                                bfloat16_with_gradients::weights);
    run<half_with_gradients::WeightsParams>(one, true, gpu::to_half, gpu::from_half,
                                            half_with_gradients::row_sums, half_with_gradients::weights);
    run<half::WeightsParams>(one, false, gpu::to_half, gpu::from_half, half::row_sums, half::weights);
    std::printf("%s: done, %d failures so far\n", one.name.c_str(), failures);
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
