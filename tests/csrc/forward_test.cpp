// The forward kernels against a plain double-precision loop, on one instruction set after the other. Every
// tensor lies between guard pages; what is not a tensor's own begins as NaN.
#include <set>

#include "kernels/interface/matrix_unit.h"
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
  bool padding = false;       // a prefix of the keys instead of random ones
  bool sinks = false;
  double dropout = 0;
  bool weights = false, key_mass = false;
  bool unrounded = false;                  // output in the dtype of accumulation, lse in double
  int64_t origin[4] = {0, 0, 0, 0};        // of batch, head, row and chunk of columns in the draws
  int poison_keys = 0, poison_values = 0;  // NaN and Inf put in so many places
  int threads = 1;
};

struct Inputs {
  Tensor query, key, value, mask, sinks;
  int64_t seed = 0x123456789abcdef;
};

struct Outputs {
  Tensor output, lse, weights, key_mass;
};

ScalarKind accumulator(ScalarKind kind) {
  return kind == ScalarKind::kFloat64 ? ScalarKind::kFloat64 : ScalarKind::kFloat32;
}

Inputs make_inputs(const Case& c, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  const auto any = [&](int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); };
  Inputs in;
  in.query = Tensor(c.dtype, c.batch, c.query_heads, c.query_len, c.head_dim, c.placement);
  in.key = Tensor(c.dtype, c.batch, c.key_heads, c.key_len, c.head_dim, c.placement);
  in.value = Tensor(c.dtype, c.batch, c.key_heads, c.key_len, c.value_dim, c.placement);
  for (Tensor* t : {&in.query, &in.key, &in.value}) t->fill([&] { return normal(generator); });
  const double bad[] = {NAN, INFINITY, -INFINITY};
  for (int i = 0; i < c.poison_keys; ++i) {
    in.key.set(any(c.batch), any(c.key_heads), any(c.key_len), any(c.head_dim), NAN);
  }
  for (int i = 0; i < c.poison_values; ++i) {
    in.value.set(any(c.batch), any(c.key_heads), any(c.key_len), any(c.value_dim), bad[i % 3]);
  }
  const std::string dims = c.mask;
  if (!dims.empty()) {
    const auto has = [&](char dim) { return dims.find(dim) != std::string::npos; };
    in.mask = Tensor(c.mask_kind, has('b') ? c.batch : 1, has('h') ? c.query_heads : 1,
                     has('r') ? c.query_len : 1, has('c') ? c.key_len : 1, c.placement);
    in.mask.broadcast_ones();
    const auto visible = static_cast<int64_t>(c.mask_density * static_cast<double>(c.key_len));
    int64_t column = 0;
    in.mask.fill([&] {
      const bool see = c.padding ? column++ % in.mask.sizes[3] < visible
                                 : std::generate_canonical<double, 20>(generator) < c.mask_density;
      if (c.mask_kind == ScalarKind::kBool) return see ? 1.0 : 0.0;
      return see ? normal(generator) : -INFINITY;
    });
  }
  if (c.sinks) {
    in.sinks = Tensor(accumulator(c.dtype), 1, c.query_heads, 1, 1, c.placement);
    in.sinks.fill([&] { return normal(generator) + 1; });
  }
  return in;
}

cpu::ForwardParams make_params(const Case& c, const Inputs& in, Outputs& out) {
  const ScalarKind wide = accumulator(c.dtype);
  const Placement dense{.edge = c.placement.edge};
  out.output = Tensor(c.unrounded ? wide : c.dtype, c.batch, c.query_heads, c.query_len, c.value_dim, dense);
  out.lse = Tensor(c.unrounded ? ScalarKind::kFloat64 : wide, c.batch, c.query_heads, 1, c.query_len, dense);
  if (c.weights) out.weights = Tensor(c.dtype, c.batch, c.query_heads, c.query_len, c.key_len, dense);
  if (c.key_mass) {
    out.key_mass = Tensor(wide, c.batch, c.query_heads, 1, c.key_len, dense);
    out.key_mass.fill([] { return 0.0; });  // as callers do: where there are no rows, nothing is written
  }
  cpu::ForwardParams p;
  p.shape = {c.dtype, c.batch, c.query_heads, c.key_heads, c.query_len, c.key_len, c.head_dim, c.value_dim};
  p.rule = c.rule;
  p.query = in.query.view;
  p.key = in.key.view;
  p.value = in.value.view;
  p.output = {out.output.view, c.unrounded};
  if (c.unrounded) {
    p.double_lse = static_cast<double*>(out.lse.view.data);
  } else {
    p.lse = out.lse.view.data;
  }
  p.lse_stride = c.query_len;
  if (*c.mask) {
    p.rule.mask_kind = c.mask_kind;
    p.rule.mask = in.mask.view;
  }
  if (c.sinks) {
    p.rule.sinks_kind = in.sinks.kind;
    p.rule.sinks = in.sinks.view;
  }
  if (c.dropout > 0) {
    p.dropout.enabled = true;
    p.dropout.threshold = static_cast<uint32_t>(std::floor(c.dropout * 4294967296.0));
    p.dropout.keep_scale = 1 / (1 - c.dropout);
    p.dropout.seeds = &in.seed;
    p.dropout.batches_per_seed = c.batch;
    p.dropout.batch_origin = c.origin[0], p.dropout.head_origin = c.origin[1];
    p.dropout.row_origin = c.origin[2], p.dropout.chunk_origin = c.origin[3];
  }
  if (c.weights) p.weights = out.weights.view;
  if (c.key_mass) p.key_mass = out.key_mass.view.data;
  return p;
}

bool is_visible(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t centre = i + c.rule.query_offset;
  if (c.rule.window_left >= 0 && j < centre - c.rule.window_left) return false;
  if (c.rule.window_right >= 0 && j > centre + c.rule.window_right) return false;
  if (!*c.mask) return true;
  const double m = in.mask.at(b, h, i, j);
  return c.mask_kind == ScalarKind::kBool ? m != 0 : m != -INFINITY;
}

bool close(double got, double want, double tolerance) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::fabs(got - want) <= tolerance * (1 + std::fabs(want));
}

void compare_row(const Case& c, const Inputs& in, const Outputs& out, int64_t b, int64_t h, int64_t i,
                 std::vector<double>& mass, const std::string& what) {
  const int64_t hk = h / (c.query_heads / c.key_heads);
  const double wide = c.dtype == ScalarKind::kFloat64    ? 1e-13
                      : c.dtype == ScalarKind::kBFloat16 ? 4e-4
                                                         : 5e-6;
  const double tight = c.dtype == ScalarKind::kFloat64    ? 2e-13
                       : c.dtype == ScalarKind::kFloat32  ? 4e-6
                       : c.dtype == ScalarKind::kBFloat16 ? 2e-2
                                                          : 2e-3;
  std::vector<double> score(static_cast<size_t>(c.key_len)), weight(score.size());
  const double sink = c.sinks ? in.sinks.at(0, h, 0, 0) : -INFINITY;
  double top = sink;
  bool any = c.sinks;
  for (int64_t j = 0; j < c.key_len; ++j) {
    if (!is_visible(c, in, b, h, i, j)) continue;
    double s = 0;
    for (int64_t d = 0; d < c.head_dim; ++d) s += in.query.at(b, h, i, d) * in.key.at(b, hk, j, d);
    s *= c.rule.scale;
    if (c.rule.softcap > 0) s = c.rule.softcap * std::tanh(s / c.rule.softcap);
    if (*c.mask && c.mask_kind != ScalarKind::kBool) s += in.mask.at(b, h, i, j);
    score[static_cast<size_t>(j)] = s;
    top = std::isnan(s) || std::isnan(top) ? NAN : std::max(top, s);
    any = true;
  }
  double sum = std::exp(sink - top);
  if (!any || top == -INFINITY) sum = 0;
  for (int64_t j = 0; j < c.key_len; ++j) {
    if (is_visible(c, in, b, h, i, j))
      sum += weight[static_cast<size_t>(j)] = std::exp(score[static_cast<size_t>(j)] - top);
  }
  const double lse = any ? top + std::log(sum) : -INFINITY;
  check(close(out.lse.at(b, h, 0, i), lse, wide),
        what + " lse " + std::to_string(out.lse.at(b, h, 0, i)) + " for " + std::to_string(lse));
  std::vector<double> row(static_cast<size_t>(c.value_dim), 0.0);
  for (int64_t j = 0; j < c.key_len; ++j) {
    double w = 0;
    if (is_visible(c, in, b, h, i, j)) {
      w = weight[static_cast<size_t>(j)] / sum;
      if (c.dropout > 0) {
        const uint32_t draw =
            philox_draw(static_cast<uint64_t>(in.seed), static_cast<uint32_t>(b + c.origin[0]),
                        static_cast<uint32_t>(h + c.origin[1]), static_cast<uint32_t>(i + c.origin[2]),
                        static_cast<uint32_t>(j + 64 * c.origin[3]));
        w *= draw >= static_cast<uint32_t>(std::floor(c.dropout * 4294967296.0)) ? 1 / (1 - c.dropout) : 0.0;
      }
      for (int64_t d = 0; d < c.value_dim; ++d) row[static_cast<size_t>(d)] += w * in.value.at(b, hk, j, d);
    } else if (std::isnan(sum)) {
      w = NAN;
    }
    if (c.weights && !std::isnan(w)) {
      check(close(out.weights.at(b, h, i, j), w, tight), what + " weight of key " + std::to_string(j));
    }
    mass[static_cast<size_t>(j)] += w;
  }
  for (int64_t d = 0; d < c.value_dim; ++d) {
    const double got = out.output.at(b, h, i, d), want = row[static_cast<size_t>(d)];
    check(close(got, want, tight), what + " output " + std::to_string(d) + ": " + std::to_string(got) +
                                       " for " + std::to_string(want));
  }
}

void compare(const Case& c, const Inputs& in, const Outputs& out, const std::string& name) {
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.query_heads; ++h) {
      std::vector<double> mass(static_cast<size_t>(c.key_len), 0.0);
      for (int64_t i = 0; i < c.query_len; ++i) {
        compare_row(
            c, in, out, b, h, i, mass,
            name + " [" + std::to_string(b) + "," + std::to_string(h) + "," + std::to_string(i) + "]");
      }
      const double tolerance = c.dtype == ScalarKind::kFloat64    ? 1e-12
                               : c.dtype == ScalarKind::kBFloat16 ? 2e-3
                                                                  : 1e-5;
      for (int64_t j = 0; c.key_mass && j < c.key_len; ++j) {
        const double want = mass[static_cast<size_t>(j)];
        check(std::isnan(want) ||
                  close(out.key_mass.at(b, h, 0, j), want, tolerance * (1 + std::sqrt(double(c.query_len)))),
              name + " key mass " + std::to_string(j));
      }
    }
  }
}

// A mask of another kind and shape for each n.
void mask_in_turn(Case& c, int64_t n) {
  constexpr const char* kDims[] = {"", "rc", "c", "bhrc", "r", "hrc", "bc"};
  constexpr ScalarKind kKinds[] = {ScalarKind::kBool, ScalarKind::kFloat32, ScalarKind::kNone};
  c.mask = kDims[n % 7];
  c.mask_kind = kKinds[n % 3];
}

// Every size, small, of every dim, on every path, at the edges of memory.
void add_sizes(std::vector<Case>& all) {
  const auto add = [&](const char* name, int64_t n, const Placement& placement, int64_t lq, int64_t lk) {
    Case c;
    c.name = std::string(name) + " " + std::to_string(n) + ", " + placement.order + " " +
             std::to_string(placement.gap) + " " + std::to_string(placement.step);
    c.placement = placement;
    c.rule.scale = 0.2;
    c.query_len = lq, c.key_len = lk;
    c.head_dim = size_in_turn(n, 2), c.value_dim = size_in_turn(n, 3);
    c.key_heads = 1 + n % 2;
    mask_in_turn(c, n);
    c.sinks = n % 5 == 0;
    all.push_back(c);
    return &all.back();
  };
  for (int64_t n = 0; n < kSizes; ++n) {
    for (const Placement& placement : placements_in_turn(n)) {
      Case* rows = add("size of rows", n, placement, size_in_turn(n, 0), size_in_turn(n, 1));
      rows->weights = n % 4 == 0;
      rows->key_mass = n % 6 == 0;
      add("size of few rows", n, placement, 1 + n % 4, size_in_turn(n, 1) + (n % 5 == 0 ? 250 : 0));
    }
    const Placement& placement = kPlacements[static_cast<size_t>(n) % std::size(kPlacements)];
    for (const char* name : {"size of split", "size of online"}) {
      const int64_t rows = name == std::string("size of split") ? 17 + n % 9 : 33 + n % 5;
      Case* c = add(name, n, placement, rows, 2048 + size_in_turn(n, 1));
      c->head_dim = 1 + c->head_dim % 18, c->value_dim = 1 + c->value_dim % 35;
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const char* name, auto change) {
    Case c;
    c.name = name;
    c.rule.scale = 0.35;
    change(c);
    all.push_back(c);
  };
  const auto sized = [](Case& c, int64_t lq, int64_t lk, int64_t d, int64_t dv) {
    c.query_len = lq, c.key_len = lk, c.head_dim = d, c.value_dim = dv;
  };
  add("small", [](Case&) {});
  add("one", [&](Case& c) { sized(c, 1, 1, 1, 1); });
  add("no keys", [&](Case& c) {
    sized(c, 3, 0, 4, 4);
    c.weights = true;
  });
  add("no queries", [&](Case& c) {
    sized(c, 0, 3, 4, 4);
    c.key_mass = true;
  });
  add("no batch", [](Case& c) { c.batch = 0; });
  add("no keys but a sink", [&](Case& c) {
    sized(c, 3, 0, 4, 4);
    c.sinks = true;
  });
  add("zero head dim", [&](Case& c) { sized(c, 3, 9, 0, 4); });
  add("zero value dim", [&](Case& c) {
    sized(c, 3, 9, 4, 0);
    c.weights = true;
  });
  add("odd dims", [&](Case& c) { sized(c, 13, 67, 17, 33); });
  add("dims of 1", [&](Case& c) { sized(c, 31, 65, 1, 1); });
  add("wide", [&](Case& c) { sized(c, 20, 100, 192, 200); });
  add("wide values", [&](Case& c) { sized(c, 40, 410, 8, 512); });
  add("wide values of many heads", [&](Case& c) {
    sized(c, 1, 300, 8, 512);
    c.query_heads = 64, c.key_heads = 1;
  });
  add("whole rows", [&](Case& c) {
    sized(c, 130, 515, 40, 48);
    c.batch = 2;
    c.threads = 3;
  });
  add("online", [&](Case& c) {
    sized(c, 45, 1531, 24, 24);
    c.threads = 2;
  });
  add("online grouped", [&](Case& c) {
    sized(c, 70, 1100, 16, 16);
    c.query_heads = 6;
    c.threads = 16;
  });
  add("split", [&](Case& c) {
    sized(c, 19, 2085, 24, 40);
    c.query_heads = 6;
    c.batch = 2;
  });
  add("few rows", [&](Case& c) {
    sized(c, 1, 1200, 64, 64);
    c.query_heads = 8;
  });
  add("few rows, small", [&](Case& c) {
    sized(c, 2, 37, 24, 28);
    c.query_heads = 4;
  });
  add("causal", [&](Case& c) {
    sized(c, 150, 150, 16, 16);
    c.rule.window_right = 0;
  });
  add("causal online", [&](Case& c) {
    sized(c, 110, 1200, 16, 16);
    c.rule.window_right = 0;
    c.rule.query_offset = 1090;
  });
  add("negative offset", [&](Case& c) {
    sized(c, 40, 40, 8, 8);
    c.rule.window_right = 0;
    c.rule.query_offset = -17;
  });
  add("far offset", [&](Case& c) {
    sized(c, 9, 40, 8, 8);
    c.rule.window_left = 3;
    c.rule.query_offset = 1000;
  });
  add("window", [&](Case& c) {
    sized(c, 200, 230, 16, 16);
    c.rule.window_left = 31;
    c.rule.window_right = 5;
  });
  add("window online", [&](Case& c) {
    sized(c, 100, 1400, 8, 8);
    c.rule.window_left = 40;
    c.rule.window_right = 0;
    c.rule.query_offset = 700;
  });
  add("window split", [&](Case& c) {
    sized(c, 18, 1400, 8, 8);
    c.rule.window_left = 40;
    c.rule.window_right = 0;
    c.rule.query_offset = 700;
  });
  for (const char* dims : {"c", "r", "rc", "hrc", "bhrc", "bc", "h", "b"}) {
    for (const ScalarKind kind : {ScalarKind::kBool, ScalarKind::kFloat32, ScalarKind::kNone}) {
      add("mask", [&](Case& c) {
        sized(c, 50, 205, 16, 16);
        c.batch = 2;
        c.mask = dims;
        c.mask_kind = kind;
        c.name = std::string("mask ") + dims +
                 (kind == ScalarKind::kBool   ? " bool"
                  : kind == ScalarKind::kNone ? " dtype"
                                              : " float32");
      });
    }
  }
  add("padding", [&](Case& c) {
    sized(c, 50, 205, 16, 16);
    c.mask = "bc";
    c.padding = true;
    c.weights = true;
    c.key_mass = true;
  });
  add("padding online", [&](Case& c) {
    sized(c, 50, 1205, 16, 16);
    c.mask = "bc";
    c.padding = true;
    c.mask_density = 0.3;
  });
  add("sparse mask", [&](Case& c) {
    sized(c, 7, 600, 8, 8);
    c.mask = "rc";
    c.mask_density = 0.002;
    c.weights = true;
  });
  add("sparse bias online", [&](Case& c) {
    sized(c, 40, 1600, 8, 8);
    c.mask = "c";
    c.mask_kind = ScalarKind::kFloat32;
    c.mask_density = 0.004;
  });
  add("dead rows", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.mask = "rc";
    c.mask_density = 0.01;
    c.weights = true;
    c.key_mass = true;
  });
  add("dead rows with a sink", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.mask = "rc";
    c.mask_density = 0.01;
    c.weights = true;
    c.sinks = true;
  });
  add("everything masked", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.mask = "rc";
    c.mask_density = 0;
    c.weights = true;
  });
  add("everything masked, split", [&](Case& c) {
    sized(c, 17, 1900, 8, 8);
    c.mask = "rc";
    c.mask_density = 0;
  });
  add("softcap", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.softcap = 2.5;
  });
  add("softcap bias", [&](Case& c) {
    sized(c, 40, 1090, 8, 8);
    c.rule.softcap = 1.5;
    c.mask = "rc";
    c.mask_kind = ScalarKind::kFloat32;
  });
  add("scale 0", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.scale = 0;
    c.rule.window_right = 0;
  });
  add("negative scale", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.scale = -0.5;
    c.rule.window_right = 0;
  });
  add("large scale", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.rule.scale = 8;
  });
  add("sinks", [&](Case& c) {
    sized(c, 40, 90, 8, 8);
    c.sinks = true;
    c.weights = true;
  });
  add("sinks online", [&](Case& c) {
    sized(c, 40, 1090, 8, 8);
    c.sinks = true;
  });
  add("sinks split", [&](Case& c) {
    sized(c, 20, 1090, 8, 8);
    c.sinks = true;
  });
  add("dropout", [&](Case& c) {
    sized(c, 40, 333, 8, 8);
    c.batch = 2;
    c.dropout = 0.3;
    c.weights = true;
    c.key_mass = true;
  });
  add("dropout online causal", [&](Case& c) {
    sized(c, 40, 1333, 8, 8);
    c.dropout = 0.3;
    c.rule.window_right = 0;
    c.rule.query_offset = 1300;
  });
  add("dropout split", [&](Case& c) {
    sized(c, 21, 1333, 8, 8);
    c.query_heads = 4;
    c.dropout = 0.3;
  });
  add("weights", [&](Case& c) {
    sized(c, 99, 133, 8, 8);
    c.weights = true;
    c.rule.window_right = 7;
  });
  add("weights of long rows", [&](Case& c) {
    sized(c, 9, 4500, 8, 8);
    c.weights = true;
    c.key_mass = true;
    c.rule.window_left = 2500;
    c.rule.window_right = 600;
    c.rule.query_offset = 2700;
  });
  add("key mass", [&](Case& c) {
    sized(c, 1999, 70, 8, 8);
    c.key_mass = true;
    c.threads = 4;
  });
  add("key mass of one row", [&](Case& c) {
    sized(c, 1, 700, 8, 8);
    c.key_mass = true;
    c.query_heads = 4;
  });
  for (const char* layout : {"brhc", "bhcr", "crbh", "bhrc"}) {
    add("layout", [&](Case& c) {
      sized(c, 45, 77, 20, 36);
      c.batch = 2;
      c.placement.order = layout;
      c.name = std::string("layout ") + layout;
    });
    add("layout", [&](Case& c) {
      sized(c, 23, 1177, 20, 36);
      c.batch = 2;
      c.placement.order = layout;
      c.name = std::string("layout split ") + layout;
    });
  }
  for (const int64_t lq : {20, 47, 48}) {  // values are read where they lie, and copied
    for (const int poisoned : {0, 5}) {
      add("values beside other heads'", [&](Case& c) {
        sized(c, lq, lq == 20 ? 1177 : 333, 20, 64);
        c.batch = 2;
        c.poison_values = poisoned;
        c.mask = "rc";
        c.placement.order = "brhc";
        if (poisoned > 0 && lq == 47) c.rule.window_left = 100, c.rule.query_offset = 200;
      });
    }
  }
  for (const int64_t lq : {1, 7, 16}) {
    add("poisoned values across memory", [&](Case& c) {
      sized(c, lq, 333, 40, 72);
      c.poison_values = 5;
      c.mask = "rc";
      c.mask_density = 0.5;
      c.placement.order = "bhcr";
    });
  }
  // As a matrix unit makes them: rows of its own keys, and of many heads on one.
  for (const char* layout : {"bhrc", "brhc", "bhcr"}) {
    for (const int64_t lq : {1, 3, 7}) {
      for (const int64_t value_dim : {8, 40, 128}) {
        const std::string size = std::to_string(lq) + " " + layout + " " + std::to_string(value_dim);
        add("", [&](Case& c) {
          sized(c, lq, 333, 128, value_dim);
          c.placement.order = layout;
          c.name = "whole steps " + size;
        });
        add("", [&](Case& c) {
          sized(c, lq, 300, 64, value_dim);
          c.query_heads = 24;
          c.batch = 2;
          c.threads = 3;
          c.rule.window_right = 0;
          c.rule.query_offset = 280;
          c.rule.window_left = 150;
          c.placement.order = layout;
          c.name = "whole steps, group, window " + size;
        });
        add("", [&](Case& c) {
          sized(c, lq, 555, 128, value_dim);
          c.query_heads = lq == 1 ? 12 : 2;
          c.poison_values = 5;
          c.mask = "rc";
          c.mask_density = 0.5;
          c.placement.order = layout;
          c.name = "whole steps, poison " + size;
        });
        add("", [&](Case& c) {
          sized(c, lq, 291, 160, value_dim);
          c.dropout = 0.2;
          c.mask = "rc";
          c.mask_density = 0.02;
          c.sinks = true;
          c.placement.order = layout;
          c.placement.edge = Edge::kStart;
          c.name = "whole steps, dropout " + size;
        });
      }
    }
  }
  for (const int64_t lk : {90, 1300}) {
    for (const int64_t lq : {3, 25, 60}) {
      const std::string size = std::to_string(lq) + "x" + std::to_string(lk);
      add("", [&](Case& c) {
        sized(c, lq, lk, 8, 20);
        c.poison_values = 5;
        c.mask = "rc";
        c.mask_density = 0.5;
        c.name = "poisoned values " + size;
      });
      add("", [&](Case& c) {
        sized(c, lq, lk, 8, 20);
        c.poison_keys = 3;
        c.mask = "rc";
        c.mask_density = 0.5;
        c.name = "poisoned keys " + size;
      });
      add("", [&](Case& c) {
        sized(c, lq, lk, 8, 20);
        c.poison_values = 9;
        c.poison_keys = 2;
        c.rule.window_right = 0;
        c.rule.query_offset = lk / 2;
        c.weights = true;
        c.name = "poison, causal " + size;
      });
      add("", [&](Case& c) {
        sized(c, lq, lk, 8, 20);
        c.poison_values = 9;
        c.dropout = 0.5;
        c.rule.window_left = 20;
        c.name = "poison, dropout " + size;
      });
      add("", [&](Case& c) {
        sized(c, lq, lk, 8, 20);
        c.name = "unrounded " + size;
        c.unrounded = c.sinks = true;
        c.dropout = 0.5;
        c.origin[0] = 3, c.origin[1] = 1 << 20, c.origin[2] = (int64_t{1} << 31) - 1, c.origin[3] = 1 << 24;
      });
    }
  }
  add_sizes(all);
  return all;
}

std::set<cpu::ForwardPath> paths;  // that cases have taken
int64_t most_heads_beside = 0;

void run_case(const cpu::KernelSet& isa, Case c, ScalarKind dtype) {
  c.dtype = dtype;
  if (c.mask_kind == ScalarKind::kNone) c.mask_kind = dtype;
  const Inputs in = make_inputs(c, 7);
  Outputs out;
  const cpu::ForwardParams params = make_params(c, in, out);
  if (kRacesOnly) c.threads = std::max(c.threads, kRacingThreads);
  paths.insert(run_forward(*isa.kernels, params, c.threads).path);
  static const char* const names[] = {"none", "float64", "float32", "bfloat16", "float16"};
  Outputs beside;
  cpu::ForwardParams by_pages = make_params(c, in, beside);
  by_pages.most_bytes_head_by_head = 0;
  cpu::ForwardPlan plan{};
  if (params.key.head_stride < params.key.row_stride) {
    plan = run_forward(*isa.kernels, by_pages, c.threads);
    most_heads_beside = std::max(most_heads_beside, plan.pieces.heads_beside);
  }
  if (kRacesOnly) return;
  const std::string what = std::string(isa.name) + " " + names[static_cast<int>(dtype)] + " " + c.name;
  compare(c, in, out, what);
  if (plan.pieces.heads_beside > 1) compare(c, in, beside, what + ", heads beside each other");
}

// The same bits whether some keys of several heads are read at a time, where heads lie between each other, or
// all of a piece of one: for one thread, and for many.
void same_bits_beside(const cpu::KernelSet& isa, Case c, int64_t key_heads, int64_t dim) {
  c.placement.order = "brhc";
  c.key_heads = key_heads, c.query_heads = 2 * key_heads, c.head_dim = dim;
  const Inputs in = make_inputs(c, 11);
  Outputs alone;
  cpu::ForwardParams params = make_params(c, in, alone);
  params.most_bytes_head_by_head = INT64_MAX;
  check(run_forward(*isa.kernels, params, 1).pieces.heads_beside <= 1, "heads one by one");
  const int64_t rows = c.batch * c.query_heads * c.query_len;
  const auto bytes = static_cast<size_t>(rows * c.value_dim * size_of(c.dtype));
  const auto lse_bytes = static_cast<size_t>(rows * size_of(accumulator(c.dtype)));
  for (const int threads : {1, 3}) {
    Outputs beside;
    params = make_params(c, in, beside);
    params.most_bytes_head_by_head = 0;
    const cpu::ForwardPlan plan = run_forward(*isa.kernels, params, threads);
    most_heads_beside = std::max(most_heads_beside, plan.pieces.heads_beside);
    check(std::memcmp(alone.output.view.data, beside.output.view.data, bytes) == 0 &&
              std::memcmp(alone.lse.view.data, beside.lse.view.data, lse_bytes) == 0,
          std::string(isa.name) + " same bits beside other heads, Lq " + std::to_string(c.query_len) +
              " Lk " + std::to_string(c.key_len));
  }
}

// The bits of a head's rows: alone, in a batch, beside other heads of its group, for any number of threads.
void same_bits(const cpu::KernelSet& isa, ScalarKind dtype, int64_t lq, int64_t lk, bool causal) {
  Case c;
  c.dtype = dtype;
  c.batch = 3, c.query_heads = 4, c.key_heads = 2, c.query_len = lq, c.key_len = lk, c.head_dim = 20,
  c.value_dim = 36;
  c.rule.scale = 0.3;
  if (causal) c.rule.window_right = 0, c.rule.query_offset = lk - lq;
  const Inputs in = make_inputs(c, 11);
  Outputs first, again, alone;
  run_forward(*isa.kernels, make_params(c, in, first), 1);
  for (const int threads : {2, 7, 64}) {
    if (kRacesOnly && threads != 7) continue;
    run_forward(*isa.kernels, make_params(c, in, again), threads);
    const auto bytes = static_cast<size_t>(c.batch * c.query_heads * lq * c.value_dim * size_of(dtype));
    check(std::memcmp(first.output.view.data, again.output.view.data, bytes) == 0,
          std::string(isa.name) + " same bits, threads " + std::to_string(threads) + " Lq " +
              std::to_string(lq));
  }
  if (!kRacesOnly && lq <= 5) {
    for (const int64_t dim : {16, 33, 260}) same_bits_beside(isa, c, 5, dim);
  }
  Case single = c;
  single.batch = single.query_heads = single.key_heads = 1;
  const int64_t b = 2, h = 3;
  Inputs part = in;
  const auto shift = [&](const Tensor& t, int64_t head) {
    return static_cast<char*>(t.view.data) + t.index(b, head, 0, 0) * size_of(dtype);
  };
  part.query.view.data = shift(in.query, h);
  part.key.view.data = shift(in.key, 1);
  part.value.view.data = shift(in.value, 1);
  run_forward(*isa.kernels, make_params(single, part, alone), 1);
  check(std::memcmp(
            static_cast<char*>(first.output.view.data) + first.output.index(b, h, 0, 0) * size_of(dtype),
            alone.output.view.data, static_cast<size_t>(lq * c.value_dim * size_of(dtype))) == 0,
        std::string(isa.name) + " same bits alone, Lq " + std::to_string(lq) + " Lk " + std::to_string(lk));
}

// Weights far below the smallest float16 or 2^-24 are still right to four digits.
void small_weights(const cpu::KernelSet& isa) {
  Case c;
  c.batch = c.query_heads = c.key_heads = 1;
  c.query_len = 40, c.key_len = 3, c.head_dim = 1, c.value_dim = 1;
  c.weights = true;
  Inputs in = make_inputs(c, 3);
  in.query.fill([] { return 1.0; });
  const double keys[] = {0, -60, -85};
  for (int64_t j = 0; j < 3; ++j) in.key.set(0, 0, j, 0, keys[j]);
  Outputs out;
  run_forward(*isa.kernels, make_params(c, in, out), 1);
  for (int64_t j = 0; j < 3; ++j) {
    const double want = std::exp(keys[j]);
    check(std::fabs(out.weights.at(0, 0, 0, j) / want - 1) < 1e-4, std::string(isa.name) + " small weight");
  }
}

// A row whose bias is the lowest finite value everywhere is not dead: it attends to all keys alike.
void lowest_bias(const cpu::KernelSet& isa) {
  Case c;
  c.batch = c.query_heads = c.key_heads = 1;
  c.mask = "rc";
  c.mask_kind = ScalarKind::kFloat32;
  Inputs in = make_inputs(c, 3);
  in.mask.fill([] { return -static_cast<double>(std::numeric_limits<float>::max()); });
  Outputs out;
  run_forward(*isa.kernels, make_params(c, in, out), 1);
  for (int64_t d = 0; d < c.value_dim; ++d) {
    double mean = 0;
    for (int64_t j = 0; j < c.key_len; ++j) mean += in.value.at(0, 0, j, d) / static_cast<double>(c.key_len);
    check(std::fabs(out.output.at(0, 0, 1, d) - mean) < 1e-5, std::string(isa.name) + " lowest bias");
  }
  check(out.lse.at(0, 0, 0, 1) == -static_cast<double>(std::numeric_limits<float>::max()),
        std::string(isa.name) + " lse of the lowest bias");
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
      const auto& ways = kernels_of(*isa.kernels, dtype).forward.of;
      int64_t expected = 0;
      for (int path = 0; path < cpu::kForwardPaths; ++path) {
        const bool by_unit = path == static_cast<int>(cpu::ForwardPath::kUnitRows);
        expected += ways[path].run != nullptr && (!by_unit || cpu::matrix_unit_is_there());
      }
      check(static_cast<int64_t>(paths.size()) == expected,
            std::string(isa.name) + ": a path that no case takes");
    }
    for (const int64_t lq : {1, 5, 100}) {
      for (const int64_t lk : {60, 300, 1100, 1700}) {
        for (const bool causal : {false, true}) {
          const double work = 3000.0 * static_cast<double>(lq * lk);
          if (selection.takes("same bits", work)) same_bits(isa, dtype, lq, lk, causal);
        }
      }
    }
  }
  check(most_heads_beside > 1 || !selection.is_whole() || !has_own_kernels(isa, ScalarKind::kFloat32),
        std::string(isa.name) + ": no case reads heads beside each other");
  small_weights(isa);
  lowest_bias(isa);
  return count;
}

}  // namespace
}  // namespace attn_ext::test

int main(int argc, char** argv) {
  return attn_ext::test::run_tests(argc, argv, attn_ext::test::run_all);
}
