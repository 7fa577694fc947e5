#include "mlxtape/formats/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "mlxtape/base/checked.h"
#include "mlxtape/base/checksum.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/formats/json.h"

namespace mlxtape::formats {
namespace {

static_assert(std::endian::native == std::endian::little, "the data of a file is used in place");

constexpr const char* kWho = "safetensors";
constexpr const char* kMetadata = "__metadata__";
constexpr std::size_t kLengthBytes = 8, kChecksumBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;  // the same limit as other readers have
constexpr std::int64_t kPieceBytes = 16LL << 20U;  // of a device's memory at a time

struct TypeName {
  const char* name;
  DType dtype;
};
// The first name of a type is the one that is written.
constexpr std::array kTypes{TypeName{"BOOL", DType::kBool},  TypeName{"U8", DType::kU8},
                            TypeName{"U16", DType::kU16},    TypeName{"U32", DType::kU32},
                            TypeName{"U64", DType::kU64},    TypeName{"I8", DType::kI8},
                            TypeName{"I16", DType::kI16},    TypeName{"I32", DType::kI32},
                            TypeName{"I64", DType::kI64},    TypeName{"F16", DType::kF16},
                            TypeName{"BF16", DType::kBF16},  TypeName{"F32", DType::kF32},
                            TypeName{"F64", DType::kF64},    TypeName{"F8_E4M3", DType::kU8},
                            TypeName{"F8_E5M2", DType::kU8}, TypeName{"F8_E8M0", DType::kU8}};

std::optional<DType> dtype_of(std::string_view name) {
  for (const TypeName& type : kTypes) {
    if (name == type.name) return type.dtype;
  }
  return std::nullopt;
}

const char* type_name(DType dtype) {
  return std::find_if(kTypes.begin(), kTypes.end(),
                      [&](const TypeName& t) { return t.dtype == dtype; })
      ->name;
}

std::string in_quotes(std::string_view name) { return "\"" + shown(name) + "\""; }

std::map<std::string, std::string> read_metadata(JsonReader& reader) {
  std::map<std::string, std::string> metadata;
  if (reader.peek() == JsonReader::Kind::kNull) {  // MLX writes that where it has none
    reader.null();
    return metadata;
  }
  std::string key;
  for (reader.begin_object(); reader.next_key(key);) {
    if (!metadata.emplace(key, reader.string()).second) {
      reader.fail("each key must come once, got " + in_quotes(key) + " twice");
    }
  }
  return metadata;
}

// What the header says of one tensor, before anything of it is believed.
struct Claim {
  std::optional<std::string> type;
  std::optional<std::vector<std::int64_t>> shape, offsets;
};

std::vector<std::int64_t> read_integers(JsonReader& reader) {
  std::vector<std::int64_t> values;
  for (reader.begin_array(); reader.next_element();) values.push_back(reader.integer());
  return values;
}

Claim read_claim(JsonReader& reader) {
  Claim claim;
  std::string key;
  const auto once = [&](bool there) {
    if (there) reader.fail("each key must come once, got " + in_quotes(key) + " twice");
  };
  for (reader.begin_object(); reader.next_key(key);) {
    if (key == "dtype") {
      once(claim.type.has_value());
      claim.type = reader.string();
    } else if (key == "shape") {
      once(claim.shape.has_value());
      claim.shape = read_integers(reader);
    } else if (key == "data_offsets") {
      once(claim.offsets.has_value());
      claim.offsets = read_integers(reader);
    } else {
      reader.skip();
    }
  }
  return claim;
}

std::string list(const std::vector<std::int64_t>& values) {
  std::string out = "[";
  for (const std::int64_t value : values) {
    if (out.size() > 1) out += ", ";
    out += std::to_string(value);
  }
  return shown(out + "]");
}

// The first thing that cannot be true of a tensor in a file with that many bytes of data.
std::string lie_of(const Claim& claim, std::int64_t data_bytes) {
  if (!claim.type) return "must have a dtype";
  if (!claim.shape) return "must have a shape";
  if (!claim.offsets) return "must have data_offsets";
  const auto& shape = *claim.shape;
  const auto& offsets = *claim.offsets;
  if (shape.size() > kMaxRank) return "must have at most 8 dimensions, got " + list(shape);
  const auto elements = element_count(Shape(shape.begin(), shape.end()));
  if (!elements) return "must have a shape of 0 or more that fits in 63 bits, got " + list(shape);
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[0] > offsets[1]) {
    return "must have data_offsets [begin, end], 0 <= begin <= end, got " + list(offsets);
  }
  if (offsets[1] > data_bytes) {
    return "must end within the " + std::to_string(data_bytes) +
           " bytes of data, got data_offsets " + list(offsets);
  }
  const auto dtype = dtype_of(*claim.type);
  if (!dtype) return "";
  const auto bytes = checked_mul(*elements, static_cast<std::int64_t>(size_of(*dtype)));
  if (bytes != offsets[1] - offsets[0]) {
    return "must have the bytes of " + *claim.type + " " + list(shape) + ", got data_offsets " +
           list(offsets);
  }
  return "";
}

}  // namespace

// ---- reading ----

SafetensorsFile::SafetensorsFile(std::string path)
    : path_(std::move(path)), file_(std::make_shared<MappedFile>(path_, kWho)) {
  read_header();
  check_overlaps();
  for (const auto& [name, entry] : entries_) names_.push_back(name);
}

void SafetensorsFile::fail(const std::string& what) const {
  throw Error(Errc::kIo, std::string(kWho) + ": " + path_ + ": " + what);
}

void SafetensorsFile::fail(std::string_view tensor, const std::string& what) const {
  fail("tensor " + in_quotes(tensor) + ": " + what);
}

void SafetensorsFile::read_header() {
  const std::span<const std::byte> bytes = file_->bytes();
  if (bytes.size() < kLengthBytes) {
    fail("must begin with 8 bytes, the header's length, got " + std::to_string(bytes.size()));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kMaxHeader || length > bytes.size() - kLengthBytes) {
    fail("must hold its header, of at most " + std::to_string(kMaxHeader) +
         " bytes, got a length of " + std::to_string(length) + " in a file of " +
         std::to_string(bytes.size()));
  }
  const std::size_t data = kLengthBytes + length;
  const auto data_bytes = static_cast<std::int64_t>(bytes.size() - data);
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): bytes as text
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, length);
  JsonReader reader(text, std::string(kWho) + ": " + path_ + ": header");
  std::string name;
  bool has_metadata = false;
  for (reader.begin_object(); reader.next_key(name);) {
    if (name == kMetadata) {
      if (std::exchange(has_metadata, true))
        reader.fail("each key must come once, got __metadata__ twice");
      metadata_ = read_metadata(reader);
      continue;
    }
    Claim claim = read_claim(reader);
    if (const std::string lie = lie_of(claim, data_bytes); !lie.empty()) fail(name, lie);
    const auto [place, is_new] = entries_.try_emplace(name);
    if (!is_new) fail(name, "must be in the file once");
    const auto begin = static_cast<std::size_t>((*claim.offsets)[0]);
    const auto end = static_cast<std::size_t>((*claim.offsets)[1]);
    place->second = {{*claim.type, dtype_of(*claim.type),
                      Shape(claim.shape->begin(), claim.shape->end()), end - begin, path_},
                     data + begin};
  }
  reader.end();
  std::size_t end = data;
  for (const auto& [unused, there] : entries_) end = std::max(end, there.begin + there.info.bytes);
  if (end < bytes.size()) {
    fail("must end where its last tensor does, got " + std::to_string(bytes.size() - end) +
         " bytes more");
  }
}

void SafetensorsFile::check_overlaps() const {
  std::vector<const std::pair<const std::string, Entry>*> order;
  for (const auto& item : entries_) {
    if (item.second.info.bytes > 0) order.push_back(&item);
  }
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return a->second.begin < b->second.begin; });
  for (std::size_t i = 1; i < order.size(); ++i) {
    const auto& [name, before] = *order[i - 1];
    if (before.begin + before.info.bytes > order[i]->second.begin) {
      fail(order[i]->first, "must have bytes of its own, got some of " + in_quotes(name));
    }
  }
}

const SafetensorsFile::Entry& SafetensorsFile::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) fail(name, "must be in the file, got no such name");
  return found->second;
}

const TensorInfo& SafetensorsFile::info(std::string_view name) const { return entry(name).info; }

// Of a type that this library has, with values that the type can have.
std::span<std::byte> SafetensorsFile::checked_bytes(std::string_view name) const {
  const Entry& there = entry(name);
  const TensorInfo& info = there.info;
  if (!info.dtype) {
    throw Error(Errc::kDType, std::string(kWho) + ": " + path_ + ": tensor " + in_quotes(name) +
                                  ": must be of a type of mlxtape, got " + shown(info.type));
  }
  const std::span<std::byte> bytes = file_->bytes().subspan(there.begin, info.bytes);
  if (info.dtype == DType::kBool) {  // any other byte would be no bool
    const auto wrong =
        std::find_if(bytes.begin(), bytes.end(), [](std::byte b) { return b > std::byte{1}; });
    if (wrong != bytes.end()) {
      fail(name, "a BOOL must be 0 or 1, got " + std::to_string(std::to_integer<int>(*wrong)));
    }
  }
  return bytes;
}

std::span<const std::byte> SafetensorsFile::bytes(std::string_view name) const {
  return checked_bytes(name);
}

Tensor SafetensorsFile::tensor(std::string_view name) const {
  const std::span<std::byte> bytes = checked_bytes(name);
  const Entry& there = entry(name);
  const TensorInfo& info = there.info;
  if (there.begin % size_of(*info.dtype) != 0) {
    Tensor copy = Device::cpu().empty(info.shape, *info.dtype);
    if (info.bytes > 0) std::memcpy(copy.data(), bytes.data(), info.bytes);
    return copy;
  }
  return {Buffer::wrap(Device::cpu(), bytes.data(), info.bytes, [file = file_] {}), *info.dtype,
          info.shape};
}

void SafetensorsFile::verify() const {
  const auto found = entries_.find(kChecksumTensor);
  const std::span<const std::byte> bytes = file_->bytes();
  const bool is_last = found != entries_.end() && found->second.info.dtype == DType::kU8 &&
                       found->second.info.bytes == kChecksumBytes &&
                       found->second.begin + kChecksumBytes == bytes.size();
  if (!is_last) fail("must end with its checksum, got none");
  std::uint64_t written = 0;
  std::memcpy(&written, bytes.data() + found->second.begin, kChecksumBytes);
  Checksum sum;
  sum.add(bytes.first(found->second.begin));
  if (sum.value() != written) fail("its bytes are not those that were written (checksum)");
}

// ---- writing ----

namespace {

// A file, and the checksum of what was written to it.
class SummedFile {
 public:
  SummedFile(const std::string& path, bool checked)
      : file_(path, kWho, WholeFile::Links::kReplace), checked_(checked) {}

  void write(std::string_view bytes) {
    file_.write(bytes);
    if (checked_) sum_.add(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }
  void commit() {
    if (checked_) {
      const std::uint64_t sum = sum_.value();
      std::array<char, kChecksumBytes> last{};
      std::memcpy(last.data(), &sum, kChecksumBytes);
      file_.write({last.data(), last.size()});
    }
    file_.commit();
  }

 private:
  WholeFile file_;
  Checksum sum_;
  bool checked_;
};

void write_values(SummedFile& file, const Tensor& t, std::vector<char>& piece) {
  if (t.size() == 0) return;
  const auto encoder = t.device()->make_encoder();
  const Tensor flat = encoder->contiguous(t).reshape({t.size()});
  if (t.device()->limits().host_visible) {
    encoder->commit_and_wait();
    file.write({static_cast<const char*>(flat.data()), flat.bytes()});
    return;
  }
  const std::int64_t step = kPieceBytes / static_cast<std::int64_t>(size_of(t.dtype()));
  for (std::int64_t begin = 0; begin < flat.size(); begin += step) {
    const Tensor part = flat.slice(0, begin, std::min(begin + step, flat.size()));
    piece.resize(part.bytes());
    encoder->download(part, piece.data(), part.bytes());
    file.write({piece.data(), part.bytes()});
  }
}

void write(const std::string& path, std::span<const NamedTensor> tensors,
           const std::map<std::string, std::string>& metadata, bool checked) {
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& item : tensors) {
    const bool is_taken = item.name == kMetadata || (checked && item.name == kChecksumTensor);
    if (is_taken || !item.tensor.has_memory()) {
      throw Error(Errc::kArgument,
                  std::string(kWho) + ": " + path + ": tensor " + in_quotes(item.name) +
                      (is_taken ? ": must have another name" : ": must have memory"));
    }
    order.push_back(&item);
  }
  std::stable_sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return size_of(a->tensor.dtype()) > size_of(b->tensor.dtype());
  });
  std::map<std::string, Json> header;  // sorts
  std::int64_t end = 0;
  const auto add = [&](const std::string& name, DType dtype, const Shape& shape,
                       std::size_t bytes) {
    const std::int64_t begin = std::exchange(end, end + static_cast<std::int64_t>(bytes));
    Json entry = Json::Object{{"dtype", type_name(dtype)},
                              {"shape", Json::Array(shape.begin(), shape.end())},
                              {"data_offsets", Json::Array{begin, end}}};
    if (!header.emplace(name, std::move(entry)).second) {
      throw Error(Errc::kArgument, std::string(kWho) + ": " + path + ": tensor " + in_quotes(name) +
                                       ": must come once");
    }
  };
  for (const NamedTensor* item : order) {
    const Tensor& t = item->tensor;
    add(item->name, t.dtype(), t.shape(), t.bytes());
  }
  if (checked) add(kChecksumTensor, DType::kU8, {kChecksumBytes}, kChecksumBytes);
  if (!metadata.empty()) header[kMetadata] = Json::Object(metadata.begin(), metadata.end());
  std::string text = Json(Json::Object(header.begin(), header.end())).dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeader) {
    throw Error(Errc::kArgument,
                std::string(kWho) + ": " + path + ": the header must have at most " +
                    std::to_string(kMaxHeader) + " bytes, got " + std::to_string(text.size()));
  }

  SummedFile file(path, checked);
  const std::uint64_t length = text.size();
  std::array<char, kLengthBytes> prefix{};
  std::memcpy(prefix.data(), &length, kLengthBytes);
  file.write({prefix.data(), prefix.size()});
  file.write(text);
  std::vector<char> piece;
  for (const NamedTensor* item : order) write_values(file, item->tensor, piece);
  file.commit();
}

}  // namespace

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  write(path, tensors, metadata, false);
}

void write_checked_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                               const std::map<std::string, std::string>& metadata) {
  write(path, tensors, metadata, true);
}

}  // namespace mlxtape::formats
