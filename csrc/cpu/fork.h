// Calls in a child process made by fork().
#pragma once

namespace attn_ext::cpu {

/// While it lives, one thread does all the work, if this process is a fork's child: the threads of OpenMP
/// stay behind in the parent, and GCC's runtime would wait for them forever.
class OneThreadInForkedChild {
 public:
  OneThreadInForkedChild();
  ~OneThreadInForkedChild();
  OneThreadInForkedChild(const OneThreadInForkedChild&) = delete;
  OneThreadInForkedChild& operator=(const OneThreadInForkedChild&) = delete;

 private:
  int threads_before_ = 0;  // 0: nothing to put back
};

}  // namespace attn_ext::cpu
