// GGUF files put together byte by byte, right or wrong as a test wants them.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace mlxtape::formats::gguf_test {

template <class T>
std::string raw(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
inline std::string text(std::string_view value) {
  return raw<std::uint64_t>(value.size()) + std::string(value);
}

struct Raw {
  std::string metadata, tensors, data;
  std::uint64_t keys = 0, count = 0;
  std::uint32_t version = 3;

  // value: the bytes behind the type.
  Raw& key(std::string_view name, std::uint32_t type, const std::string& value) {
    metadata += text(name) + raw(type) + value;
    ++keys;
    return *this;
  }
  Raw& u32(std::string_view name, std::uint32_t value) { return key(name, 4, raw(value)); }
  Raw& string(std::string_view name, std::string_view value) { return key(name, 8, text(value)); }
  Raw& array(std::string_view name, std::uint32_t of, std::uint64_t size,
             const std::string& values) {
    return key(name, 9, raw(of) + raw(size) + values);
  }

  Raw& tensor(std::string_view name, std::vector<std::uint64_t> dims, std::uint32_t type,
              std::uint64_t offset) {
    tensors += text(name) + raw(static_cast<std::uint32_t>(dims.size()));
    for (const std::uint64_t dim : dims) tensors += raw(dim);
    tensors += raw(type) + raw(offset);
    ++count;
    return *this;
  }

  std::string head() const {
    return "GGUF" + raw(version) + raw(count) + raw(keys) + metadata + tensors;
  }
  std::string file(std::size_t alignment = 32) const {
    std::string bytes = head();
    bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
    return bytes + data;
  }
};

}  // namespace mlxtape::formats::gguf_test
