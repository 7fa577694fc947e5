// The four kinds of fields that a protocol buffer has, one after the other. Bytes come from files: all that is wrong with
// them is an Error(kIo), "source: byte 12: what must hold, got what came".
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

#include "mlxtape/base/error.h"

namespace mlxtape::formats {

class ProtobufReader {
 public:
  ProtobufReader(std::string_view bytes, std::string source, std::size_t offset = 0)
      : bytes_(bytes), source_(std::move(source)), offset_(offset) {}

  // Goes on to the next field; false: there is none. What was not read of the last one is passed over.
  bool next() {
    if (!read_) skip();
    if (at_ == bytes_.size()) return false;
    const std::uint64_t key = take_varint();
    field_ = key >> 3, wire_ = static_cast<unsigned>(key & 7U), read_ = false;
    if (field_ == 0) fail("a field must have a number above 0");
    return true;
  }
  std::uint64_t field() const { return field_; }

  std::uint64_t varint() {
    expect(0, "a whole number");
    return take_varint();
  }
  std::int64_t integer() { return static_cast<std::int64_t>(varint()); }
  bool boolean() { return varint() != 0; }
  float real() {
    expect(5, "a float");
    return std::bit_cast<float>(static_cast<std::uint32_t>(take_fixed(4)));
  }
  std::string_view text() {
    expect(2, "text or a message");
    return take_block();
  }
  ProtobufReader message() {
    const std::string_view block = text();
    return {block, source_, offset_ + at_ - block.size()};
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(Errc::kIo, source_ + ": byte " + std::to_string(offset_ + at_) + ": " + what);
  }

 private:
  void expect(unsigned wire, const char* what) {
    if (wire_ != wire)
      fail("field " + std::to_string(field_) + " must be " + what + ", got wire type " +
           std::to_string(wire_));
    read_ = true;
  }
  void skip() {
    read_ = true;
    switch (wire_) {
      case 0: take_varint(); break;
      case 1: take_fixed(8); break;
      case 2: take_block(); break;
      case 5: take_fixed(4); break;
      default: fail("a wire type must be 0, 1, 2 or 5, got " + std::to_string(wire_));
    }
  }
  std::uint64_t take_varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (at_ == bytes_.size()) fail("a number must end within the message");
      const auto byte = static_cast<unsigned char>(bytes_[at_++]);
      value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
      if (byte < 0x80) return value;
    }
    fail("a number must have at most 10 bytes");
  }
  std::uint64_t take_fixed(std::size_t count) {
    if (bytes_.size() - at_ < count) fail("a number must end within the message");
    std::uint64_t value = 0;
    for (std::size_t i = count; i-- > 0;)
      value = value << 8 | static_cast<unsigned char>(bytes_[at_ + i]);
    at_ += count;
    return value;
  }
  std::string_view take_block() {
    const std::uint64_t length = take_varint();
    if (length > bytes_.size() - at_)
      fail("a block must end within the message, which has " + std::to_string(bytes_.size() - at_) +
           " bytes left, got " + std::to_string(length));
    at_ += length;
    return bytes_.substr(at_ - length, length);
  }

  std::string_view bytes_;
  std::string source_;
  std::size_t offset_, at_ = 0;
  std::uint64_t field_ = 0;
  unsigned wire_ = 0;
  bool read_ = true;
};

}  // namespace mlxtape::formats
