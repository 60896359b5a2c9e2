#include "fork.h"

#include <pthread.h>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace attn_ext::cpu {

namespace {

bool is_forked_child = false;

[[maybe_unused]] const int kRegistered = pthread_atfork(nullptr, nullptr, [] { is_forked_child = true; });

}  // namespace

OneThreadInForkedChild::OneThreadInForkedChild() {
#ifdef _OPENMP
  if (is_forked_child) {
    threads_before_ = omp_get_max_threads();
    omp_set_num_threads(1);
  }
#endif
}

OneThreadInForkedChild::~OneThreadInForkedChild() {
#ifdef _OPENMP
  if (threads_before_ > 0) {
    omp_set_num_threads(threads_before_);
  }
#endif
}

}  // namespace attn_ext::cpu
