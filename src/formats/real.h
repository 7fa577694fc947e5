// A number's digits as a double, in no locale. The digits are a number by the grammar of who asks:
// an optional minus, digits, perhaps a point and an exponent.
#pragma once

#include <string_view>

namespace mlxtape::formats {

// False, and value unchanged: beyond the range of double, or not 0 but nearer to 0 than any double.
bool to_real(std::string_view digits, double& value);

// The same by the C library, for a C++ library whose std::from_chars reads no double (cmake/flags.cmake
// looks). In every build, so that the tests of any machine compare the two.
bool to_real_by_c(std::string_view digits, double& value);

}  // namespace mlxtape::formats
