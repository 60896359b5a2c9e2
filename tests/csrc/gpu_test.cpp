// The kernels of csrc/cuda/device against plain sums, on an emulated GPU.

#include "gpu.h"
#include "../../csrc/cuda/device/windows.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

// What gpu_kernels.h makes of each is a namespace with all kernels.
#define HELD 128
#define WITH_DROPOUT 2
#define HEAD_DIM 32
#define VALUE_DIM 16
#define IS_BFLOAT16 1
#define BUFFERS 2
#define WITH_WGMMA 0
namespace bfloat16 {
#include "gpu_kernels.h"
}  // namespace bfloat16
#undef IS_BFLOAT16
#undef BUFFERS
#undef HEAD_DIM
#undef VALUE_DIM
#define HEAD_DIM 48
#define VALUE_DIM 80
#define IS_BFLOAT16 0
#define BUFFERS 1
namespace half {
#include "gpu_kernels.h"
}  // namespace half
#undef HEAD_DIM
#undef VALUE_DIM
#undef BUFFERS
#undef WITH_WGMMA
#define HEAD_DIM 64
#define VALUE_DIM 128
#define BUFFERS 2
#define WITH_WGMMA 1
namespace hopper {
#include "gpu_kernels.h"
}  // namespace hopper
#undef HELD
#define HELD 64
namespace hopper_grads {
#include "gpu_kernels.h"
}  // namespace hopper_grads

namespace {

using attn_ext::cuda::Window;

constexpr int64_t kNoLimit = int64_t{1} << 40;

struct Case {
  std::string name;
  int batches, heads, group, query_len, key_len;
  int low = -1000000, high = 1000000;
  float softcap = 0.0F;
  int bias_kind = 0;
  double dropout_p = 0.0;
  int64_t most_bytes_of_draws = kNoLimit;
  int first_head = 0, heads_of_launch = 0, row_begin = 0, rows = 0;  // 0: all
  float scale = 1.7F;                                                // times the usual one
};

const std::vector<Case> kCases{
    {"one tile", 1, 1, 1, 128, 128},
    {"ragged", 2, 2, 1, 70, 131},
    {"grouped", 1, 4, 2, 40, 50},
    {"causal", 1, 2, 2, 200, 260, -1000000, 0},
    {"window over tiles", 1, 1, 1, 300, 300, -20, 5},
    {"rows that see nothing", 1, 1, 1, 150, 140, -1000000, -30},
    {"softcap", 1, 2, 1, 60, 90, -1000000, 1000000, 2.0F},
    {"softcap of whole tiles", 1, 1, 1, 128, 192, -1000000, 1000000, 2.0F},
    {"bool mask", 1, 2, 1, 60, 90, -1000000, 1000000, 0.0F, 1},
    {"bias of half precision", 1, 2, 1, 60, 90, -1000000, 1000000, 0.0F, 2},
    {"bias of float and softcap", 1, 2, 1, 60, 90, -1000000, 1000000, 3.0F, 3},
    {"dropout", 2, 3, 1, 50, 200, -1000000, 1000000, 0.0F, 0, 0.3},
    {"dropout of whole tiles", 1, 1, 1, 128, 128, -1000000, 1000000, 0.0F, 0, 0.3},
    {"all dropped", 1, 1, 1, 20, 30, -1000000, 1000000, 0.0F, 0, 1.0},
    {"dropout in a window", 1, 1, 1, 130, 130, -20, 5, 0.0F, 0, 0.3},
    {"dropout, some heads after the other", 3, 2, 1, 20, 40, -1000000, 0, 0.0F, 0, 0.3, 4000},
    {"dropout, some rows and keys after the other", 1, 2, 2, 150, 150, -1000000, 0, 0.0F, 0, 0.3, 6144},
    {"far band", 1, 1, 1, 20, 30, -2147483647 - 1, 2147483647},
    {"wide softcap", 1, 1, 1, 40, 60, -1000000, 1000000, 1e6F},
    {"a part", 2, 4, 2, 300, 130, -1000000, 1000000, 0.0F, 0, 0.0, kNoLimit, 2, 4, 128, 128},
    {"a part with dropout", 1, 2, 1, 140, 530, -1000000, 1000000, 0.0F, 0, 0.3, kNoLimit, 1, 1, 128, 12},
    {"negative scale", 1, 1, 1, 128, 64, -1000000, 1000000, 0.0F, 0, 0.0, kNoLimit, 0, 0, 0, 0, -1.7F},
    {"scale of 0", 1, 1, 1, 128, 64, -1000000, 1000000, 0.0F, 0, 0.0, kNoLimit, 0, 0, 0, 0, 0.0F},
};

constexpr int kFirstBatch = 3, kBatchStep = 2;  // of the draws

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

/// Numbers of half precision.
struct Format {
  uint16_t (*narrow)(float);
  float (*widen)(uint16_t);
  double step;  // of rounding, with room for a few of them
};

constexpr Format kBfloat16{&gpu::to_bfloat16, &gpu::from_bfloat16, 0.01};
constexpr Format kHalf{&gpu::to_half, &gpu::from_half, 0.002};

/// What a kernel is compiled for.
struct Compiled {
  const Format& format;
  int held, head_dim, value_dim, pad, buffers;

  int threads() const { return 2 * held; }
  int blocks(int lines) const { return (lines + held - 1) / held; }

  size_t tile_bytes(size_t lines, size_t columns) const { return lines * (columns + pad) * 2; }
  size_t passing_bytes() const { return tile_bytes(64, head_dim) + tile_bytes(64, value_dim); }
  size_t held_bytes() const { return tile_bytes(held, head_dim) + tile_bytes(held, value_dim); }
};

constexpr Compiled kOfBfloat16{kBfloat16, 128, 32, 16, 8, 2}, kOfHalf{kHalf, 128, 48, 80, 8, 1},
    kOfHopper{kHalf, 128, 64, 128, 0, 2}, kOfHopperGrads{kHalf, 64, 64, 128, 0, 2};

/// What a case takes, and what is right.
struct Data {
  Data(const Case& one_case, const Compiled& its_kernels)
      : one(one_case),
        compiled(its_kernels),
        format(its_kernels.format),
        head_dim(its_kernels.head_dim),
        value_dim(its_kernels.value_dim),
        scale(one_case.scale / std::sqrt(static_cast<float>(its_kernels.head_dim))),
        heads(one.batches * one.heads),
        lines(static_cast<size_t>(heads) * one.query_len),
        key_lines(static_cast<size_t>(heads / one.group) * one.key_len),
        query(fill(lines * head_dim)),
        key(fill(key_lines * head_dim)),
        value(fill(key_lines * value_dim)),
        grad(fill(lines * value_dim)),
        half_bias(fill(lines * one.key_len)) {
    for (const uint16_t number : half_bias) {
      float_bias.push_back(format.widen(number));
      bool_bias.push_back(float_bias.back() > 0.0F);
    }
    for (size_t i = 0; i < lines; ++i) {
      grad_lse.push_back(normal(random));
    }
    solve();
  }

  std::vector<uint16_t> fill(size_t count) {
    std::vector<uint16_t> numbers(count);
    std::generate(numbers.begin(), numbers.end(), [&] { return format.narrow(normal(random)); });
    return numbers;
  }

  double dot(const std::vector<uint16_t>& left, size_t left_line, const std::vector<uint16_t>& right,
             size_t right_line, int dims) const {
    double sum = 0.0;
    for (int d = 0; d < dims; ++d) {
      sum += static_cast<double>(format.widen(left[left_line * dims + d])) *
             format.widen(right[right_line * dims + d]);
    }
    return sum;
  }

  /// `to` += factor times a line of `from`.
  void add(std::vector<double>& to, size_t to_line, const std::vector<uint16_t>& from, size_t from_line,
           int dims, double factor) const {
    for (int d = 0; d < dims; ++d) {
      to[to_line * dims + d] += factor * format.widen(from[from_line * dims + d]);
    }
  }

  void solve() {
    lse.resize(lines);
    weights.resize(lines * one.key_len);
    output.resize(lines * value_dim);
    saved_output.resize(output.size());
    grad_query.resize(lines * head_dim);
    grad_key.resize(key_lines * head_dim);
    grad_value.resize(key_lines * value_dim);
    for (size_t line = 0; line < lines; ++line) {
      solve(line);
    }
  }

  void solve(size_t line) {
    const int head = static_cast<int>(line / one.query_len), row = static_cast<int>(line % one.query_len);
    const size_t keys = static_cast<size_t>(head / one.group) * one.key_len;
    std::vector<double> score(one.key_len), slope(one.key_len, 1.0);
    double sum = 0.0;
    for (int j = 0; j < one.key_len; ++j) {
      score[j] = dot(query, line, key, keys + j, head_dim) * scale;
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
    lse[line] = static_cast<float>(std::log(sum));
    for (int j = 0; j < one.key_len; ++j) {
      const double applied = weight_of(score[j], sum) * multiplier(head, row, j);
      weights[line * one.key_len + j] = applied;
      add(output, line, value, keys + j, value_dim, applied);
    }
    double delta = -grad_lse[line];
    for (int d = 0; d < value_dim; ++d) {
      saved_output[line * value_dim + d] = format.narrow(static_cast<float>(output[line * value_dim + d]));
      delta += static_cast<double>(format.widen(saved_output[line * value_dim + d])) *
               format.widen(grad[line * value_dim + d]);
    }
    for (int j = 0; j < one.key_len; ++j) {
      const double weight = weight_of(score[j], sum), applied = weight * multiplier(head, row, j);
      const double grad_weight = dot(grad, line, value, keys + j, value_dim) * multiplier(head, row, j);
      const double grad_score = weight * (grad_weight - delta) * slope[j];
      add(grad_query, line, key, keys + j, head_dim, grad_score * scale);
      add(grad_key, keys + j, query, line, head_dim, grad_score * scale);
      add(grad_value, keys + j, grad, line, value_dim, applied);
    }
  }

  static double weight_of(double score, double sum) { return sum == 0.0 ? 0.0 : std::exp(score) / sum; }

  double multiplier(int head, int row, int column) const {
    if (one.dropout_p == 0.0) {
      return 1.0;
    }
    const uint32_t drawn = draw(static_cast<uint64_t>(seed), head / one.heads * kBatchStep + kFirstBatch,
                                head % one.heads, row, column);
    return drawn >= std::ldexp(one.dropout_p, 32) ? 1.0 / (1.0 - one.dropout_p) : 0.0;
  }

  /// With all inputs; of what is made nothing.
  template <class Params>
  Params params() const {
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
    strides(p.query_strides, one.heads, one.query_len, head_dim);
    strides(p.key_strides, one.heads / one.group, one.key_len, head_dim);
    strides(p.value_strides, one.heads / one.group, one.key_len, value_dim);
    strides(p.grad_output_strides, one.heads, one.query_len, value_dim);
    strides(p.saved_output_strides, one.heads, one.query_len, value_dim);
    strides(p.bias_strides, one.heads, one.query_len, one.key_len);
    p.bias_strides[3] = 1;
    p.bias_kind = one.bias_kind;
    p.bias = one.bias_kind == 1   ? static_cast<const void*>(bool_bias.data())
             : one.bias_kind == 2 ? static_cast<const void*>(half_bias.data())
                                  : static_cast<const void*>(float_bias.data());
    p.lse = lse.data();
    p.saved_output = saved_output.data();
    p.grad_lse = grad_lse.data();
    p.batches = one.batches;
    p.heads = one.heads;
    p.heads_together = 2;
    p.group = one.group;
    p.query_len = one.query_len;
    p.key_len = one.key_len;
    p.low = one.low;
    p.high = one.high;
    p.scale = scale;
    p.softcap = one.softcap;
    if (one.dropout_p > 0.0) {
      p.seed = &seed;
      p.threshold = static_cast<unsigned>(std::min(std::ldexp(one.dropout_p, 32), 4294967295.0));
      p.first_batch = kFirstBatch;
      p.batch_step = kBatchStep;
      p.kept = one.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - one.dropout_p)) : 0.0F;
    }
    return p;
  }

  /// Numbers that are sums of many are as exact as the largest of them.
  void expect_sums(const char* what, const std::vector<uint16_t>& made,
                   const std::vector<double>& right) const {
    double largest = 1.0;
    for (const double number : right) {
      largest = std::max(largest, std::fabs(number));
    }
    expect(what, made, right, largest);
  }

  void expect(const char* what, const std::vector<uint16_t>& made, const std::vector<double>& right,
              double least) const {
    for (size_t i = 0; i < right.size(); ++i) {
      expect_near(one, what, format.widen(made[i]), right[i],
                  format.step * std::max(std::fabs(right[i]), least));
    }
  }

  std::mt19937 random{1};
  std::normal_distribution<float> normal;
  const Case& one;
  const Compiled& compiled;
  const Format& format;
  int head_dim, value_dim;
  float scale;
  int heads;
  size_t lines, key_lines;
  std::vector<uint16_t> query, key, value, grad, half_bias;
  std::vector<float> float_bias, lse, grad_lse;
  std::vector<uint16_t> saved_output;  // as attend would have stored it
  std::vector<uint8_t> bool_bias;
  const long long seed = 0x123456789abcdefLL;
  std::vector<double> weights, output, grad_query, grad_key, grad_value;
};

/// A row whose biases are all the lowest number sees all keys alike.
void expect_lowest_bias() {
  constexpr int kHeadDim = kOfHalf.head_dim, kValueDim = kOfHalf.value_dim;
  const std::vector<uint16_t> query(kHeadDim), key(2 * kHeadDim, gpu::to_half(1.0F));
  std::vector<uint16_t> value(2 * kValueDim, gpu::to_half(1.0F)), output(kValueDim);
  std::fill(value.begin() + kValueDim, value.end(), gpu::to_half(3.0F));
  float lse = 0.0F;
  half::TileParams p{};
  p.query = query.data();
  p.key = key.data();
  p.value = value.data();
  p.query_strides[2] = p.key_strides[2] = kHeadDim;
  p.value_strides[2] = kValueDim;
  p.output = output.data();
  p.made_lse = &lse;
  p.batches = p.heads = p.heads_together = p.group = p.parts = p.launch_heads = p.query_len = p.rows = 1;
  p.key_len = p.keys = 2;
  p.low = -2;
  p.high = 2;
  p.scale = 1.0F;
  p.bias_kind = 3;
  p.bias_strides[3] = 1;
  for (const float bias : {std::numeric_limits<float>::lowest(), std::numeric_limits<float>::max()}) {
    const std::vector<float> biases(2, bias);
    p.bias = biases.data();
    gpu::launch({1, 1, 1}, kOfHalf.threads(), 2 * kOfHalf.held_bytes(), [&] { half::attend(p); });
    if (lse != bias || gpu::from_half(output[0]) != 2.0F) {
      ++failures;
      std::printf("a bias of %g: lse %g, output %g\n", bias, lse, gpu::from_half(output[0]));
    }
  }
}

Window all_of(const Data& data) {
  return {0, data.heads, 0, data.one.query_len, 0, data.one.key_len};
}

int parts(int64_t all, int of) {
  return static_cast<int>((all + of - 1) / of);
}

template <class Params>
using Kernel = void (*)(Params);

template <class Params>
struct Kernels {
  const Compiled& compiled;
  Kernel<Params> attend, merge, draws, weights;
};

template <class Params>
struct GradKernels {
  const Compiled& compiled;
  Kernel<Params> grad_query, grad_keys;
};

/// The bits of a window; none without dropout. As large as they have to be, so that a sanitizer sees more.
template <class Params>
std::vector<uint32_t> bits_of_draws(const Data& data, const Kernels<Params>& kernels, const Window& window,
                                    bool of_keys = false) {
  if (data.one.dropout_p == 0.0) {
    return {};
  }
  std::vector<uint32_t> bits(static_cast<size_t>(bytes_of_draws(window)) / sizeof(uint32_t), 0x55555555U);
  auto p = data.params<Params>();
  put_window(p, window);
  p.draws = bits.data();
  const int threads = kernels.compiled.threads();
  const auto launch = [&] {
    gpu::launch({parts(window.keys, 512), parts(window.rows, 128), static_cast<int>(window.heads)}, threads,
                threads * sizeof(uint32_t), [&] { kernels.draws(p); });
  };
  if (!of_keys) {
    launch();
    return bits;
  }
  // At once with those of rows, and after them.
  std::vector<uint32_t> bits_of_keys = bits, later = bits;
  p.draws_of_keys = bits_of_keys.data();
  launch();
  p.draws_of_keys = later.data();
  p.are_drawn = 1;
  launch();
  if (later != bits_of_keys) {
    ++failures;
    std::printf("%s: draws as keys are held\n", data.one.name.c_str());
  }
  return bits_of_keys;
}

template <class Params>
void test_attend(const Data& data, const Kernels<Params>& kernels, int parts_of_keys) {
  const Case& one = data.one;
  std::vector<uint16_t> output(data.output.size(), data.format.narrow(7.0F));
  std::vector<float> lse(data.lines, 7.0F), part_output(output.size() * parts_of_keys),
      part_lse(data.lines * parts_of_keys);
  auto p = data.params<Params>();
  p.output = output.data();
  p.made_lse = lse.data();
  p.parts = parts_of_keys;
  p.part_output = part_output.data();
  p.part_lse = part_lse.data();
  const Compiled& compiled = data.compiled;
  for (const Window& heads : split_heads(all_of(data), one.group, one.most_bytes_of_draws)) {
    for (const Window& rows : split_rows(heads, one.most_bytes_of_draws)) {
      auto bits = bits_of_draws(data, kernels, rows);
      p.draws = bits.empty() ? nullptr : bits.data();
      put_window(p, rows);
      gpu::launch(
          {parts(rows.rows, compiled.held) * static_cast<int>(rows.heads), parts_of_keys, 1},
          compiled.threads(),
          compiled.tile_bytes(compiled.held, data.head_dim) + compiled.buffers * compiled.passing_bytes(),
          [&] { kernels.attend(p); });
    }
  }
  if (parts_of_keys > 1) {
    gpu::launch({static_cast<int>(data.lines + 7) / 8, 1, 1}, compiled.threads(), 0,
                [&] { kernels.merge(p); });
  }
  for (size_t line = 0; line < data.lines; ++line) {
    expect_near(one, "lse", lse[line], data.lse[line], 1e-4);
  }
  data.expect_sums("an output", output, data.output);
}

template <class Params>
void test_weights(const Data& data, const Kernels<Params>& kernels) {
  const Case& one = data.one;
  const int heads = one.heads_of_launch == 0 ? data.heads : one.heads_of_launch;
  const int rows = one.rows == 0 ? one.query_len : one.rows;
  const Window window{one.first_head, heads, one.row_begin, rows, 0, one.key_len};
  std::vector<uint16_t> made(static_cast<size_t>(heads) * rows * one.key_len, data.format.narrow(7.0F));
  auto bits = bits_of_draws(data, kernels, window);
  auto p = data.params<Params>();
  p.weights = made.data();
  p.draws = bits.empty() ? nullptr : bits.data();
  put_window(p, window);
  const Compiled& compiled = data.compiled;
  gpu::launch({parts(one.key_len, 512), compiled.blocks(rows), heads}, compiled.threads(),
              compiled.tile_bytes(compiled.held, data.head_dim) + 2 * compiled.tile_bytes(64, data.head_dim),
              [&] { kernels.weights(p); });
  std::vector<double> right;
  for (int head = 0; head < heads; ++head) {
    const auto begin =
        data.weights.begin() +
        (static_cast<long>(one.first_head + head) * one.query_len + one.row_begin) * one.key_len;
    right.insert(right.end(), begin, begin + static_cast<long>(rows) * one.key_len);
  }
  data.expect("a weight", made, right, 1e-4);
}

template <class Params, class GradParams>
void test_grads(const Data& data, const Kernels<Params>& kernels, const GradKernels<GradParams>& of_grads) {
  const Case& one = data.one;
  const uint16_t nothing = data.format.narrow(7.0F);
  std::vector<uint16_t> query(data.query.size(), nothing), key(data.key.size(), nothing),
      value(data.value.size(), nothing);
  std::vector<float> delta(data.lines), subtrahend(data.lines);
  auto p = data.params<GradParams>();
  p.delta = delta.data();
  p.subtrahend = subtrahend.data();
  p.grad_query = query.data();
  p.grad_key = key.data();
  p.grad_value = value.data();
  const Compiled& compiled = of_grads.compiled;
  const size_t bytes = compiled.held_bytes() + 2 * compiled.passing_bytes();
  for (const Window& heads : split_heads(all_of(data), one.group, one.most_bytes_of_draws)) {
    for (const Window& rows : split_rows(heads, one.most_bytes_of_draws)) {
      auto bits = bits_of_draws(data, kernels, rows);
      p.draws = bits.empty() ? nullptr : bits.data();
      put_window(p, rows);
      const int blocks = compiled.blocks(static_cast<int>(rows.rows)) * static_cast<int>(rows.heads);
      gpu::launch({blocks, 1, 1}, compiled.threads(), bytes, [&] { of_grads.grad_query(p); });
    }
    for (const Window& keys : split_keys(heads, one.most_bytes_of_draws)) {
      auto bits = bits_of_draws(data, kernels, keys, /*of_keys=*/true);
      p.draws_of_keys = bits.empty() ? nullptr : bits.data();
      put_window(p, keys);
      const int blocks =
          compiled.blocks(static_cast<int>(keys.keys)) * static_cast<int>(keys.heads) / one.group;
      gpu::launch({blocks, 1, 1}, compiled.threads(), bytes + 2 * 2 * 64 * sizeof(float),
                  [&] { of_grads.grad_keys(p); });
    }
  }
  data.expect_sums("a gradient of the query", query, data.grad_query);
  data.expect_sums("a gradient of a key", key, data.grad_key);
  data.expect_sums("a gradient of a value", value, data.grad_value);
}

/// A row of NaN is no row that sees nothing, and a key that it does not see has nothing of it.
void expect_nan() {
  constexpr int kHeadDim = kOfHalf.head_dim, kValueDim = kOfHalf.value_dim;
  const uint16_t kOne = gpu::to_half(1.0F);
  std::vector<uint16_t> query(2 * kHeadDim, kOne), made(4), output(2 * kValueDim), grad_query(2 * kHeadDim),
      grad_key(2 * kHeadDim), grad_value(2 * kValueDim);
  const std::vector<uint16_t> key(2 * kHeadDim, kOne), value(2 * kValueDim, kOne);
  std::fill(query.begin(), query.begin() + kHeadDim, gpu::to_half(std::nanf("")));
  std::vector<float> lse(2), subtrahend(2), delta(2);
  half::TileParams p{};
  p.query = query.data();
  p.key = key.data();
  p.value = p.grad_output = p.saved_output = value.data();
  p.query_strides[2] = p.key_strides[2] = kHeadDim;
  p.value_strides[2] = p.grad_output_strides[2] = p.saved_output_strides[2] = kValueDim;
  p.lse = p.made_lse = lse.data();
  p.subtrahend = subtrahend.data();
  p.delta = delta.data();
  p.weights = made.data();
  p.output = output.data();
  p.grad_query = grad_query.data();
  p.grad_key = grad_key.data();
  p.grad_value = grad_value.data();
  p.batches = p.heads = p.heads_together = p.group = p.parts = p.launch_heads = 1;
  p.query_len = p.key_len = p.rows = p.keys = 2;
  p.low = -2;
  p.scale = 1.0F;
  const size_t bytes = 2 * kOfHalf.held_bytes() + 2 * kOfHalf.passing_bytes();
  for (const bool causal : {false, true}) {
    p.high = causal ? 0 : 2;
    gpu::launch({1, 1, 1}, kOfHalf.threads(), bytes, [&] { half::attend(p); });
    gpu::launch({1, 1, 1}, kOfHalf.threads(), bytes, [&] { half::weights(p); });
    gpu::launch({1, 1, 1}, kOfHalf.threads(), bytes, [&] { half::grad_query(p); });
    gpu::launch({1, 1, 1}, kOfHalf.threads(), bytes, [&] { half::grad_keys(p); });
    const auto number = [](uint16_t bits) { return gpu::from_half(bits); };
    const bool shows = std::isnan(lse[0]) && std::isnan(number(made[0])) && std::isnan(number(output[0])) &&
                       std::isnan(number(grad_value[0])) && std::isnan(number(grad_key[0]));
    const bool stays = std::isfinite(lse[1]) && number(made[2]) == 0.5F && number(output[kValueDim]) == 1.0F;
    const bool hides = number(made[1]) == 0.0F && number(grad_value[kValueDim]) == 0.5F;
    if (!shows || !stays || hides != causal) {
      ++failures;
      std::printf("NaN, %s: lse %g %g, weights %g %g %g\n", causal ? "causal" : "all seen", lse[0], lse[1],
                  number(made[0]), number(made[1]), number(made[2]));
    }
  }
}

template <class Params, class GradParams>
void test(const Case& one, const Kernels<Params>& kernels, const GradKernels<GradParams>& of_grads) {
  const Data data(one, kernels.compiled);
  test_weights(data, kernels);
  if (one.heads_of_launch != 0) {  // weights alone are made in parts that a caller names
    return;
  }
  test_attend(data, kernels, 1);
  test_attend(data, kernels, 3);
  test_grads(data, kernels, of_grads);
}

/// All heads, rows and keys, once each, and no more bytes than what may be unless a part cannot be smaller.
void expect_windows() {
  const Window all{0, 12, 0, 1000, 0, 700};
  for (const int64_t most : {int64_t{1}, int64_t{100000}, int64_t{400000}, kNoLimit}) {
    int64_t rows = 0, keys = 0;
    for (const Window& heads : split_heads(all, 3, most)) {
      for (const bool of_rows : {true, false}) {
        for (const Window& one : of_rows ? split_rows(heads, most) : split_keys(heads, most)) {
          (of_rows ? rows : keys) += one.heads * one.rows * one.keys;
          const bool is_least = one.heads == 3 && std::min(one.rows, one.keys) <= 128;
          const bool begins_with_a_block = one.row_begin % 128 == 0 && one.key_begin % 128 == 0;
          if (!begins_with_a_block || (bytes_of_draws(one) > most && !is_least)) {
            ++failures;
            std::printf("windows of %lld bytes\n", static_cast<long long>(bytes_of_draws(one)));
          }
        }
      }
    }
    if (rows != 12 * 1000 * 700 || keys != rows) {
      ++failures;
      std::printf("windows of %lld and %lld elements\n", static_cast<long long>(rows),
                  static_cast<long long>(keys));
    }
  }
}

}  // namespace

/// Which of three ways a case goes: all; or where KERNEL_SHARE wants less, two of them, others in each case,
/// and with Clang the third.
class Ways {
 public:
  Ways() {
    const char* share = std::getenv("KERNEL_SHARE");
    all_ = share == nullptr || std::atoi(share) <= 1;
  }
  bool takes(int way) const {
#if defined(__clang__)
    return all_ || way == turn_;
#else
    return all_ || way != turn_;
#endif
  }
  void go_on() {
    turn_ = (turn_ + 1) % 3;
  }

 private:
  int turn_ = 0;
  bool all_;
};

int main() {
  expect_windows();
  expect_nan();
  expect_lowest_bias();
  gpu::products_are_late = true;
  const Kernels<bfloat16::TileParams> of_bfloat16{kOfBfloat16, &bfloat16::attend, &bfloat16::merge,
                                                  &bfloat16::draws, &bfloat16::weights};
  const GradKernels<bfloat16::TileParams> grads_of_bfloat16{kOfBfloat16, &bfloat16::grad_query,
                                                            &bfloat16::grad_keys};
  const Kernels<half::TileParams> of_half{kOfHalf, &half::attend, &half::merge, &half::draws, &half::weights};
  const GradKernels<half::TileParams> grads_of_half{kOfHalf, &half::grad_query, &half::grad_keys};
  const Kernels<hopper::TileParams> of_hopper{kOfHopper, &hopper::attend, &hopper::merge, &hopper::draws,
                                              &hopper::weights};
  const GradKernels<hopper_grads::TileParams> grads_of_hopper{kOfHopperGrads, &hopper_grads::grad_query,
                                                              &hopper_grads::grad_keys};
  Ways ways;
  for (const Case& one : kCases) {
    // At once, a copy shows if somebody still reads what it writes over; late, if somebody does not wait.
    gpu::copies_are_late = !gpu::copies_are_late;
    if (ways.takes(0)) test(one, of_bfloat16, grads_of_bfloat16);
    if (ways.takes(1)) test(one, of_half, grads_of_half);
    if (ways.takes(2)) test(one, of_hopper, grads_of_hopper);
    ways.go_on();
    std::printf("%s: done, %d failures so far\n", one.name.c_str(), failures);
  }
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
