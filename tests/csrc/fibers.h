// Many threads that take turns on one: each has a stack of its own, and goes on until it gives way. So they
// wait for each other without the system, which would take microseconds for each time.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)  // GCC's word for it
#define FIBERS_UNDER_ADDRESS_SANITIZER
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)  // Clang's
#define FIBERS_UNDER_ADDRESS_SANITIZER
#endif
#endif
#if defined(FIBERS_UNDER_ADDRESS_SANITIZER)
#include <sanitizer/common_interface_defs.h>
#endif

class Fibers {
 public:
  /// body(i) for i of [0, count). Some that are neighbours go on as far as they can without the others, the
  /// first or the last of them first, then some others, as chance has it: what may be done in any order is
  /// done in many.
  void run(int count, const std::function<void(int)>& body) {
    while (fibers_.size() < static_cast<size_t>(count)) fibers_.push_back(std::make_unique<Fiber>());
    body_ = &body;
    left_ = count;
    for (int i = 0; i < count; ++i) begin(*fibers_[static_cast<size_t>(i)]);
    while (left_ > 0) {
      const int first = below(count), some = 1 + below(count);
      while (take_turns(first, some, count)) {
      }
      if (!take_turns(0, count, count) && left_ > 0) {
        std::fprintf(stderr, "threads wait for each other for ever\n");
        std::abort();
      }
    }
  }

  /// Of the one that runs: which it is, and that the others go on first.
  int current() const { return current_; }
  void give_way() {
    Fiber& own = *fibers_[static_cast<size_t>(current_)];
    leave(own.context, main_, &own.fake_stack, main_stack_, main_size_);
  }

  /// Until all of `size` have come here.
  class Barrier {
   public:
    Barrier(Fibers& fibers, int size) : fibers_(fibers), size_(size) {}
    void wait() {
      const long phase = phase_;
      if (++arrived_ == size_) {
        arrived_ = 0;
        ++phase_;
        fibers_.progress_ = true;
      }
      while (phase_ == phase) fibers_.give_way();
    }

   private:
    Fibers& fibers_;
    const int size_;
    int arrived_ = 0;
    long phase_ = 0;
  };

 private:
  int below(int n) { return static_cast<int>(chance_() % static_cast<unsigned>(n)); }

  // Once each those from `first` on, `some` of `count`; whether that was of any use to one of them.
  bool take_turns(int first, int some, int count) {
    progress_ = false;
    const bool forwards = below(2) == 0;
    for (int i = 0; i < some; ++i) resume((first + (forwards ? i : some - 1 - i)) % count);
    return progress_;
  }

  static constexpr size_t kStackBytes = size_t{1}
                                        << 16;  // which a sanitizer clears the shadow of at each turn

  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    void* fake_stack = nullptr;  // the sanitizer's
    bool has_ended = false;
  };

  void begin(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &main_;
    fiber.has_ended = false;
    const auto self = reinterpret_cast<uintptr_t>(this);  // in two words: arguments are ints
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::enter), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
  }

  static void enter(unsigned high, unsigned low) {
    auto* const self = reinterpret_cast<Fibers*>(static_cast<uintptr_t>(high) << 32 | low);
#if defined(FIBERS_UNDER_ADDRESS_SANITIZER)
    __sanitizer_finish_switch_fiber(nullptr, &self->main_stack_, &self->main_size_);
#endif
    (*self->body_)(self->current_);
    self->fibers_[static_cast<size_t>(self->current_)]->has_ended = true;
    self->progress_ = true;
    --self->left_;
#if defined(FIBERS_UNDER_ADDRESS_SANITIZER)
    __sanitizer_start_switch_fiber(nullptr, self->main_stack_, self->main_size_);
#endif
  }

  void resume(int i) {
    Fiber& fiber = *fibers_[static_cast<size_t>(i)];
    if (fiber.has_ended) return;
    current_ = i;
    void* fake_stack = nullptr;
    leave(main_, fiber.context, &fake_stack, fiber.stack.get(), kStackBytes);
  }

  // From one to the other, until something comes back; of which it is to tell the sanitizer.
  static void leave(ucontext_t& from, ucontext_t& to, [[maybe_unused]] void** fake_stack,
                    [[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes) {
#if defined(FIBERS_UNDER_ADDRESS_SANITIZER)
    __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#endif
    swapcontext(&from, &to);
#if defined(FIBERS_UNDER_ADDRESS_SANITIZER)
    __sanitizer_finish_switch_fiber(*fake_stack, nullptr, nullptr);
#endif
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  const std::function<void(int)>* body_ = nullptr;
  ucontext_t main_;
  const void* main_stack_ = nullptr;
  size_t main_size_ = 0;
  std::minstd_rand chance_;
  int current_ = 0, left_ = 0;
  bool progress_ = false;
};
