// Loads a module that Python exported and compiled ahead of time (compile_module.py), runs it on two lengths,
// and checks the outputs against the answers saved beside it. There is no Python in this process. What is
// compiled this way runs forward only: a program that needs gradients takes TorchScript, as
// scripted_module.cpp does.
//
// Usage: compiled_module FOLDER
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

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
    std::cerr << "usage: compiled_module FOLDER\n";
    return 2;
  }
  const std::string folder = argv[1];
  torch::inductor::AOTIModelPackageLoader module(folder + "/module.pt2");
  const torch::jit::Module answers = torch::jit::load(folder + "/answers.pt");

  bool right = true;
  for (const std::string length : {"10", "100"}) {
    const at::Tensor input = answers.attr("input_" + length).toTensor();
    const at::Tensor output = module.run({input}).front();
    right &= check("output of length " + length, output, answers.attr("output_" + length).toTensor());
  }
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
}
