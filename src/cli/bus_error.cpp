#include "bus_error.h"

#include <csignal>
#include <cstring>

#include <unistd.h>

#include "command.h"
#include "mlxtape/base/mapped_ranges.h"

namespace mlxtape::cli {

namespace {

struct sigaction before{};

#ifdef __APPLE__
constexpr bool kSaysWhoSent = false;  // every SIGBUS comes with the code and the address of a fault
#else
constexpr bool kSaysWhoSent = true;
#endif

// Only what a handler may call.
extern "C" void on_bus_error(int number, siginfo_t* info, void*) {
  const char* file = info->si_code > 0 ? mapped_file_at(info->si_addr) : nullptr;
  if (file == nullptr) {
    ::sigaction(number, &before, nullptr);
    // Sent by somebody; else what is wrong happens again.
    if (info->si_code <= 0 || !kSaysWhoSent) ::raise(number);
    return;
  }
  for (const char* part :
       {"mlxtape: ", file,
        ": was truncated or became unreadable while in use; copy the file again, "
        "and do not change it during a run\n"}) {
    // Nothing can be done here about a terminal that is gone.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, part, std::strlen(part));
  }
  ::_exit(kFailed);
}

}  // namespace

void tell_bus_errors() {
  struct sigaction action{};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);  // without ::, for it is a macro on macOS
  ::sigaction(SIGBUS, &action, &before);
}

}  // namespace mlxtape::cli
