#include "fork.h"

#include <ATen/Parallel.h>
#include <pthread.h>

namespace attn_ext::cpu {

namespace {

bool is_forked_child = false;

[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });

}  // namespace

OneThreadInForkedChild::OneThreadInForkedChild() {
  if (is_forked_child) {
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
