// Blocks of memory taken and given back by several threads at once: each is its holder's alone.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "tasks.h"

namespace {

std::atomic<int> failures = 0;

void take_and_give_back(int thread) {
  constexpr int64_t kSizes[] = {1, 100, 5000, 70000, 3 << 20, 40 << 20};  // pages small and huge, kept or not
  for (int round = 0; round < 600; ++round) {
    const int64_t bytes = kSizes[(round * 7 + thread) % (round % 50 == 0 ? 6 : 5)];
    const attn_ext::cpu::Scratch memory(bytes);
    const int64_t touched = std::min<int64_t>(bytes, 4096);
    const char tag = static_cast<char>(thread * 50 + round % 50);
    for (char* part : {memory.data(), memory.data() + bytes - touched}) {
      std::memset(part, tag, static_cast<size_t>(touched));
    }
    std::this_thread::yield();
    for (const char* part : {memory.data(), memory.data() + bytes - touched}) {
      if (std::any_of(part, part + touched, [&](char c) { return c != tag; })) ++failures;
    }
    if (reinterpret_cast<uintptr_t>(memory.data()) % 64 != 0) ++failures;
  }
}

}  // namespace

int main() {
  std::vector<std::thread> team;
  for (int thread = 0; thread < 4; ++thread) team.emplace_back(take_and_give_back, thread);
  for (std::thread& thread : team) thread.join();
  std::printf("%d failures\n", failures.load());
  return failures != 0;
}
