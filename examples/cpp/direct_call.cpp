// Calls the operator from C++, takes a gradient through it, and checks both against plain ATen.
#include <attn_ext/attn_ext.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <iostream>

namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kLength = 6, kDim = 8;

// softmax(Q K^T / sqrt(D) + causal mask) V
at::Tensor plain_causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const at::Tensor future = at::ones({kLength, kLength}, at::kBool).triu(1);
  const at::Tensor scores = at::matmul(query, key.transpose(-2, -1)) / std::sqrt(double(kDim));
  return at::matmul(scores.masked_fill(future, -INFINITY).softmax(-1), value);
}

bool check(const char* name, const at::Tensor& actual, const at::Tensor& expected) {
  const double difference = (actual - expected).abs().max().item<double>();
  std::cout << name << ": largest difference from plain ATen " << difference << "\n";
  return difference < 1e-5;
}

}  // namespace

int main() {
  torch::manual_seed(0);
  const auto random = [] { return torch::randn({kBatch, kHeads, kLength, kDim}); };
  const at::Tensor query = random().requires_grad_(), key = random(), value = random();

  const at::Tensor output = attn_ext::sdpa(query, key, value, {.is_causal = true});
  const at::Tensor grad_query = torch::autograd::grad({output.square().sum()}, {query}).front();

  const at::Tensor expected = plain_causal_attention(query, key, value);
  const at::Tensor expected_grad = torch::autograd::grad({expected.square().sum()}, {query}).front();
  const bool output_right = check("output", output, expected);
  const bool grad_right = check("gradient of the query", grad_query, expected_grad);
  return output_right && grad_right ? EXIT_SUCCESS : EXIT_FAILURE;
}
