#include "interrupt.h"

#include <csignal>

#include <array>
#include <atomic>
#include <cstring>

#include <unistd.h>

#include "command.h"

namespace mlxtape::cli {

namespace {

constexpr std::array<int, 2> kSignals = {SIGINT, SIGTERM};

std::atomic<int> first{0};
std::atomic<const char*> message{""};
static_assert(std::atomic<int>::is_always_lock_free &&
              std::atomic<const char*>::is_always_lock_free);  // a handler may use nothing else
std::array<struct sigaction, kSignals.size()> before{};

void say(const char* text) {
  // Nothing can be done in a handler about a terminal that is gone.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

extern "C" void on_signal(int number) {
  int none = 0;
  if (!first.compare_exchange_strong(none, number)) ::_exit(kInterrupted);
  const char* says = message.load();
  if (*says == '\0') return;
  say("\nmlxtape: ");
  say(says);
  say("; again to end at once\n");
}

}  // namespace

Interrupts::Interrupts(const char* says) {
  first = 0;
  message = says;
  struct sigaction action{};
  action.sa_handler = on_signal;  // without SA_RESTART: a read from a terminal returns
  ::sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before[i]);
}

Interrupts::~Interrupts() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
}

bool Interrupts::asked() { return first != 0; }
int Interrupts::signal() { return first; }
void Interrupts::forget() { first = 0; }

}  // namespace mlxtape::cli
