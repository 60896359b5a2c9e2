// The backward kernels against a plain double-precision loop, on one instruction set after the other. Every
// tensor lies between guard pages; what is not a tensor's own begins as NaN; tasks run in a mixed order.
#include <functional>
#include <set>

#include "support.h"

namespace attn_ext::test {
namespace {

struct Case {
  std::string name;
  ScalarKind dtype = ScalarKind::kFloat32;
  int64_t batch = 1, query_heads = 2, key_heads = 2, query_len = 5, key_len = 7, head_dim = 8, value_dim = 8;
  cpu::ScoreRule rule;
  Placement placement;
  const char* mask = "";  // the dims it has, of "bhrc"; empty: none
  ScalarKind mask_kind = ScalarKind::kBool;
  double mask_density = 0.7;  // visible share
  bool mask_grad = false;
  double far_bias = 0;  // of every third row, in the place of what the mask has; its query is 0
  bool sinks = false;
  double dropout = 0;
  bool grad_output = true, grad_lse = false, grad_weights = false, grad_key_mass = false;
  bool expanded = false;                        // incoming gradients are one number, expanded
  bool query = true, key = true, value = true;  // gradients wanted
  int masked_keys = 0;  // the last keys are masked out for every query, and hold NaN and Inf
  bool visible_nan = false;
  bool given = false;                // delta, and a double lse, over more keys than these
  int64_t origin[4] = {0, 0, 0, 0};  // of batch, head, row and chunk of columns in the draws
};

ScalarKind accumulator(ScalarKind kind) {
  return kind == ScalarKind::kFloat64 ? ScalarKind::kFloat64 : ScalarKind::kFloat32;
}

struct Gradients {
  Tensor query, key, value, mask, sinks;
};

// The weights of one query row.
struct Row {
  std::vector<char> seen;  // a key each, as all of these
  std::vector<double> weight, cap_slope, keep;
  double lse = -INFINITY;
};

// Rows of a tensor, side by side, as doubles: the plain loops read each of them many times.
class Rows {
 public:
  Rows() = default;
  Rows(const Tensor& t, int64_t batch, int64_t heads, int64_t rows, int64_t columns)
      : heads_(heads), rows_(rows), columns_(columns) {
    numbers_.reserve(static_cast<size_t>(batch * heads * rows * columns));
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < columns; ++c) numbers_.push_back(t.at(b, h, r, c));
  }
  const double* at(int64_t b, int64_t h, int64_t r) const {
    return numbers_.data() + ((b * heads_ + h) * rows_ + r) * columns_;
  }

 private:
  int64_t heads_ = 0, rows_ = 0, columns_ = 0;
  std::vector<double> numbers_;
};

struct Problem {
  Tensor query, key, value, mask, sinks, output, lse, grad_output, grad_lse, grad_weights, grad_key_mass;
  Tensor delta, double_lse, weights;
  Rows query_rows, key_rows, value_rows, grad_output_rows;
  std::vector<Row> plain_rows;  // of every query row of every head
  int64_t seed = 0x123456789abcdef;
  cpu::BackwardParams params;
};

bool is_visible(const Case& c, const Problem& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t centre = i + c.rule.query_offset;
  if (c.rule.window_left >= 0 && j < centre - c.rule.window_left) return false;
  if (c.rule.window_right >= 0 && j > centre + c.rule.window_right) return false;
  if (!*c.mask) return true;
  const double m = in.mask.at(b, h, i, j);
  return c.mask_kind == ScalarKind::kBool ? m != 0 : m != -INFINITY;
}

double keep_factor(const Case& c, const Problem& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (c.dropout == 0) return 1;
  const uint32_t draw =
      philox_draw(static_cast<uint64_t>(in.seed), static_cast<uint32_t>(b + c.origin[0]),
                  static_cast<uint32_t>(h + c.origin[1]), static_cast<uint32_t>(i + c.origin[2]),
                  static_cast<uint32_t>(j + 64 * c.origin[3]));
  return draw >= static_cast<uint32_t>(std::floor(c.dropout * 4294967296.0)) ? 1 / (1 - c.dropout) : 0;
}

Row plain_row(const Case& c, const Problem& in, int64_t b, int64_t h, int64_t i) {
  const int64_t hk = h / (c.query_heads / c.key_heads);
  const auto keys = static_cast<size_t>(c.key_len);
  Row row{std::vector<char>(keys, 0), std::vector<double>(keys, -INFINITY), std::vector<double>(keys, 1.0),
          std::vector<double>(keys, 0.0)};
  const double* query = in.query_rows.at(b, h, i);
  double top = c.sinks ? in.sinks.at(b, h, 0, 0) : -INFINITY;
  for (int64_t j = 0; j < c.key_len; ++j) {
    if (!is_visible(c, in, b, h, i, j)) continue;
    const auto at = static_cast<size_t>(j);
    const double* key = in.key_rows.at(b, hk, j);
    double s = 0;
    for (int64_t d = 0; d < c.head_dim; ++d) s += query[d] * key[d];
    s *= c.rule.scale;
    if (c.rule.softcap > 0) {
      const double t = std::tanh(s / c.rule.softcap);
      s = c.rule.softcap * t;
      row.cap_slope[at] = 1 - t * t;
    }
    if (*c.mask && c.mask_kind != ScalarKind::kBool) s += in.mask.at(b, h, i, j);
    row.seen[at] = 1;
    row.weight[at] = s;
    row.keep[at] = keep_factor(c, in, b, h, i, j);
    top = std::isnan(s) || std::isnan(top) ? NAN : std::max(top, s);
  }
  double sum = c.sinks ? std::exp(in.sinks.at(b, h, 0, 0) - top) : 0;
  for (double& w : row.weight) {
    if (w != -INFINITY) sum += w = std::exp(w - top);
  }
  if (sum > 0 || std::isnan(sum)) row.lse = top + std::log(sum);
  for (double& w : row.weight) w = w == -INFINITY ? 0 : w / sum;
  return row;
}

// f(b, h, i, its plain row) for every query row.
template <typename F>
void each_plain_row(const Case& c, const Problem& in, F f) {
  size_t row = 0;
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.query_heads; ++h)
      for (int64_t i = 0; i < c.query_len; ++i) f(b, h, i, in.plain_rows[row++]);
}

void add(Tensor& t, int64_t b, int64_t h, int64_t r, int64_t column, double x) {
  t.set(b, h, r, column, t.at(b, h, r, column) + x);
}

// to (count) += factor x
void add_scaled(double factor, const double* x, int64_t count, double* to) {
  for (int64_t d = 0; d < count; ++d) to[d] += factor * x[d];
}

double* row_of(const Tensor& doubles, int64_t b, int64_t h, int64_t r) {
  return static_cast<double*>(doubles.view.data) + doubles.index(b, h, r, 0);
}

void plain_backward_row(const Case& c, const Problem& in, int64_t b, int64_t h, int64_t i, const Row& row,
                        Gradients& out) {
  const int64_t hk = h / (c.query_heads / c.key_heads);
  const double lse = c.given ? in.double_lse.at(b, h, 0, i) : row.lse;
  // Where it is given, the sum of the weights is that of more keys.
  const double share = !c.given ? 1 : row.lse == -INFINITY ? 0 : std::exp(row.lse - lse);
  const double grad_lse = c.grad_lse ? in.grad_lse.at(b, h, i, 0) : 0;
  std::vector<double> grad(row.weight.size(), 0.0);
  double delta = 0;
  for (int64_t j = 0; j < c.key_len; ++j) {
    const auto at = static_cast<size_t>(j);
    if (!row.seen[at]) continue;
    const double weight = share * row.weight[at];
    if (c.grad_output) {
      const double *grad_output = in.grad_output_rows.at(b, h, i), *value = in.value_rows.at(b, hk, j);
      for (int64_t d = 0; d < c.value_dim; ++d) grad[at] += grad_output[d] * value[d];
      add_scaled(weight * row.keep[at], grad_output, c.value_dim, row_of(out.value, b, hk, j));
    }
    if (c.grad_weights) grad[at] += in.grad_weights.at(b, h, i, j);
    if (c.grad_key_mass) grad[at] += in.grad_key_mass.at(b, h, 0, j);
    grad[at] *= row.keep[at];
    delta += weight * grad[at];
  }
  if (c.given) delta = in.delta.at(b, h, 0, i);
  for (int64_t j = 0; j < c.key_len; ++j) {
    const auto at = static_cast<size_t>(j);
    if (!row.seen[at]) continue;
    const double weight = share * row.weight[at];
    const double ds = weight * (grad[at] - delta + grad_lse);
    if (c.mask_grad) add(out.mask, b, h, i, j, ds);
    const double factor = c.rule.scale * ds * row.cap_slope[at];
    add_scaled(factor, in.key_rows.at(b, hk, j), c.head_dim, row_of(out.query, b, h, i));
    add_scaled(factor, in.query_rows.at(b, h, i), c.head_dim, row_of(out.key, b, hk, j));
  }
  if (c.sinks && lse != -INFINITY) {
    add(out.sinks, b, h, 0, 0, std::exp(in.sinks.at(b, h, 0, 0) - lse) * (grad_lse - delta));
  }
}

Tensor make_mask(const Case& c, std::mt19937& generator) {
  std::normal_distribution<double> normal;
  const std::string dims = c.mask;
  const auto has = [&](char dim) { return dims.find(dim) != std::string::npos; };
  Tensor mask(c.mask_kind, has('b') ? c.batch : 1, has('h') ? c.query_heads : 1, has('r') ? c.query_len : 1,
              has('c') ? c.key_len : 1, c.placement);
  mask.broadcast_ones();
  mask.fill([&] {
    const bool see = std::generate_canonical<double, 20>(generator) < c.mask_density;
    if (c.mask_kind == ScalarKind::kBool) return see ? 1.0 : 0.0;
    return see ? normal(generator) : -INFINITY;
  });
  for (int64_t i = 0; c.far_bias != 0 && i < mask.sizes[2]; i += 3) {
    for (int64_t j = 0; j < mask.sizes[3]; ++j) mask.set(0, 0, i, j, c.far_bias);
  }
  for (int64_t j = c.key_len - c.masked_keys; has('c') && j < c.key_len; ++j) {
    for (int64_t b = 0; b < mask.sizes[0]; ++b)
      for (int64_t h = 0; h < mask.sizes[1]; ++h)
        for (int64_t i = 0; i < mask.sizes[2]; ++i)
          mask.set(b, h, i, j, c.mask_kind == ScalarKind::kBool ? 0 : -INFINITY);
  }
  return mask;
}

Tensor incoming(const Case& c, ScalarKind kind, int64_t rows, int64_t columns, std::mt19937& generator) {
  std::normal_distribution<double> normal;
  Tensor t = c.expanded ? Tensor(kind, 1, 1, 1, 1, c.placement)
                        : Tensor(kind, c.batch, c.query_heads, rows, columns, c.placement);
  if (c.expanded) t.broadcast_ones();
  t.fill([&] { return normal(generator); });
  return t;
}

void make_inputs(const Case& c, uint32_t seed, Problem& in) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  const ScalarKind wide = accumulator(c.dtype);
  in.query = Tensor(c.dtype, c.batch, c.query_heads, c.query_len, c.head_dim, c.placement);
  in.key = Tensor(c.dtype, c.batch, c.key_heads, c.key_len, c.head_dim, c.placement);
  in.value = Tensor(c.dtype, c.batch, c.key_heads, c.key_len, c.value_dim, c.placement);
  for (Tensor* t : {&in.query, &in.key, &in.value}) t->fill([&] { return normal(generator); });
  for (int64_t i = 0; c.far_bias != 0 && i < c.query_len; i += 3) {
    for (int64_t h = 0; h < c.query_heads; ++h)
      for (int64_t d = 0; d < c.head_dim; ++d) in.query.set(0, h, i, d, 0);
  }
  const double bad[] = {NAN, INFINITY, -INFINITY};
  for (int64_t j = c.key_len - c.masked_keys; j < c.key_len; ++j) {
    for (int64_t h = 0; h < c.key_heads; ++h) {
      in.key.set(0, h, j, j % c.head_dim, bad[j % 3]);
      in.value.set(0, h, j, j % c.value_dim, bad[(j + 1) % 3]);
    }
  }
  if (c.visible_nan) in.key.set(0, 0, c.key_len / 2, 0, NAN);
  if (*c.mask) in.mask = make_mask(c, generator);
  if (c.sinks) {
    in.sinks = Tensor(wide, 1, c.query_heads, 1, 1, c.placement);
    in.sinks.fill([&] { return normal(generator) + 1; });
  }
  if (c.grad_output) in.grad_output = incoming(c, c.dtype, c.query_len, c.value_dim, generator);
  if (c.grad_lse) in.grad_lse = incoming(c, wide, c.query_len, 1, generator);
  if (c.grad_weights) in.grad_weights = incoming(c, c.dtype, c.query_len, c.key_len, generator);
  if (c.grad_key_mass) in.grad_key_mass = incoming(c, wide, 1, c.key_len, generator);
  in.output = Tensor(c.dtype, c.batch, c.query_heads, c.query_len, c.value_dim, c.placement);
  in.lse = Tensor(wide, c.batch, c.query_heads, 1, c.query_len, {.edge = c.placement.edge});
  in.query_rows = Rows(in.query, c.batch, c.query_heads, c.query_len, c.head_dim);
  in.key_rows = Rows(in.key, c.batch, c.key_heads, c.key_len, c.head_dim);
  in.value_rows = Rows(in.value, c.batch, c.key_heads, c.key_len, c.value_dim);
  if (c.grad_output) {
    in.grad_output_rows = Rows(in.grad_output, c.batch, c.query_heads, c.query_len, c.value_dim);
  }
}

// lse and delta as if there were other keys, of which no row that sees nothing here need know; no output.
void give_rows(const Case& c, Problem& in) {
  std::mt19937 generator(5);
  std::normal_distribution<double> normal;
  const Placement placement{.edge = c.placement.edge};
  in.delta = Tensor(accumulator(c.dtype), c.batch, c.query_heads, 1, c.query_len, placement);
  in.double_lse = Tensor(ScalarKind::kFloat64, c.batch, c.query_heads, 1, c.query_len, placement);
  in.delta.fill([&] { return normal(generator); });
  each_plain_row(c, in, [&](int64_t b, int64_t h, int64_t i, const Row& row) {
    const double all = row.lse == -INFINITY ? normal(generator) : row.lse + std::fabs(normal(generator));
    in.double_lse.set(b, h, 0, i, all);
    in.lse.set(b, h, 0, i, all);
    for (int64_t d = 0; d < c.value_dim; ++d) in.output.set(b, h, i, d, NAN);
  });
}

// Output and lse as a forward would have saved them.
void save_forward(const Case& c, Problem& in) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t h = 0; h < c.query_heads; ++h)
      for (int64_t i = 0; i < c.query_len; ++i) in.plain_rows.push_back(plain_row(c, in, b, h, i));
  if (c.given) return give_rows(c, in);
  each_plain_row(c, in, [&](int64_t b, int64_t h, int64_t i, const Row& row) {
    in.lse.set(b, h, 0, i, row.lse);
    std::vector<double> output(static_cast<size_t>(c.value_dim), 0.0);
    for (int64_t j = 0; j < c.key_len; ++j) {
      const auto at = static_cast<size_t>(j);
      if (!row.seen[at]) continue;
      const double* value = in.value_rows.at(b, h / (c.query_heads / c.key_heads), j);
      add_scaled(row.weight[at] * row.keep[at], value, c.value_dim, output.data());
    }
    for (int64_t d = 0; d < c.value_dim; ++d) in.output.set(b, h, i, d, output[static_cast<size_t>(d)]);
  });
}

// The weights as a forward would have saved them.
void save_weights(const Case& c, Problem& in) {
  in.weights = Tensor(c.dtype, c.batch, c.query_heads, c.query_len, c.key_len, {.edge = c.placement.edge});
  each_plain_row(c, in, [&](int64_t b, int64_t h, int64_t i, const Row& row) {
    for (int64_t j = 0; j < c.key_len; ++j) in.weights.set(b, h, i, j, row.weight[static_cast<size_t>(j)]);
  });
  in.params.weights = in.weights.view;
}

// Whether the mask broadcasts over anything, or has one key.
bool sums_mask_grad(const Case& c) {
  const std::string dims = c.mask;
  const auto lacks = [&](char dim, int64_t n) { return n > 1 && dims.find(dim) == std::string::npos; };
  return lacks('b', c.batch) || lacks('h', c.query_heads) || lacks('r', c.query_len) ||
         dims.find('c') == std::string::npos || c.key_len == 1;
}

Gradients make_gradients(const Case& c, ScalarKind kind, const Placement& placement, double start) {
  Gradients g;
  g.query = Tensor(kind, c.batch, c.query_heads, c.query_len, c.head_dim, placement);
  g.key = Tensor(kind, c.batch, c.key_heads, c.key_len, c.head_dim, placement);
  g.value = Tensor(kind, c.batch, c.key_heads, c.key_len, c.value_dim, placement);
  g.sinks = Tensor(accumulator(kind), c.batch, c.query_heads, 1, 1, placement);
  for (Tensor* t : {&g.query, &g.key, &g.value, &g.sinks}) t->fill([&] { return start; });
  if (c.mask_grad) {
    const std::string dims = c.mask;
    const auto size = [&](char dim, int64_t n) { return dims.find(dim) != std::string::npos ? n : 1; };
    g.mask = Tensor(sums_mask_grad(c) ? accumulator(kind) : kind, size('b', c.batch),
                    size('h', c.query_heads), size('r', c.query_len), size('c', c.key_len), placement);
    g.mask.broadcast_ones();
    g.mask.fill([] { return 0.0; });
  }
  return g;
}

void set_params(const Case& c, Problem& in) {
  cpu::BackwardParams& p = in.params;
  p.shape = {c.dtype, c.batch, c.query_heads, c.key_heads, c.query_len, c.key_len, c.head_dim, c.value_dim};
  p.rule = c.rule;
  p.query = in.query.view;
  p.key = in.key.view;
  p.value = in.value.view;
  p.output = in.output.view;
  p.lse = in.lse.view.data;
  p.lse_stride = c.query_len;
  if (c.given) {
    p.output = {};
    p.delta = in.delta.view.data;
    if (c.dtype != ScalarKind::kFloat64) p.double_lse = static_cast<const double*>(in.double_lse.view.data);
  }
  p.grad_output = in.grad_output.view;
  p.grad_lse = in.grad_lse.view;
  p.grad_weights = in.grad_weights.view;
  p.grad_key_mass = in.grad_key_mass.view;
  if (*c.mask) {
    p.rule.mask_kind = c.mask_kind == ScalarKind::kNone ? c.dtype : c.mask_kind;
    p.rule.mask = in.mask.view;
  }
  if (c.sinks) {
    p.rule.sinks_kind = in.sinks.kind;
    p.rule.sinks = in.sinks.view;
  }
  if (c.dropout > 0) {
    p.dropout = {true, static_cast<uint32_t>(std::floor(c.dropout * 4294967296.0)), 1 / (1 - c.dropout),
                 &in.seed, c.batch};
    p.dropout.batch_origin = c.origin[0], p.dropout.head_origin = c.origin[1];
    p.dropout.row_origin = c.origin[2], p.dropout.chunk_origin = c.origin[3];
  }
}

std::set<cpu::BackwardPath> paths;  // that cases have taken

Gradients run(const Case& c, const cpu::KernelTable& table, const Problem& in, int threads, bool wide = false,
              bool one_takes_turns = false) {
  const Placement dense{.edge = c.placement.edge};
  Gradients g = make_gradients(c, wide ? accumulator(c.dtype) : c.dtype, dense, NAN);
  cpu::BackwardParams p = in.params;
  if (c.query) p.grad_query = {g.query.view, wide};
  if (c.key) p.grad_key = {g.key.view, wide};
  if (c.value) p.grad_value = {g.value.view, wide};
  if (c.sinks) p.grad_sinks = g.sinks.view.data;
  if (c.mask_grad) {
    p.grad_mask = {g.mask.view, wide || sums_mask_grad(c)};
    p.grad_mask_size = g.mask.sizes[0] * g.mask.sizes[1] * g.mask.sizes[2] * g.mask.sizes[3];
    const auto& ways = kernels_of(table, p.shape.dtype).backward;
    if (cpu::plan_call(ways, p, threads).plan.fills_mask_grad) g.mask.fill([] { return NAN; });
  }
  paths.insert(run_backward(table, p, threads, one_takes_turns).path);
  return g;
}

// `least`: what an error is measured against where the gradient itself is near 0.
void compare(const Tensor& got, const Tensor& want, double tolerance, double least, const std::string& what) {
  double scale = 0;
  const auto each = [&](auto body) {
    for (int64_t b = 0; b < want.sizes[0]; ++b)
      for (int64_t h = 0; h < want.sizes[1]; ++h)
        for (int64_t r = 0; r < want.sizes[2]; ++r)
          for (int64_t k = 0; k < want.sizes[3]; ++k) body(b, h, r, k);
  };
  each([&](int64_t b, int64_t h, int64_t r, int64_t k) {
    const double x = std::fabs(want.at(b, h, r, k));
    if (std::isfinite(x)) scale = std::max(scale, x);
  });
  each([&](int64_t b, int64_t h, int64_t r, int64_t k) {
    const double x = got.at(b, h, r, k), y = want.at(b, h, r, k);
    const bool ok = std::isfinite(y) ? std::fabs(x - y) <= tolerance * (std::fabs(y) + 0.3 * scale + least)
                                     : !std::isfinite(x);
    if (!ok)
      check(false, what + " [" + std::to_string(b) + "," + std::to_string(h) + "," + std::to_string(r) + "," +
                       std::to_string(k) + "]: " + std::to_string(x) + " for " + std::to_string(y));
  });
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const auto count = static_cast<size_t>(a.sizes[0] * a.sizes[1] * a.sizes[2] * a.sizes[3] * size_of(a.kind));
  return count == 0 || std::memcmp(a.view.data, b.view.data, count) == 0;
}

// Small heads with nothing special about them have a way of their own; a mask that hides nothing keeps them
// from it.
void check_small_heads(const Case& c, const cpu::KernelTable& table, const Problem& in, const Gradients& got,
                       const std::string& name) {
  if (c.query_len > 16 || c.key_len > 16 || *c.mask) return;
  const uint8_t seen = 1;
  Problem masked = in;
  masked.params.rule.mask_kind = ScalarKind::kBool;
  masked.params.rule.mask.data = const_cast<uint8_t*>(&seen);
  const Gradients other = run(c, table, masked, 1);
  check((!c.query || same_bits(got.query, other.query)) && (!c.key || same_bits(got.key, other.key)) &&
            (!c.value || same_bits(got.value, other.value)),
        name + ": other bits with a mask that hides nothing");
}

// Of which a set that reads weights at all saves them.
constexpr cpu::AttentionShape kSavingShape{ScalarKind::kBFloat16, 1, 1, 1, 200, 200, 64, 64};

void run_case(const cpu::KernelSet& isa, const Case& base, ScalarKind dtype) {
  Case c = base;
  c.dtype = dtype;
  if (c.mask_kind == ScalarKind::kNone) c.mask_kind = dtype;
  Problem in;
  make_inputs(c, 42, in);
  save_forward(c, in);
  set_params(c, in);
  if (kRacesOnly) {
    run(c, *isa.kernels, in, kRacingThreads);
    return;
  }
  Gradients want = make_gradients(c, ScalarKind::kFloat64, {}, 0);
  each_plain_row(c, in, [&](int64_t b, int64_t h, int64_t i, const Row& row) {
    plain_backward_row(c, in, b, h, i, row, want);
  });
  const double tolerance = dtype == ScalarKind::kFloat64    ? 1e-11
                           : dtype == ScalarKind::kFloat32  ? 2e-5
                           : dtype == ScalarKind::kBFloat16 ? 4e-2
                                                            : 6e-3;
  static const char* const kNames[] = {"float64", "float32", "bfloat16", "float16"};
  const Gradients got = run(c, *isa.kernels, in, 1);
  const std::string name = c.name + " " + kNames[dtype_row(dtype)] + " " + isa.name;
  const int before = failures;
  // Where there is one key, or the mask has no keys, the sums are 0 but for rounding.
  const double least_score = c.key_len == 1 ? 2.0 : 0.02;
  const auto compare_inputs = [&](const Gradients& g, const std::string& which) {
    if (c.query) compare(g.query, want.query, tolerance, least_score, name + which + " query");
    if (c.key) compare(g.key, want.key, tolerance, least_score, name + which + " key");
    if (c.value) compare(g.value, want.value, tolerance, 0.02, name + which + " value");
  };
  const double least_mask = std::strchr(c.mask, 'c') != nullptr ? least_score : 2.0;
  const auto compare_all = [&](const Gradients& g, const std::string& which) {
    compare_inputs(g, which);
    if (c.mask_grad) compare(g.mask, want.mask, tolerance, least_mask, name + which + " mask");
    if (c.sinks) compare(g.sinks, want.sinks, tolerance, 0.02, name + which + " sinks");
  };
  compare_all(got, "");
  if (size_of(dtype) == 2) {
    const Gradients unrounded = run(c, *isa.kernels, in, 1, true);
    compare_inputs(unrounded, " wide");
    if (c.mask_grad) compare(unrounded.mask, want.mask, tolerance, least_mask, name + " wide mask");
  }
  const auto check_threads = [&](const Gradients& alone, const std::string& which) {
    const auto check_bits = [&](const Gradients& other, const char* how) {
      check((!c.query || same_bits(alone.query, other.query)) &&
                (!c.key || same_bits(alone.key, other.key)) &&
                (!c.value || same_bits(alone.value, other.value)) &&
                (!c.mask_grad || same_bits(alone.mask, other.mask)) &&
                (!c.sinks || same_bits(alone.sinks, other.sinks)),
            name + which + ": other bits " + how);
    };
    check_bits(run(c, *isa.kernels, in, 7), "with other threads");
    const bool joins = c.query_heads > c.key_heads && c.query_len * c.query_heads > 24 * c.key_heads;
    const bool segments = c.query_len >= 512 && c.key_len >= 512;
    const bool few_keys = c.query_len > 128 && c.key_len <= 128;
    if (segments || few_keys || joins || c.key_len > 3000) {
      check_bits(run(c, *isa.kernels, in, 7, false, true), "where one thread does what was cut for seven");
      check_bits(run(c, *isa.kernels, in, 160), "with many threads");
    }
  };
  check_threads(got, "");
  check_small_heads(c, *isa.kernels, in, got, name);
  if (kernels_of(*isa.kernels, dtype).saves_weights(kSavingShape, true) && c.dropout == 0 &&
      c.rule.softcap == 0 && !c.given) {
    save_weights(c, in);
    const Gradients from_weights = run(c, *isa.kernels, in, 1);
    compare_all(from_weights, " from weights");
    check_threads(from_weights, " from weights");
  }
  if (failures != before) std::fprintf(stderr, "%s: %d failures\n", name.c_str(), failures - before);
}

void sized(Case& c, int64_t lq, int64_t lk, int64_t d, int64_t dv) {
  c.query_len = lq, c.key_len = lk, c.head_dim = d, c.value_dim = dv;
}

using Add = std::function<void(const char*, std::function<void(Case&)>)>;

void add_shapes(const Add& add) {
  add("small", [](Case&) {});
  add("one", [](Case& c) { sized(c, 1, 1, 1, 1); });
  add("no keys", [](Case& c) { sized(c, 3, 0, 4, 4); });
  add("no queries", [](Case& c) { sized(c, 0, 3, 4, 4); });
  add("no batch", [](Case& c) { c.batch = 0; });
  add("zero head dim", [](Case& c) { sized(c, 3, 9, 0, 4); });
  add("zero value dim", [](Case& c) { sized(c, 3, 9, 4, 0); });
  add("odd dims", [](Case& c) { sized(c, 13, 67, 17, 33); });
  add("wide", [](Case& c) { sized(c, 20, 100, 192, 200); });
  add("blocks", [](Case& c) {
    sized(c, 300, 261, 24, 40);
    c.query_heads = 4;
    c.batch = 2;
  });
  add("segments", [](Case& c) {
    sized(c, 523, 770, 8, 8);
    c.query_heads = 2;
    c.key_heads = 1;
  });
  add("unequal segments", [](Case& c) {
    sized(c, 1100, 1500, 8, 8);
    c.query_heads = c.key_heads = 1;
  });
  add("many heads", [](Case& c) {
    sized(c, 17, 19, 8, 8);
    c.batch = 11;
    c.query_heads = c.key_heads = 13;
  });
  add("other layout", [](Case& c) {
    sized(c, 70, 90, 20, 24);
    c.batch = 2;
    c.placement.order = "brhc";
  });
  add("columns apart", [](Case& c) {
    sized(c, 40, 35, 20, 24);
    c.batch = 2;
    c.placement.order = "bhcr";
  });
  for (const int64_t lq : {1, 3, 9, 24, 25}) {
    add("few rows, columns apart", [=](Case& c) {
      sized(c, lq, 395, 56, 72);
      c.placement.order = "bhcr";
      c.dropout = 0.2;
      c.mask = "rc";
      c.mask_density = 0.05;
      c.masked_keys = 9;
      c.key_heads = 1;
    });
  }
}

void add_few_keys_in_turn(const Add& add) {
  add("few keys in turn", [](Case& c) {
    sized(c, 250, 77, 16, 24);
    c.query_heads = 3, c.key_heads = 1;
    c.sinks = c.grad_lse = true;
  });
  add("few keys in turn, keys that padding hides", [](Case& c) {
    sized(c, 250, 100, 16, 24);
    c.batch = 3, c.query_heads = c.key_heads = 1;
    c.mask = "bc";
    c.mask_density = 0.05;
  });
  add("few keys in turn, NaN and Inf", [](Case& c) {
    sized(c, 250, 95, 16, 16);
    c.query_heads = c.key_heads = 1;
    c.masked_keys = 9;
    c.mask = "rc";
    c.dropout = 0.2;
  });
  for (const int64_t heads : {1, 5}) {
    add("few keys in turn, a mask of many batches", [=](Case& c) {  // more than copies of its gradient
      sized(c, 300, 100, 8, 8);
      c.batch = 40 / heads, c.query_heads = c.key_heads = heads;
      c.mask = "rc";
      c.mask_kind = ScalarKind::kFloat32;
      c.mask_grad = true;
    });
  }
}

struct Window {
  int64_t left, right, offset;
};

void add_rules(const Add& add) {
  add("causal", [](Case& c) {
    sized(c, 150, 150, 16, 16);
    c.rule.window_right = 0;
  });
  add("causal segments", [](Case& c) {
    sized(c, 600, 530, 8, 8);
    c.rule.window_right = 0;
    c.rule.query_offset = -20;
  });
  add("window segments", [](Case& c) {
    sized(c, 1100, 830, 8, 8);
    c.query_heads = 4, c.key_heads = 2;
    c.rule.window_left = 300;
    c.rule.window_right = 40;
  });
  add("dead segments", [](Case& c) {
    sized(c, 1030, 1100, 8, 8);
    c.rule.window_left = 200;
    c.rule.window_right = 0;
    c.rule.query_offset = -400;
  });
  add("softcap and dropout in segments", [](Case& c) {
    sized(c, 600, 700, 8, 8);
    c.dropout = 0.3;
    c.rule.softcap = 2.5;
    c.rule.window_right = 0;
    c.sinks = true;
  });
  add("window", [](Case& c) {
    sized(c, 200, 230, 16, 16);
    c.rule.window_left = 31;
    c.rule.window_right = 5;
    c.rule.query_offset = 11;
  });
  for (const Window window : {Window{1, 0, 7}, Window{0, 2, 7}, Window{0, 7, 0}, Window{3, 2, 7},
                              Window{40, 0, 0}, Window{64, 0, 7}}) {
    for (const bool masked : {false, true}) {
      add("narrow window", [=](Case& c) {  // than tiles and half panels, over the ends of blocks
        sized(c, 560, 590, 8, 8);
        c.rule.window_left = window.left;
        c.rule.window_right = window.right;
        c.rule.query_offset = window.offset;
        if (masked) c.mask = "c";
      });
    }
  }
  for (const int64_t heads : {2, 4}) {
    add("window that leaves blocks of keys unseen", [=](Case& c) {
      sized(c, 200, 900, 8, 8);
      c.query_heads = heads, c.key_heads = 2;
      c.rule.window_left = 20;
      c.rule.window_right = 3;
      c.rule.query_offset = 300;
      c.sinks = true;
    });
  }
  add("far offset", [](Case& c) {
    sized(c, 9, 40, 8, 8);
    c.rule.window_left = 3;
    c.rule.query_offset = 1000;
  });
  add("softcap", [](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.softcap = 2.5;
  });
  add("scale 0", [](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.scale = 0;
    c.rule.window_right = 0;
  });
  add("negative scale", [](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.scale = -0.5;
  });
  add("sinks", [](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.sinks = true;
    c.batch = 2;
  });
  add("sinks over dead rows", [](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.sinks = c.grad_lse = true;
    c.mask = "r";
  });
  add("dropout", [](Case& c) {
    sized(c, 150, 230, 16, 16);
    c.batch = 2;
    c.dropout = 0.3;
  });
  add("everything", [](Case& c) {
    sized(c, 270, 290, 16, 24);
    c.query_heads = 4;
    c.dropout = 0.2;
    c.rule.softcap = 3;
    c.rule.window_left = 200;
    c.rule.window_right = 10;
    c.sinks = c.mask_grad = c.grad_lse = c.grad_weights = c.grad_key_mass = true;
    c.mask = "hrc";
    c.mask_kind = ScalarKind::kFloat32;
  });
}

void add_masks(const Add& add) {
  for (const char* dims : {"c", "r", "rc", "hrc", "bhrc", "brc", "bc", "h", "b"}) {
    for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32, ScalarKind::kNone}) {
      const std::string name = std::string("mask ") + dims +
                               (kind == ScalarKind::kBool   ? " bool"
                                : kind == ScalarKind::kNone ? " dtype"
                                                            : " float32");
      add(name.c_str(), [=](Case& c) {
        sized(c, 83, 205, 16, 16);
        c.batch = 3;
        c.mask = dims;
        c.mask_kind = kind;
        c.mask_grad = kind != ScalarKind::kBool;
      });
    }
  }
  for (const ScalarKind kind : {ScalarKind::kFloat32, ScalarKind::kNone}) {
    add("few keys mask bhrc", [=](Case& c) {
      sized(c, 83, 43, 16, 16);
      c.batch = 2;
      c.mask = "bhrc";
      c.mask_kind = kind;
      c.mask_grad = true;
    });
  }
  for (const char* dims : {"bhrc", "rc", "c", "r", "h"}) {
    add(("segments mask " + std::string(dims)).c_str(), [=](Case& c) {
      sized(c, 520, 530, 8, 8);
      c.mask = dims;
      c.mask_kind = ScalarKind::kFloat32;
      c.mask_grad = true;
    });
  }
  for (const char* dims : {"r", "c", "rc"}) {
    add(("segments mask of a group " + std::string(dims)).c_str(), [=](Case& c) {
      sized(c, 780, 770, 4, 4);
      c.query_heads = 4;
      c.mask = dims;
      c.mask_kind = ScalarKind::kFloat32;
      c.mask_grad = true;
    });
  }
  add("segments mask of many heads", [](Case& c) {  // more than there are copies of its gradient
    sized(c, 512, 513, 8, 8);
    c.query_heads = c.key_heads = 36;
    c.mask = "c";
    c.mask_kind = ScalarKind::kFloat32;
    c.mask_grad = true;
  });
  for (const double far : {-1e9, -1e4, -3.4028234663852886e38}) {
    for (const int64_t keys : {95, 700}) {
      add("far rows", [=](Case& c) {
        sized(c, keys, keys, 16, 16);
        c.mask = "rc";
        c.mask_kind = ScalarKind::kFloat32;
        c.far_bias = far;
        c.rule.window_right = 0;
      });
    }
  }
  add("sparse mask", [](Case& c) {
    sized(c, 300, 290, 8, 8);
    c.mask = "rc";
    c.mask_density = 0.002;
  });
  add("everything masked", [](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.mask = "rc";
    c.mask_density = 0;
  });
  for (const char* dims : {"c", "rc", "bhrc"}) {
    for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32}) {
      add((std::string("masked NaN and Inf ") + dims).c_str(), [=](Case& c) {
        sized(c, 70, 95, 16, 16);
        c.masked_keys = 9;
        c.mask = dims;
        c.mask_kind = kind;
        c.rule.softcap = kind == ScalarKind::kBool ? 0 : 2;
      });
    }
  }
  add("causal NaN and Inf", [](Case& c) {
    sized(c, 70, 95, 16, 16);
    c.masked_keys = 25;
    c.rule.window_right = 0;
  });
  add("NaN and Inf in segments", [](Case& c) {
    sized(c, 570, 595, 16, 16);
    c.masked_keys = 25;
    c.rule.window_right = 0;
  });
  add("visible NaN in segments", [](Case& c) {
    sized(c, 570, 595, 16, 16);
    c.visible_nan = true;
    c.rule.window_right = 0;
  });
  add("visible NaN", [](Case& c) {
    sized(c, 70, 95, 16, 16);
    c.visible_nan = true;
    c.rule.window_right = 0;
  });
}

void add_gradients(const Add& add) {
  add("lse only", [](Case& c) {
    sized(c, 33, 50, 8, 8);
    c.grad_output = false;
    c.grad_lse = true;
  });
  add("weights and mass", [](Case& c) {
    sized(c, 63, 250, 8, 8);
    c.grad_lse = c.grad_weights = c.grad_key_mass = true;
    c.dropout = 0.25;
    c.sinks = true;
  });
  add("weights in segments", [](Case& c) {
    sized(c, 530, 620, 8, 8);
    c.grad_weights = c.grad_key_mass = true;
    c.rule.window_right = 0;
  });
  add("expanded", [](Case& c) {
    sized(c, 33, 50, 8, 8);
    c.expanded = true;
    c.grad_lse = c.grad_weights = c.grad_key_mass = true;
  });
  for (int i = 0; i < 3; ++i) {
    add("one gradient", [=](Case& c) {
      sized(c, 33, 50, 8, 8);
      c.query = i == 0, c.key = i == 1, c.value = i == 2;
    });
  }
}

using AddFew = std::function<void(const char* name, const std::function<void(Case&)>& change)>;

// What few query rows can have about them, whatever they meet.
void add_kinds_of_few_rows(const AddFew& few) {
  few("plain", [](Case&) {});
  few("other layout", [](Case& c) { c.placement.order = "brhc"; });
  few("columns apart", [](Case& c) { c.placement.order = "bhcr"; });
  few("window", [](Case& c) {
    c.rule.window_left = c.key_len / 2, c.rule.window_right = 2;
    c.rule.query_offset = c.key_len * 3 / 4;
  });
  few("dead rows", [](Case& c) {
    c.rule.window_right = 0;
    c.rule.query_offset = -1;
  });
  few("softcap and sinks", [](Case& c) {
    c.rule.softcap = 2.5;
    c.sinks = c.grad_lse = true;
  });
  few("scale 0", [](Case& c) { c.rule.scale = 0; });
  few("negative scale", [](Case& c) {
    c.rule.scale = -0.5;
    c.mask = "c";
  });
  few("dropout", [](Case& c) { c.dropout = 0.3; });
  few("everything", [](Case& c) {
    c.dropout = 0.2;
    c.rule.softcap = 3;
    c.rule.window_left = c.key_len * 5 / 6, c.rule.query_offset = c.key_len * 9 / 10;
    c.sinks = c.mask_grad = c.grad_lse = c.grad_weights = c.grad_key_mass = true;
    c.mask = "hrc";
    c.mask_kind = ScalarKind::kFloat32;
  });
  few("lse only", [](Case& c) {
    c.grad_output = false;
    c.grad_lse = true;
  });
  few("expanded", [](Case& c) { c.expanded = c.grad_lse = c.grad_weights = c.grad_key_mass = true; });
  for (int i = 0; i < 3; ++i) {
    few("one gradient", [=](Case& c) { c.query = i == 0, c.key = i == 1, c.value = i == 2; });
  }
  for (const char* dims : {"c", "r", "rc", "hrc", "bhrc", "brc", "bc", "h", "b"}) {
    for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32, ScalarKind::kNone}) {
      few((std::string("mask ") + dims).c_str(), [=](Case& c) {
        c.mask = dims;
        c.mask_kind = kind;
        c.mask_grad = kind != ScalarKind::kBool;
      });
    }
  }
  for (const double far : {-1e9, -3.4028234663852886e38}) {
    few("far rows", [=](Case& c) {
      c.batch = 1;
      c.mask = "rc";
      c.mask_kind = ScalarKind::kFloat32;
      c.far_bias = far;
      c.sinks = far > -1e10;
    });
  }
  few("everything masked", [](Case& c) {
    c.mask = "rc";
    c.mask_density = 0;
  });
  for (const char* dims : {"c", "rc", "bhrc"}) {
    for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32}) {
      few((std::string("masked NaN and Inf ") + dims).c_str(), [=](Case& c) {
        c.batch = 1;
        c.masked_keys = c.key_len / 16;
        c.mask = dims;
        c.mask_kind = kind;
        c.rule.softcap = kind == ScalarKind::kBool ? 0 : 2;
      });
    }
  }
  few("causal NaN and Inf", [](Case& c) {
    c.batch = 1;
    c.masked_keys = 3;
    c.rule.window_right = 0;
    c.rule.query_offset = c.key_len - 6;
  });
  few("visible NaN", [](Case& c) {
    c.visible_nan = true;
    c.rule.window_right = 0;
    c.rule.query_offset = c.key_len / 2;
  });
}

// Few query rows have a way of their own.
void add_few_rows(const Add& add) {
  const AddFew few = [&](const char* name, const std::function<void(Case&)>& change) {
    add((std::string("few rows ") + name).c_str(), [&](Case& c) {
      sized(c, 3, 601, 24, 40);
      c.batch = 2;
      c.query_heads = 4;
      change(c);
    });
  };
  add_kinds_of_few_rows(few);
  few("whole vectors", [](Case& c) { sized(c, 1, 1040, 64, 128); });
  few("past the caches", [](Case& c) {
    sized(c, 1, 4110, 128, 128);
    c.query_heads = 2;
  });
  few("past the caches, parts of lines", [](Case& c) {
    sized(c, 1, 9001, 37, 83);
    c.query_heads = 2;
  });
  few("past the caches, heads beside each other", [](Case& c) {
    sized(c, 1, 9001, 37, 83);
    c.query_heads = 2;
    c.placement.order = "brhc";
  });
  few("many heads of a group", [](Case& c) {
    sized(c, 8, 259, 32, 32);
    c.query_heads = 10, c.key_heads = 1;
  });
}

// Up to four rows go it among few keys, too, and keep all products there.
void add_few_rows_of_few_keys(const Add& add) {
  const AddFew few = [&](const char* name, const std::function<void(Case&)>& change) {
    add((std::string("few rows of few keys ") + name).c_str(), [&](Case& c) {
      sized(c, 3, 77, 72, 48);
      c.batch = 2;
      c.query_heads = c.key_heads = 3;
      change(c);
    });
  };
  add_kinds_of_few_rows(few);
  for (const int64_t keys : {8, 9, 13, 15, 16, 17, 31, 32, 127, 128, 129, 256}) {
    for (const int64_t rows : {1, 2, 4, 5}) {
      few("plain", [=](Case& c) { sized(c, rows, keys, 80, 80); });
    }
  }
  few("of a group", [](Case& c) {
    sized(c, 2, 50, 64, 96);
    c.query_heads = 6;
  });
  few("delta given", [](Case& c) { c.given = c.grad_lse = true; });
  few("everything but a mask's gradient", [](Case& c) {
    c.dropout = 0.2;
    c.rule.softcap = 3;
    c.rule.window_left = 50, c.rule.query_offset = 70;
    c.sinks = c.grad_lse = c.grad_weights = c.grad_key_mass = true;
    c.mask = "hrc";
    c.mask_kind = ScalarKind::kFloat32;
  });
  few("past the caches", [](Case& c) {
    sized(c, 1, 100, 64, 64);
    c.batch = 60, c.query_heads = c.key_heads = 3;
  });
  for (const char* order : {"brhc", "bhcr"}) {
    few("past the caches, other layout", [=](Case& c) {
      sized(c, 2, 70, 64, 128);
      c.batch = 60, c.query_heads = c.key_heads = 3;
      c.placement.order = order;
    });
  }
  few("past the caches, several heads a task", [](Case& c) {
    sized(c, 2, 16, 64, 64);
    c.batch = 400, c.query_heads = c.key_heads = 3;
  });
}

// Heads of few keys, thousands of them, whose gradients go past the caches.
void add_streamed_few_keys(const Add& add) {
  add("small heads past the caches", [](Case& c) {
    sized(c, 5, 12, 64, 32);
    c.batch = 300, c.query_heads = c.key_heads = 8;
  });
  add("few keys past the caches", [](Case& c) {
    sized(c, 9, 60, 32, 64);
    c.batch = 80, c.query_heads = c.key_heads = 5;
  });
}

// Heads of a group whose rows go through tiles side by side, where nothing tells them apart.
void add_joined_heads(const Add& add) {
  const auto joined = [&](const char* name, const std::function<void(Case&)>& change) {
    add((std::string("joined heads ") + name).c_str(), [&](Case& c) {
      sized(c, 13, 601, 24, 40);
      c.batch = 2;
      c.query_heads = 6;
      change(c);
    });
  };
  joined("plain", [](Case&) {});
  joined("of one row", [](Case& c) {
    sized(c, 1, 601, 72, 33);
    c.query_heads = 70;
  });
  joined("of one row under a mask of rows", [](Case& c) {
    sized(c, 1, 601, 24, 40);
    c.query_heads = 70;
    c.mask = "rc";
  });
  joined("of several blocks", [](Case& c) {
    sized(c, 32, 301, 24, 40);
    c.query_heads = 20;
  });
  joined("past the caches", [](Case& c) {
    sized(c, 5, 9001, 37, 83);
    c.query_heads = 12;
  });
  joined("of no features", [](Case& c) { sized(c, 13, 230, 0, 8); });
  joined("of no values", [](Case& c) { sized(c, 13, 230, 8, 0); });
  joined("beside each other", [](Case& c) {
    c.placement.order = "brhc";
    c.grad_lse = true;
  });
  joined("columns apart", [](Case& c) { c.placement.order = "bhcr"; });
  joined("rows apart", [](Case& c) { c.placement.gap = 5; });
  joined("softcap and lse", [](Case& c) {
    c.rule.softcap = 2.5;
    c.grad_lse = true;
  });
  joined("lse only", [](Case& c) {
    c.grad_output = false;
    c.grad_lse = true;
  });
  joined("expanded", [](Case& c) { c.expanded = c.grad_lse = true; });
  joined("negative scale", [](Case& c) { c.rule.scale = -0.5; });
  for (int i = 0; i < 3; ++i) {
    joined("one gradient", [=](Case& c) { c.query = i == 0, c.key = i == 1, c.value = i == 2; });
  }
  for (const char* dims : {"c", "bc", "b", "rc", "h"}) {
    for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32, ScalarKind::kNone}) {
      joined((std::string("mask ") + dims).c_str(), [=](Case& c) {
        c.mask = dims;
        c.mask_kind = kind;
      });
    }
  }
  for (const double density : {0.0, 0.01}) {
    joined("few or no keys", [=](Case& c) {
      c.mask = "bc";
      c.mask_density = density;
    });
  }
  for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32}) {
    joined("masked NaN and Inf", [=](Case& c) {
      c.masked_keys = 37;
      c.mask = "c";
      c.mask_kind = kind;
    });
  }
  for (const double far : {-1e9, -3.4028234663852886e38}) {
    joined("far rows", [=](Case& c) {
      sized(c, 1, 601, 16, 16);
      c.batch = 1;
      c.query_heads = 70;
      c.mask = "c";
      c.mask_kind = ScalarKind::kFloat32;
      c.far_bias = far;
    });
  }
}

// One block of query rows against many blocks of keys, which tasks share.
void add_many_blocks(const Add& add) {
  const auto many = [&](const char* name, const std::function<void(Case&)>& change) {
    add((std::string("many blocks ") + name).c_str(), [&](Case& c) {
      sized(c, 37, 3200, 8, 8);
      change(c);
    });
  };
  many("plain", [](Case&) {});
  many("of joined heads", [](Case& c) { c.query_heads = 6; });
  many("of a whole block", [](Case& c) { sized(c, 256, 3073, 8, 16); });
  many("under a window", [](Case& c) {
    c.rule.window_left = 200, c.rule.window_right = 3;
    c.rule.query_offset = 1500;
  });
  // For many threads more parts than are put in order.
  many("of queries, too, under a window", [](Case& c) {
    sized(c, 4100, 4100, 8, 8);
    c.rule.window_left = 300, c.rule.window_right = 0;
  });
  many("with sinks and dropout", [](Case& c) {
    c.sinks = c.grad_lse = true;
    c.dropout = 0.3;
  });
  many("with gradients of weights", [](Case& c) { c.grad_weights = true; });
  many("some masked", [](Case& c) {
    c.mask = "rc";
    c.mask_density = 0.05;
  });
  many("with far rows", [](Case& c) {
    c.mask = "rc";
    c.mask_kind = ScalarKind::kFloat32;
    c.far_bias = -1e9;
  });
  many("without the query's gradient", [](Case& c) { c.query = false; });
}

// Many heads of a few rows and keys: up to 16 of both they have a way of their own.
void add_small_heads(const Add& add) {
  const auto heads = [&](const char* name, const std::function<void(Case&)>& change) {
    add((std::string("small heads ") + name).c_str(), [&](Case& c) {
      sized(c, 16, 16, 32, 32);
      c.batch = 5;
      change(c);
    });
  };
  heads("whole", [](Case&) {});
  for (const int64_t rows : {1, 7, 8, 9, 15, 17}) {
    for (const int64_t keys : {1, 3, 8, 11, 16, 17}) {
      heads("of some rows", [=](Case& c) { sized(c, rows, keys, 8 + rows, 3 * keys); });
    }
  }
  heads("of many features", [](Case& c) { sized(c, 8, 8, 64, 64); });
  heads("of more features", [](Case& c) { sized(c, 12, 10, 72, 130); });
  heads("of no features", [](Case& c) { sized(c, 12, 10, 0, 8); });
  heads("of no values", [](Case& c) { sized(c, 12, 10, 8, 0); });
  heads("enough for a task of several", [](Case& c) {
    sized(c, 3, 5, 16, 16);
    c.batch = 67;
  });
  heads("of a group", [](Case& c) { c.query_heads = 4; });
  heads("beside each other", [](Case& c) { c.placement.order = "brhc"; });
  heads("columns apart", [](Case& c) { c.placement.order = "bhcr"; });
  heads("rows apart", [](Case& c) { c.placement.gap = 5; });
  heads("expanded", [](Case& c) { c.expanded = true; });
  heads("causal", [](Case& c) { c.rule.window_right = 0; });
  heads("negative scale", [](Case& c) { c.rule.scale = -0.5; });
  heads("scale 0", [](Case& c) { c.rule.scale = 0; });
  heads("sinks", [](Case& c) { c.sinks = true; });
  heads("one without NaN", [](Case& c) { c.visible_nan = true; });
  heads("some with NaN and Inf", [](Case& c) { c.masked_keys = 3; });
  heads("dropout", [](Case& c) { c.dropout = 0.3; });
  for (int i = 0; i < 3; ++i) {
    heads("one gradient", [=](Case& c) { c.query = i == 0, c.key = i == 1, c.value = i == 2; });
  }
}

// Every size, small, of every dim, at the edges of memory.
void add_sizes(const Add& add) {
  constexpr const char* kDims[] = {"", "rc", "c", "bhrc", "r", "hrc", "bc"};
  constexpr ScalarKind kKinds[] = {ScalarKind::kBool, ScalarKind::kFloat32, ScalarKind::kNone};
  for (int64_t n = 0; n < kSizes; ++n) {
    for (const Placement& placement : placements_in_turn(n)) {
      const std::string name = "size " + std::to_string(n) + ", " + placement.order + " " +
                               std::to_string(placement.gap) + " " + std::to_string(placement.step);
      add(name.c_str(), [&](Case& c) {
        sized(c, size_in_turn(n, 0), size_in_turn(n, 1), size_in_turn(n, 2), size_in_turn(n, 3));
        c.rule.scale = 0.2;
        c.placement = placement;
        c.key_heads = 1 + n % 2;
        c.mask = kDims[n % 7];
        c.mask_kind = kKinds[n % 3];
        c.mask_grad = *c.mask && c.mask_kind != ScalarKind::kBool;
        c.sinks = n % 5 == 0;
        c.grad_lse = n % 2 == 0;
        c.grad_weights = n % 4 == 0;
        c.grad_key_mass = n % 6 == 0;
      });
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const Add add = [&](const char* name, const std::function<void(Case&)>& change) {
    Case c;
    c.name = name;
    c.rule.scale = 0.35;
    change(c);
    all.push_back(c);
  };
  add_shapes(add);
  add_rules(add);
  add_masks(add);
  add_gradients(add);
  add_few_rows(add);
  add_few_rows_of_few_keys(add);
  add_streamed_few_keys(add);
  add_joined_heads(add);
  add_many_blocks(add);
  add_small_heads(add);
  // Few keys have a way of their own: the same again with many.
  for (size_t i = 0, count = all.size(); i < count; ++i) {
    if (all[i].key_len == 0 || all[i].key_len > 128 || all[i].query_len <= 8) continue;
    Case c = all[i];
    c.name += ", many keys";
    c.key_len += 150;
    all.push_back(c);
  }
  add_few_keys_in_turn(add);
  // All of it as a part of a call over more keys; but far rows, whose lse must be made of scores rounded as
  // the kernels round them: tests/test_partial_calls.py has these.
  for (size_t i = 0, count = all.size(); i < count; ++i) {
    if (all[i].visible_nan || all[i].far_bias != 0) continue;
    Case c = all[i];
    c.name += ", given";
    c.given = true;
    c.origin[0] = 3, c.origin[1] = 1 << 20, c.origin[2] = (int64_t{1} << 31) - 1, c.origin[3] = 1 << 24;
    all.push_back(c);
  }
  add_sizes(add);
  return all;
}

int64_t run_all(const cpu::KernelSet& isa, Selection selection) {
  constexpr ScalarKind kDtypes[] = {ScalarKind::kFloat64, ScalarKind::kFloat32, ScalarKind::kBFloat16,
                                    ScalarKind::kFloat16};
  int64_t count = 0;
  for (const ScalarKind dtype : kDtypes) {
    if (!has_own_kernels(isa, dtype)) continue;
    paths.clear();
    for (const Case& c : cases()) {
      if (!selection.takes(c.name, work_of(c))) continue;
      run_case(isa, c, dtype);
      ++count;
    }
    if (selection.is_whole()) {
      check(paths.size() == cpu::kBackwardPaths, std::string(isa.name) + ": a path that no case takes");
    }
  }
  return count;
}

}  // namespace
}  // namespace attn_ext::test

int main(int argc, char** argv) {
  return attn_ext::test::run_tests(argc, argv, attn_ext::test::run_all);
}
