#include "fork.h"

#include <ATen/Parallel.h>
#include <pthread.h>

#include "openmp.h"

namespace attn_ext::cpu {

namespace {

thread_local bool threads_were_ended = false;  // of the thread that forks, which is the child's only one
bool one_thread_is_safe = false;

void before_fork() {
  threads_were_ended = end_waiting_threads();
}

void in_child() {
  one_thread_is_safe = one_thread_is_safe || !threads_were_ended;
}

[[maybe_unused]] const int kRegistered = pthread_atfork(before_fork, nullptr, in_child);

}  // namespace

bool only_one_thread_is_safe() {
  return one_thread_is_safe;
}

OneThreadInForkedChild::OneThreadInForkedChild() {
  if (only_one_thread_is_safe()) {
    threads_before_ = at::get_num_threads();
    at::set_num_threads(1);  // of the matrix libraries too
  }
}

OneThreadInForkedChild::~OneThreadInForkedChild() {
  if (threads_before_ > 0) {
    at::set_num_threads(threads_before_);
  }
}

}  // namespace attn_ext::cpu
