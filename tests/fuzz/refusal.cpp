#include "fuzz/targets.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::fuzz {

void check_refusal(const Error& error) {
  const std::string_view message = error.what();
  constexpr std::size_t kMostBytes = 4000;
  check(!message.empty(), "an error says what is wrong");
  const std::string shown = escaped(message.substr(0, kMostBytes));
  check(message.size() <= kMostBytes, "an error is short", shown);
  check(shown == message, "an error is one line without control characters", shown);
  switch (error.code()) {
    case Errc::kShape:
    case Errc::kDType:
    case Errc::kArgument:
    case Errc::kIo: return;
    default:
      check(false,
            std::string("a file is refused for what it holds, not for ") + name_of(error.code()),
            shown);
  }
}

}  // namespace mlxtape::fuzz
