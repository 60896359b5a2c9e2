// Calls in a child process made by fork().
#pragma once

namespace attn_ext::cpu {

// A child has the one thread that called fork(). GCC's OpenMP runtime does not know: it would wait for ever
// for the threads that stood ready for that thread's next parallel region. So these are ended just before the
// fork, and parent and child alike start new ones when they need them. What other threads of the parent left
// behind, no thread of the child ever asks for.

/// Whether this process is a fork's child and the threads could not be ended: fork() was called inside a
/// parallel region.
bool only_one_thread_is_safe();

/// While it lives, one thread does all the work where only_one_thread_is_safe.
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
