// Attends to sequences of different lengths that lie one after the other, and to keys in two parts, and
// checks each sequence against a call of its own.
#include <attn_ext/attn_ext.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <vector>

namespace {

constexpr int64_t kHeads = 4, kDim = 8;

bool check(const char* name, const at::Tensor& actual, const at::Tensor& expected, double tolerance) {
  const double difference = (actual - expected).abs().max().item<double>();
  std::cout << name << ": largest difference " << difference << "\n";
  return difference <= tolerance;
}

/// Rows of one sequence, heads first, as sdpa takes them.
at::Tensor rows_of(const at::Tensor& packed, int64_t begin, int64_t end) {
  return packed.slice(0, begin, end).transpose(0, 1);
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const std::vector<int64_t> begins{0, 5, 6, 26};
  const at::Tensor starts = torch::tensor(begins);
  const auto random = [&] { return torch::randn({begins.back(), kHeads, kDim}); };
  const at::Tensor query = random().requires_grad_(), key = random(), value = random();

  const auto [output, lse] = attn_ext::sdpa_packed_with_lse(query, key, value, starts, {.is_causal = true});
  const at::Tensor grad_query = torch::autograd::grad({output.square().sum()}, {query}).front();

  bool right =
      check("sdpa_packed", attn_ext::sdpa_packed(query, key, value, starts, {.is_causal = true}), output, 0);
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    const auto rows = [&](const at::Tensor& packed) { return rows_of(packed, begins[i], begins[i + 1]); };
    const at::Tensor own = rows(query).detach().requires_grad_();
    const at::Tensor alone = attn_ext::sdpa(own, rows(key), rows(value), {.is_causal = true});
    const at::Tensor grad = torch::autograd::grad({alone.square().sum()}, {own}).front();
    right = check("a sequence", rows(output), alone, 0) && right;
    right = check("its gradient", rows(grad_query), grad, 1e-5) && right;
  }

  // The same queries have attended to other keys elsewhere.
  const at::Tensor other_key = random(), other_value = random();
  const auto [other, other_lse] = attn_ext::sdpa_packed_with_lse(query, other_key, other_value, starts);
  const auto [merged, merged_lse] = attn_ext::merge_partials({output, other}, {lse.t(), other_lse.t()});
  const at::Tensor share = at::sigmoid(other_lse - lse).t().unsqueeze(-1);
  right = check("merge_partials", merged, at::lerp(output, other, share), 1e-5) && right;
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
