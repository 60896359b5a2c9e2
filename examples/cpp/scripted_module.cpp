// Loads a module that Python scripted and saved (save_module.py), runs it forward and backward, and checks
// everything against the answer saved beside it. There is no Python in this process.
//
// Usage: scripted_module FOLDER
#include <torch/script.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>

namespace {

bool check(const std::string& name, const at::Tensor& actual, const at::Tensor& expected) {
  const double difference = (actual - expected).abs().max().item<double>();
  std::cout << name << ": largest difference from Python's answer " << difference << "\n";
  return difference < 1e-5;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: scripted_module FOLDER\n";
    return 2;
  }
  const std::string folder = argv[1];
  torch::jit::Module module = torch::jit::load(folder + "/module.pt");
  const torch::jit::Module answer = torch::jit::load(folder + "/answer.pt");
  const auto expected = [&answer](const std::string& name) { return answer.attr(name).toTensor(); };

  const at::Tensor input = expected("input").clone().requires_grad_();
  const at::Tensor output = module.forward({input}).toTuple()->elements()[0].toTensor();
  output.square().sum().backward();

  bool right = check("output", output, expected("output"));
  right &= check("grad_input", input.grad(), expected("grad_input"));
  for (const auto& parameter : module.named_parameters()) {
    std::string name = "grad_" + parameter.name;
    std::replace(name.begin(), name.end(), '.', '_');
    right &= check(name, parameter.value.grad(), expected(name));
  }
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
