// A place in a file of which only what is left of it can be read: no count from the file is used before it was compared with
// that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

class GgufCursor {
 public:
  GgufCursor(std::span<const std::byte> bytes, std::string source)
      : bytes_(bytes), source_(std::move(source)) {}

  std::size_t at() const { return at_; }
  std::size_t left() const { return bytes_.size() - at_; }

  template <class T>
  T number(const std::string& what) {
    T value{};
    std::memcpy(&value, take(sizeof value, what).data(), sizeof value);
    return value;
  }

  std::string_view string(const std::string& what) {
    const auto length = number<std::uint64_t>(what);
    const std::span<const std::byte> text = take(length, what);
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as text
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  std::span<const std::byte> take(std::uint64_t bytes, const std::string& what) {
    if (bytes > left()) {
      fail(what + " must lie in the file, got " + std::to_string(bytes) + " bytes where " +
           std::to_string(left()) + " are left");
    }
    const std::span<const std::byte> taken = bytes_.subspan(at_, bytes);
    at_ += bytes;
    return taken;
  }

  // So many things of at least that many bytes each must be left.
  void expect(std::uint64_t count, std::size_t least_bytes, const std::string& what) const {
    if (count <= left() / least_bytes) return;
    fail(what + " must fit in the file, got " + std::to_string(count) + " where " +
         std::to_string(left()) + " bytes are left");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Errc::kIo, source_ + ": " + what);
  }

 private:
  std::span<const std::byte> bytes_;
  std::string source_;
  std::size_t at_ = 0;
};

}  // namespace mlxtape::formats
