#include "capability.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>

namespace attn_ext {

namespace {

constexpr const char* kVariable = "ATTN_EXT_CPU_CAPABILITY";

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

std::string choose() {
  const std::vector<std::string> available = available_cpu_capabilities();
  const char* forced = std::getenv(kVariable);
  if (forced == nullptr || *forced == '\0') {
    return available.back();
  }
  TORCH_CHECK(std::find(available.begin(), available.end(), forced) != available.end(), "attn_ext: expected ",
              kVariable, " to be one of ", join(available), " on this machine, but got ", forced);
  return forced;
}

}  // namespace

std::vector<std::string> available_cpu_capabilities() {
  return {"aten"};
}

const std::string& cpu_capability() {
  static const std::string capability = choose();
  return capability;
}

}  // namespace attn_ext
