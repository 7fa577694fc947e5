// What the tests of files share: a folder that goes with its test, and what an error said.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "mlxtape/base/error.h"
#include "support/temp_folder.h"

namespace mlxtape::formats {

// What fn throws says, with `folder/` taken out so that it can be compared; the code must be this one.
template <class Fn>
std::string message_of(Fn&& fn, Errc code = Errc::kIo, const std::string& folder = "") {
  try {
    fn();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    std::string text = e.what();
    for (std::size_t at = 0; !folder.empty() && (at = text.find(folder)) != std::string::npos;) {
      text.erase(at, folder.size());
    }
    return text;
  }
  return "no error";
}

using test::put;
using test::TempFolder;

// The values of tests/formats/make_golden.py, in the type of zero.
template <class T>
T golden_value(std::int64_t i, T zero) {
  const int v = static_cast<int>((7 * i + 3) % 11);
  if constexpr (std::is_same_v<T, bool>)
    return v % 2 == 1;
  else if constexpr (std::is_unsigned_v<T>)
    return static_cast<T>(v);
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(v - 5);
  else
    return static_cast<T>(static_cast<float>(v - 5) / 2 + static_cast<float>(zero));
}

}  // namespace mlxtape::formats
