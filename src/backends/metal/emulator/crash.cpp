#include "backends/metal/emulator/crash.h"

#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "backends/metal/emulator/group.h"

namespace mlxtape::emulator {
namespace {

constexpr std::size_t kStackBytes = 32 << 10;

bool is_near(const void* address, const char* guard) {
  const auto* p = static_cast<const char*>(address);
  return p < guard && guard - p <= (16 << 10);
}

// Runs on a stack of its own: the fiber's may be what has run out.
void report(int signal, siginfo_t* info, void*) {
  char text[512] = "";
  if (running != nullptr && self != nullptr) {
    const bool overflow = is_near(info->si_addr, running->stacks().low(self->stack));
    std::snprintf(
        text, sizeof text, "metal emulator: %s, thread %u of threadgroup %u, %s %p\n",
        running->dispatch().kernel->name, self->index, running->linear(),
        overflow ? "needs more than 128 KB of private memory:" : "touches memory that is nobody's:",
        info->si_addr);
  }
  std::size_t length = 0;
  while (text[length] != '\0') ++length;
  if (length != 0 && write(STDERR_FILENO, text, length) < 0) _exit(3);
  // Back to what would have happened, when the access is tried again.
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  sigaction(signal, &plain, nullptr);
}

bool install() {
  for (const int signal : {SIGSEGV, SIGBUS}) {
    struct sigaction before = {};
    sigaction(signal, nullptr, &before);
    if ((before.sa_flags & SA_SIGINFO) != 0 || before.sa_handler != SIG_DFL) return false;
  }
  struct sigaction ours = {};
  ours.sa_sigaction = report;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  for (const int signal : {SIGSEGV, SIGBUS}) sigaction(signal, &ours, nullptr);
  return true;
}

}  // namespace

void name_crashes() {
  static const bool installed = install();
  thread_local char* stack = nullptr;
  if (!installed || stack != nullptr) return;
  stack = static_cast<char*>(std::malloc(kStackBytes));  // the thread's last use of it is its end
  stack_t where = {};
  where.ss_sp = stack;
  where.ss_size = kStackBytes;
  if (stack != nullptr) sigaltstack(&where, nullptr);
}

}  // namespace mlxtape::emulator
