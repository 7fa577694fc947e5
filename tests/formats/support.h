// What the tests of files share: a folder that goes with its test, and what an error said.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "mlxtape/base/error.h"

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

struct TempFolder {
  TempFolder() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "mlxtape-formats-XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(path),
                                                  std::filesystem::directory_iterator()));
  }
  std::filesystem::path path;
};

// As write_whole, but does not wait for the disk.
inline void put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

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
