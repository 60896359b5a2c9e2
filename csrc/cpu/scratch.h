// The memory that a call works in.
#pragma once

#include <atomic>
#include <cstdint>
#include <new>

#include "huge_pages.h"

namespace attn_ext::cpu {

/// Memory for the time of a call, aligned for any vector. The blocks given back last are kept for the next
/// calls, since to touch fresh pages takes as long as a good part of a short call's work.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    if (bytes <= 0) {
      return;
    }
    const auto size = static_cast<size_t>(bytes) + kHeaderBytes;
    for (auto& slot : kept_) {
      Block* block = slot.exchange(nullptr);
      if (block != nullptr && block->size >= size) {
        block_ = block;
        return;
      }
      release(block);
    }
    block_ = allocate(size);
  }
  ~Scratch() {
    if (block_ == nullptr || block_->size > kKeptBytes) {
      release(block_);
      return;
    }
    for (auto& slot : kept_) {
      block_ = slot.exchange(block_);
    }
    release(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const { return block_ == nullptr ? nullptr : reinterpret_cast<char*>(block_) + kHeaderBytes; }

 private:
  struct Block {
    size_t size;  // with this header
    std::align_val_t alignment;
  };
  static constexpr size_t kHeaderBytes = 64;
  static constexpr size_t kKeptBytes = size_t{1} << 25;  // of a block, at most

  static Block* allocate(size_t size) {
    const bool huge = size >= kHugePage;
    const std::align_val_t alignment{huge ? kHugePage : kHeaderBytes};
    size = huge ? (size + kHugePage - 1) / kHugePage * kHugePage : size;
    void* memory = ::operator new(size, alignment);
    if (huge) {
      ask_for_huge_pages(memory, size);
    }
    return new (memory) Block{size, alignment};
  }
  static void release(Block* block) {
    if (block != nullptr) {
      ::operator delete(block, block->alignment);
    }
  }

  static inline std::atomic<Block*> kept_[2] = {};
  Block* block_ = nullptr;
};

}  // namespace attn_ext::cpu
