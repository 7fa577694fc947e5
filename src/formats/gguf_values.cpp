// Metadata by key, and the names of parts.
#include <array>
#include <cstdio>
#include <cstring>
#include <limits>

#include "formats/gguf_cursor.h"
#include "formats/gguf_split.h"
#include "formats/utf8.h"
#include "mlxtape/base/quote.h"

namespace mlxtape::formats {

namespace {

constexpr const char* kWhole = "must be a whole number that fits in 63 bits";
constexpr const char* kNumber = "must be a number";

std::optional<std::int64_t> whole_of(const GgufValue& value) {
  if (const auto* set = std::get_if<std::int64_t>(&value.value)) return *set;
  const auto* large = std::get_if<std::uint64_t>(&value.value);
  const auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  if (large == nullptr || *large > most) return std::nullopt;
  return static_cast<std::int64_t>(*large);
}

template <class T>
T element(const GgufArray& array, std::uint64_t i) {
  T value{};
  std::memcpy(&value, array.bytes.data() + i * sizeof value, sizeof value);
  return value;
}

// Element i of an array of numbers as `value` would be of a key.
GgufValue element_of(const GgufArray& array, std::uint64_t i) {
  using T = GgufValueType;
  GgufValue result{array.of, {}};
  switch (array.of) {
    case T::kU8: result.value = std::int64_t{element<std::uint8_t>(array, i)}; break;
    case T::kI8: result.value = std::int64_t{element<std::int8_t>(array, i)}; break;
    case T::kU16: result.value = std::int64_t{element<std::uint16_t>(array, i)}; break;
    case T::kI16: result.value = std::int64_t{element<std::int16_t>(array, i)}; break;
    case T::kU32: result.value = std::int64_t{element<std::uint32_t>(array, i)}; break;
    case T::kI32: result.value = std::int64_t{element<std::int32_t>(array, i)}; break;
    case T::kI64: result.value = element<std::int64_t>(array, i); break;
    case T::kU64: result.value = element<std::uint64_t>(array, i); break;
    case T::kF32: result.value = static_cast<double>(element<float>(array, i)); break;
    case T::kF64: result.value = element<double>(array, i); break;
    case T::kBool: result.value = element<std::uint8_t>(array, i) == 1; break;
    default: result.value = std::string_view(); break;
  }
  return result;
}

std::optional<double> number_of(const GgufValue& value) {
  if (const auto* set = std::get_if<double>(&value.value)) return *set;
  if (const auto whole = whole_of(value)) return static_cast<double>(*whole);
  return std::nullopt;
}

// "-00001-of-00003.gguf" at the end of a path.
struct PartName {
  std::string stem;
  std::size_t part = 0, count = 0;
};
std::optional<PartName> part_named(const std::string& path) {
  constexpr std::size_t kEnd = sizeof("-00001-of-00003.gguf") - 1;
  if (path.size() <= kEnd) return std::nullopt;
  PartName name;
  name.stem = path.substr(0, path.size() - kEnd);
  const std::string end = path.substr(path.size() - kEnd);
  for (const std::size_t at : {1U, 10U}) {
    std::size_t number = 0;
    for (std::size_t i = at; i < at + 5; ++i) {
      if (end[i] < '0' || end[i] > '9') return std::nullopt;
      number = number * 10 + static_cast<std::size_t>(end[i] - '0');
    }
    (at == 1 ? name.part : name.count) = number;
  }
  if (name.part == 0 || name.part > name.count) return std::nullopt;
  if (part_path(name.stem, name.part - 1, name.count) != path) return std::nullopt;
  return name;
}

}  // namespace

// ---- values ----

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

std::optional<std::int64_t> GgufFile::whole(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto result = whole_of(*value);
  if (!result) fail_key(key, kWhole);
  return result;
}

std::optional<double> GgufFile::number(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto result = number_of(*value);
  if (!result) fail_key(key, kNumber);
  return result;
}

std::optional<bool> GgufFile::truth(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto* set = std::get_if<bool>(&value->value);
  if (set == nullptr) fail_key(key, "must be a bool");
  return *set;
}

std::optional<std::string_view> GgufFile::text(std::string_view key) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto* set = std::get_if<std::string_view>(&value->value);
  if (set == nullptr || !is_valid_utf8(*set)) fail_key(key, "must be a string of UTF-8");
  return *set;
}

bool GgufFile::is_array(std::string_view key) const {
  const GgufValue* value = find(key);
  return value != nullptr && value->type == GgufValueType::kArray;
}

const GgufArray* GgufFile::array(std::string_view key, const char* what) const {
  const GgufValue* value = find(key);
  if (value == nullptr) return nullptr;
  const auto* set = std::get_if<GgufArray>(&value->value);
  if (set == nullptr) fail_key(key, std::string("must be an array of ") + what);
  return set;
}

std::optional<std::vector<std::string_view>> GgufFile::texts(std::string_view key) const {
  const GgufArray* found = array(key, "strings");
  if (found == nullptr) return std::nullopt;
  if (found->of != GgufValueType::kString && found->count > 0) {
    fail("key \"" + shown(key) + "\" must be an array of strings, got one of " +
         name_of(found->of));
  }
  std::vector<std::string_view> result;
  result.reserve(found->count);  // of at least 8 bytes each in the file
  GgufCursor cursor(found->bytes, path_);
  for (std::uint64_t i = 0; i < found->count; ++i) result.push_back(cursor.string("a string"));
  return result;
}

std::optional<std::vector<std::int64_t>> GgufFile::wholes(std::string_view key) const {
  const GgufArray* found = array(key, "whole numbers");
  if (found == nullptr) return std::nullopt;
  std::vector<std::int64_t> result;
  for (std::uint64_t i = 0; i < found->count; ++i) {
    const auto value = whole_of(element_of(*found, i));
    if (!value) {
      fail("key \"" + shown(key) + "\" must be an array of whole numbers, got one of " +
           name_of(found->of));
    }
    result.push_back(*value);
  }
  return result;
}

std::optional<std::vector<double>> GgufFile::numbers(std::string_view key) const {
  const GgufArray* found = array(key, "numbers");
  if (found == nullptr) return std::nullopt;
  std::vector<double> result;
  for (std::uint64_t i = 0; i < found->count; ++i) {
    const auto value = number_of(element_of(*found, i));
    if (!value) {
      fail("key \"" + shown(key) + "\" must be an array of numbers, got one of " +
           name_of(found->of));
    }
    result.push_back(*value);
  }
  return result;
}

// ---- parts ----

std::string part_path(const std::string& stem, std::size_t part, std::size_t count) {
  std::array<char, 64> end{};
  std::snprintf(end.data(), end.size(), "-%05zu-of-%05zu.gguf", part + 1, count);
  return stem + end.data();
}

std::vector<std::string> part_paths(const GgufFile& first) {
  const std::int64_t count = first.whole("split.count").value_or(1);
  if (count <= 1) return {first.path()};
  const auto name = part_named(first.path());
  if (!name || static_cast<std::int64_t>(name->count) != count) {
    first.fail("is one of " + std::to_string(count) +
               " parts, and its name must say so: NAME-00001-of-" +
               part_path("", 0, static_cast<std::size_t>(std::min<std::int64_t>(count, 99999)))
                   .substr(10));
  }
  std::vector<std::string> paths;
  for (std::size_t i = 0; i < name->count; ++i) {
    paths.push_back(part_path(name->stem, i, name->count));
  }
  return paths;
}

void check_part(const GgufFile& file, const std::string& path, std::size_t part) {
  const std::int64_t number = file.whole("split.no").value_or(0);
  if (number == static_cast<std::int64_t>(part)) return;
  const auto name = part_named(path);
  if (part == 0) {
    file.fail("is part " + shown(std::to_string(number + 1)) + " of several: open the first" +
              (name ? ", " + part_path(name->stem, 0, name->count) : ""));
  }
  file.fail("the part " + path + " must have split.no " + std::to_string(part) + ", got " +
            std::to_string(number));
}

}  // namespace mlxtape::formats
