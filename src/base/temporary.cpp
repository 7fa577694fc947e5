#include "mlxtape/base/temporary.h"

#include <unistd.h>

#include <atomic>
#include <string_view>

namespace mlxtape {

namespace {

constexpr std::string_view kMiddle = ".tmp";

}  // namespace

std::string temporary_path(const std::string& path) {
  static std::atomic<unsigned> number{0};  // two threads may write the same path
  return path + std::string(kMiddle) + std::to_string(getpid()) + "." +
         std::to_string(number.fetch_add(1));
}

std::optional<Temporary> temporary_named(const std::string& name) {
  const std::size_t at = name.rfind(kMiddle);
  if (at == std::string::npos || at == 0) return std::nullopt;
  const std::string_view rest = std::string_view(name).substr(at + kMiddle.size());
  if (rest.empty() || rest.find_first_not_of("0123456789.") != std::string_view::npos) {
    return std::nullopt;
  }
  return Temporary{name.substr(0, at)};
}

}  // namespace mlxtape
