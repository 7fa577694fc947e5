#include "mlxtape/formats/gguf_write.h"

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <set>

#include "formats/gguf_split.h"
#include "formats/utf8.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

namespace {

constexpr const char* kWho = "gguf";
constexpr const char* kAlignment = "general.alignment";
constexpr std::uint32_t kUsualAlignment = 32;
constexpr std::size_t kMaxName = 63;  // what llama.cpp takes
constexpr std::int64_t kMaxDims = 4;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(Errc::kArgument, std::string(kWho) + ": " + path + ": " + what);
}

template <class T>
void put_number(std::string& out, T value) {
  std::array<char, sizeof value> bytes{};
  std::memcpy(bytes.data(), &value, sizeof value);
  out.append(bytes.data(), bytes.size());
}

void put_text(std::string& out, std::string_view text) {
  put_number(out, static_cast<std::uint64_t>(text.size()));
  out += text;
}

void put_one(std::string& out, const std::string& value) { put_text(out, value); }
void put_one(std::string& out, bool value) { out += static_cast<char>(value ? 1 : 0); }
template <class T>
void put_one(std::string& out, T value) {
  put_number(out, value);
}

// GgufValueType by the C++ type.
std::uint32_t type_of(std::uint16_t) { return 2; }
std::uint32_t type_of(std::uint32_t) { return 4; }
std::uint32_t type_of(std::int32_t) { return 5; }
std::uint32_t type_of(float) { return 6; }
std::uint32_t type_of(bool) { return 7; }
std::uint32_t type_of(const std::string&) { return 8; }
std::uint32_t type_of(std::uint64_t) { return 10; }

template <class T>
void put_value(std::string& out, const T& value) {
  put_number(out, type_of(value));
  put_one(out, value);
}
template <class T>
void put_value(std::string& out, const std::vector<T>& values) {
  put_number(out, std::uint32_t{9});
  put_number(out, type_of(T{}));
  put_number(out, static_cast<std::uint64_t>(values.size()));
  for (const T& value : values) put_one(out, value);
}

std::size_t padded(std::size_t bytes, std::size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// The bytes of a tensor; fails where it can be none.
std::size_t checked_bytes(const std::string& path, const GgufTensorToWrite& tensor) {
  const std::string what = "tensor \"" + shown(tensor.name) + "\"";
  if (tensor.name.empty() || tensor.name.size() > kMaxName || !is_valid_utf8(tensor.name)) {
    fail(path, what + " must have a name of UTF-8 of 1 to 63 bytes");
  }
  const GgufTypeInfo& info = info_of(tensor.type);
  const auto elements = element_count(tensor.shape);
  const bool right = tensor.shape.rank() >= 1 && tensor.shape.rank() <= kMaxDims && elements &&
                     *elements > 0 && tensor.shape.back() % info.block == 0;
  const auto bytes =
      right ? checked_mul(*elements / info.block, info.bytes) : std::optional<std::int64_t>();
  if (!bytes) {
    fail(path, what + " must have 1 to 4 dimensions and rows of whole blocks of " +
                   std::to_string(info.block) + " for " + info.name + ", got " +
                   to_string(tensor.shape));
  }
  return static_cast<std::size_t>(*bytes);
}

using Tensors = std::span<const GgufTensorToWrite>;

std::vector<Tensors> parts_of(const std::string& path, Tensors tensors,
                              const GgufWriteOptions& options) {
  std::vector<Tensors> parts;
  std::size_t begin = 0, bytes = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t more = checked_bytes(path, tensors[i]);
    if (options.part_bytes > 0 && i > begin && bytes + more > options.part_bytes) {
      parts.push_back(tensors.subspan(begin, i - begin));
      begin = i;
      bytes = 0;
    }
    bytes += more;
  }
  parts.push_back(tensors.subspan(begin));
  return parts;
}

std::string head_of(const std::string& path, std::span<const GgufKey> keys, Tensors tensors,
                    std::size_t alignment) {
  std::string out = "GGUF";
  put_number(out, std::uint32_t{3});
  put_number(out, static_cast<std::uint64_t>(tensors.size()));
  put_number(out, static_cast<std::uint64_t>(keys.size()));
  for (const GgufKey& key : keys) {
    put_text(out, key.key);
    std::visit([&](const auto& value) { put_value(out, value); }, key.value);
  }
  std::size_t offset = 0;
  for (const GgufTensorToWrite& tensor : tensors) {
    put_text(out, tensor.name);
    put_number(out, static_cast<std::uint32_t>(tensor.shape.rank()));
    for (std::int64_t i = tensor.shape.rank(); i > 0; --i) {
      put_number(out, static_cast<std::uint64_t>(tensor.shape[i - 1]));
    }
    put_number(out, static_cast<std::uint32_t>(tensor.type));
    put_number(out, static_cast<std::uint64_t>(offset));
    offset += padded(checked_bytes(path, tensor), alignment);
  }
  out.resize(padded(out.size(), alignment));
  return out;
}

void write_part(WholeFile& file, const std::string& path, std::span<const GgufKey> keys,
                Tensors tensors, std::size_t alignment) {
  file.write(head_of(path, keys, tensors, alignment));
  for (const GgufTensorToWrite& tensor : tensors) {
    std::size_t written = 0;
    tensor.data([&](std::span<const std::byte> piece) {
      written += piece.size();
      // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as the file's text
      file.write({reinterpret_cast<const char*>(piece.data()), piece.size()});
    });
    const std::size_t want = checked_bytes(path, tensor);
    MT_ASSERT(written == want);
    file.write(std::string(padded(want, alignment) - want, '\0'));
  }
}

void check_keys(const std::string& path, std::span<const GgufKey> keys, Tensors tensors) {
  const auto check = [&](std::string_view text, const std::string& what) {
    if (!is_valid_utf8(text)) fail(path, what + " must be UTF-8, got " + shown(text));
  };
  std::set<std::string_view> seen;
  for (const GgufKey& key : keys) {
    check(key.key, "a key");
    const bool wrong = key.key.empty() || key.key.size() > 65535 || key.key == kAlignment ||
                       key.key.starts_with("split.");
    if (wrong || !seen.insert(key.key).second) {
      fail(path, "key \"" + shown(key.key) +
                     "\" must come once, and not be one that the writer sets itself");
    }
    if (const auto* text = std::get_if<std::string>(&key.value)) check(*text, key.key);
    if (const auto* texts = std::get_if<std::vector<std::string>>(&key.value)) {
      for (const std::string& text : *texts) check(text, key.key);
    }
  }
  seen.clear();
  for (const GgufTensorToWrite& tensor : tensors) {
    if (seen.insert(tensor.name).second) continue;
    fail(path, "tensor \"" + shown(tensor.name) + "\" must come once");
  }
}

}  // namespace

std::vector<std::string> write_gguf(const std::string& path, std::span<const GgufKey> keys,
                                    std::span<const GgufTensorToWrite> tensors,
                                    const GgufWriteOptions& options) {
  check_keys(path, keys, tensors);
  if (!std::has_single_bit(options.alignment) || options.alignment > (1U << 20U)) {
    fail(path, "the alignment must be a power of 2 up to 1048576, got " +
                   std::to_string(options.alignment));
  }
  const std::vector<Tensors> parts = parts_of(path, tensors, options);
  if (parts.size() > 65535) {
    fail(path, "there must be at most 65535 parts, got " + std::to_string(parts.size()));
  }
  std::string stem = path;
  if (is_gguf_path(path)) stem.resize(path.size() - std::string_view(".gguf").size());
  std::vector<std::string> paths;
  std::vector<std::unique_ptr<WholeFile>> files;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<GgufKey> of_part;
    if (i == 0) of_part.assign(keys.begin(), keys.end());
    if (options.alignment != kUsualAlignment) of_part.push_back({kAlignment, options.alignment});
    if (parts.size() > 1) {
      of_part.push_back({"split.no", static_cast<std::uint16_t>(i)});
      of_part.push_back({"split.count", static_cast<std::uint16_t>(parts.size())});
      of_part.push_back({"split.tensors.count", static_cast<std::int32_t>(tensors.size())});
    }
    paths.push_back(parts.size() == 1 ? path : part_path(stem, i, parts.size()));
    files.push_back(std::make_unique<WholeFile>(paths.back(), kWho));
    write_part(*files.back(), paths.back(), of_part, parts[i], options.alignment);
  }
  // The first is what a model is opened by: it comes last.
  for (std::size_t i = files.size(); i > 0; --i) files[i - 1]->commit();
  return paths;
}

}  // namespace mlxtape::formats
