// What an Arm processor has beyond armv8-a, as the operating system tells.
#pragma once

#if defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>

#include <string>
#endif

namespace attn_ext::cpu {

/// On Linux a bit of the first or the second word of capabilities, on macOS a name under hw.optional; nothing
/// that another system would be asked.
[[maybe_unused]] inline bool arm_cpu_has([[maybe_unused]] int word, [[maybe_unused]] int bit,
                                         [[maybe_unused]] const char* name) {
#if defined(__linux__)
  return (getauxval(word == 2 ? AT_HWCAP2 : AT_HWCAP) >> bit & 1) != 0;
#elif defined(__APPLE__)
  int value = 0;
  std::size_t size = sizeof(value);
  const std::string full = std::string("hw.optional.") + name;
  return sysctlbyname(full.c_str(), &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}

}  // namespace attn_ext::cpu

#endif
