// Fibers: stacks, and the few instructions that go from one to another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mlxtape::emulator {

// Leaves the stack that runs, noting in *save where it goes on, for what was noted in to.
extern "C" void mlxtape_switch_fiber(void** save, void* to);

// As many stacks as one threadgroup has threads, each behind a page that cannot be touched.
class Stacks {
 public:
  explicit Stacks(std::uint32_t count);
  ~Stacks();
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  std::uint32_t take();
  void give_back(std::uint32_t stack) { free_.push_back(stack); }
  void give_back_all();
  // What to switch to for main to begin on this stack. It must not return.
  void* prepare(std::uint32_t stack, void (*main)());

  const char* low(std::uint32_t stack) const { return base_ + stack * kStride + kGuard; }
  const char* high(std::uint32_t stack) const { return base_ + (stack + 1) * kStride; }
  bool holds(const void* address) const {
    return address >= base_ && address < base_ + count_ * kStride;
  }

 private:
  static constexpr std::size_t kGuard = std::size_t{16} << 10;  // a page of any machine
  static constexpr std::size_t kStride = kGuard + (std::size_t{128} << 10);

  char* base_;
  std::uint32_t count_;
  std::uint32_t opened_ = 0;  // stacks that can be touched
  std::vector<std::uint32_t> free_;
};

}  // namespace mlxtape::emulator
