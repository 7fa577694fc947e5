#include "interrupt.h"

#include <csignal>

#include <array>
#include <atomic>
#include <cstring>

#include <unistd.h>

#include "command.h"

namespace mlxtape::cli {

namespace {

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};

std::atomic<int> first{0};
// A terminal that goes away may send SIGHUP twice, and a service manager another one behind SIGTERM: only who asks twice by
// the other two wants the end at once.
std::atomic<bool> was_told{false};
std::atomic<const char*> message{""};
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
              std::atomic<const char*>::is_always_lock_free);  // a handler may use nothing else
std::array<struct sigaction, kSignals.size()> before{};

void say(const char* text) {
  // Nothing can be done in a handler about a terminal that is gone.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

extern "C" void on_signal(int number) {
  if (number != SIGHUP && was_told.exchange(true)) ::_exit(kInterrupted);
  int none = 0;
  if (!first.compare_exchange_strong(none, number)) return;
  const char* says = message.load();
  if (*says == '\0') return;
  say("\nmlxtape: ");
  say(says);
  say(number == SIGHUP ? "\n" : "; press Ctrl-C again to quit at once\n");
}

}  // namespace

Interrupts::Interrupts(const char* says) {
  forget();
  message = says;
  struct sigaction action{};
  action.sa_handler = on_signal;  // without SA_RESTART: a read from a terminal returns
  sigemptyset(&action.sa_mask);   // without ::, for it is a macro on macOS
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &before[i]);
    const bool is_nohup = kSignals[i] == SIGHUP && before[i].sa_handler == SIG_IGN;
    if (!is_nohup) ::sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupts::~Interrupts() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before[i], nullptr);
}

bool Interrupts::asked() { return first != 0; }
int Interrupts::signal() { return first; }
void Interrupts::forget() {
  first = 0;
  was_told = false;
}

}  // namespace mlxtape::cli
