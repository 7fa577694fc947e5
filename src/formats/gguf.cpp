#include "mlxtape/formats/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>

#include "formats/gguf_cursor.h"
#include "formats/gguf_split.h"
#include "formats/utf8.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/core/device.h"

namespace mlxtape::formats {

static_assert(std::endian::native == std::endian::little, "values are used as they lie");

namespace {

namespace fs = std::filesystem;

constexpr const char* kWho = "gguf";
constexpr const char* kAlignment = "general.alignment";
constexpr std::size_t kUsualAlignment = 32, kMaxAlignment = std::size_t{1} << 20U;
constexpr std::uint32_t kMaxDims = 4;
constexpr std::size_t kMaxKey = 65535, kMaxName = 255;
constexpr int kMaxArrayDepth = 4;
constexpr std::size_t kLeastKey = 8 + 4 + 1, kLeastTensor = 8 + 4 + 8 + 4 + 8;

struct ValueTypeFacts {
  const char* name;
  std::size_t least;  // bytes of a value
};
constexpr std::array<ValueTypeFacts, 13> kValueTypes{{{"u8", 1},
                                                      {"i8", 1},
                                                      {"u16", 2},
                                                      {"i16", 2},
                                                      {"u32", 4},
                                                      {"i32", 4},
                                                      {"f32", 4},
                                                      {"bool", 1},
                                                      {"string", 8},
                                                      {"array", 12},
                                                      {"u64", 8},
                                                      {"i64", 8},
                                                      {"f64", 8}}};

std::string in_quotes(std::string_view name) { return "\"" + shown(name) + "\""; }

GgufValueType read_value_type(GgufCursor& cursor, const std::string& what) {
  const auto type = cursor.number<std::uint32_t>(what);
  if (type >= kValueTypes.size()) {
    cursor.fail(what + " must be of a type from 0 to 12, got " + std::to_string(type));
  }
  return static_cast<GgufValueType>(type);
}

bool read_bool(GgufCursor& cursor, const std::string& what) {
  const auto byte = cursor.number<std::uint8_t>(what);
  if (byte > 1) cursor.fail(what + " must be a bool of 0 or 1, got " + std::to_string(byte));
  return byte == 1;
}

GgufArray read_array(GgufCursor& cursor, std::span<const std::byte> file, const std::string& what,
                     int depth) {
  GgufArray array;
  array.of = read_value_type(cursor, what);
  array.count = cursor.number<std::uint64_t>(what);
  const std::size_t least = kValueTypes[static_cast<std::size_t>(array.of)].least;
  cursor.expect(array.count, least, what);
  const std::size_t begin = cursor.at();
  if (array.of == GgufValueType::kString) {
    for (std::uint64_t i = 0; i < array.count; ++i) cursor.string(what);
  } else if (array.of == GgufValueType::kBool) {
    for (std::uint64_t i = 0; i < array.count; ++i) read_bool(cursor, what);
  } else if (array.of == GgufValueType::kArray) {
    if (depth == kMaxArrayDepth) {
      cursor.fail(what + " must have at most " + std::to_string(kMaxArrayDepth) +
                  " levels of arrays");
    }
    for (std::uint64_t i = 0; i < array.count; ++i) read_array(cursor, file, what, depth + 1);
  } else {
    cursor.take(array.count * least, what);  // no more than what is left, by expect
  }
  array.bytes = file.subspan(begin, cursor.at() - begin);
  return array;
}

GgufValue read_value(GgufCursor& cursor, std::span<const std::byte> file, const std::string& what) {
  using T = GgufValueType;
  const auto small = [&](auto value) {
    return static_cast<std::int64_t>(value);
  };
  GgufValue result{read_value_type(cursor, what), {}};
  switch (result.type) {
    case T::kU8: result.value = small(cursor.number<std::uint8_t>(what)); break;
    case T::kI8: result.value = small(cursor.number<std::int8_t>(what)); break;
    case T::kU16: result.value = small(cursor.number<std::uint16_t>(what)); break;
    case T::kI16: result.value = small(cursor.number<std::int16_t>(what)); break;
    case T::kU32: result.value = small(cursor.number<std::uint32_t>(what)); break;
    case T::kI32: result.value = small(cursor.number<std::int32_t>(what)); break;
    case T::kI64: result.value = cursor.number<std::int64_t>(what); break;
    case T::kU64: result.value = cursor.number<std::uint64_t>(what); break;
    case T::kF32: result.value = static_cast<double>(cursor.number<float>(what)); break;
    case T::kF64: result.value = cursor.number<double>(what); break;
    case T::kBool: result.value = read_bool(cursor, what); break;
    case T::kString: result.value = cursor.string(what); break;
    case T::kArray: result.value = read_array(cursor, file, what, 1); break;
  }
  return result;
}

// "GGUF", the version; what follows them is the same in 2 and 3.
std::uint32_t read_version(GgufCursor& cursor) {
  constexpr std::uint32_t kMagic = 0x46554747;  // "GGUF"
  if (cursor.left() < 4 || cursor.number<std::uint32_t>("the file") != kMagic) {
    cursor.fail("must begin with \"GGUF\": this is no GGUF file");
  }
  const auto version = cursor.number<std::uint32_t>("the version");
  if (version != 0 && (version & 0xFFFFU) == 0) {
    cursor.fail(
        "is big-endian, which is not supported: turn it around with gguf-convert-endian of the "
        "Python package gguf");
  }
  if (version != 2 && version != 3) {
    cursor.fail("must be of version 2 or 3, got " + std::to_string(version) +
                (version == 1 ? ": convert the original model again with a newer llama.cpp" : ""));
  }
  return version;
}

std::map<std::string, GgufValue, std::less<>> read_metadata(GgufCursor& cursor,
                                                            std::span<const std::byte> file,
                                                            std::uint64_t keys) {
  std::map<std::string, GgufValue, std::less<>> metadata;
  for (std::uint64_t i = 0; i < keys; ++i) {
    const std::string_view key = cursor.string("key " + std::to_string(i));
    if (key.empty() || key.size() > kMaxKey || !is_valid_utf8(key)) {
      cursor.fail("a key must be UTF-8 of 1 to 65535 bytes, got " + in_quotes(key));
    }
    GgufValue value = read_value(cursor, file, "key " + in_quotes(key));
    if (!metadata.emplace(key, value).second) {
      cursor.fail("each key must come once, got " + in_quotes(key) + " twice");
    }
  }
  return metadata;
}

// What a file says of a tensor; the offset counts from the data, whose place is known later.
struct Claim {
  std::string name;
  GgufTensor tensor;
  std::uint64_t offset = 0;
};

Claim read_claim(GgufCursor& cursor, std::uint64_t number) {
  const std::string_view name = cursor.string("tensor " + std::to_string(number));
  if (name.empty() || name.size() > kMaxName || !is_valid_utf8(name)) {
    cursor.fail("a tensor's name must be UTF-8 of 1 to 255 bytes, got " + in_quotes(name));
  }
  const std::string what = "tensor " + in_quotes(name);
  const auto dims = cursor.number<std::uint32_t>(what);
  if (dims < 1 || dims > kMaxDims) {
    cursor.fail(what + " must have 1 to 4 dimensions, got " + std::to_string(dims));
  }
  std::array<std::int64_t, kMaxDims> dim{};
  std::int64_t elements = 1;
  for (std::uint32_t i = 0; i < dims; ++i) {
    const auto size = cursor.number<std::uint64_t>(what);
    const auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
    const auto product = size == 0 || size > most
                             ? std::nullopt
                             : checked_mul(elements, static_cast<std::int64_t>(size));
    if (!product) {
      cursor.fail(what + " must have dimensions from 1 on whose product fits in 63 bits, got " +
                  std::to_string(size) + " as number " + std::to_string(i));
    }
    dim[i] = static_cast<std::int64_t>(size);
    elements = *product;
  }
  const auto type = cursor.number<std::uint32_t>(what);
  const GgufTypeInfo* info = find_gguf_type(type);
  if (info == nullptr) cursor.fail(what + " " + gguf_type_fault(type));
  if (dim[0] % info->block != 0) {
    cursor.fail(what + " must have rows of whole blocks of " + std::to_string(info->block) +
                " for " + info->name + ", got rows of " + std::to_string(dim[0]));
  }
  const auto bytes = checked_mul(elements / info->block, info->bytes);
  if (!bytes) cursor.fail(what + " must have a size that fits in 63 bits");
  Claim claim{std::string(name), {}, cursor.number<std::uint64_t>(what)};
  claim.tensor.type = info->type;
  claim.tensor.bytes = static_cast<std::size_t>(*bytes);
  for (std::uint32_t i = dims; i > 0; --i) claim.tensor.shape.push_back(dim[i - 1]);
  return claim;
}

// Sets each tensor's place in the file. Aligned, inside the file, apart from each other.
void place(std::vector<Claim>& claims, std::size_t data, std::size_t size, std::size_t alignment,
           const GgufCursor& cursor) {
  const std::size_t room = size - std::min(data, size);
  for (Claim& claim : claims) {
    const std::string what = "tensor " + in_quotes(claim.name);
    if (claim.offset % alignment != 0) {
      cursor.fail(what + " must lie at a multiple of " + std::to_string(alignment) + ", got " +
                  std::to_string(claim.offset));
    }
    if (claim.offset > room || claim.tensor.bytes > room - claim.offset) {
      cursor.fail(what + " must lie within the " + std::to_string(room) + " bytes of data, got " +
                  std::to_string(claim.tensor.bytes) + " from " + std::to_string(claim.offset) +
                  " on: the file may be cut short");
    }
    claim.tensor.begin = data + claim.offset;
  }
  std::vector<const Claim*> order;
  for (const Claim& claim : claims) order.push_back(&claim);
  std::sort(order.begin(), order.end(),
            [](const Claim* a, const Claim* b) { return a->tensor.begin < b->tensor.begin; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const Claim& before = *order[i - 1];
    if (before.tensor.begin + before.tensor.bytes <= order[i]->tensor.begin) continue;
    cursor.fail("tensor " + in_quotes(order[i]->name) +
                " must have bytes of its own, got some of " + in_quotes(before.name));
  }
}

}  // namespace

const char* name_of(GgufValueType type) { return kValueTypes[static_cast<std::size_t>(type)].name; }

bool is_gguf_path(const std::string& path) {
  std::string end = fs::path(path).extension().string();
  std::transform(end.begin(), end.end(), end.begin(),
                 [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  std::error_code reason;
  return end == ".gguf" && !fs::is_directory(path, reason);
}

GgufFile::GgufFile(const std::string& path) : path_(path) {
  read(path, 0);
  open_other_parts();
}

void GgufFile::read(const std::string& path, std::size_t part) {
  maps_.push_back(std::make_shared<MappedFile>(path, kWho));
  files_.push_back(path);
  const std::span<const std::byte> file = maps_.back()->bytes();
  GgufCursor cursor(file, std::string(kWho) + ": " + path);
  const std::uint32_t version = read_version(cursor);
  const auto tensors = cursor.number<std::uint64_t>("the number of tensors");
  const auto keys = cursor.number<std::uint64_t>("the number of keys");
  cursor.expect(keys, kLeastKey, "the keys");
  auto metadata = read_metadata(cursor, file, keys);
  cursor.expect(tensors, kLeastTensor, "the tensors");
  std::vector<Claim> claims;
  for (std::uint64_t i = 0; i < tensors; ++i) claims.push_back(read_claim(cursor, i));
  std::swap(metadata_, metadata);  // whose accessors say what is wrong
  check_part(*this, path, part);
  alignment_ = kUsualAlignment;
  if (const GgufValue* value = find(kAlignment)) {
    const auto* set = std::get_if<std::int64_t>(&value->value);
    const bool right = value->type == GgufValueType::kU32 && *set > 0 &&
                       std::has_single_bit(static_cast<std::uint64_t>(*set)) &&
                       static_cast<std::size_t>(*set) <= kMaxAlignment;
    if (!right) fail_key(kAlignment, "must be a power of 2 up to 1048576, as u32");
    alignment_ = static_cast<std::size_t>(*set);
  }
  const std::size_t data = (cursor.at() + alignment_ - 1) / alignment_ * alignment_;
  place(claims, data, file.size(), alignment_, cursor);
  for (Claim& claim : claims) {
    claim.tensor.part = part;
    total_bytes_ += claim.tensor.bytes;
    const auto [at, is_new] = tensors_.try_emplace(std::move(claim.name), claim.tensor);
    if (!is_new) cursor.fail("tensor " + in_quotes(at->first) + " must be there once");
  }
  if (part > 0) std::swap(metadata_, metadata);
  if (part == 0) version_ = version;
}

void GgufFile::open_other_parts() {
  const std::vector<std::string> paths = part_paths(*this);
  std::string missing;
  for (const std::string& path : paths) {
    std::error_code reason;
    if (!fs::exists(path, reason)) missing += (missing.empty() ? "" : ", ") + path;
  }
  if (!missing.empty()) fail("its other parts must lie beside it, missing: " + missing);
  for (std::size_t i = 1; i < paths.size(); ++i) read(paths[i], i);
  const std::optional<std::int64_t> all = whole("split.tensors.count");
  if (paths.size() > 1 && all && *all != static_cast<std::int64_t>(tensors_.size())) {
    fail("its parts must hold " + std::to_string(*all) + " tensors, got " +
         std::to_string(tensors_.size()));
  }
}

const GgufTensor& GgufFile::tensor(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) fail("tensor " + in_quotes(name) + " must be in the file");
  return found->second;
}

std::span<const std::byte> GgufFile::bytes(const GgufTensor& tensor) const {
  return std::span<const std::byte>(maps_[tensor.part]->bytes())
      .subspan(tensor.begin, tensor.bytes);
}

Tensor GgufFile::in_place(const GgufTensor& tensor, DType dtype, const Shape& shape) const {
  const std::shared_ptr<MappedFile>& map = maps_[tensor.part];
  const std::span<std::byte> bytes = map->bytes().subspan(tensor.begin, tensor.bytes);
  return {Buffer::wrap(Device::cpu(), bytes.data(), bytes.size(), [map] {}), dtype, shape};
}

void GgufFile::fail(const std::string& what) const {
  throw Error(Errc::kIo, std::string(kWho) + ": " + path_ + ": " + what);
}

void GgufFile::fail_key(std::string_view key, const std::string& what) const {
  const GgufValue* value = find(key);
  fail("key " + in_quotes(key) + " " + what +
       (value == nullptr ? ", and is missing" : std::string(", got ") + name_of(value->type)));
}

}  // namespace mlxtape::formats
