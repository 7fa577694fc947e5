#include "backends/metal/emulator/fibers.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

// Only what a function must leave as it found it is kept. Floating-point modes are the worker's and the same for all.
#if defined(__x86_64__)
asm(R"(
.text
.globl mlxtape_switch_fiber
.type mlxtape_switch_fiber, @function
mlxtape_switch_fiber:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size mlxtape_switch_fiber, . - mlxtape_switch_fiber
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl mlxtape_switch_fiber
.type mlxtape_switch_fiber, %function
mlxtape_switch_fiber:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size mlxtape_switch_fiber, . - mlxtape_switch_fiber
)");
#else
#error "fibers are switched on x86-64 and aarch64 alone: configure with MLXTAPE_METAL=OFF"
#endif

namespace mlxtape::emulator {
namespace {

// Stacks that begin at the same place of a page fight for one set of the cache: with 1024 of them a switch took four times
// as long. So each begins a little lower than the one before.
constexpr std::size_t kColours = 61;
constexpr std::size_t kColour = 320;

}  // namespace

Stacks::Stacks(std::uint32_t count) : count_(count) {
  void* memory =
      mmap(nullptr, count * kStride, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<char*>(memory);
  free_.reserve(count);
}

Stacks::~Stacks() { munmap(base_, count_ * kStride); }

std::uint32_t Stacks::take() {
  if (!free_.empty()) {
    const std::uint32_t stack = free_.back();
    free_.pop_back();
    return stack;
  }
  const std::uint32_t stack = opened_;
  if (stack == count_ ||
      mprotect(base_ + stack * kStride + kGuard, kStride - kGuard, PROT_READ | PROT_WRITE) != 0) {
    throw std::bad_alloc();
  }
  ++opened_;
  return stack;
}

void Stacks::give_back_all() {
  free_.clear();
  for (std::uint32_t stack = opened_; stack > 0; --stack) free_.push_back(stack - 1);
}

void* Stacks::prepare(std::uint32_t stack, void (*main)()) {
  char* top = base_ + (stack + 1) * kStride - stack % kColours * kColour;
#if defined(__x86_64__)
  // Popped: six registers, the address of main, and the address that main would return to.
  auto* at = reinterpret_cast<void**>(top) - 8;
  std::memset(at, 0, 8 * sizeof(void*));
  at[6] = reinterpret_cast<void*>(main);
#else
  auto* at = reinterpret_cast<void**>(top) - 20;
  std::memset(at, 0, 20 * sizeof(void*));
  at[11] = reinterpret_cast<void*>(main);  // x30
#endif
  return at;
}

}  // namespace mlxtape::emulator
