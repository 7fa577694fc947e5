#include "formats/real.h"

#include <cerrno>
#include <charconv>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <string>
#include <system_error>

#include <locale.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

namespace mlxtape::formats {

bool to_real(std::string_view digits, double& value) {
#ifdef MLXTAPE_REAL_BY_C
  return to_real_by_c(digits, value);
#else
  return std::from_chars(digits.data(), digits.data() + digits.size(), value).ec == std::errc{};
#endif
}

bool to_real_by_c(std::string_view digits, double& value) {
  // The program's own locale may write a comma where the point is.
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", locale_t{});
  const std::string text(digits);  // the C function stops at a zero byte alone
  const int before = errno;
  errno = 0;
  const double read = strtod_l(text.c_str(), nullptr, plain);
  const bool beyond =
      errno == ERANGE && (read == 0 || std::isinf(read));  // subnormal numbers are fine
  errno = before;
  if (!beyond) value = read;
  return !beyond;
}

}  // namespace mlxtape::formats
